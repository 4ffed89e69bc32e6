"""Comparing systems over a grid: rows by setting and system, with the spread over seeds.

A setting is all of a cell but its system, the default clock and the seed. Attainment is by request. Where the
mean attainment of every system is below what is to be served, the setting is marked: no policy serves it, and
energies there mean nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
from msgspec.structs import replace

from services.local_sched import presets as local_sched
from shared.model import Struct
from shared.systems import system_for
from sim.bound import Bound, bound
from sim.cells import Cell, Played, device_of, load_of, models_of
from sim.page import Section, Sheet, drawing, svg

SERVED = 0.9  # attainment by request below which a system does not serve a setting
STEADY_MINUTES = 20.0  # of the requests that a bound is made for: their ends then weigh little
ACCOUNTINGS = ("cold", "warm", "off")


class Spread(Struct):
    """The mean of a figure over seeds, and its ends."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        half = (self.high - self.low) / 2
        return f"{self.mean:.3g}" + (f" ± {half:.2g}" if half else "")


class Row(Struct):
    """One system in one setting.

    Args:
        name: of the system, with the default clock where it leaves GPUs at that.
        energy_kj: within the window, by `accounting`.
        ratio: of its energy per token to that of the reference, seed by seed; None without one.
        to_bound: of its energy per token to that of the fluid bound; None where there is none.
    """

    setting: Cell
    name: str
    seeds: int
    energy_kj: Spread
    j_per_token: Spread
    request: Spread
    strict: Spread
    token: Spread
    ttft_p99_ms: Spread
    clock_p50_mhz: Spread
    gpus: Spread
    ratio: Spread | None
    to_bound: Spread | None
    served: bool


def grid(
    systems: Sequence[str], default_clocks: Sequence[int | None], seeds: Sequence[int], **axes: Sequence[Any]
) -> list[Cell]:
    """Return the cells of a grid; a system that governs its GPUs is played at one default clock alone.

    Args:
        axes: values by field of `Cell`.
    """
    cells = []
    for system, seed, *values in product(systems, seeds, *axes.values()):
        clocks = default_clocks if ungoverned(system) else [None]
        one = replace(Cell(system=system, seed=seed), **dict(zip(axes, values, strict=True)))
        cells += [replace(one, default_clock_mhz=clock) for clock in clocks]
    return cells


def ungoverned(system: str) -> bool:
    """Say whether a system leaves its GPUs at the default clock. Raises ConfigError for an unknown one."""
    return local_sched.preset(system).get("clock") == "default"


def name_of(cell: Cell) -> str:
    """Return how a cell's system is called in tables."""
    return f"{cell.system} @ {cell.default_clock_mhz}" if cell.default_clock_mhz else cell.system


def setting_of(cell: Cell) -> Cell:
    """Return a cell without what is compared within a setting."""
    return replace(cell, system="", seed=0, default_clock_mhz=None, traced=False)


def rows(
    played: Sequence[Played], reference: str, accounting: str = "cold", served: float = SERVED
) -> list[Row]:
    """Return what came of a grid, setting by setting.

    Args:
        reference: the system that energies are held against, by its name in tables.
        accounting: of idle GPUs; see `sim/report.py`.
    """
    settings: dict[Cell, dict[str, list[Played]]] = {}
    for one in played:
        by_name = settings.setdefault(_hashable(setting_of(one.cell)), {})
        by_name.setdefault(name_of(one.cell), []).append(one)
    found = []
    for by_name in settings.values():
        best = max(
            _mean([one.report.attainment.request or 0.0 for one in group]) for group in by_name.values()
        )
        base = {one.cell.seed: one for one in by_name.get(reference, [])}
        setting = setting_of(next(iter(by_name.values()))[0].cell)
        least = least_of(setting)
        for name, group in by_name.items():
            found.append(_row(setting, name, group, base, least, accounting, best >= served))
    return found


def least_of(setting: Cell) -> Bound:
    """Return the fluid bound of a setting, for a long time at its load."""
    steady = replace(setting, minutes=max(setting.minutes, STEADY_MINUTES))
    arrivals = load_of(steady).arrivals
    device = device_of(steady)
    return bound(models_of(steady), arrivals, device, steady.gpus, steady.minutes * 6e4)


def _row(
    setting: Cell,
    name: str,
    group: Sequence[Played],
    base: dict[int, Played],
    least: Bound,
    accounting: str,
    served: bool,
) -> Row:
    # what becomes of empty GPUs may be part of a system
    kind = "off" if system_for(group[0].cell.system).idle == "off" else accounting

    reports = [one.report for one in group]
    per_token = [joules_per_token(one, kind) for one in group]
    ratios = [
        joules_per_token(one, kind) / joules_per_token(base[one.cell.seed], accounting)
        for one in group
        if one.cell.seed in base
    ]
    bounds: list[float] = []
    if least.energy_j is not None:
        least_j = float(getattr(least.energy_j, kind)) / max(1, least.output_tokens)
        bounds = [value / least_j for value in per_token]
    return Row(
        setting=setting,
        name=name,
        seeds=len(group),
        energy_kj=spread([float(getattr(one.report.energy_j, kind)) / 1000 for one in group]),
        j_per_token=spread(per_token),
        request=spread([one.attainment.request or 0.0 for one in reports]),
        strict=spread([one.attainment.strict or 0.0 for one in reports]),
        token=spread([one.attainment.token or 0.0 for one in reports]),
        ttft_p99_ms=spread([one.ttft_ms.p99 or float("nan") for one in reports]),
        clock_p50_mhz=spread([one.clock_mhz.p50 or float("nan") for one in reports]),
        gpus=spread([one.active_gpus_mean for one in reports]),
        ratio=spread(ratios) if ratios else None,
        to_bound=spread(bounds) if bounds else None,
        served=served,
    )


def joules_per_token(played: Played, accounting: str) -> float:
    """Return the joules of the window by its tokens.

    Not energy alone is compared: a system that answers slowly leaves more of its work to the time after the
    window, and the more so the shorter that is.
    """
    return float(getattr(played.report.energy_j, accounting)) / max(1, played.report.output_tokens)


def spread(values: Iterable[float]) -> Spread:
    """Return the mean and the ends of some values."""
    kept = list(values)
    return Spread(_mean(kept), min(kept), max(kept))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _hashable(setting: Cell) -> Any:
    return setting.key("")


NUMBERS = (
    *("energy_kj", "j_per_token", "request", "strict", "token", "ttft_p99_ms", "clock_p50_mhz", "gpus"),
    *("ratio", "to_bound"),
)
HEADER = (
    *("system", "kJ", "/ reference", "/ bound", "J/token", "request", "strict", "token"),
    *("TTFT p99", "MHz p50", "GPUs"),
)


def sections(found: Sequence[Row], reference: str, accounting: str) -> list[Section]:
    """Return the document of a grid: a section for each workload and number of models."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        one = row.setting
        groups.setdefault((one.workload, len(one.models) or one.llms, one.gpus, one.gpu_type), []).append(row)
    return [
        Section(
            name=f"{workload}-{llms}-{gpus}-{gpu_type}",
            title=f"{workload}, {llms} LLMs on {gpus} x {gpu_type}",
            pictures=(picture(group, reference, accounting),),
            sheets=tuple(sheet(group, rate) for rate in sorted({row.setting.rps for row in group})),
        )
        for (workload, llms, gpus, gpu_type), group in groups.items()
    ]


def sheet(group: Sequence[Row], rps: float) -> Sheet:
    """Return the table of one setting."""
    at_rate = [row for row in group if row.setting.rps == rps]
    mark = "" if at_rate[0].served else " (no policy serves this: energies mean nothing)"
    lines = tuple(
        (
            row.name,
            str(row.energy_kj),
            "" if row.ratio is None else str(row.ratio),
            "" if row.to_bound is None else str(row.to_bound),
            str(row.j_per_token),
            *(f"{one.mean:.1%}" for one in (row.request, row.strict, row.token)),
            f"{row.ttft_p99_ms.mean:.0f}",
            f"{row.clock_p50_mhz.mean:.0f}",
            f"{row.gpus.mean:.2f}",
        )
        for row in at_rate
    )
    return Sheet(HEADER, lines, title=f"{rps:g} requests/s per model{mark}")


def picture(group: Sequence[Row], reference: str, accounting: str) -> str:
    """Draw energy against the reference, and attainment, over rates; settings nobody serves are shaded."""
    figure, grid_of_axes = drawing(1, 2, width=12.0, height=3.8)
    energy, attained = grid_of_axes[0]
    rates = sorted({row.setting.rps for row in group})
    names = list(dict.fromkeys(row.name for row in group))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [row for row in group if row.name == name]
        shown = [row for row in mine if row.ratio is not None]
        at = [rates.index(row.setting.rps) + (number - len(names) / 2 + 0.5) * width for row in shown]
        ratios = [row.ratio for row in shown if row.ratio is not None]
        ends = [[r.mean - r.low for r in ratios], [r.high - r.mean for r in ratios]]
        energy.bar(at, [r.mean for r in ratios], width, yerr=ends, label=name, error_kw={"linewidth": 0.7})
        mine.sort(key=lambda row: row.setting.rps)
        attained.plot(
            [row.setting.rps for row in mine], [row.request.mean * 100 for row in mine], "o-", label=name
        )
    for place, rate in enumerate(rates):
        if not any(row.served for row in group if row.setting.rps == rate):
            energy.axvspan(place - 0.5, place + 0.5, color="grey", alpha=0.25)
    energy.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    energy.axhline(1.0, color="black", linewidth=0.8)
    energy.set(xlabel="requests/s per model", ylabel=f"energy per token / {reference} ({accounting})")
    attained.set(xlabel="requests/s per model", ylabel="requests on time (%)", ylim=(None, 101))
    attained.legend(fontsize="x-small", ncols=2)
    return svg(figure)


def csv_lines(found: Sequence[Row]) -> Iterable[Sequence[object]]:
    """Yield the rows as a CSV's, the header first."""
    where = ("workload", "llms", "rps", "gpus", "gpu_type", "minutes")
    ends = [f"{name}{end}" for name in NUMBERS for end in ("", "_low", "_high")]
    yield [*where, "system", "seeds", "served", *ends]
    for row in found:
        values: list[object] = []
        for name in NUMBERS:
            one: Spread | None = getattr(row, name)
            values += ["", "", ""] if one is None else [one.mean, one.low, one.high]
        place = [getattr(row.setting, name) for name in where]
        yield [*place, row.name, row.seeds, row.served, *values]
