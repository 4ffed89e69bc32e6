"""A thousand clients that leave at random moments, at two gateways: nothing of theirs is left anywhere."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from support import RunningPool

from services.gateway.limits import CONCURRENT
from shared.catalog import emulated_models
from shared.subjects import limit_key

CLIENTS = 1_000
AT_ONCE = 80
HOT = [model.name for model in emulated_models(2)]
COLD = "Loaded-On-Demand"
KEYS = """
[keys]
root = "admin"
key = "limited"
[tenants.limited]
requests_per_minute = 1000000
tokens_per_minute = 1000000000
max_concurrent = 1000
"""

REST = {
    "gateway_inflight_requests",
    "gateway_open_inboxes",
    "gateway_limit_places",
    "gateway_limit_corrections",
    "waiting_dispatches",
    "reservations",
    "reserved_bytes",
    "running_requests",
    "waiting_requests",
    "engine_requests",
    "promised_kv_bytes",
    "unacknowledged_attempts",
    "open_moves",
}
"""What is counted, reserved or promised for requests, on whatever service: 0 when there are none."""

SEEN = REST - {"gateway_limit_corrections", "reservations", "reserved_bytes", "open_moves"}
"""Of these, what stands for long enough to be seen while clients come and go."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    folder: Path = tmp_path_factory.mktemp("cancels")
    (folder / "keys.toml").write_text(KEYS)
    env = {
        "FESTINA_GATEWAY_API_KEYS_FILE": str(folder / "keys.toml"),
        "FESTINA_ADMIN_KEY": "root",
        "FESTINA_METRICS_PORT": "0",
        "FESTINA_LOCAL_SCHED_MAX_RUNNING": "12",  # so that some wait on their GPU
    }
    flags = ("--emulated", "--gpus", "2", "--models", "2", "--schedulers", "2")
    made = RunningPool(folder, *flags, gateways=2, env=env)
    try:
        made.wait_for_models(*HOT, key="root")
        yield made
    finally:
        made.stop()


class Gauges:
    """The metrics of all services of a pool, each summed over them."""

    def __init__(self, pool: RunningPool) -> None:
        self._pages = [f"{url}/metrics" for url in pool.urls]
        for log in (pool.folder / "state" / "log").glob("*.log"):
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            ports = [line["port"] for line in lines if line["message"] == "metrics"]
            if ports and not log.name.startswith("gateway"):
                self._pages.append(f"http://127.0.0.1:{ports[-1]}/metrics")
        assert len(self._pages) == 2 + 2 + 1 + 1 + 2, self._pages  # a consolidator, a migrator, two GPUs
        self._http = httpx.AsyncClient(trust_env=False)

    async def read(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for answer in await asyncio.gather(*(self._http.get(page) for page in self._pages)):
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    found[sample.name.removeprefix("festina_")] += sample.value
                    if outcome := sample.labels.get("outcome"):
                        found[f"{sample.name} {sample.labels['service']} {outcome}"] += sample.value
        return found


async def one(number: int, pool: RunningPool) -> int:
    """Ask, read some of the answer or none, and go, politely or not; returns how many it asked for."""
    chance = random.Random(number)
    body = {
        "model": chance.choices((*HOT, COLD), (4, 4, 1))[0],
        "prompt": "word " * chance.choice((3, 30, 900)),
        "max_tokens": chance.choice((1, 20, 200)),
        "n": chance.choice((1, 1, 1, 2)),
        "stream": chance.random() < 0.7,
        "ignore_eos": True,
        **({"stop": ["e"]} if chance.random() < 0.1 else {}),
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    port = int(pool.urls[number % 2].rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    match chance.choice(("at once", "soon", "later", "first bytes", "midway", "end")):
        case "at once":
            await writer.drain()
        case "soon":
            await asyncio.sleep(chance.uniform(0.0, 0.02))
        case "later":
            await asyncio.sleep(chance.uniform(0.0, 1.0))
        case "first bytes":
            await reader.read(1)
        case "midway":
            for _ in range(chance.randrange(2, 30)):
                await reader.read(400)
        case "end":
            await reader.read()
    if chance.random() < 0.5:  # a reset instead of an orderly end
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    return int(body["n"])


async def all_of_them(pool: RunningPool, gauges: Gauges) -> tuple[int, Counter[str]]:
    """Send every client; returns how many answers they asked for, and the highest of each gauge."""
    places = asyncio.Semaphore(AT_ONCE)
    highest: Counter[str] = Counter()

    async def bounded(number: int) -> int:
        async with places:
            return await one(number, pool)

    work = asyncio.gather(*(bounded(number) for number in range(CLIENTS)))
    while not work.done():
        highest |= await gauges.read()
        await asyncio.wait({work}, timeout=0.1)
    return sum(await work), highest


async def test_a_thousand_clients_leave_at_random_and_nothing_is_left(pool: RunningPool) -> None:
    root = {"Authorization": "Bearer root"}
    specs = httpx.get(pool.url + "/admin/models", headers=root, trust_env=False).json()["models"]
    cold = {**specs[0], "name": COLD, "weight_bytes": 2 * 10**9, "keep_alive_ms": 200.0}
    added = httpx.post(pool.url + "/admin/models", json=cold, headers=root, trust_env=False)
    assert added.status_code == 201

    gauges = Gauges(pool)
    asked, highest = await all_of_them(pool, gauges)
    assert [name for name in sorted(SEEN) if not highest[name]] == []

    deadline = time.monotonic() + 8.0
    while left := {name: value for name, value in (await gauges.read()).items() if name in REST and value}:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.6)  # and so it stays: what a device samples is older than what a gateway says
    counters = await gauges.read()
    assert {name: counters[name] for name in REST} == dict.fromkeys(REST, 0.0)
    outcomes = {
        name.removeprefix("festina_gateway_requests_total gateway "): count
        for name, count in counters.items()
        if name.startswith("festina_gateway_requests_total ")
    }
    print(outcomes, {name: highest[name] for name in sorted(REST)})
    assert outcomes.keys() <= {"cancelled", "length", "stop"}
    assert 0.9 * asked < sum(outcomes.values()) <= asked  # a reset may overtake what was asked
    assert outcomes["cancelled"] > CLIENTS / 4 and outcomes["length"] > CLIENTS / 8
    assert store_of(pool).hgetall(limit_key("limited", CONCURRENT)) == {}


def store_of(pool: RunningPool) -> "redis.Redis":
    environ = Path(f"/proc/{pool.pid_of('gateway-0')}/environ").read_bytes().decode().split("\0")
    return redis.Redis.from_url(
        next(line for line in environ if line.startswith("FESTINA_REDIS_URL=")).partition("=")[2]
    )
