"""`festina lut`: look at a look-up table, and at how far tables are from measured data."""

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console

from services.cli import (
    lut_fidelity_power,
    lut_fidelity_tables,
    lut_fidelity_time,
    lut_paper,
    lut_plot,
    lut_print,
)
from services.cli.lut_fidelity import Check
from services.cli.lut_paper import Point
from shared import lut
from shared.catalog import entries
from shared.devices import device_for
from shared.errors import FestinaError
from shared.lut_points import best_point, least_point
from shared.model import ModelSpec
from shared.slo import objectives_for

lut_app = typer.Typer(help="The look-up tables that the schedulers decide by (3.2).", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

ROOT = Path(__file__).resolve().parents[2]
DATA_FOLDERS = (ROOT.parent / "shared/data/calibration", ROOT / "tests/data")  # the first that has a file
PREFILL_TOKENS = (512, 2048, 8192)
DECODE_AT = ((8, 1088), (32, 1088), (32, 4160))  # (batch, context tokens)


@lut_app.command("show")
def show(
    model: str,
    gpu_type: Annotated[str, typer.Option(help="Row of the device table.")] = "h100-80gb",
    file: Annotated[Path | None, typer.Option(help="A stored table instead of the modelled one.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this PNG or SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Show MODEL's energy against clock for both phases, the map of SM share and clock, the chosen points."""
    table = _read(file) if file else lut.build(device_for(gpu_type), _catalog_model(model))
    if not table.device.has_meter:
        raise FestinaError(f"{table.device.name} has no power meter, so there is no energy to show")
    view = _view(table)
    if plot:
        lut_plot.plot(view, plot)
    if as_json:
        _print_json(view)
        return
    console = Console()
    console.print(f"{view['model']} on {view['gpu_type']}: {view['source']}; sha256 {table.sha256[:12]}")
    for phase in ("prefill", "decode"):
        console.print(lut_print.curves_table(phase, view))
    console.print(lut_print.heat_table(view["heat"]))
    console.print(lut_print.chosen_table(view["chosen"]))
    if plot:
        console.print(f"drawn to {plot}")


@lut_app.command("check")
def check(
    data: Annotated[Path | None, typer.Option(help="Folder with the calibration data.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Also the paper's own points beside ours.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    as_json: Json = False,
) -> None:
    """Compare the device model and its tables with measured data; status 1 if one is over its bound."""
    if data and not data.is_dir():
        raise FestinaError(f"{data} is no folder; name the one with the calibration CSV files")
    checks = run_checks([data, *DATA_FOLDERS] if data else list(DATA_FOLDERS))
    points = paper_points() if paper else []
    if as_json:
        _print_json(
            {
                "checks": [msgspec.to_builtins(c) | {"verdict": c.verdict} for c in checks],
                "paper": [msgspec.to_builtins(point) for point in points],
            }
        )
    elif markdown:
        lut_print.print_markdown(checks, points)
    else:
        console = Console()
        console.print(lut_print.checks_table(checks))
        if points:
            console.print(lut_print.points_table(points))
    if any(c.verdict == "over" for c in checks):
        raise typer.Exit(1)


def run_checks(folders: list[Path]) -> list[Check]:
    """Run every comparison whose data is in one of the folders; the others say that they were skipped."""
    models = {entry.name: entry.spec() for entry in entries()}
    composed = "composed_step_latency_h100_h200.csv"
    h100, h200 = device_for("h100-80gb"), device_for("h200-141gb")
    steps: list[tuple[str, str, Any]] = [
        (
            "kernels on h100_sxm, composed",
            composed,
            lambda r: lut_fidelity_time.kernels(r, models, h100, "h100_sxm"),
        ),
        (
            "kernels on h200_sxm, composed",
            composed,
            lambda r: lut_fidelity_time.kernels(r, models, h200, "h200_sxm"),
        ),
        ("Aegaeon H100", "aegaeon_profiles.csv", lambda r: lut_fidelity_time.aegaeon(r, models)),
        (
            "MuxServe A100, SM share",
            "muxserve_a100_latency_vs_sm.csv",
            lambda r: lut_fidelity_time.muxserve(r, models),
        ),
        (
            "ML.ENERGY H100, power",
            "mlenergy_llm_steady_state.csv",
            lambda r: lut_fidelity_power.mlenergy(r, models),
        ),
        (
            "H100 power at locked clocks",
            "h100_firestarter_dgemm_power_vs_clock.csv",
            lut_fidelity_power.voltage,
        ),
    ]
    checks: list[Check] = []
    for name, file, compare in steps:
        found = next((folder / file for folder in folders if (folder / file).is_file()), None)
        if found is None:
            checks.append(
                Check(check=name, subject="all", skipped=f"{file} is not here; name its folder, --data")
            )
            continue
        with found.open(newline="") as lines:
            checks += compare(list(csv.DictReader(lines)))
    return checks + lut_fidelity_tables.interpolation([entry.spec() for entry in entries()])


def paper_points() -> list[Point]:
    """Compute the paper's points: Figs. 3 and 4, Appendix H, and the bands of what is assumed."""
    models = {entry.name: entry.spec() for entry in entries()}
    figures = [models[name] for name in lut_paper.FIGURE_MODELS]
    return [
        *lut_paper.figure_3_points(figures),
        *lut_paper.figure_4_points(figures),
        *lut_paper.appendix_h_points(models),
        *lut_paper.bands(models["Llama-2-13B-chat"]),
    ]


# ---- what `show` shows


def _read(file: Path) -> lut.Lut:
    try:
        return lut.unpack(file.read_bytes())
    except OSError as error:
        raise FestinaError(f"{file} cannot be read: {error.strerror}") from None


def _catalog_model(name: str) -> ModelSpec:
    found = [entry.spec() for entry in entries() if entry.name.lower() == name.lower()]
    if not found:
        near = [entry.name for entry in entries() if name.lower() in entry.name.lower()]
        known = ", ".join(near or [entry.name for entry in entries()])
        raise FestinaError(f"the catalog has no model {name!r}; choose from: {known}")
    return found[0]


def _view(table: lut.Lut) -> dict[str, Any]:
    """Everything `show` prints and draws, as plain data."""
    clocks = [int(clock) for clock in table.axes.clocks_mhz]
    at = np.array(clocks)
    prefill = [
        (f"{tokens} tokens", table.ttft_ms(at, 100, tokens), table.prefill_power_w(at, 100, tokens))
        for tokens in PREFILL_TOKENS
    ]
    decode = [
        (
            f"batch {batch}, context {context}",
            table.tbt_ms(at, 100, batch, context),
            table.decode_power_w(at, 100, batch, context),
        )
        for batch, context in DECODE_AT
    ]
    source = table.provenance
    return {
        "model": table.model.name,
        "gpu_type": table.device.name,
        "source": f"{source.kind}, {source.device}" + (f", {source.date}" if source.date else ""),
        "clocks_mhz": clocks,
        "prefill": [_curve(clocks, *found) for found in prefill],
        "decode": [_curve(clocks, *found) for found in decode],
        "heat": _heat_of(table),
        "chosen": [_chosen_of(table, tokens) for tokens in (128, 512, 1024, 4096, 8192)],
    }


def _curve(clocks: list[int], workload: str, ms: Any, watts: Any) -> dict[str, Any]:
    energy = ms * watts / 1000
    best = int(np.argmin(energy))
    at_f_max = int(np.argmin(np.abs(np.array(clocks) - lut_paper.TDP_MHZ)))
    return {
        "workload": workload,
        "ms": np.round(ms, 2).tolist(),
        "least_j": round(float(energy[best]), 3),
        "energy": np.round(energy / energy[best], 4).tolist(),
        "best_mhz": clocks[best],
        "saving_pct": round(100 * float(1 - energy[best] / energy[at_f_max]), 1),
    }


def _heat_of(table: lut.Lut) -> dict[str, Any]:
    tokens, output, batch = lut_print.REQUEST
    clocks, shares = table.clocks_mhz[None, :], table.shares_pct[:, None]
    energy = table.request_energy_j(clocks, shares, tokens, output, batch)
    return {
        "workload": f"{tokens} in, {output} out, batch {batch}",
        "clocks_mhz": table.clocks_mhz.tolist(),
        "shares_pct": table.shares_pct.tolist(),
        "energy": np.round(energy / energy.min(), 3).tolist(),
        "least_j": round(float(energy.min()), 3),
        "best": best_point(table, tokens, output, objectives_for(tokens), batch),
    }


def _chosen_of(table: lut.Lut, tokens: int) -> dict[str, Any]:
    _, output, batch = lut_print.REQUEST
    objectives = objectives_for(tokens)
    best = best_point(table, tokens, output, objectives, batch)
    least = least_point(table, tokens, output, objectives, batch)
    chosen: dict[str, Any] = {"input_tokens": tokens, "ttft_objective_ms": objectives.ttft_ms}
    chosen |= {"best": best, "least": least, "ttft_ms": None, "tbt_ms": None, "energy_j": None}
    if best:
        chosen["ttft_ms"] = round(float(table.ttft_ms(*best, tokens)), 1)
        chosen["tbt_ms"] = round(float(table.tbt_ms(*best, batch, tokens + output / 2)), 1)
        chosen["energy_j"] = round(float(table.request_energy_j(*best, tokens, output, batch)), 2)
    return chosen


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
