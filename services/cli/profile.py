"""`festina profile`: make the look-up table of a model on a device, measured or composed (3.2.1)."""

import asyncio
import datetime
import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.cli import tables
from services.cli.profile_target import Target, cuda_index, target_for
from services.local_sched import profile_aic, profile_kernels
from services.local_sched.profile import Bench, run_sweeps
from services.local_sched.profile_grid import Point, Reading
from services.local_sched.profile_journal import Heading, Journal, Measured
from services.local_sched.profile_stats import Plan, beyond_memory, foresee, oddities, samples_of
from services.local_sched.vllm_env import MODEL_NAME
from shared.errors import ConfigError, FestinaError, Unavailable
from shared.lut import Lut, build, from_samples
from shared.lut_table import Provenance
from shared.model import slug

BUSY = 0.5
"""Load per core before the profile begins above which the engine would not have the machine to itself."""

console = Console()


def profile(
    model: Annotated[
        str, typer.Option(help="Name of a model, the start of one, or a JSON file.")
    ] = MODEL_NAME,
    gpu: Annotated[str, typer.Option(help="cpu, cuda:N, or a device type that is then emulated.")] = "cpu",
    source: Annotated[str, typer.Option("--from", help="measure, or aiconfigurator.")] = "measure",
    kernels: Annotated[bool, typer.Option(help="Time plain kernels on cuda:N, without an engine.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print what would be measured, and its cost.")] = False,
    fresh: Annotated[bool, typer.Option(help="Forget what an interrupted profile has measured.")] = False,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Skip what neighbours foretell this well; 0: all.")
    ] = 0.03,
    precision: Annotated[
        float, typer.Option(min=0.001, help="Half width of the 95 % confidence interval aimed for.")
    ] = 0.03,
    gpu_type: Annotated[str, typer.Option(help="Device type of cuda:N, if its name does not tell.")] = "",
    store: Annotated[bool, typer.Option(help="Put the table into the store as well.")] = True,
    state_dir: Annotated[
        str, typer.Option(envvar="FESTINA_STATE_DIR", help="Where tables and models are kept.")
    ] = ".festina",
    vllm_env: Annotated[
        str, typer.Option(envvar="FESTINA_VLLM_ENV", help="Virtual environment of the vLLM engine.")
    ] = ".venv-vllm",
) -> None:
    """Make the look-up table of a model on a device: sweep clocks, SM shares, lengths and batches.

    A run that was interrupted goes on where it was. The table goes into a file and into the store, and
    running services use it at once.
    """
    state = Path(state_dir).resolve()
    if kernels:
        _kernels(model, gpu, state)
        return
    if source not in ("measure", "aiconfigurator"):
        raise ConfigError(f"--from {source} is not known; it is `measure` or `aiconfigurator`")
    with target_for(model, gpu, gpu_type, source, state, Path(vllm_env), precision) as target:
        for what, why in target.grid.fixed:
            console.print(f"[yellow]{what} cannot be moved: {why}; one value is recorded[/yellow]")
        if source == "aiconfigurator":
            lut = _composed(target, state, dry_run)
        else:
            lut = _measured(target, tolerance, state, dry_run, fresh)
    if lut is not None and store:
        _offer(lut, state)


# ---- making the table


def _measured(target: Target, tolerance: float, state: Path, dry_run: bool, fresh: bool) -> Lut | None:
    plan = foresee(target.grid, tolerance, target.effort, build(target.device, target.model))
    if dry_run:
        _show_plan(target, plan)
        return None
    device, model = target.device, target.model
    path = tables.tables_dir(state) / f"{slug(device.name)}--{slug(model.name)}.journal"
    if fresh:
        path.unlink(missing_ok=True)
    settings = repr((target.grid, target.effort, tolerance))
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    if device.name == "cpu" and busy > BUSY:
        console.print(f"[yellow]this machine is busy (load {busy:.1f} per core): times will be long[/yellow]")
    journal = Journal(
        path, Heading(gpu_type=device.name, model=model.name, source=target.source, grid=settings)
    )
    if journal.entries:
        console.print(f"going on after {len(journal.entries)} points of an interrupted profile")
    try:
        readings, load_ms = asyncio.run(_sweep(target, tolerance, plan, journal))
    finally:
        journal.close()
    lut = _table(target, readings, journal, load_ms)
    _save(lut, state)
    path.replace(path.with_suffix(".measured"))  # what was measured stays beside the table
    return lut


async def _sweep(
    target: Target, tolerance: float, plan: Plan, journal: Journal
) -> tuple[dict[Point, Reading], float]:
    assert target.lab is not None
    bench = Bench(target.lab, target.model, target.effort)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("loading the model", total=None)
            await bench.load(target.kv_pool_bytes)
            # Costs in seconds, so that the time left is not that of the cheap points.
            known = {entry.point for entry in journal.entries}
            left_s = sum(ms for point, ms in plan.cost_ms.items() if point not in known) / 1000
            progress.update(bar, total=round(left_s, 1), description="profiling (expected seconds)")

            def tell(entry: Measured) -> None:
                progress.advance(bar, round(plan.cost_ms.get(entry.point, 0.0) / 1000, 1))
                if entry.outliers:
                    progress.console.print(
                        f"[dim]{_name(entry.point)}: {entry.outliers} outliers left out[/dim]"
                    )

            return await run_sweeps(bench, target.grid, tolerance, journal, tell), bench.load_ms
    finally:
        await target.lab.close()


def _table(target: Target, readings: dict[Point, Reading], journal: Journal, load_ms: float) -> Lut:
    entries = list({entry.point: entry for entry in journal.entries}.values())  # the newest of each point
    beyond = beyond_memory(target.grid, readings)
    odd = oddities({entry.point: entry.latency_ms for entry in entries})
    loose = sum(not entry.precise for entry in entries)
    console.print(
        f"{len(entries)} points measured, {len(readings) - len(entries)} taken from their neighbours, "
        f"{len(beyond)} past the KV memory; {loose} with a wide confidence interval; "
        f"load {load_ms / 1000:.1f} s"
    )
    for before, after in odd[:5]:
        console.print(f"[yellow]odd: {_name(after)} took less than {_name(before)}[/yellow]")
    note = [f"{target.source}; {len(entries)} of {len(readings)} points measured, load {load_ms:.0f} ms"]
    note += [f"{what} not moved: {why}" for what, why in target.grid.fixed]
    note += [f"{sum(e.outliers for e in entries)} outliers left out, {len(odd)} odd pairs, {loose} imprecise"]
    provenance = Provenance(
        kind="measured",
        device=target.source,
        driver=target.driver,
        engine_version=target.engine_version,
        date=datetime.date.today().isoformat(),
        note="; ".join(note),
    )
    return from_samples(target.device, target.model, samples_of(readings | beyond), provenance)


def _composed(target: Target, state: Path, dry_run: bool) -> Lut | None:
    device, model = target.device, target.model
    kernel_ms, source = profile_aic.kernel_times(device, model)
    if dry_run:
        console.print(f"{model.name} on {device.name} from {source}: nothing is measured, some seconds")
        return None
    modelled = build(device, model)
    readings = {
        point: (ms, watts)
        for point, ms, watts in profile_aic.composed(device, model, target.grid, modelled, kernel_ms)
    }
    provenance = Provenance(
        kind="modelled",
        device=device.name,
        date=datetime.date.today().isoformat(),
        parameters_digest=device.digest,
        note=f"kernels of {source} at the default clock; clocks, SM shares, overheads, power modelled",
    )
    samples = samples_of(readings | beyond_memory(target.grid, readings))
    lut = from_samples(device, model, samples, provenance)
    _save(lut, state)
    return lut


def _show_plan(target: Target, plan: Plan) -> None:
    grid = target.grid
    table = Table(
        "dimension", "values", title=f"{target.model.name} on {target.device.name}: {target.source}"
    )
    table.add_row("SM clock, MHz", " ".join(map(str, grid.clocks_mhz)))
    table.add_row("SM share, %", " ".join(map(str, grid.shares_pct)))
    table.add_row("input tokens", " ".join(map(str, grid.input_tokens)))
    table.add_row("batch", " ".join(map(str, grid.batches)))
    table.add_row("context tokens", " ".join(map(str, grid.context_tokens)))
    console.print(table)
    cost_s = sum(plan.cost_ms.values()) / 1000
    console.print(
        f"about {len(plan.cost_ms)} points to measure and {plan.skipped} that their neighbours tell; "
        f"about {cost_s / 60:.1f} minutes of the device's time, and the load, if it is as fast as its model"
    )


def _name(point: Point) -> str:
    batch = f" batch {point.batch}," if point.phase == "decode" else ""
    return f"{point.phase} of {point.tokens} tokens,{batch} {point.sm_clock_mhz} MHz, {point.sm_share_pct} %"


def _kernels(model: str, gpu: str, state: Path) -> None:
    shape = next((s for s in profile_kernels.SHAPES if slug(s).startswith(slug(model))), None)
    if shape is None:
        raise ConfigError(f"--kernels has the shapes of: {', '.join(profile_kernels.SHAPES)}")
    index = cuda_index(gpu if gpu != "cpu" else "cuda:0")
    try:
        found = profile_kernels.profile(shape, index, console.print)
    except profile_kernels.NoDevice as error:
        raise FestinaError(str(error)) from None
    folder = tables.tables_dir(state)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kernels--{slug(found['device'])}--{slug(shape)}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    console.print(f"written to {path}")


# ---- keeping it


def _save(lut: Lut, state: Path) -> None:
    for phase, fit in (("prefill", lut.prefill_fit), ("decode", lut.decode_fit)):
        if fit is not None:
            console.print(
                f"{phase}: polynomials up to degree {fit.degree} miss a length left out by "
                f"{fit.mean_pct:.1f} % on average, {fit.worst_pct:.1f} % at worst"
            )
    path = tables.save(tables.tables_dir(state), lut)
    console.print(f"table {lut.sha256[:12]} written to {path} ({path.stat().st_size / 1000:.0f} kB)")


def _offer(lut: Lut, state: Path) -> None:
    logging.getLogger("festina.bus").setLevel(logging.ERROR)  # that our own connection ends is no news
    common = tables.servers_of(state)
    if not asyncio.run(tables.answers(common)):
        console.print(f"no store at {common.redis_url}: `festina up` will put the table there when it starts")
        return
    try:
        asyncio.run(tables.put(common, lut))
        asyncio.run(tables.tell(common, lut))
    except Unavailable as error:
        raise FestinaError(f"the table is in its file, but the services do not know: {error}") from None
    console.print("the store has it, and running services decide by it from now on")
