"""A live pool whose emulated engines run on a GPU of the stub NVML: its clock follows the load."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
from guard_process import Guard
from nvml import Call, StubNvml
from support import RunningPool

from services.local_sched.clocks import WRITE_INTERVAL_MS
from services.local_sched.settings import LocalSettings
from shared.devices import device_for

QWEN = "Qwen2.5-7B-Instruct"
GPU = 1
DWELL_S = LocalSettings().clock_dwell_ms / 1000.0
WRITE_INTERVAL_S = WRITE_INTERVAL_MS / 1000.0
LATE_S = 0.05
"""A write comes so much later than it was asked for, more or less, by way of event loop and guard."""
MEASURED_LATE_S = 1.5
"""Joules in a summary may be so old: the time between two readings of an idle GPU, and a heartbeat."""


def gpu_of(pool: RunningPool) -> dict[str, Any]:
    [gpu] = httpx.get(pool.url + "/admin/gpus", trust_env=False).json()["gpus"]
    return gpu


@contextmanager
def load_of_the_pool(pool: RunningPool, nvml: StubNvml) -> Iterator[None]:
    """Let the stub's GPU have as much to do as the pool's: its watts follow clock and load."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.05):
            running = sum(engine["running"] for engine in gpu_of(pool)["engines"])
            nvml.set(GPU, load=min(1.0, running / 16))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def answered(pool: RunningPool, requests: int, tokens: int, at_once: int) -> list[Any]:
    """Ask for so many answers; returns what was told of each."""
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="unused", max_retries=0, timeout=60)

    def ask(number: int) -> Any:
        words = f"{number} " * 400
        asked = [{"role": "user", "content": words}]
        return client.chat.completions.create(model=QWEN, messages=asked, max_tokens=tokens).festina

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(ask, range(requests)))


def locks(calls: list[Call]) -> list[tuple[float, int]]:
    """When the clock was locked, and to what."""
    return [(c.at_s, int(c.what.split("-")[1])) for c in calls if c.what.startswith("lock ")]


def test_the_clock_of_a_gpu_follows_the_load(nvml: StubNvml, guard: Guard, tmp_path: Path) -> None:
    nvml.set(GPU, settle_ms=30)
    driven = {"CLOCKS": "nvml", "GPU": str(GPU), "CLOCK_GUARD": str(guard.socket)}
    env = nvml.env | {f"FESTINA_DEVICE_{name}": value for name, value in driven.items()}
    pool = RunningPool(tmp_path, "--emulated", "--gpus", "1", "--hosts", "1", "--models", "1", env=env)
    try:
        pool.wait_for_models(QWEN)
        with load_of_the_pool(pool, nvml):
            few = answered(pool, 6, 20, 1)
            before_j = gpu_of(pool)["energy_j"] - nvml.get(GPU, "energy_mj") / 1000.0
            started_s = time.monotonic()
            many = answered(pool, 96, 40, 48)
            ended_s = time.monotonic()
            answered(pool, 6, 20, 1)
            told = gpu_of(pool)
            after_j = told["energy_j"] - nvml.get(GPU, "energy_mj") / 1000.0
            assert abs(after_j - before_j) < MEASURED_LATE_S * 690.0
            assert told["sm_clock_mhz"] == nvml.get(GPU, "running_mhz") == nvml.locked_mhz(GPU)[0]
    finally:
        pool.stop()
    assert nvml.locked_mhz(GPU) is None  # with its holder the lease has ended
    assert {call.gpu for call in nvml.calls} == {0, GPU, 2}  # the guard's, freed at its start
    assert all(call.what == "reset" or call.gpu == GPU or "memory" in call.what for call in nvml.calls)

    written = locks(nvml.calls)
    gaps_s = [after[0] - before[0] for before, after in pairwise(written)]
    assert min(gaps_s) >= WRITE_INTERVAL_S - 0.001
    # Less than the dwell it is only upwards, where a deadline is at risk, or after a write that had to wait.
    for i, (before, after) in enumerate(pairwise(written)):
        waited = i > 0 and gaps_s[i - 1] <= WRITE_INTERVAL_S + LATE_S
        assert gaps_s[i] >= DWELL_S - LATE_S or after[1] > before[1] or waited, written
    highest = device_for("h100-80gb").f_max_mhz
    during = [clock for at_s, clock in written if started_s <= at_s <= ended_s]
    assert max(during) == highest and min(clock for _, clock in written) < 0.8 * highest
    assert all("modelled" in report["energy_source"] for report in few + many)
