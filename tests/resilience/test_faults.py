"""Every service killed, bus and store taken away, under streams whose every token is known.

And undisturbed: two gateways and three global schedulers, and every request is dispatched once.
"""

import asyncio
import json
import os
import signal
import time
import urllib.request

import pytest
from chaos import (
    CUT_S,
    LEASE_S,
    Clients,
    Outcome,
    gateways_answer,
    kill,
    service_pids,
    wait_until_idle,
)
from support import ROUNDS, RunningPool, Servers, eventually
from trace_collector import TraceCollector

pytestmark = pytest.mark.resilience

# one of each service in turn; of each, another replica every round
VICTIMS = (
    ("scheduler-0", "scheduler-1", "scheduler-2"),
    ("emulated-0-gpu-0", "emulated-1-gpu-0", "emulated-0-gpu-1", "emulated-1-gpu-1"),
    ("consolidator-0", "consolidator-1"),
    ("emulated-0", "emulated-1"),
    ("gateway-1", "gateway-0"),
)


async def test_killing_each_service_in_turn_loses_and_doubles_nothing(
    pool: RunningPool, urls: list[str], clients: Clients
) -> None:
    await clients.learn()
    stop = asyncio.Event()
    load = asyncio.create_task(clients.load(16, stop))
    gateway_deaths: list[tuple[int, float]] = []
    for number in range(ROUNDS):
        for replicas in VICTIMS:
            await asyncio.sleep(1.5)
            victim = replicas[number % len(replicas)]
            died_s = await kill(pool, victim)
            if victim.startswith("gateway"):
                gateway_deaths.append((int(victim[-1]), died_s))
    await asyncio.sleep(2.0)
    while len(clients.outcomes) < 80 * ROUNDS:
        await asyncio.sleep(0.1)
    stop.set()
    await load
    print(clients.summary())

    assert clients.wrong() == []
    unexplained = [
        outcome
        for outcome in clients.failed()
        if not outcome.broken
        or not any(
            gateway == outcome.gateway and outcome.started_s - 0.5 <= died_s <= outcome.ended_s + 0.5
            for gateway, died_s in gateway_deaths
        )
    ]
    assert unexplained == []
    assert len(clients.outcomes) - len(clients.failed()) >= 70 * ROUNDS
    await gateways_answer(urls)
    await wait_until_idle(urls[0], LEASE_S + 2.0)


async def test_the_work_of_a_dead_gateway_is_aborted_within_its_lease(
    pool: RunningPool, urls: list[str], clients: Clients
) -> None:
    asked = [clients.ask(model, 1, gateway=1, max_tokens=4000) for model in clients.models * 2]
    tasks = [asyncio.create_task(each) for each in asked]
    await asyncio.sleep(1.5)
    died_s = await kill(pool, "gateway-1")
    await wait_until_idle(urls[0], LEASE_S + 1.0 - (time.monotonic() - died_s))
    assert all(outcome.broken for outcome in await asyncio.gather(*tasks))


async def test_streams_of_a_gateway_that_stood_still_for_longer_than_its_lease_go_on_at_once(
    pool: RunningPool, urls: list[str], clients: Clients
) -> None:
    pid = await asyncio.to_thread(pool.pid_of, "gateway-1")

    def ask_all(gateway: int) -> asyncio.Future[list[Outcome]]:
        return asyncio.gather(*(clients.ask(model, 1, gateway, max_tokens=1500) for model in clients.models))

    undisturbed, disturbed = ask_all(gateway=0), ask_all(gateway=1)
    await asyncio.sleep(1.0)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(LEASE_S + 1.5)  # its work is given up
    os.kill(pid, signal.SIGCONT)
    resumed_s = time.monotonic()
    wanted, found = await undisturbed, await disturbed
    assert [(o.text, o.error) for o in found] == [(o.text, "") for o in wanted]
    assert {o.report["attempt"] for o in found} == {2}
    undisturbed_s = max(o.ended_s - o.started_s for o in wanted)
    assert max(o.ended_s for o in found) - resumed_s < undisturbed_s + 10.0


@pytest.mark.parametrize("server", ["nats", "store"])
async def test_bus_or_store_away_costs_time_and_nothing_else(
    pool: RunningPool, urls: list[str], clients: Clients, servers: Servers, server: str
) -> None:
    await clients.learn(prompts=4)
    before = service_pids(pool)
    stop = asyncio.Event()
    load = asyncio.create_task(clients.load(16, stop))
    await asyncio.sleep(1.5)
    await asyncio.to_thread(servers.stop, server)
    stopped_s = time.monotonic()
    await asyncio.sleep(CUT_S)
    servers.start(server)
    await asyncio.sleep(3.0)
    stop.set()
    await load
    print(clients.summary())

    assert clients.wrong() == [] and clients.failed() == []
    through = [o for o in clients.outcomes if o.started_s < stopped_s < o.ended_s]
    assert len(through) >= 8
    # nobody took a GPU for dead: each stream went on where it was
    assert {outcome.report["attempt"] for outcome in clients.outcomes} == {1}
    assert service_pids(pool) == before
    await wait_until_idle(urls[0], 3.0)


async def test_restarting_one_after_the_other_under_load_loses_nothing(
    pool: RunningPool, urls: list[str], clients: Clients
) -> None:
    await clients.learn(prompts=4)
    stop = asyncio.Event()
    load = asyncio.create_task(clients.load(16, stop))
    services = ["scheduler-0", "emulated-0-gpu-0", "gateway-1"]
    if ROUNDS > 1:
        services = [each for replicas in VICTIMS for each in replicas]
    for service in services:
        await asyncio.sleep(1.0)
        await kill(pool, service, signal.SIGTERM)
    await asyncio.sleep(2.0)
    stop.set()
    await load
    print(clients.summary())
    assert clients.wrong() == []
    assert clients.failed() == []
    await gateways_answer(urls)
    await wait_until_idle(urls[0], 3.0)


async def test_every_request_is_dispatched_once_and_runs_on_one_gpu(
    clients: Clients, collector: TraceCollector
) -> None:
    await clients.learn(prompts=4)

    async def client(number: int) -> list[tuple[str, str]]:
        found = []
        for turn in range(2 * ROUNDS):
            trace_id = f"{0xC0DE0000 + number * 100 + turn:032x}"
            model = clients.models[(number + turn) % len(clients.models)]
            outcome = await clients.ask(model, turn % 4, number % 2, f"00-{trace_id}-b7ad6b7169203331-01", 20)
            assert outcome.done and not outcome.error, outcome
            found.append((trace_id, outcome.report["gpu"]))
        return found

    asked = [pair for found in await asyncio.gather(*map(client, range(32))) for pair in found]
    assert len(asked) == 64 * ROUNDS

    def spans(trace_id: str) -> list[dict]:
        with urllib.request.urlopen(f"{collector.url}/api/traces/{trace_id}") as answer:
            return [span for trace in json.load(answer)["data"] for span in trace["spans"]]

    wanted = ["global.dispatch", "local.decode", "local.prefill", "local.queue"]

    def names(trace_id: str) -> list[str]:
        return sorted(n for s in spans(trace_id) if (n := s["operationName"]) in wanted)

    def story(trace_id: str) -> list[str]:
        told = sorted(spans(trace_id), key=lambda span: span["startTime"])
        start = told[0]["startTime"]
        return [
            f"{(s['startTime'] - start) / 1000:.0f} ms +{s['duration'] / 1000:.0f}: {s['operationName']} "
            + " ".join(f"{tag['key'].removeprefix('festina.')}={tag['value']}" for tag in s["tags"])
            for s in told
        ]

    for trace_id, _ in asked:
        await eventually(lambda t=trace_id: len(names(t)) >= len(wanted), within_s=10)
        assert names(trace_id) == wanted, story(trace_id)
    assert len({gpu for _, gpu in asked}) > 1
