"""Figs. 10, 11 and 12: all systems on 16, 24 and 32 models over their rates; longer inputs and outputs."""

from collections.abc import Sequence

from msgspec.structs import replace

from shared.systems import SYSTEMS
from sim.cells import Cell
from sim.compare import Row, name_of, picture, sheet, ungoverned
from sim.page import Section, Sheet
from sim.paper.entry import DEFAULT_CLOCKS, Claim, Results, Scale, claim, claims, pooled, settings, there

PAPER, BEST = "festina-paper", "festina"
COMPARED = (
    *(BEST, PAPER, "serverlessllm", "muxserve", "dilu", "aegaeon", "aegvoltana"),
    *("prism", "voltanallm", "greenllm", "dynamollm"),
)
UP_TO = {"serverlessllm": 1.56, "muxserve": 1.37, "dilu": 1.36, "aegaeon": 1.31, "aegvoltana": 1.3}
ATTAINED = {"serverlessllm": 27.0, "muxserve": 16.0, "dilu": 4.0}
NEAR = {"aegaeon": 2.0, "aegvoltana": 1.0}
SAVED = {"sharegpt-ix2": (18.0, 30.0), "sharegpt-ox2": (28.0, 35.0)}  # % against Aegaeon
AS_SAID = (
    "Energy of the window on modelled H100s, GPUs without models cold; ratios are of joules per token in it;"
    " ± is half the range over seeds. A name with"
    " @ is that of a system that leaves GPUs at a default clock: 1635 MHz as the paper's testbed"
    " did, 1980 as the"
    " card ships. Against bound: joules per token over those of `festina bound`."
)


def systems(
    cells: Sequence[Cell], names: Sequence[str], scale: Scale, clocks: Sequence[int] = DEFAULT_CLOCKS
) -> list[Cell]:
    """Return each of these settings under each system, seed and, where it matters, default clock."""
    return [
        replace(cell, system=name, seed=seed, default_clock_mhz=clock)
        for cell in cells
        for name in names
        for clock in (clocks if ungoverned(name) else (None,))
        for seed in scale.seeds_of(name, scale.place(cell))
    ]


def cells(scale: Scale) -> list[Cell]:
    """Return the cells of Figs. 10 and 11."""
    return systems(settings(scale), there(*COMPARED), scale)


def show(results: Results, scale: Scale) -> Section:
    """Figs. 10 and 11: energy against Festina, and attainment."""
    found = results.rows(cells(scale), PAPER)
    groups = [[row for row in found if row.setting.llms == llms] for llms in (16, 24, 32)]
    sheets = [
        Sheet(one.header, one.rows, f"{group[0].setting.llms} LLMs, {one.title}")
        for group in groups
        for one in (sheet(group, rps) for rps in sorted({row.setting.rps for row in group}))
    ]
    return Section(
        name="fig10",
        title="Figs. 10 and 11: energy and attainment over rates, all systems",
        pictures=tuple(picture(group, PAPER, "cold") for group in groups),
        sheets=(claims(_beside(found)), _ratios(found), *sheets),
        notes=(AS_SAID, _unserved(found)),
    )


def _beside(found: Sequence[Row]) -> list[Claim]:
    """Hold the most that each baseline takes, and how far apart attainments are, against the paper."""
    told = []
    served = [row for row in found if row.served]
    for system, most in UP_TO.items():
        for name in _names(served, system):
            ratios = [row.ratio.mean for row in served if row.name == name and row.ratio]
            told.append(claim(f"energy of {name} / {PAPER}, at most", most, max(ratios, default=None), "x"))
    for system, points in (ATTAINED | NEAR).items():
        for name in _names(served, system):
            gaps = _gaps(served, name)
            sign = 1.0 if system in ATTAINED else -1.0
            value = max((sign * gap for gap in gaps), default=None)
            what = f"{PAPER} above {name}" if sign > 0 else f"{PAPER} below {name}"
            told.append(claim(f"attainment of {what}, at most", points, value, " points", within=2.0))
    return told


def _ratios(found: Sequence[Row]) -> Sheet:
    """Return every system's energy against both Festinas and the bound, over the settings that are served."""
    served = [row for row in found if row.served]
    best = {(row.setting.llms, row.setting.rps): row for row in served if row.name == BEST}
    lines = []
    for name in dict.fromkeys(row.name for row in served):
        mine = [row for row in served if row.name == name]
        to_best = [
            row.j_per_token.mean / best[where].j_per_token.mean
            for row in mine
            if (where := (row.setting.llms, row.setting.rps)) in best
        ]
        to_bound = pooled(row.to_bound for row in mine)
        request, strict, token = (
            sum(getattr(row, kind).mean for row in mine) / len(mine)
            for kind in ("request", "strict", "token")
        )
        ratio = pooled(row.ratio for row in mine)
        lines.append(
            (
                name,
                *("" if one is None else str(one) for one in (ratio,)),
                f"{sum(to_best) / len(to_best):.3g}" if to_best else "",
                "" if to_bound is None else str(to_bound),
                *(f"{share:.1%}" for share in (request, strict, token)),
            )
        )
    header = (
        "system",
        f"energy / {PAPER}",
        f"energy / {BEST}",
        "J/token / bound",
        "by request",
        "strict",
        "by token",
    )
    return Sheet(header, tuple(lines), title="Over the settings that are served (means; ± half the range)")


def cells_longer(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 12, at the lowest rates unless all are played, with the testbed's clock."""
    rates = scale if len(scale.points) > 2 else replace(scale, points=scale.points[:1])
    made = [one for workload in SAVED for one in settings(rates, workload=workload)]
    return systems(made, there(BEST, PAPER, "aegaeon"), scale, DEFAULT_CLOCKS[:1])


def show_longer(results: Results, scale: Scale) -> Section:
    """Fig. 12: twice the input, twice the output, against Aegaeon."""
    found = results.rows(cells_longer(scale), PAPER)
    told, pictures, sheets = [], [], []
    for workload, (least, most) in SAVED.items():
        mine = [row for row in found if row.setting.workload == workload]
        for name in _names(mine, "aegaeon"):
            saved = [100 * (1 - 1 / r.ratio.mean) for r in mine if r.name == name and r.ratio and r.served]
            for what, paper, value in (("least", least, min), ("most", most, max)):
                ours = value(saved) if saved else None
                told.append(claim(f"{workload}: saved against {name}, {what}", paper, ours, " %", within=3.0))
        for llms in (16, 24, 32):
            group = [row for row in mine if row.setting.llms == llms]
            pictures.append(picture(group, PAPER, "cold"))
            for rps in sorted({row.setting.rps for row in group}):
                one = sheet(group, rps)
                sheets.append(Sheet(one.header, one.rows, f"{workload}, {llms} LLMs, {one.title}"))
    return Section(
        name="fig12",
        title="Fig. 12: prefill-heavy and decode-heavy workloads",
        pictures=tuple(pictures),
        sheets=(claims(told), *sheets),
        notes=(AS_SAID, _unserved(found)),
    )


def _names(found: Sequence[Row], system: str) -> list[str]:
    if system not in SYSTEMS:
        return []
    cell = Cell(system=system)
    names = {name_of(replace(cell, default_clock_mhz=clock)) for clock in (None, *DEFAULT_CLOCKS)}
    return [name for name in dict.fromkeys(row.name for row in found) if name in names]


def _gaps(found: Sequence[Row], name: str) -> list[float]:
    """Return how much more attainment Festina has than a system in each setting, in points."""
    ours = {(r.setting.llms, r.setting.rps): r.request.mean for r in found if r.name == PAPER}
    mine = {(r.setting.llms, r.setting.rps): r.request.mean for r in found if r.name == name}
    return [100 * (ours[where] - mine[where]) for where in mine if where in ours]


def _unserved(found: Sequence[Row]) -> str:
    """Say which settings no policy serves."""
    where = {(r.setting.workload, r.setting.llms, r.setting.rps) for r in found if not r.served}
    told = "; ".join(f"{workload}, {llms} LLMs at {rps:g}/s" for workload, llms, rps in sorted(where))
    return (
        f"No policy serves, so that energies mean nothing: {told}."
        if told
        else "Every setting is served by some policy."
    )
