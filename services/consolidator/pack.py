"""EWR-aware placement of models onto the fewest GPUs (3.5.2, phase three; Algorithm 1).

Models go in order of their clocks, the highest first, each to the GPU whose clock is closest: directly where
it fits; else by swapping the lowest-clocked model of that GPU to the second closest; else to the closest one
that has room; and only last to a further GPU. An empty GPU has whatever clock its first model wants. Clocks
less than a step of the device apart count as equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.consolidator.capacity import Capacity
from services.consolidator.demand import Demand
from services.consolidator.ewr import group_clock_mhz, waste

STEP_MHZ = 15.0  # between the clocks that devices offer


@dataclass(slots=True)
class Packing:
    """Who goes together: one group of demands per GPU, and how it came to be."""

    groups: list[list[Demand]]
    direct: int = 0
    swaps: int = 0
    fallbacks: int = 0
    opened: int = 0


@dataclass(slots=True)
class _Bins:
    """The GPUs while they are filled; arrays by GPU."""

    capacity: Capacity
    groups: list[list[Demand]]
    spread: bool
    free_pct: NDArray[np.float64] = field(init=False)
    free_bytes: NDArray[np.float64] = field(init=False)
    clock_mhz: NDArray[np.float64] = field(init=False)
    of_model: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.groups)
        self.free_pct = np.full(count, self.capacity.sm_pct)
        self.free_bytes = np.full(count, float(self.capacity.usable_bytes))
        self.clock_mhz = np.zeros(count)

    def fits(self, demand: Demand) -> NDArray[np.bool_]:
        """Say of each GPU whether it has room for a demand, and no other copy of its model."""
        room: NDArray[np.bool_] = (self.free_pct >= demand.sm_pct) & (self.free_bytes >= demand.need_bytes)
        room[self.of_model.get(demand.model, [])] = False
        return room

    def closest(self, demand: Demand, among: NDArray[np.bool_], fits: NDArray[np.bool_]) -> int | None:
        """Return the GPU with the closest clock; of equals one that fits, and has most room.

        Used GPUs come before empty ones, so that those are left for models with other clocks; not if models
        are to be spread.
        """
        steps = np.floor(np.abs(self.clock_mhz - demand.clock_mhz) / STEP_MHZ)
        distance = np.where(self.clock_mhz > 0.0, steps, 0.0)
        distance[~among] = np.inf
        least = distance.min(initial=np.inf)
        if least == np.inf:
            return None
        ties = np.flatnonzero(distance == least)
        if len(ties) == 1:
            return int(ties[0])
        empty = (self.clock_mhz[ties] == 0.0) & (not self.spread)
        room_pct = self.free_pct[ties] / self.capacity.sm_pct
        room = np.minimum(room_pct, self.free_bytes[ties] / self.capacity.usable_bytes)
        return int(ties[np.lexsort((-room, empty, ~fits[ties]))[0]])

    def add(self, gpu: int, demand: Demand) -> None:
        """Put a demand onto a GPU."""
        self.groups[gpu].append(demand)
        self.of_model.setdefault(demand.model, []).append(gpu)
        self._count(gpu, demand, 1)

    def take(self, gpu: int, demand: Demand) -> None:
        """Take a demand off a GPU."""
        self.groups[gpu].remove(demand)
        self.of_model[demand.model].remove(gpu)
        self._count(gpu, demand, -1)

    def open(self) -> int:
        """Add an empty GPU and return it."""
        self.groups.append([])
        self.free_pct = np.append(self.free_pct, self.capacity.sm_pct)
        self.free_bytes = np.append(self.free_bytes, float(self.capacity.usable_bytes))
        self.clock_mhz = np.append(self.clock_mhz, 0.0)
        return len(self.groups) - 1

    def _count(self, gpu: int, demand: Demand, sign: int) -> None:
        self.free_pct[gpu] -= sign * demand.sm_pct
        self.free_bytes[gpu] -= sign * demand.need_bytes
        self.clock_mhz[gpu] = group_clock_mhz(self.groups[gpu])


def pack(demands: Iterable[Demand], gpus: int, capacity: Capacity, spread: bool = False) -> Packing:
    """Place demands onto `gpus` GPUs, or more where it takes them; each must fit an empty GPU.

    Args:
        spread: models with equal clocks go to different GPUs as long as there are empty ones.
    """
    bins = _Bins(capacity, [[] for _ in range(gpus)], spread)
    packing = Packing(bins.groups)
    everywhere = np.ones(gpus, bool)
    for demand in sorted(demands, key=lambda d: (-d.clock_mhz, -d.need_bytes, d.model, d.copy)):
        assert capacity.holds(demand), f"{demand.model} does not fit on any GPU"
        if len(everywhere) != len(bins.groups):
            everywhere = np.ones(len(bins.groups), bool)
        fits = bins.fits(demand)
        target = bins.closest(demand, everywhere, fits)
        if target is not None and fits[target]:
            bins.add(target, demand)
            packing.direct += 1
            continue
        instead = bins.closest(demand, fits, fits)
        swap = None if target is None else _swap(bins, demand, target, instead)
        if swap is not None and target is not None:
            outlier, candidate = swap
            bins.take(target, outlier)
            bins.add(candidate, outlier)
            bins.add(target, demand)
            packing.swaps += 1
        elif instead is not None:
            bins.add(instead, demand)
            packing.fallbacks += 1
        else:
            bins.add(bins.open(), demand)
            packing.opened += 1
    return packing


def _swap(bins: _Bins, demand: Demand, target: int, instead: int | None) -> tuple[Demand, int] | None:
    """Return which model of `target` would go where to make room for `demand`, if that wastes less.

    It is compared with the best that is possible without it: the closest GPU with room, `instead`. Where
    there is none the swap saves a GPU, which no clock can make up for.
    """
    outlier = min(bins.groups[target], key=lambda d: (d.clock_mhz, d.model, d.copy))
    outlier_fits = bins.fits(outlier)
    others = np.ones(len(bins.groups), bool)
    others[target] = False
    candidate = bins.closest(demand, others, outlier_fits)
    if candidate is None or not outlier_fits[candidate] or target in bins.of_model.get(demand.model, ()):
        return None
    if (
        bins.free_pct[target] + outlier.sm_pct < demand.sm_pct
        or bins.free_bytes[target] + outlier.need_bytes < demand.need_bytes
    ):
        return None
    if instead is not None:
        touched = {target, candidate, instead}
        groups = {gpu: bins.groups[gpu] for gpu in touched}
        placed = waste({**groups, instead: [*groups[instead], demand]}.values())
        left = [each for each in groups[target] if each is not outlier]
        swapped = {**groups, target: [*left, demand], candidate: [*groups[candidate], outlier]}
        if waste(swapped.values()) >= placed:
            return None
    return outlier, candidate
