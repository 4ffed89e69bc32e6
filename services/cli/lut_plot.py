"""Figures of a look-up table, as in the paper's Figs. 3 and 4; needs the optional extra ``plots``."""

from pathlib import Path
from typing import Any

from shared.errors import FestinaError


def plot(view: dict[str, Any], path: Path) -> None:
    """Draw energy against clock for both phases and the map of SM share against clock, to PNG or SVG.

    Args:
        view: as `festina lut show --json` prints it.

    Raises FestinaError where matplotlib is missing, or the name ends in neither.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise FestinaError(f"{path}: a figure is .png or .svg; name the file so")
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise FestinaError("matplotlib is not installed; pip install 'festina[plots]'") from None
    figure, (prefill, decode, heat) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for axes, phase in ((prefill, "prefill"), (decode, "decode")):
        for curve in view[phase]:
            axes.plot(view["clocks_mhz"], curve["energy"], label=curve["workload"])
            best = view["clocks_mhz"].index(curve["best_mhz"])
            axes.plot(curve["best_mhz"], curve["energy"][best], "o", color="red", fillstyle="none")
        axes.set(title=f"{view['model']}, {phase}", xlabel="SM clock (MHz)", ylabel="energy / least energy")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    grid = view["heat"]
    image = heat.imshow(grid["energy"], aspect="auto", origin="lower", cmap="viridis_r")
    heat.set_xticks(range(len(grid["clocks_mhz"])), grid["clocks_mhz"], rotation=60)
    heat.set_yticks(range(len(grid["shares_pct"])), grid["shares_pct"])
    heat.set(title=f"energy of a request, {grid['workload']}", xlabel="SM clock (MHz)", ylabel="SM share (%)")
    if grid["best"]:
        clock, share = grid["best"]
        heat.plot(grid["clocks_mhz"].index(clock), grid["shares_pct"].index(share), "o", color="red")
    figure.colorbar(image, ax=heat, label="energy / least energy")
    figure.suptitle(f"{view['gpu_type']}, {view['source']}", fontsize="small")
    figure.savefig(path)
    plt.close(figure)
