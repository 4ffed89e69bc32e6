"""Do GPUs empty when the load falls, and fill again when it rises? A live emulated pool, twice.

``python -m sim.consolidate_check`` (``make consolidate-check``) sends the full load, a tenth of it, and the
full load again, to a pool that consolidates and to one that never does (3.5). The consolidator's windows are
as short as such a run needs. Numbers go to ``build/consolidate-check.json``, active GPUs over time to
``build/consolidate-check.png``.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from services.consolidator.capacity import best_fit_decreasing
from services.consolidator.place import KvFloor
from services.consolidator.settings import ConsolidatorSettings
from shared.catalog import pool_models
from shared.devices import device_for
from shared.model import ModelSpec
from sim.figures import check_plottable
from sim.live_check import GPU_TYPE, OUTPUT, answered, progress_bar, teller
from sim.live_plot import plot_active
from sim.live_pool import Live, live_run
from sim.report import attainment, by_idle_accounting
from sim.workload import generate

HASTE = {  # the defaults are for days; here each third of the run is to show a consolidation
    "WINDOW_MS": "30000",
    "OBSERVE_MS": "15000",
    "CONSOLIDATE_MS": "10000",
    "TRIGGER_GAP_MS": "3000",
    "DWELL_MS": "20000",
    "REPLICA_KEEP_ALIVE_MS": "15000",
}
RUNS = {"consolidating": "ewr", "never": "none"}
THIRDS = ("full", "a tenth", "full again")


class Third(msgspec.Struct):
    """What a third of a run came to, and how many GPUs had models in its last half.

    Args:
        bound: GPUs that best-fit decreasing needs for the models that were loaded then, by memory.
        changes: how often the number of active GPUs changed in that half.
    """

    attainment: float
    active_mean: float
    active_last: int
    bound: float
    changes: int


class Outcome(msgspec.Struct):
    """One run: its thirds, its energy in kJ by what a GPU without models takes, and processor cores taken."""

    name: str
    requests: int
    failed: int
    attainment: float
    thirds: list[Third]
    energy_kj: dict[str, float]
    empty_gpu_s: float
    pool_cores: float
    machine_cores: float


def active(live: Live) -> dict[float, list[tuple[str, ...]]]:
    """Return, by the time of each look, the models of each GPU that has any."""
    looks: dict[float, list[tuple[str, ...]]] = {}
    for sample in live.samples:
        on = looks.setdefault(sample.at_s, [])
        if sample.models:
            on.append(sample.models)
    return looks


def bound(resident: Sequence[str], models: dict[str, ModelSpec]) -> int:
    """Return how many GPUs best-fit decreasing takes for these models, with the least KV memory of each."""
    settings = ConsolidatorSettings()
    usable = (1.0 - settings.safety_margin) * device_for(GPU_TYPE).total_bytes
    floor = KvFloor(settings.min_kv_bytes, settings.min_kv_tokens)
    return best_fit_decreasing(
        (models[name].weight_bytes + floor.of(models[name]) for name in set(resident)), usable
    )


def outcome(name: str, live: Live, gpus: int, minutes: float, models: Sequence[ModelSpec]) -> Outcome:
    """Sum up a run."""
    specs = {model.name: model for model in models}
    looks = active(live)
    thirds = []
    for number in range(3):
        start_s, end_s = 20.0 * minutes * number, 20.0 * minutes * (number + 1)
        late = [on for at_s, on in looks.items() if (start_s + end_s) / 2 <= at_s < end_s]
        arrived = [one for one in live.requests if start_s <= one.arrived_ms / 1000 < end_s]
        bounds = [bound([model for on in gpu for model in on], specs) for gpu in late]
        thirds.append(
            Third(
                attainment=attainment(arrived).request or 0.0,
                active_mean=float(np.mean([len(on) for on in late])),
                active_last=len(late[-1]),
                bound=float(np.mean(bounds)),
                changes=sum(len(a) != len(b) for a, b in pairwise(late)),
            )
        )
    empty_s = sum((b - a) * (gpus - len(looks[a])) for a, b in pairwise(looks))
    energy_j = by_idle_accounting(live.energy_j, device_for(GPU_TYPE), 1000.0 * empty_s)
    return Outcome(
        name=name,
        requests=len(live.requests),
        failed=sum(not one.token_ms for one in live.requests),
        attainment=attainment(live.requests).request or 0.0,
        thirds=thirds,
        energy_kj={how: joules / 1e3 for how, joules in msgspec.structs.asdict(energy_j).items()},
        empty_gpu_s=empty_s,
        pool_cores=live.pool_cores,
        machine_cores=live.machine_cores,
    )


def main(
    minutes: Annotated[float, typer.Option(help="How long requests arrive; a third at a tenth.")] = 9.0,
    models: Annotated[int, typer.Option(help="Models served, by rank in the catalog.")] = 16,
    gpus: Annotated[int, typer.Option(help="Emulated H100.")] = 8,
    rps: Annotated[float, typer.Option(help="Requests per second and model, at the highest.")] = 0.1,
    keep_alive_s: Annotated[float, typer.Option(help="Keep-alive of each model.")] = 40.0,
    seed: int = 0,
    output: Annotated[Path, typer.Option(help="Folder for the numbers and the picture.")] = OUTPUT,
) -> None:
    """Compare a live emulated pool that consolidates with one that never does."""
    output.mkdir(parents=True, exist_ok=True)
    check_plottable(output / "consolidate-check.png")
    console = Console()
    served = tuple(
        msgspec.structs.replace(model, keep_alive_ms=1000.0 * keep_alive_s) for model in pool_models(models)
    )
    made = generate("step", models=served, rps_per_llm=rps, minutes=minutes, seed=seed).arrivals
    arrivals = answered(made, served)
    lives: list[tuple[str, Live]] = []
    with tempfile.TemporaryDirectory(prefix="festina-live-") as folder, progress_bar(console) as bar:
        for name, policy in RUNS.items():
            task = bar.add_task(f"live, {name}", total=1.0)
            settings = {f"FESTINA_CONSOLIDATOR_{key}": value for key, value in HASTE.items()}
            settings["FESTINA_CONSOLIDATOR_CONSOLIDATION"] = policy
            settings["FESTINA_LOCAL_SCHED_COLD_AFTER_MS"] = "1"  # `outcome` takes empty GPUs to be cold
            live = asyncio.run(
                live_run(arrivals, served, gpus, Path(folder) / name, teller(bar, task), settings)
            )
            lives.append((name, live))
            bar.update(task, completed=1.0)
    found = [outcome(name, live, gpus, minutes, served) for name, live in lives]
    title = f"{len(arrivals):,} requests in {minutes:g} min, {models} models, {gpus} x {GPU_TYPE}"
    by_time = [(name, {at: len(on) for at, on in active(live).items()}) for name, live in lives]
    plot_active(by_time, f"{title} (emulated, live)", output / "consolidate-check.png")
    kept = {"workload": title, "seed": seed, "keep_alive_s": keep_alive_s, "settings": HASTE, "runs": found}
    (output / "consolidate-check.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    _show(console, title, found)


def _show(console: Console, title: str, found: Sequence[Outcome]) -> None:
    table = Table("figure", *(one.name for one in found), title=title)
    for number, name in enumerate(THIRDS):
        each = [one.thirds[number] for one in found]
        table.add_row(f"{name}: active GPUs, last half", *(f"{third.active_mean:.1f}" for third in each))
        table.add_row("  at its end; least by memory", *(f"{t.active_last}; {t.bound:.1f}" for t in each))
        table.add_row("  changes of their number", *(str(third.changes) for third in each))
        table.add_row("  attainment", *(f"{third.attainment:.2%}" for third in each))
    table.add_row("attainment", *(f"{one.attainment:.2%}" for one in found))
    table.add_row("requests without an answer", *(str(one.failed) for one in found))
    for how in ("warm", "cold", "off"):
        table.add_row(f"energy, kJ, empty GPUs {how}", *(f"{one.energy_kj[how]:.1f}" for one in found))
    table.add_row("GPU-seconds empty", *(f"{one.empty_gpu_s:.0f}" for one in found))
    table.add_row(
        "cores: pool, machine", *(f"{one.pool_cores:.2f}, {one.machine_cores:.2f}" for one in found)
    )
    console.print(table)
    ours, theirs = found
    for how in ("warm", "cold", "off"):
        saved_kj = theirs.energy_kj[how] - ours.energy_kj[how]
        part = saved_kj / theirs.energy_kj[how]
        console.print(f"saved, empty GPUs {how}: {saved_kj:.1f} kJ ({part:.1%})", highlight=False)
    console.print(f"attainment {100 * (ours.attainment - theirs.attainment):+.2f} points", highlight=False)


if __name__ == "__main__":
    typer.run(main)
