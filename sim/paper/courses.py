"""Figs. 1, 2 and 15, and the trace of Fig. 10: clocks and latencies over time."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from sim.cells import Cell, Played
from sim.compare import name_of, ungoverned
from sim.page import Section, Sheet, drawing, svg
from sim.paper.entry import Results, Scale, claim, claims, there
from sim.paper.head_to_head import COMPARED

DEFAULT_MHZ = 1635  # at which the paper's GPUs stood
SHARED = there("muxserve", "aegaeon")
THREE = ("Qwen2.5-7B-Instruct", "Llama-2-13B-chat", "Mistral-Small-3.1-24B")
LARGE = ("Qwen2.5-7B-Instruct", "Llama-2-13B-chat", "Qwen2.5-32B-Instruct")
LEAST_SLACK = {"muxserve": 24.0, "aegaeon": 52.0}  # % at the worst point of Fig. 2
BIN_S = 5.0  # over which latencies are averaged before the worst is taken


def _clocked(system: str, cell: Cell) -> Cell:
    clock = DEFAULT_MHZ if ungoverned(system) else None
    return replace(cell, system=system, default_clock_mhz=clock, traced=True)


def cells_clocks(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 1: MuxServe's popularity on eight GPUs."""
    base = Cell(system="", workload="powerlaw-0.9", llms=16, rps=1.0, minutes=scale.minutes)
    return [_clocked(system, base) for system in SHARED]


def show_clocks(results: Results, scale: Scale) -> Section:
    """Fig. 1: clocks of eight GPUs under MuxServe and Aegaeon."""
    lines, pictures = [], []
    for played in results.of(cells_clocks(scale)):
        figure, axes = drawing(1, 1, width=8.0, height=2.8)
        busy = [[clock for clock in gpu if clock] for gpu in played.trace.clock_mhz]
        axes[0][0].boxplot([clocks or [0] for clocks in busy], whis=(0, 100))
        axes[0][0].set(title=played.cell.system, xlabel="GPU", ylabel="SM clock while busy (MHz)")
        pictures.append(svg(figure))
        every = [clock for clocks in busy for clock in clocks]
        share = sum(clock == DEFAULT_MHZ for clock in every) / max(1, len(every))
        lines.append(
            (played.cell.system, f"{min(every, default=0)}", f"{max(every, default=0)}", f"{share:.1%}")
        )
    header = ("system", "lowest, MHz", "highest, MHz", f"busy time at {DEFAULT_MHZ} MHz")
    return Section(
        name="fig1",
        title="Fig. 1: clocks of GPUs that nobody governs",
        pictures=tuple(pictures),
        sheets=(Sheet(header, tuple(lines)),),
        notes=(
            f"The paper measured that its GPUs stay at {DEFAULT_MHZ} MHz. Here that is the default"
            f" clock they were"
            " given; what is shown is that neither system leaves it. Lower values are those of the"
            " power cap.",
        ),
    )


def _slack(models: tuple[str, ...], scale: Scale) -> list[Cell]:
    base = Cell(
        system="", workload="sharegpt", models=models, rps=0.5, gpus=2, minutes=max(1.5, scale.minutes)
    )
    return [_clocked(system, base) for system in SHARED]


def cells_slack(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 2."""
    return _slack(THREE, scale)


def cells_large(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 15."""
    return _slack(LARGE, scale)


def show_slack(results: Results, scale: Scale) -> Section:
    """Fig. 2: latency against its objective, and slack, of three co-located models."""
    return _shown_slack(
        results.of(cells_slack(scale)), "fig2", "Fig. 2: slack of three co-located models", LEAST_SLACK
    )


def show_large(results: Results, scale: Scale) -> Section:
    """Fig. 15: the same with a large model."""
    section = _shown_slack(
        results.of(cells_large(scale)), "fig15", "Fig. 15: slack with a large model", {"muxserve": 18.0}
    )
    note = (
        "Llama-2-70B of the paper does not fit on one GPU, and tensor parallelism is not modelled:"
        " Qwen2.5-32B,"
        " the largest that fits, stands in its place."
    )
    return replace(section, notes=(*section.notes, note))


def _shown_slack(played: Sequence[Played], name: str, title: str, least: dict[str, float]) -> Section:
    figure, grid = drawing(max(1, len(played)), 2, width=11.0)
    told, lines = [], []
    for one, (course, distribution) in zip(played, grid, strict=False):
        worst = 0.0
        for model in one.cell.models:
            at_s, over = _latencies(one, model)
            middles, means = _binned(at_s, over)
            worst = max(worst, float(means.max(initial=0.0)))
            course.plot(middles, means, ".-", label=model)
            slack = np.sort(1 - over)
            distribution.plot(slack, np.linspace(0, 1, len(slack)), label=model)
            low, middle = np.quantile(slack, (0.05, 0.5)) if len(slack) else (np.nan, np.nan)
            on_time = np.mean(over <= 1) if len(over) else np.nan
            lines.append(
                (
                    one.cell.system,
                    model,
                    f"{len(over)}",
                    f"{low:.0%}",
                    f"{middle:.0%}",
                    f"{on_time:.1%}",
                )
            )
        course.axhline(1.0, color="black", linestyle="--")
        course.set(title=one.cell.system, xlabel="s", ylabel="latency / objective", ylim=(0, None))
        distribution.set(xlabel="slack", ylabel="requests", xlim=(0, 1))
        distribution.legend(fontsize="x-small")
        if one.cell.system in least:
            what = f"slack under {one.cell.system} at the worst point"
            told.append(claim(what, least[one.cell.system], 100 * (1 - worst), " %", within=10.0))
    header = ("system", "model", "requests", "slack p5", "median", "on time")
    return Section(
        name=name,
        title=title,
        pictures=(svg(figure),),
        sheets=(claims(told), Sheet(header, tuple(lines))),
        notes=(
            f"Three models on two GPUs at 0.5 requests/s each (their weights do not fit on one), GPUs at"
            f" {DEFAULT_MHZ}"
            f" MHz. A request's latency is the worse of TTFT and mean TBT over its objective; the"
            f" worst point is of"
            f" means over {BIN_S:g} s, after the first third, in which models are loaded.",
        ),
    )


def _latencies(played: Played, model: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (arrival in s, latency over objective) of a model's requests after the first third."""
    from_s = played.cell.minutes * 20
    mine = [
        (s, over)
        for name, s, over in played.trace.requests
        if name == model and s >= from_s and over is not None
    ]
    found = np.array(mine, float).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _binned(at_s: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the middles of the bins that have values, and their means."""
    bins = (at_s // BIN_S).astype(int)
    kept = np.unique(bins)
    return (kept + 0.5) * BIN_S, np.array([values[bins == one].mean() for one in kept])


def cells_trace(scale: Scale) -> list[Cell]:
    """Return the cells of Fig. 10's clock trace: a load that rises and falls."""
    minutes = max(3.0, scale.minutes)
    base = Cell(system="", workload="diurnal", llms=16, rps=1.5, minutes=minutes)
    return [_clocked(system, base) for system in there(*COMPARED)]


def show_trace(results: Results, scale: Scale) -> Section:
    """Fig. 10, right: clocks while the load moves."""
    figure, grid = drawing(1, 1, width=10.0, height=3.6)
    axes, lines, played = grid[0][0], [], results.of(cells_trace(scale))
    for one in played:
        series = [[c for c in moment if c] for moment in zip(*one.trace.clock_mhz, strict=False)]
        clock = np.array([np.mean(moment) if moment else np.nan for moment in series])
        arrived = np.histogram([s for _, s, _ in one.trace.requests], np.arange(len(clock) + 1))[0]
        smooth = np.convolve(arrived, np.ones(15) / 15, "same")
        both = ~np.isnan(clock)
        moves = clock[both].std() > 1
        follows = f"{np.corrcoef(clock[both], smooth[both])[0, 1]:.2f}" if moves else "-"
        axes.plot(clock, linewidth=1, label=name_of(one.cell))
        lines.append((name_of(one.cell), f"{np.nanmean(clock):.0f}", f"{np.nanstd(clock):.0f}", follows))
    load = axes.twinx()
    load.plot(smooth * 60, color="grey", linestyle=":")
    load.set(ylabel="requests/min (dotted)")
    axes.set(xlabel="s", ylabel="mean SM clock of busy GPUs (MHz)")
    axes.legend(fontsize="x-small", ncols=3)
    header = ("system", "mean, MHz", "standard deviation", "correlation with the load")
    return Section(
        name="fig10-trace",
        title="Fig. 10, the trace: clocks while the load moves",
        pictures=(svg(figure),),
        sheets=(Sheet(header, tuple(lines)),),
        notes=(
            "The paper shows an hour of 32 LLMs at 2.5 requests/s each, which these GPUs do not"
            " serve here; this is"
            " 16 LLMs at 1.5, rising and falling once. It says that Festina's clock follows the load"
            " and all others"
            " stay high. On this device model the best clock hardly depends on the load (the voltage knee).",
        ),
    )
