"""Is the simulator what it simulates? One trace through a live emulated pool, and through a world.

``python -m sim.live_check`` (``make live-check``) starts ``festina up --emulated``, sends it a workload in
real time, plays the same workload in virtual time, and compares energy, attainment and token counts. The live
pool is recorded, and every core plays its recording again.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.cli.supervise import free_port
from services.local_sched.made_up import VocabSlice, answer
from shared.devices import device_for
from shared.errors import FestinaError
from shared.model import ModelSpec, Request
from shared.recording import FOLDER_VARIABLE
from shared.slo import objectives_for
from sim.cli import pool_models
from sim.replay import Differs, replay
from sim.report import attainment, report
from sim.scenario import RequestRecord, Scenario
from sim.workload import Arrival, generate
from sim.world import run

LEAD_MS = 20_000.0  # before the first request, in which the models are loaded
TAIL_S = 30.0  # after the last, in which all requests end
ENERGY_WITHIN, ATTAINMENT_WITHIN = 0.05, 0.02
VOCAB = VocabSlice(token_ids=(1,), eos_id=2)  # only lengths matter here
UNLIMITED = httpx.Limits(max_connections=None)  # every open request has one
PROMPT_IDS = range(300, 700)  # ordinary tokens of the stand-in tokenizer


class Live(msgspec.Struct):
    """What the live pool came to."""

    energy_j: float
    requests: list[RequestRecord]


def prompt_of(index: int, tokens: int) -> list[int]:
    """Return the prompt of a request, as token ids; each request has its own."""
    return [PROMPT_IDS[(index + i) % len(PROMPT_IDS)] for i in range(tokens)]


def answered(arrivals: tuple[Arrival, ...], models: tuple[ModelSpec, ...]) -> tuple[Arrival, ...]:
    """Give each arrival the length that the emulated model's answer to its prompt will have.

    So no client has to say how long it shall be, and the live schedulers have to guess it as always.
    """
    context_tokens = {model.name: model.context_tokens for model in models}
    lengths = []
    for index, arrival in enumerate(arrivals):
        request = Request(
            request_id="",
            attempt=1,
            gateway="",
            model=arrival.model,
            prompt_tokens=tuple(prompt_of(index, arrival.input_tokens)),
            max_tokens=1 << 30,
            objectives=objectives_for(arrival.input_tokens),
            sampling={"seed": index},
        )
        made = answer(request, VOCAB, context_tokens[arrival.model])
        lengths.append(min(made.length or made.max_tokens, made.max_tokens))
    return tuple(
        msgspec.structs.replace(arrival, output_tokens=length)
        for arrival, length in zip(arrivals, lengths, strict=True)
    )


# ---- the live pool


async def live_run(
    arrivals: tuple[Arrival, ...], models: int, gpus: int, folder: Path, progress: Progress
) -> Live:
    """Start a pool, send it the arrivals, and stop it. Raises FestinaError if it does not come up."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "services.cli", "up", "--emulated", "--port", str(port)]
    command += ["--gpus", str(gpus), "--models", str(models), "--state-dir", str(folder / "state")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FESTINA_")}
    environment |= {"FESTINA_TRACING": "0", FOLDER_VARIABLE: str(folder / "recorded")}
    with (folder / "up.log").open("wb") as log:
        pool = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=UNLIMITED, trust_env=False) as http:
            await _ready(http, models, pool, folder)
            return await _measured(http, arrivals, progress)
    finally:
        pool.send_signal(signal.SIGINT)
        try:
            pool.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(pool.pid, signal.SIGKILL)


async def _ready(http: httpx.AsyncClient, models: int, pool: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s and pool.poll() is None:
        await asyncio.sleep(0.5)
        try:
            listed = (await http.get("/v1/models")).json()["data"]
        except (httpx.HTTPError, KeyError, ValueError):
            continue
        if sum(model["state"] == "ready" for model in listed) == models:
            return
    raise FestinaError(f"the pool did not come up: {(folder / 'up.log').read_text()[-2000:]}")


async def _measured(http: httpx.AsyncClient, arrivals: tuple[Arrival, ...], progress: Progress) -> Live:
    await asyncio.sleep(2.0)  # the summaries say what was loaded
    before_j = await _energy_j(http)
    start_s = time.monotonic()
    total_s = arrivals[-1].at_ms / 1000.0 + TAIL_S
    task = progress.add_task("live", total=total_s)
    sending = [asyncio.create_task(_send(http, start_s, index, one)) for index, one in enumerate(arrivals)]
    while (past_s := time.monotonic() - start_s) < total_s:
        progress.update(task, completed=past_s)
        await asyncio.sleep(min(1.0, total_s - past_s))
    spent_j = await _energy_j(http) - before_j
    progress.update(task, completed=total_s)
    records = await asyncio.wait_for(asyncio.gather(*sending), 60.0)
    return Live(energy_j=spent_j, requests=records)


async def _energy_j(http: httpx.AsyncClient) -> float:
    gpus = (await http.get("/admin/gpus")).json()["gpus"]
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
            if "error" in chunk:
                record.outcome = str(chunk["error"].get("code"))
    if first_ms is not None and last_ms is not None:
        record.token_ms = np.linspace(first_ms, last_ms, tokens).tolist()
    return record


# ---- the comparison


def simulated(
    arrivals: tuple[Arrival, ...], models: tuple[ModelSpec, ...], gpus: int
) -> tuple[float, list[RequestRecord]]:
    """Play the same in a world; return its joules over the time measured live, and its requests."""
    later = tuple(msgspec.structs.replace(one, at_ms=one.at_ms + LEAD_MS) for one in arrivals)
    until_ms = later[-1].at_ms + TAIL_S * 1000.0
    result = run(Scenario(models=models, arrivals=later, gpus=gpus, horizon_ms=until_ms))
    numbers = report(result, device_for("h100-80gb"), LEAD_MS, until_ms)
    return numbers.energy_j.cold, result.requests


def main(
    minutes: Annotated[float, typer.Option(help="How long requests arrive.")] = 10.0,
    llms: int = 4,
    rps: Annotated[float, typer.Option(help="Requests per second and model.")] = 0.25,
    gpus: int = 2,
    seed: int = 0,
) -> None:
    """Compare a live emulated pool with the simulator; status 1 if they differ by more than they may."""
    console = Console()
    models = pool_models(llms)
    made = generate("sharegpt", models=models, rps_per_llm=rps, minutes=minutes, seed=seed).arrivals
    arrivals = answered(made, models)
    with tempfile.TemporaryDirectory(prefix="festina-live-") as name, Progress(console=console) as progress:
        live = asyncio.run(live_run(arrivals, llms, gpus, Path(name), progress))
        task = progress.add_task("simulated", total=None)
        energy_j, requests = simulated(arrivals, models, gpus)
        progress.update(task, total=1, completed=1)
        replayed = _replayed(Path(name) / "recorded", progress)
    same = _compare(console, live, energy_j, requests)
    for line in replayed:
        console.print(line)
    if not same or any("steps, all the same" not in line for line in replayed):
        raise typer.Exit(1)


def _replayed(folder: Path, progress: Progress) -> list[str]:
    lines = []
    for path in progress.track(sorted(folder.glob("*.rec")), description="replayed"):
        try:
            lines.append(f"{path.name}: {replay(path):,} steps, all the same")
        except Differs as error:
            lines.append(str(error))
    return lines


def _compare(console: Console, live: Live, energy_j: float, requests: list[RequestRecord]) -> bool:
    """Print both sides of each figure; say whether all are as close as they must be."""
    live_met, sim_met = attainment(live.requests).request or 0.0, attainment(requests).request or 0.0
    live_tokens = [one.output_tokens for one in live.requests]
    sim_tokens = [one.output_tokens for one in requests]
    off = live.energy_j / energy_j - 1.0
    verdicts = (
        abs(off) <= ENERGY_WITHIN,
        abs(live_met - sim_met) <= ATTAINMENT_WITHIN,
        live_tokens == sim_tokens,
    )
    table = Table("figure", "live", "simulated", "difference", "within")
    rows = (
        ("energy, kJ (cold)", f"{live.energy_j / 1e3:.2f}", f"{energy_j / 1e3:.2f}", f"{off:+.2%}", "5 %"),
        (
            "attainment by request",
            f"{live_met:.2%}",
            f"{sim_met:.2%}",
            f"{100 * (live_met - sim_met):+.2f} points",
            "2 points",
        ),
        (
            f"tokens of {len(requests)} requests",
            f"{sum(live_tokens):,}",
            f"{sum(sim_tokens):,}",
            f"{sum(a != b for a, b in zip(live_tokens, sim_tokens, strict=True))} requests differ",
            "none",
        ),
    )
    for row, good in zip(rows, verdicts, strict=True):
        table.add_row(*row, style="" if good else "red")
    for name, side in (("live", live.requests), ("simulated", requests)):
        ttft_ms = [one.token_ms[0] - one.arrived_ms for one in side if one.token_ms]
        console.print(
            f"TTFT p50, p99 {name}: {np.quantile(ttft_ms, 0.5):.1f}, {np.quantile(ttft_ms, 0.99):.1f} ms"
        )
    console.print(table)
    return all(verdicts)


if __name__ == "__main__":
    typer.run(main)
