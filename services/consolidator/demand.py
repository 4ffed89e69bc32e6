"""What one copy of a model needs of a GPU (3.5.2, phase one): the item that planning packs."""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from services.consolidator.capacity import Capacity
from services.consolidator.preference import prefer
from services.consolidator.window import Load
from shared.lut import Lut
from shared.model import Objectives

MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """One copy of a model, and what it takes.

    Args:
        copy: number of the copy; two copies of a model never share a GPU.
        sm_pct: SM_l times the part of the time in which it runs, for Eq. 8 alone ignores load; or the percent
            of the time that it takes of a whole GPU, if that is more, for engines side by side share the
            memory bandwidth, and a small share of the SMs draws much of it.
        need_bytes: M_l.
        clock_mhz: F_l.
        busy: t_l of Eqs. 5 and 6, in seconds per second.
        least_pct: the SM share without which it is late while it runs.
        clocks_mhz, watts: its mean power above static, by the clock of its GPU.
        meets: whether it can meet its objectives on a GPU of its own.
    """

    model: str
    copy: int = 0
    sm_pct: float = 0.0
    need_bytes: int = 0
    clock_mhz: float = 0.0
    busy: float = 0.0
    least_pct: float = 0.0
    clocks_mhz: tuple[float, ...] = ()
    watts: tuple[float, ...] = ()
    meets: bool = True


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model to plan for.

    Args:
        load: None: nobody asks for it, but it is to stay loaded.
        floor_bytes: KV memory that a copy is at least to find.
        sigmas: standard deviations above the mean number of requests for which there is to be memory.
    """

    lut: Lut
    load: Load | None
    objectives: Objectives
    floor_bytes: int
    sigmas: float

    def copies(self, count: int) -> list[Demand]:
        """Return the demands of so many copies that share the load evenly."""
        name = self.lut.model.name
        if self.load is None:
            idle_bytes = self.lut.model.weight_bytes + self.floor_bytes
            # the lowest clock: it never makes others run faster
            one = Demand(name, need_bytes=idle_bytes, clock_mhz=float(self.lut.clocks_mhz[0]))
        else:
            one = self._busy(replace(self.load, rate_per_s=self.load.rate_per_s / count))
        return [replace(one, copy=copy) for copy in range(count)]

    def fewest_copies(self, capacity: Capacity) -> list[Demand] | None:
        """Return the demands of as few copies as fit onto GPUs and are in time; None if no number is."""

        def fits(count: int) -> bool:
            one = self.copies(count)[0]
            return one.meets and capacity.holds(one)

        most = 1 if self.load is None else MOST_COPIES
        count = 1 if fits(1) else bisect_left(range(1, most + 1), True, key=fits) + 1
        return self.copies(count) if count <= most else None

    def _busy(self, load: Load) -> Demand:
        preference = prefer(self.lut, load, self.objectives)
        # in service as long as the table says, or as was measured if that is longer
        latency_ms = max(preference.latency_ms, load.latency_ms)
        return Demand(
            model=self.lut.model.name,
            sm_pct=max(preference.sm_share_pct * preference.busy, preference.whole_pct),
            need_bytes=need_bytes(self.lut, load, latency_ms, self.sigmas, self.floor_bytes),
            clock_mhz=preference.sm_clock_mhz,
            busy=preference.busy,
            least_pct=preference.least_pct,
            clocks_mhz=tuple(map(float, self.lut.clocks_mhz)),
            watts=preference.watts,
            meets=preference.meets,
        )


def need_bytes(lut: Lut, load: Load, latency_ms: float, sigmas: float, floor_bytes: int) -> int:
    """Return M_l: weights, and the KV memory of the requests that are served at one time (Little's law).

    The mean alone would starve bursts of memory. Arrivals are taken as Poisson, so the number in service has
    the standard deviation sqrt(mean), of which `sigmas` are added.

    Args:
        latency_ms: W, from a request's start to its last token.
    """
    mean = load.rate_per_s * latency_ms / 1000.0
    concurrent = math.ceil(mean + sigmas * math.sqrt(mean))
    request_bytes = lut.request_bytes(math.ceil(load.input_tokens + load.output_tokens))
    return lut.model.weight_bytes + max(floor_bytes, concurrent * request_bytes)
