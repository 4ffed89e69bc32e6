"""What one tenant's flood at ten times its limit does to another tenant's time to first token.

One pool of one emulated GPU; both tenants use the same model. The steady tenant's TTFT is measured at its
client, turn by turn with the flooding tenant at its limit and at ten times that.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support import RunningPool

QWEN = "Qwen2.5-7B-Instruct"
FLOOD_PER_MINUTE = 60
KEYS = f"""
[keys]
root = "admin"
steady-key = "steady"
flood-key = "flood"
late-key = "late"
[tenants.flood]
requests_per_minute = {FLOOD_PER_MINUTE}
"""
BODY = {
    "model": QWEN,
    "messages": [{"role": "user", "content": "Say hello to the whole wide world. " * 8}],
    "max_tokens": 8,
    "ignore_eos": True,
    "stream": True,
}
STEADY_EVERY_S = 0.1
SECONDS = 15.0
ROUNDS = 4


@dataclass
class Result:
    """What the clients of both tenants saw; times at the client."""

    steady_ttft_ms: list[float] = field(default_factory=list)
    steady_statuses: Counter[int] = field(default_factory=Counter)
    flood_statuses: Counter[int] = field(default_factory=Counter)
    flood_retry_after_s: list[int] = field(default_factory=list)

    def add(self, other: "Result") -> None:
        """Take in what was seen in a further round."""
        self.steady_ttft_ms += other.steady_ttft_ms
        self.steady_statuses += other.steady_statuses
        self.flood_statuses += other.flood_statuses
        self.flood_retry_after_s += other.flood_retry_after_s


def run() -> dict[str, float]:
    """Return the steady tenant's p50 and p99 TTFT with the other at its limit and at ten times that."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys.toml").write_text(KEYS)
        env = {"FESTINA_GATEWAY_API_KEYS_FILE": str(folder / "keys.toml"), "FESTINA_ADMIN_KEY": "root"}
        pool = RunningPool(folder, "--emulated", "--models", "2", "--gpus", "1", env=env)
        try:
            pool.wait_for_models(QWEN, key="root")
            flood(pool.url, 3.0, times=0.0)  # warm
            calm, stormy = Result(), Result()
            for _ in range(ROUNDS):  # turn by turn, so that what else this machine does falls on both
                calm.add(flood(pool.url, SECONDS, times=1.0))
                stormy.add(flood(pool.url, SECONDS, times=10.0))
        finally:
            pool.stop()
    figures = {
        "flood.calm_p50_ttft_ms": statistics.median(calm.steady_ttft_ms),
        "flood.calm_p99_ttft_ms": _p99(calm.steady_ttft_ms),
        "flood.stormy_p50_ttft_ms": statistics.median(stormy.steady_ttft_ms),
        "flood.stormy_p99_ttft_ms": _p99(stormy.steady_ttft_ms),
        "flood.steady_refused": float(sum(stormy.steady_statuses.values()) - stormy.steady_statuses[200]),
        "flood.flood_admitted": float(stormy.flood_statuses[200]),
        "flood.flood_refused": float(stormy.flood_statuses[429]),
    }
    figures["flood.p99_ttft_ratio"] = figures["flood.stormy_p99_ttft_ms"] / figures["flood.calm_p99_ttft_ms"]
    return figures


def flood(url: str, seconds: float, times: float = 10.0) -> Result:
    """Let one tenant send at `times` its limit per minute for so long, while the other sends steadily."""
    return asyncio.run(_flood(url, seconds, times))


async def _flood(url: str, seconds: float, times: float) -> Result:
    result = Result()
    every_s = 60.0 / (FLOOD_PER_MINUTE * times) if times else seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, limits=limits) as client:

        async def steady() -> None:
            ttft_ms, status, _ = await _call(client, "steady-key")
            result.steady_ttft_ms.append(ttft_ms)
            result.steady_statuses[status] += 1

        async def flooding() -> None:
            _, status, retry_after_s = await _call(client, "flood-key")
            result.flood_statuses[status] += 1
            if status == 429:
                result.flood_retry_after_s.append(retry_after_s)

        async def paced(make: Callable[[], Coroutine[None, None, None]], period_s: float) -> None:
            started_s, calls = time.monotonic(), []
            for turn in range(int(seconds / period_s)):
                await asyncio.sleep(max(0.0, started_s + turn * period_s - time.monotonic()))
                calls.append(asyncio.create_task(make()))
            await asyncio.gather(*calls)

        kinds = [paced(steady, STEADY_EVERY_S)]
        if times:
            kinds.append(paced(flooding, every_s))
        await asyncio.gather(*kinds)
    return result


async def _call(client: httpx.AsyncClient, key: str) -> tuple[float, int, int]:
    """Return (ms to the first text, status, Retry-After) of one streamed call."""
    started_s, first_s = time.monotonic(), 0.0
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/chat/completions", json=BODY, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if not first_s and line.startswith("data: {") and _has_text(line):
                first_s = time.monotonic()
        retry_after_s = int(answer.headers.get("retry-after", "0"))
        return (first_s - started_s) * 1000.0, answer.status_code, retry_after_s


def _has_text(line: str) -> bool:
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
