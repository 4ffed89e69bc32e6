"""A card watched for a while: by its counter, by its power over time, and by the product's own meter."""

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from services.local_sched.meter import EnergyMeter
from services.local_sched.nvml import NvmlGpu, Reading


class Watched(msgspec.Struct, frozen=True):
    """The card over a while.

    Args:
        counter_j, integrated_j: what its counter moved by, and its power over time; None where it has none.
        power_w: by the product's meter, whose label `source` is and whose `faults` are counted.
        real_mhz: the mean clock; `limits`: what held it down, ever.
    """

    for_s: float
    readings: int
    counter_j: float | None
    integrated_j: float | None
    power_w: float | None
    source: str
    faults: dict[str, int]
    real_mhz: float
    limits: tuple[str, ...] = ()


def watch(gpu: NvmlGpu, for_s: float, every_s: float, cap_w: float) -> Watched:
    """Read a card over and over for a while."""
    started_s = time.monotonic()
    seen: list[tuple[float, Reading]] = []
    while not seen or time.monotonic() - started_s < for_s:
        seen.append((time.monotonic(), gpu.read()))
        time.sleep(every_s)
    seen.append((time.monotonic(), gpu.read()))
    return summed(seen, cap_w)


def summed(seen: Sequence[tuple[float, Reading]], cap_w: float) -> Watched:
    """Return what readings come to: by the counter, by power, and by the product's meter."""
    meter = EnergyMeter(cap_w)
    for at_s, reading in seen:
        meter.read(at_s * 1000.0, reading.counter_j, reading.power_w)
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    counters = (first.counter_j, last.counter_j)
    integrated_j: float | None = 0.0
    for (before_s, before), (at_s, reading) in pairwise(seen):
        if before.power_w is None or reading.power_w is None or integrated_j is None:
            integrated_j = None
            break
        integrated_j += (before.power_w + reading.power_w) / 2.0 * (at_s - before_s)
    energy_j = meter.energy_j(last_s * 1000.0)
    return Watched(
        for_s=last_s - first_s,
        readings=len(seen),
        counter_j=None if None in counters else counters[1] - counters[0],  # type: ignore[operator]
        integrated_j=integrated_j,
        power_w=None if energy_j is None else energy_j / (last_s - first_s),
        source=meter.source,
        faults=dict(meter.faults),
        real_mhz=sum(reading.clock_mhz for _, reading in seen) / len(seen),
        limits=tuple(dict.fromkeys(limit for _, reading in seen for limit in reading.limits)),
    )
