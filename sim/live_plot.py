"""The picture of a live check: clocks, watts and attainment over time, governed and at the default clock."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.live_pool import GpuSample, Live
from sim.report import request_met
from sim.scenario import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 30  # of load and attainment, over the run


def plot(runs: Sequence[tuple[str, Live]], title: str, path: Path) -> None:
    """Draw the runs, the first of which is the governed one, to a PNG. matplotlib must be installed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, figsize=(10, 11), sharex=True, layout="constrained")
    clock, power, load, attainment = axes
    for number, (name, live) in enumerate(runs):
        by_gpu = {gpu: [s for s in live.samples if s.gpu == gpu] for gpu in {s.gpu for s in live.samples}}
        for gpu in sorted(by_gpu):
            if number == 0:
                clock.step(*_busy_clock(by_gpu[gpu]), where="post", linewidth=0.8, label=gpu)
        if number > 0:
            fixed = [sample.sm_clock_mhz for sample in live.samples if sample.running]
            clock.axhline(np.median(fixed), linestyle="--", color="grey", label=name)
        times = sorted({sample.at_s for sample in live.samples})
        totals = [sum(s.power_w for s in live.samples if s.at_s == at) for at in times]
        power.plot(np.array(times) / 60, totals, linewidth=0.8, label=f"{name}: {live.energy_j / 1e3:.1f} kJ")
        _shares(attainment, live.requests, name)
    arrived = [one.arrived_ms / 60_000 for one in runs[0][1].requests]
    counts, edges = np.histogram(arrived, BINS)
    load.stairs(counts / (60 * np.diff(edges)), edges)
    clock.set(title=title, ylabel="SM clock while busy (MHz)")
    power.set(ylabel="power of all GPUs (W)", ylim=(0, None))
    load.set(ylabel="requests/s", ylim=(0, None))
    attainment.set(ylabel="requests on time (%)", ylim=(0, 103), xlabel="minutes")
    for one in axes:
        one.grid(alpha=0.3)
    for one in (clock, power, attainment):
        one.legend(fontsize="small", ncols=5)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_active(runs: Sequence[tuple[str, dict[float, int]]], title: str, path: Path) -> None:
    """Draw the number of GPUs that have models, by the time in s, to a PNG. matplotlib must be installed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for name, active in runs:
        axes.step(np.array(list(active)) / 60, list(active.values()), where="post", label=name)
    axes.set(title=title, xlabel="minutes", ylabel="GPUs with models", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _busy_clock(samples: Sequence[GpuSample]) -> tuple[list[float], list[float]]:
    clocks = [sample.sm_clock_mhz if sample.running else np.nan for sample in samples]
    return [sample.at_s / 60 for sample in samples], clocks


def _shares(axes: "Axes", requests: Sequence[RequestRecord], name: str) -> None:
    arrived = np.array([one.arrived_ms / 60_000 for one in requests])
    edges = np.linspace(0.0, float(arrived.max()) + 1e-3, BINS + 1)
    count, _ = np.histogram(arrived, edges)
    met, _ = np.histogram(arrived, edges, weights=[float(request_met(one)) for one in requests])
    filled = count > 0
    middles = (edges[:-1] + edges[1:]) / 2
    axes.plot(middles[filled], 100 * met[filled] / count[filled], "o-", markersize=3, label=name)
