"""A live emulated pool and its client: `festina up --emulated`, sent a workload in real time and watched."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from services.cli.supervise import free_port
from shared.errors import FestinaError
from shared.model import ModelSpec
from shared.recording import FOLDER_VARIABLE
from shared.slo import objectives_for
from sim.scenario import RequestRecord
from sim.workload import Arrival

READY_S = 120.0  # for the pool to come up
POOL_SETTINGS = {"FESTINA_CONSOLIDATOR_GATHER_MS": "10000"}
"""Of every pool: all models are placed together, as in the simulator, though to register them may stall."""
TAIL_S = 30.0  # after the last request, in which all end
ENDS_S = 120.0  # after that, for those that have not
WATCHED_S = 0.5  # period at which GPUs are looked at; they tell of themselves as often
UNLIMITED = httpx.Limits(max_connections=None)  # every open request has one
PROMPT_IDS = range(300, 700)  # ordinary tokens of the stand-in tokenizer

Progress = Callable[[float], None]
"""Is told the part that is done."""


class GpuSample(msgspec.Struct):
    """One GPU as it told of itself, `at_s` after the start."""

    at_s: float
    gpu: str
    sm_clock_mhz: int
    power_w: float
    running: int
    models: tuple[str, ...] = ()


class Live(msgspec.Struct):
    """What a live pool came to, from the start of the workload to `TAIL_S` after its last request.

    Args:
        pool_cores: processor cores that the pool took, its start and end included.
        machine_cores: that all this machine took; where little is left of them, latencies are not the pool's.
    """

    energy_j: float
    requests: list[RequestRecord]
    samples: list[GpuSample]
    machine_cores: float
    pool_cores: float = 0.0


def prompt_of(index: int, tokens: int) -> list[int]:
    """Return the prompt of a request, as token ids; each request has its own."""
    return [PROMPT_IDS[(index + i) % len(PROMPT_IDS)] for i in range(tokens)]


async def live_run(
    arrivals: tuple[Arrival, ...],
    models: tuple[ModelSpec, ...],
    gpus: int,
    folder: Path,
    progress: Progress,
    environment: Mapping[str, str],
) -> Live:
    """Start a pool, send it the arrivals, and stop it.

    Args:
        models: what it serves.
        folder: its state, its log ``up.log``, and below ``recorded`` all that its cores heard and did.
        environment: further settings of its services.

    Raises:
        FestinaError: it does not come up, or a request never ends.
    """
    folder.mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-m", "services.cli", "up", "--emulated", "--port", str(port)]
    command += ["--gpus", str(gpus), "--models", "0", "--state-dir", str(folder / "state")]
    base = {key: value for key, value in os.environ.items() if not key.startswith("FESTINA_")}
    own = {"FESTINA_TRACING": "0", FOLDER_VARIABLE: str(folder / "recorded")}
    with (folder / "up.log").open("wb") as log:
        pool = subprocess.Popen(
            command,
            env={**base, **own, **POOL_SETTINGS, **environment},
            stdout=log,
            stderr=log,
            process_group=0,
        )
    started_s, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=UNLIMITED, trust_env=False) as http:
            await _ready(http, models, pool, folder)
            live = await _measured(http, arrivals, progress)
    finally:
        pool.send_signal(signal.SIGINT)
        try:
            pool.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(pool.pid, signal.SIGKILL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    live.pool_cores = worked_s / (time.monotonic() - started_s)
    return live


async def _ready(
    http: httpx.AsyncClient, models: tuple[ModelSpec, ...], pool: "subprocess.Popen[bytes]", folder: Path
) -> None:
    """Register the models, and wait until all are loaded."""
    deadline_s = time.monotonic() + READY_S
    missing = list(models)
    states: dict[str, str] = {}
    while time.monotonic() < deadline_s and pool.poll() is None:
        await asyncio.sleep(0.5)
        try:
            while missing:
                answer = await http.post("/admin/models", content=msgspec.json.encode(missing[0]))
                answer.raise_for_status()
                del missing[0]
            listed = (await http.get("/v1/models")).json()["data"]
        except (httpx.HTTPError, KeyError, ValueError):
            continue
        states = {model["id"]: model["state"] for model in listed}
        if list(states.values()).count("ready") == len(models):
            await asyncio.sleep(2.0)  # the summaries say what was loaded
            return
    log = (folder / "up.log").read_text()[-2000:]
    raise FestinaError(f"the pool did not come up; its models: {states}; its log: {log}")


async def _measured(http: httpx.AsyncClient, arrivals: tuple[Arrival, ...], progress: Progress) -> Live:
    samples: list[GpuSample] = []
    start_s, machine_s = time.monotonic(), _machine_s()
    before_j = await _look(http, 0.0, samples)
    total_s = arrivals[-1].at_ms / 1000.0 + TAIL_S
    sending = [asyncio.create_task(_send(http, start_s, index, one)) for index, one in enumerate(arrivals)]
    spent_j = 0.0
    while (past_s := time.monotonic() - start_s) < total_s:
        progress(past_s / total_s)
        await asyncio.sleep(min(WATCHED_S, total_s - past_s))
        spent_j = await _look(http, time.monotonic() - start_s, samples) - before_j
    machine_cores = (_machine_s() - machine_s) / (time.monotonic() - start_s)
    try:
        records = await asyncio.wait_for(asyncio.gather(*sending), ENDS_S)
    except TimeoutError:
        waiting = sum(not task.done() for task in sending)
        raise FestinaError(
            f"{waiting} requests had not ended {TAIL_S + ENDS_S:.0f} s after the last"
        ) from None
    return Live(energy_j=spent_j, requests=records, samples=samples, machine_cores=machine_cores)


def _machine_s() -> float:
    """Return the processor time that this whole machine has spent working, in s of one core."""
    user, nice, system, _idle, _wait, irq, softirq = Path("/proc/stat").read_text().split(None, 8)[1:8]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


async def _look(http: httpx.AsyncClient, at_s: float, samples: list[GpuSample]) -> float:
    """Add a sample of each GPU; return the joules of all since they started."""
    gpus = (await http.get("/admin/gpus")).json()["gpus"]
    for gpu in gpus:
        running = sum(engine["running"] for engine in gpu["engines"])
        loaded = tuple(engine["model"] for engine in gpu["engines"])
        samples.append(GpuSample(at_s, gpu["gpu"], gpu["sm_clock_mhz"], gpu["power_w"], running, loaded))
    return float(sum(gpu["energy_j"] for gpu in gpus))


async def _send(http: httpx.AsyncClient, start_s: float, index: int, arrival: Arrival) -> RequestRecord:
    """Send one request at its time; the tokens between its first and its last are given even times."""
    await asyncio.sleep(max(0.0, start_s + arrival.at_ms / 1000.0 - time.monotonic()))
    body: dict[str, Any] = {
        "model": arrival.model,
        "prompt": prompt_of(index, arrival.input_tokens),
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = RequestRecord(
        request_id=f"r{index}",
        model=arrival.model,
        tenant=arrival.tenant,
        objectives=objectives_for(arrival.input_tokens),
        arrived_ms=(time.monotonic() - start_s) * 1000.0,
        input_tokens=arrival.input_tokens,
        expected_tokens=arrival.output_tokens,
    )
    first_ms = last_ms = None
    tokens = 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            if chunk.get("choices"):
                last_ms = (time.monotonic() - start_s) * 1000.0
                first_ms = first_ms or last_ms
                record.outcome = chunk["choices"][0].get("finish_reason") or record.outcome
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
                record.energy_j = chunk["festina"]["energy_j"]
            if "error" in chunk:
                record.outcome = str(chunk["error"].get("code"))
    if first_ms is not None and last_ms is not None:
        record.token_ms = np.linspace(first_ms, last_ms, tokens).tolist()
    return record
