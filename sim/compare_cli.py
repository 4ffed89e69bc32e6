"""`festina compare` and `festina bound`: systems side by side, and the least that any would need."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from shared.catalog import pool_models
from shared.errors import ConfigError
from sim.cli import (
    Gpus,
    GpuType,
    Json,
    Llms,
    Predictor,
    Rps,
    Seed,
    WorkloadName,
    check,
    load_workload,
    print_json,
    progress,
)

T = TypeVar("T", str, int, float)

SHOWN = 7  # columns of a table in the terminal; the page has all
STEADY_MINUTES = 20.0  # of a made workload: the ends, where few requests share a step, weigh little then


def bound(
    workload: WorkloadName = "sharegpt",
    llms: Llms = 16,
    rps: Rps = None,
    gpus: Gpus = 8,
    gpu_type: GpuType = "h100-80gb",
    minutes: Annotated[
        float | None,
        typer.Option(help=f"How long requests arrive; {STEADY_MINUTES:g} if left out, or a trace's own."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The least energy for which a setting can be served at all, whatever the policy.

    A fluid bound: memory, bandwidth, arithmetic, objectives and the device's power, and nothing else
    (docs/evaluation.md says what it leaves out).
    """
    from sim import tables
    from sim.bound import bound as least
    from sim.tasks import planned_device

    device = planned_device(gpu_type)
    models = pool_models(llms)
    load, span_ms = load_workload(workload, models, rps, minutes, seed, None, STEADY_MINUTES)
    answer = least(models, load.arrivals, device, gpus, span_ms)
    if as_json:
        print_json(answer)
        return
    title = f"at least: {workload}, {llms} LLMs, {gpus} x {gpu_type}"
    Console().print(tables.least(answer, device, title))


def compare(
    systems: Annotated[
        str, typer.Option(help="Systems, with commas between, or `all`; see `festina systems`.")
    ] = "festina,festina-paper,muxserve,dilu",
    workloads: Annotated[str, typer.Option(help="Names of workloads, with commas between.")] = "sharegpt",
    llms: Annotated[str, typer.Option(help="Numbers of models, by rank in the catalog: 16,24,32.")] = "16",
    rps: Annotated[str, typer.Option(help="Rates in requests per second and model: 1,2,3.")] = "1",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs: 8.")] = "8",
    seeds: Annotated[str, typer.Option(help="Seeds: 0,1,2. Tables show the mean and half the range.")] = "0",
    default_clocks: Annotated[
        str, typer.Option(help="SM clocks in MHz of GPUs that a system does not govern: 1635,1980.")
    ] = "1635",
    minutes: Annotated[float, typer.Option(min=0.1, help="How long requests arrive in each cell.")] = 3.0,
    gpu_type: GpuType = "h100-80gb",
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting for all cells, such as consolidator.safety_margin=0.1."),
    ] = None,
    predictor: Predictor = "live",
    reference: Annotated[
        str, typer.Option(help="Energies are shown against this system's.")
    ] = "festina-paper",
    accounting: Annotated[str, typer.Option(help="Of GPUs without models: cold, warm or off.")] = "cold",
    served: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Settings where no system has this attainment are marked.")
    ] = 0.9,
    out: Annotated[Path, typer.Option(help="Folder of results, and of what is made of them.")] = Path(
        "build/compare"
    ),
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: as many as there are cores.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Only say what would be played.")] = False,
    as_json: Json = False,
) -> None:
    """Play a grid of systems, workloads, models, rates and seeds, and show it side by side.

    Cells run in parallel; each is kept when it is done, so a run that was stopped goes on where it was, and a
    larger grid plays only what is new. A change of the sources plays everything anew. Written to the folder:
    index.html (figures and tables), summary.csv (a row per system and setting) and cells.csv (one per cell).

    For example: festina compare --systems all --llms 16,24 --rps 1,2 --seeds 0,1,2 --default-clocks 1635,1980
    """
    from shared.systems import SYSTEMS
    from sim import tables
    from sim.compare import ACCOUNTINGS, csv_lines, grid, rows, sections
    from sim.compare_write import cell_lines, write_csv, write_page
    from sim.grid import Grid, said
    from sim.tasks import planned_device

    if accounting not in ACCOUNTINGS:
        raise ConfigError(f"--accounting {accounting}: choose one of {', '.join(ACCOUNTINGS)}")
    check(predictor, None, planned_device(gpu_type))
    cells = grid(
        list(SYSTEMS) if systems == "all" else _listed("systems", systems, str),
        _listed("default-clocks", default_clocks, int),
        _listed("seeds", seeds, int),
        workload=_listed("workloads", workloads, str),
        llms=_listed("llms", llms, int),
        rps=_listed("rps", rps, float),
        gpus=_listed("gpus", gpus, int),
        gpu_type=[gpu_type],
        minutes=[minutes],
        predictor=[predictor],
        knobs=[_knobs(knobs or [])],
    )
    store = Grid(out)
    missing = store.missing(cells)
    if dry_run:
        Console().print(f"{len(cells)} cells, {len(missing)} to play: " + "; ".join(map(said, missing[:5])))
        return
    with progress() as bar:
        store.play(cells, bar, workers or None)
    played = [one for one in map(store.kept, cells) if one is not None]
    found = rows(played, reference, accounting, served)
    title = f"{systems} on {workloads}"
    intro = (
        f"Modelled energy on {gpu_type}; GPUs without models count as {accounting}. Of each run of"
        f" {minutes:g} minutes the last two thirds count. Cells show the mean over seeds and half the range.",
        f"Over the reference: energy over that of {reference}. Over the bound: joules per token over those of"
        " the fluid lower bound. Attainment: by request, strict, by token. Where no system brings"
        f" {served:.0%} of the requests in time, it is said.",
    )
    write_page(out, title, intro, sections(found, reference, accounting))
    write_csv(out / "summary.csv", csv_lines(found))
    write_csv(out / "cells.csv", cell_lines(played))
    if as_json:
        print_json(tuple(found))
        return
    for section in sections(found, reference, accounting):
        for sheet in section.sheets:
            Console().print(tables.of_sheet(sheet, section.title, SHOWN))
    Console().print(f"{len(cells)} cells, {len(missing)} played now; page and CSVs in {out}")


def _listed(option: str, text: str, kind: "type[T]") -> "list[T]":
    """Return the values that commas separate. Raises ConfigError naming the option for one that is none."""
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise ConfigError(f"--{option} {text}: give values with commas between")
    return values


def _knobs(given: Sequence[str]) -> dict[str, float]:
    """Return settings by their place. Raises ConfigError for what is not ``service.field=number``."""
    found = {}
    for text in given:
        place, _, value = text.partition("=")
        try:
            found[place] = float(value)
        except ValueError:
            raise ConfigError(f"--set {text}: say service.field=number") from None
    return found
