"""Figs. 13, 14 and 16: Festina's stages, prefill and decode apart, and the safety margin of placement.

They are played for longer than the others, at the lowest rate of each number of models unless all are played:
consolidation decides on what it has heard for two minutes.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from sim.cells import Cell, Played
from sim.compare import Spread, spread
from sim.page import Section, Sheet, drawing, svg
from sim.paper.entry import Results, Scale, claim, claims, settings

COUNTS = (16, 24, 32)
STAGES = tuple(f"festina-stage-{number}" for number in range(1, 6))
PUBLISHED = STAGES[-1]  # the same settings as festina-paper; so each is played once
SAVED = {2: 12.0, 3: 25.0, 4: 2.0, 5: 11.0, 6: 16.0}  # % by each stage
DEFAULT_MHZ = 1635  # of stage 1, as on the paper's testbed
APART = "festina-pdd"
SHIPPED_MARGIN = 0.05
MARGINS = (0.0, 0.05, 0.10, 0.15)


def _settings(scale: Scale, system: str, **fields: object) -> list[Cell]:
    """Return the settings of these figures under a system, by seed."""
    rates = scale if len(scale.points) > 2 else replace(scale, points=scale.points[:1])
    made = settings(rates, minutes=scale.long_minutes, system=system, **fields)
    return [replace(cell, seed=seed) for cell in made for seed in scale.long_seeds]


def _stage(scale: Scale, system: str) -> list[Cell]:
    return _settings(scale, system, default_clock_mhz=DEFAULT_MHZ if system == STAGES[0] else None)


def cells(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 13; stage 6 is stage 5 with GPUs without models off."""
    return [cell for system in STAGES for cell in _stage(scale, system)]


def show(results: Results, scale: Scale) -> Section:
    """Fig. 13: what each stage saves."""
    by_stage = {number: results.of(_stage(scale, name)) for number, name in enumerate(STAGES, 1)}
    by_stage[6] = by_stage[5]

    def joules(number: int, llms: int, seed: int) -> float:
        mine = [p.report for p in by_stage[number] if p.cell.llms == llms and p.cell.seed == seed]
        return sum(one.energy_j.off if number == 6 else one.energy_j.cold for one in mine)

    def ratio(number: int, base: int, counts: Sequence[int] = COUNTS) -> Spread:
        pairs = [(llms, seed) for llms in counts for seed in scale.long_seeds]
        return spread(joules(number, *pair) / joules(base, *pair) for pair in pairs)

    told = []
    for number, saved in SAVED.items():
        change = ratio(number, number - 1)
        less = Spread(*(100 * (1 - value) for value in (change.mean, change.high, change.low)))
        told.append(claim(f"stage {number} saves, against stage {number - 1}", saved, less, " %", within=3.0))
    lines = [
        (
            f"stage {number}",
            *(str(ratio(number, 5, (llms,))) for llms in COUNTS),
            *(_attained([p for p in by_stage[number] if p.cell.llms == llms]) for llms in COUNTS),
        )
        for number in by_stage
    ]
    figure, axes = drawing(1, 1, width=9.0, height=3.4)
    for place, number in enumerate(by_stage):
        at = [column + place * 0.13 for column in range(len(COUNTS))]
        axes[0][0].bar(at, [ratio(number, 5, (llms,)).mean for llms in COUNTS], 0.12, label=f"stage {number}")
    axes[0][0].set_xticks(
        [column + 0.33 for column in range(len(COUNTS))], [f"{llms} LLMs" for llms in COUNTS]
    )
    axes[0][0].set(ylabel="energy / stage 5")
    axes[0][0].legend(fontsize="small", ncols=6)
    header = ("", *(f"energy, {llms} LLMs" for llms in COUNTS), *(f"by request, {llms}" for llms in COUNTS))
    return Section(
        name="fig13",
        title="Fig. 13: energy by stage",
        pictures=(svg(figure),),
        sheets=(
            claims(told),
            Sheet(header, tuple(lines), "Energy over that of stage 5 (Festina as published)"),
        ),
        notes=(
            f"Stage 1 leaves GPUs at {DEFAULT_MHZ} MHz. Stage 6 is stage 5 with GPUs without models"
            f" off (0 W);"
            " the device model has no clock of the memory to lower. Frequency affinity does not show on this"
            " device model: the voltage knee near 1.0 GHz sets almost every model's best clock.",
        ),
    )


def cells_apart(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 14."""
    return [*_settings(scale, PUBLISHED), *_settings(scale, APART)]


def show_apart(results: Results, scale: Scale) -> Section:
    """Fig. 14: prefill and decode on one GPU (PD-A) or on different ones (PD-D)."""
    together, apart = results.of(_settings(scale, PUBLISHED)), results.of(_settings(scale, APART))
    points = _change(together, apart)
    saved = [
        100 * (1 - b.report.energy_j.cold / a.report.energy_j.cold)
        for a, b in zip(together, apart, strict=True)
    ]
    told = [
        claim("attainment lost by PD-D", 1.5, spread(-value for value in points), " points", within=1.0),
        claim("energy saved by PD-D", 7.0, spread(saved), " %", within=3.0),
    ]
    lines = [
        (f"{llms} LLMs", *(text for played in (together, apart) for text in _both(played, llms)))
        for llms in COUNTS
    ]
    header = ("", "PD-A kJ", "PD-A by request", "PD-D kJ", "PD-D by request")
    return Section(
        name="fig14",
        title="Fig. 14: prefill and decode apart",
        pictures=(_bars({"PD-A": together, "PD-D": apart}),),
        sheets=(claims(told), Sheet(header, tuple(lines))),
    )


def cells_margin(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 16."""
    return [cell for margin in MARGINS for cell in _margin(scale, margin)]


def _margin(scale: Scale, margin: float) -> list[Cell]:
    knobs = {} if margin == SHIPPED_MARGIN else {"consolidator.safety_margin": margin}
    return _settings(scale, PUBLISHED, knobs=knobs)


def show_margin(results: Results, scale: Scale) -> Section:
    """Fig. 16: the safety margin of placement, 0 to 15 %."""
    by_margin = {margin: results.of(_margin(scale, margin)) for margin in MARGINS}
    base = by_margin[SHIPPED_MARGIN]

    def energy(margin: float) -> Spread:
        pairs = zip(by_margin[margin], base, strict=True)
        return spread(100 * (a.report.energy_j.cold / b.report.energy_j.cold - 1) for a, b in pairs)

    told = [
        claim(
            "attainment at 0 % against 5 %",
            -2.0,
            spread(_change(base, by_margin[0.0])),
            " points",
            within=1.0,
        ),
        claim("energy at 0 % against 5 %", -2.0, energy(0.0), " %", within=1.0),
        *(
            claim(
                f"attainment at {margin:.0%} against 5 %",
                0.0,
                spread(_change(base, by_margin[margin])),
                " points",
                within=0.5,
            )
            for margin in MARGINS[2:]
        ),
    ]
    lines = [
        (f"{margin:.0%}", *(text for llms in COUNTS for text in _both(played, llms)))
        for margin, played in by_margin.items()
    ]
    header = ("margin", *(text for llms in COUNTS for text in (f"kJ, {llms} LLMs", "by request")))
    return Section(
        name="fig16",
        title="Fig. 16: the safety margin",
        pictures=(_bars({f"{margin:.0%}": played for margin, played in by_margin.items()}),),
        sheets=(claims(told), Sheet(header, tuple(lines))),
    )


def _change(base: Sequence[Played], other: Sequence[Played]) -> list[float]:
    """Return the attainment that others have more, in points, cell by cell."""
    return [
        100 * ((b.report.attainment.request or 0.0) - (a.report.attainment.request or 0.0))
        for a, b in zip(base, other, strict=True)
    ]


def _both(played: Sequence[Played], llms: int) -> tuple[str, str]:
    mine = [one for one in played if one.cell.llms == llms]
    return str(spread(one.report.energy_j.cold / 1000 for one in mine)), _attained(mine)


def _attained(played: Sequence[Played]) -> str:
    return f"{spread(one.report.attainment.request or 0.0 for one in played).mean:.1%}"


def _bars(groups: dict[str, list[Played]]) -> str:
    """Draw energy and attainment of some variants, by number of models."""
    figure, grid = drawing(1, 2, width=11.0, height=3.2)
    width = 0.8 / len(groups)
    for place, (name, played) in enumerate(groups.items()):
        by_count = [[one.report for one in played if one.cell.llms == llms] for llms in COUNTS]
        at = [column + (place - len(groups) / 2 + 0.5) * width for column in range(len(COUNTS))]
        grid[0][0].bar(
            at,
            [spread(r.energy_j.cold / 1000 for r in reports).mean for reports in by_count],
            width,
            label=name,
        )
        attained = [100 * spread(r.attainment.request or 0.0 for r in reports).mean for reports in by_count]
        grid[0][1].bar(at, attained, width, label=name)
    for axes, label in zip(grid[0], ("energy, kJ (cold)", "requests on time (%)"), strict=True):
        axes.set_xticks(range(len(COUNTS)), [f"{llms} LLMs" for llms in COUNTS])
        axes.set(ylabel=label)
    grid[0][1].legend(fontsize="small")
    return svg(figure)
