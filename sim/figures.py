"""Drawing a run: clocks, watts, residents and attainment over time."""

from pathlib import Path

import numpy as np

from shared.errors import FestinaError
from sim.report import request_met
from sim.scenario import Result

BINS = 40  # of attainment, over the run


def check_plottable(path: Path) -> None:
    """Raise FestinaError, before anything long is run, where `path` could not be drawn to."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise FestinaError(f"{path}: a figure is .png or .svg; name the file so")
    if not path.absolute().parent.is_dir():
        raise FestinaError(f"{path}: its folder does not exist; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FestinaError("matplotlib is not installed; pip install 'festina[plots]'") from None


def plot(result: Result, title: str, path: Path) -> None:
    """Draw a run, one line per GPU, to a PNG or SVG; `check_plottable` says whether that is possible."""
    check_plottable(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, figsize=(10, 10), sharex=True, layout="constrained")
    clock, power, residents, attainment = axes
    for device in result.devices:
        minutes = [sample.at_ms / 60_000 for sample in device.samples]
        busy_mhz = [sample.clock_mhz if sample.running else np.nan for sample in device.samples]
        clock.plot(minutes, busy_mhz, linewidth=0.8, label=device.gpu)
        power.plot(minutes, [sample.power_w for sample in device.samples], linewidth=0.8)
        residents.step(minutes, [sample.residents for sample in device.samples], where="post")
    clock.set(title=title, ylabel="SM clock while busy (MHz)")
    clock.legend(fontsize="small", ncols=4)
    power.set(ylabel="power (W)", ylim=(0, None))
    residents.set(ylabel="models resident", ylim=(0, None))
    middles, shares = attainment_over_time(result, BINS)
    attainment.plot(np.array(middles) / 60_000, np.array(shares) * 100, "o-", markersize=3)
    attainment.set(ylabel="requests on time (%)", ylim=(0, 103), xlabel="minutes")
    for one in axes:
        one.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def attainment_over_time(result: Result, bins: int) -> tuple[list[float], list[float]]:
    """Return (middle in ms, share of requests on time) of each part of the run in which requests arrived."""
    arrived_ms = np.array([r.arrived_ms for r in result.requests if r.outcome != "cancelled"])
    on_time = np.array([request_met(r) for r in result.requests if r.outcome != "cancelled"], float)
    if not len(arrived_ms):
        return [], []
    edges = np.linspace(0.0, float(arrived_ms.max()) + 1.0, bins + 1)
    count, _ = np.histogram(arrived_ms, edges)
    met, _ = np.histogram(arrived_ms, edges, weights=on_time)
    filled = count > 0
    middles = (edges[:-1] + edges[1:]) / 2
    return middles[filled].tolist(), (met[filled] / count[filled]).tolist()
