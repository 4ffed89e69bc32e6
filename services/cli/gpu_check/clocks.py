"""Time and watts of both kernels at some clocks. Runs only with ALLOW_CLOCKS=1, and gives the clock back."""

import time
from collections.abc import Iterator, Sequence

import msgspec

from services.cli.gpu_check.kernels import Kernels, Skipped
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.shares import KERNELS
from services.local_sched.clock_setters import Clocks, GuardedClocks, OwnClocks
from services.local_sched.clocks import snapped
from shared.errors import ActuatorRefused

WINDOW_S, SETTLE_MOST_S = 1.5, 2.0
PARTS = (0.0, 0.25, 0.4, 0.6, 0.8, 1.0)
"""Where in the range of clocks offered it is measured."""
SAME_MHZ = 15


class AtClock(msgspec.Struct, frozen=True):
    """A kernel at a clock: the one asked for, how soon it ran, and the one that did run."""

    kernel: str
    asked_mhz: int
    settle_ms: float | None
    real_mhz: float
    limits: tuple[str, ...]
    ms: float
    power_w: float | None
    joules: float | None


class ClocksFound(msgspec.Struct, frozen=True):
    """By clock and kernel; the joules are those of one run."""

    rows: tuple[AtClock, ...]


def clocks(lab: Lab) -> ClocksFound:
    """Measure at several clocks. Raises Skipped: that is not allowed, or not permitted."""
    if not lab.allow_clocks:
        raise Skipped("changes clocks, and ALLOW_CLOCKS=1 is not set")
    offered = lab.gpu.clocks_mhz
    if not offered:
        raise Skipped("this GPU offers no clocks to choose from")
    try:
        with lab.kernels() as kernels:
            setter: Clocks = (
                GuardedClocks(lab.clock_guard, lab.gpu.uuid) if lab.clock_guard else OwnClocks(lab.gpu)
            )
            try:
                return ClocksFound(tuple(_at_clocks(lab, kernels, setter, offered)))
            finally:
                setter.close()
    except ActuatorRefused as why:
        raise Skipped(str(why)) from None


def _at_clocks(lab: Lab, kernels: Kernels, setter: Clocks, offered: Sequence[int]) -> Iterator[AtClock]:
    low_mhz, high_mhz = offered[0], offered[-1]
    for part in PARTS:
        asked_mhz = snapped(offered, round(low_mhz + part * (high_mhz - low_mhz)))
        kernels.begin(do="run", kernel="prefill", for_s=1.1 * SETTLE_MOST_S * lab.pace)
        settle_ms = _settled_ms(lab, setter, asked_mhz)
        kernels.ended()
        for kernel in KERNELS:
            setter.hold(asked_mhz, 0)  # a guard's lease has to be renewed
            ran, watched = lab.watch_running(kernels, WINDOW_S, kernel=kernel)
            yield AtClock(
                kernel=kernel,
                asked_mhz=asked_mhz,
                settle_ms=settle_ms,
                real_mhz=watched.real_mhz,
                limits=watched.limits,
                ms=ran.ms,
                power_w=watched.power_w,
                joules=None if watched.power_w is None else watched.power_w * ran.ms / 1000.0,
            )


def _settled_ms(lab: Lab, setter: Clocks, asked_mhz: int) -> float | None:
    """Hold a clock; returns how long it took until it ran, None if it did not for as long as we waited."""
    started_s = time.monotonic()
    setter.hold(asked_mhz, 0)
    while (passed_s := time.monotonic() - started_s) < SETTLE_MOST_S * lab.pace:
        if abs(lab.gpu.read().clock_mhz - asked_mhz) <= SAME_MHZ:
            return 1000.0 * passed_s
        time.sleep(0.005)
    return None
