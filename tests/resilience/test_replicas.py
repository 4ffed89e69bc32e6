"""Two gateways and three global schedulers: every request is dispatched once."""

import asyncio
import json
import urllib.request

import pytest
from chaos import Clients
from support import ROUNDS, eventually
from trace_collector import TraceCollector

pytestmark = pytest.mark.resilience


async def test_every_request_is_dispatched_once_and_runs_on_one_gpu(
    clients: Clients, traces: TraceCollector
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
        with urllib.request.urlopen(f"{traces.url}/api/traces/{trace_id}") as answer:
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
