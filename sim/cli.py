"""`festina sim` and `festina plan`: the commands of the simulator."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from shared.catalog import pool_models
from shared.errors import ConfigError

if TYPE_CHECKING:  # the simulator is imported when it runs, so that other commands start fast
    from shared.devices import Device
    from shared.model import ModelSpec
    from sim.workload import Workload

MINUTES = 10.0  # of a made workload
BUDGET_S = 45.0  # of a plan: with what starts and ends it, under a minute
PREDICTORS = ("live", "oracle", "paper", "measured")

errors = Console(stderr=True)

GpuType = Annotated[str, typer.Option(help="Row of the device table.")]
Gpus = Annotated[int, typer.Option(min=1, max=1024)]
WorkloadName = Annotated[str, typer.Option(help="Name of a workload, or a CSV of requests to replay.")]
Rps = Annotated[
    float | None,
    typer.Option(help="Requests per second and model; 1 if left out, and a trace keeps its own."),
]
Llms = Annotated[int, typer.Option(min=1, max=1000, help="Models served, by rank in the catalog.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all chance.")]
Predictor = Annotated[str, typer.Option(help=f"How output lengths are predicted: {', '.join(PREDICTORS)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def sim(
    system: Annotated[
        str, typer.Option(help="The serving system, of those that `festina systems` lists.")
    ] = "festina",
    workload: WorkloadName = "sharegpt",
    llms: Llms = 16,
    rps: Rps = None,
    gpus: Gpus = 8,
    gpu_type: GpuType = "h100-80gb",
    minutes: Annotated[
        float | None,
        typer.Option(help=f"How long requests arrive; {MINUTES:g} if left out, or a trace's own."),
    ] = None,
    seed: Seed = 0,
    default_clock: Annotated[
        int | None, typer.Option(help="SM clock in MHz of a GPU that nobody governs, such as 1980 or 1635.")
    ] = None,
    predictor: Predictor = "live",
    clients: Annotated[
        Path | None,
        typer.Option(help="For servegen: its files, up to _arrivals (default: an hour of m-large)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw clocks, watts, residents and attainment to this PNG or SVG.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a workload on emulated GPUs, with the very schedulers that serve.

    Figures are of the last two thirds of the time in which requests arrive.
    """
    from sim import figures, tables
    from sim.collector import collecting_rarely
    from sim.report import report
    from sim.scenario import FAST, Scenario
    from sim.systems import under
    from sim.tasks import planned_device
    from sim.world import run

    settings = under(system, FAST)
    device = planned_device(gpu_type)
    check(predictor, default_clock, device)
    if plot is not None:
        figures.check_plottable(plot)
    models = pool_models(llms)
    load, span_ms = load_workload(workload, models, rps, minutes, seed, clients)
    scenario = Scenario(
        models=models,
        arrivals=load.arrivals,
        gpus=gpus,
        gpu_type=gpu_type,
        seed=seed,
        default_clock_mhz=default_clock,
        predictor=predictor,
        settings=settings,
    )
    with progress() as bar:
        task = bar.add_task(f"simulating {len(load.arrivals):,} requests", total=1.0)
        started_s = time.monotonic()
        with collecting_rarely():
            result = run(scenario, progress=lambda part: bar.update(task, completed=part))
        result.wall_s = time.monotonic() - started_s
    numbers = report(result, device, span_ms / 3, span_ms)
    title = f"{system}: {workload}, {llms} LLMs, {gpus} x {gpu_type}"
    if plot is not None:
        figures.plot(result, f"{title} (modelled; GPUs without models drawn as cold)", plot)
    if as_json:
        print_json(numbers)
        _say(load)
    else:
        console = Console()
        console.print(tables.summary(numbers, device, title, span_ms))
        ended = sum(1 for r in result.requests if r.outcome in ("stop", "length"))
        console.print(f"{ended:,} of {len(result.requests):,} requests finished. {tables.said(load)}")
        if plot is not None:
            console.print(f"drawn to {plot}")


def plan(
    trace: Annotated[Path, typer.Option(help="CSV of requests: time, input, output and perhaps model.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs to try: 4, or 1..8.")] = "1..8",
    llms: Llms = 8,
    rps: Annotated[
        float | None,
        typer.Option(help="Stretch time to this rate per second and model; left out: as it was."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Only the first minutes of the trace.")] = None,
    target: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests to be on time.")] = 0.95,
    price: Annotated[float | None, typer.Option(help="Price of a kWh, in any currency.")] = None,
    gpu_type: GpuType = "h100-80gb",
    seed: Seed = 0,
    predictor: Predictor = "live",
    budget_s: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds to spend: a long trace is sampled. 0: none is, however long."),
    ] = BUDGET_S,
    as_json: Json = False,
) -> None:
    """What would this trace cost, and how many GPUs does it need?

    The fewest GPUs that meet the target are looked for; that run is repeated with the unmeasured numbers of
    the device model at the ends of their bands. Of a long trace windows are played, and figures come with the
    95 % interval that this leaves.
    """
    from sim import tables
    from sim.plan import plan as find
    from sim.tasks import Case, planned_device
    from sim.traces import read_trace
    from sim.workers import Workers
    from sim.workload import replay

    device = planned_device(gpu_type)
    check(predictor, None, device)
    counts = gpu_counts(gpus)
    models = pool_models(llms)
    load = replay(read_trace(trace), models=models, rps_per_llm=rps, minutes=minutes, seed=seed)
    base = Case(models=models, arrivals=load.arrivals, gpus=1, device=device, seed=seed, predictor=predictor)
    said = f"planning for {len(load.arrivals):,} requests"
    budget = budget_s or math.inf
    with progress() as bar, Workers(bar, said, budget) as workers:
        answer = find(base, counts, target, workers.play, budget, workers.left_s)
    if as_json:
        print_json(answer)
        _say(load)
        return
    for part in (*tables.planned(answer, base, price), tables.said(load)):
        Console().print(part)


def gpu_counts(text: str) -> list[int]:
    """Return the numbers of GPUs that ``4`` or ``1..8`` names. Raises ConfigError for anything else."""
    first, _, last = text.partition("..")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high <= 1024:
        raise ConfigError(f"--gpus {text}: give a number, or a range such as 1..8, of 1 to 1024 GPUs")
    return list(range(low, high + 1))


def print_json(value: object) -> None:
    """Print a value as JSON, every field of it."""
    plain = msgspec.json.encode(_fields(value))
    sys.stdout.write(msgspec.json.format(plain).decode() + "\n")


def _fields(value: object) -> object:
    """Return structs as dictionaries, fields at their defaults included."""
    if isinstance(value, msgspec.Struct):
        return {name: _fields(getattr(value, name)) for name in value.__struct_fields__}
    return [_fields(one) for one in value] if isinstance(value, tuple) else value


def is_file(workload: str) -> bool:
    """Say whether a workload's name is that of a file."""
    return workload.endswith((".csv", ".csv.gz")) or "/" in workload


def load_workload(
    workload: str,
    models: "Sequence[ModelSpec]",
    rps: float | None,
    minutes: float | None,
    seed: int,
    clients: Path | None,
    made_minutes: float = MINUTES,
) -> "tuple[Workload, float]":
    """Make the workload, or replay the file, that the command line names; returns it and its ms.

    It is `made_minutes` long if it is made and `minutes` is not said; a file then, until its last request.
    """
    from sim import traces
    from sim.workload import SERVEGEN, generate, replay

    if is_file(workload):
        rows = traces.read_trace(Path(workload))
        load = replay(rows, models=models, rps_per_llm=rps, minutes=minutes, seed=seed)
        return load, load.arrivals[-1].at_ms + 1.0 if minutes is None else minutes * 6e4
    wanted = traces.read_clients(clients or traces.SERVEGEN_HOUR) if workload == SERVEGEN else ()
    made_minutes = made_minutes if minutes is None else minutes
    load = generate(
        workload,
        models=models,
        rps_per_llm=1.0 if rps is None else rps,
        minutes=made_minutes,
        seed=seed,
        clients=wanted,
    )
    return load, made_minutes * 6e4


def _say(load: "Workload") -> None:
    """Tell on stderr, beside JSON on stdout, what was done to requests that are too long."""
    from sim import tables

    if said := tables.said(load):
        errors.print(said, soft_wrap=True)


def check(predictor: str, default_clock: int | None, device: "Device") -> None:
    """Raise ConfigError for a predictor or a default clock that there is not."""
    if predictor not in PREDICTORS:
        raise ConfigError(f"no predictor is called {predictor!r}; there are: {', '.join(PREDICTORS)}")
    if default_clock is not None:
        device.at_default_clock(default_clock)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show progress on stderr, so that stdout stays what was asked for."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:
        yield bar
