"""Is the energy counter to be believed? It is held against power over time, idle and at work."""

import time

import msgspec

from services.cli.gpu_check.kernels import Skipped
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.watched import Watched

WINDOW_S = 10.0
POLL_S, POLLED_S = 0.002, 2.0


class MeterFound(msgspec.Struct, frozen=True):
    """What the meter does.

    Args:
        counter_every_ms, power_every_ms: time between two changes of what each tells; None: it did not.
        windows: by what the card did.
        not_run: why it did not work, where it did not.
    """

    counter_every_ms: float | None
    power_every_ms: float | None
    windows: dict[str, Watched]
    not_run: str = ""


def meter(lab: Lab) -> MeterFound:
    """Hold the counter against integrated power over 10 s, idle and with a prefill running."""
    every_ms = _changes(lab)
    windows, not_run = {"as found": lab.watch(WINDOW_S)}, ""
    try:
        with lab.kernels() as kernels:
            _, windows["prefill"] = lab.watch_running(kernels, WINDOW_S, kernel="prefill")
            _, windows["decode"] = lab.watch_running(kernels, WINDOW_S, kernel="decode")
    except Skipped as why:
        not_run = str(why)
    return MeterFound(*every_ms, windows, not_run)


def differs_pct(watched: Watched) -> float | None:
    """Return by how much the counter tells more than integrated power, in percent of the latter."""
    if watched.counter_j is None or not watched.integrated_j:
        return None
    return 100.0 * (watched.counter_j / watched.integrated_j - 1.0)


def _changes(lab: Lab) -> tuple[float | None, float | None]:
    """Return how often counter and power change what they tell, in ms, read as fast as can be."""
    seen: tuple[dict[float, float], dict[float, float]] = ({}, {})
    started_s = time.monotonic()
    while time.monotonic() - started_s < POLLED_S * lab.pace:
        reading, at_s = lab.gpu.read(), time.monotonic()
        for firsts, value in zip(seen, (reading.counter_j, reading.power_w), strict=True):
            if value is not None:
                firsts.setdefault(value, at_s)
        time.sleep(POLL_S)
    spans = [list(firsts.values()) for firsts in seen]
    counter_ms, power_ms = (
        1000.0 * (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None for times in spans
    )
    return counter_ms, power_ms
