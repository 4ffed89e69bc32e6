"""How many GPUs a workload needs (3.5.2, phase two)."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Sized(Protocol):
    """What takes a share of the SMs and some memory."""

    @property
    def sm_pct(self) -> float:
        """Percent of the SMs, over time."""

    @property
    def need_bytes(self) -> int:
        """Bytes of memory."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What placement may fill of each GPU: SM_eff in percent and M_eff in bytes, the margin taken off."""

    sm_pct: float
    usable_bytes: int

    def holds(self, demand: Sized) -> bool:
        """Say whether an empty GPU has room for a demand."""
        return demand.sm_pct <= self.sm_pct and demand.need_bytes <= self.usable_bytes


def best_fit_decreasing(sizes: Iterable[float], capacity: float) -> int:
    """Return how many bins of a capacity best-fit decreasing takes. No size may be above the capacity.

    It is no lower bound: it may take 11/9 of the optimum and up to one more.
    """
    free: list[float] = []  # of each bin, ascending
    for size in sorted(sizes, reverse=True):
        assert size <= capacity, f"{size} does not fit into {capacity}"
        index = bisect_left(free, size)
        left = free.pop(index) if index < len(free) else capacity
        insort(free, left - size)
    return len(free)


def least_gpus(demands: Iterable[Sized], capacity: Capacity) -> tuple[int, int]:
    """Return (N_sm, N_mem), the GPUs that SMs alone and memory alone take; the larger is N."""
    wanted = list(demands)
    return (
        best_fit_decreasing((demand.sm_pct for demand in wanted), capacity.sm_pct),
        best_fit_decreasing((demand.need_bytes for demand in wanted), capacity.usable_bytes),
    )
