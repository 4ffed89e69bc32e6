"""A plan for GPUs of one kind (3.5.2): who goes where, so that fewest run, at least waste, for least sent.

From what models need and what GPUs hold to a placement, and what is to be expected of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.consolidator.capacity import Capacity, least_gpus
from services.consolidator.demand import Demand
from services.consolidator.ewr import Group, ewr, power_w, served_share
from services.consolidator.mapping import assign, costs_ms
from services.consolidator.pack import pack
from shared.devices import Device


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is to be expected of a placement.

    Args:
        used: GPUs with a model.
        power_w: of all GPUs, used and empty, by the look-up tables.
        ewr: the paper's Energy Waste Ratio.
        served_share: the least of any GPU; see `ewr.served_share`.
    """

    used: int
    power_w: float
    ewr: float
    served_share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Which models go onto which GPU, by its name.

    Args:
        fullest_pct, fullest_bytes: percent of the SMs and memory used, of the GPU on which most are.
    """

    on_gpu: dict[str, list[str]]
    outlook: Outlook
    fullest_pct: float
    fullest_bytes: int

    def fits(self, capacity: Capacity) -> bool:
        """Say whether no GPU is filled more than it may be."""
        return self.fullest_pct <= capacity.sm_pct and self.fullest_bytes <= capacity.usable_bytes


def expected(groups: Sequence[Group], device: Device, gpus: int, empty_w: float) -> Outlook:
    """Return what is to be expected of these groups on so many GPUs; the empty ones draw `empty_w`."""
    used = [group for group in groups if group]
    return Outlook(
        used=len(used),
        power_w=power_w(used, device) + (gpus - len(used)) * empty_w,
        ewr=ewr(used),
        served_share=min(map(served_share, used), default=1.0),
    )


def groupings(
    demands: Sequence[Demand], most: int, capacity: Capacity, least_served: float = 0.0
) -> Iterator[list[list[Demand]] | None]:
    """Look for the fewest GPUs, `most` at most, on which objectives hold.

    Capacity planning says where that begins. If it is more, the number is searched for by halves, though
    packing is a heuristic and a smaller one may be missed. On each number of GPUs models are grouped by clock
    as long as objectives hold then, and else spread. It is done a step at a time, for a step is long.

    Args:
        demands: each fits onto an empty GPU.
        least_served: the least `served_share` of any GPU with which objectives hold.

    Yields:
        After each number of GPUs, who goes together on the fewest so far; None as long as there is no way.
    """

    def on(gpus: int) -> list[list[Demand]] | None:
        for spread in (False, True):
            groups = [group for group in pack(demands, gpus, capacity, spread).groups if group]
            if len(groups) <= most and min(map(served_share, groups), default=1.0) >= least_served:
                return groups
        return None

    least = max(least_gpus(demands, capacity))
    if least > most:
        yield None
        return
    found = on(least)
    yield found
    if found is not None or least == most:
        return
    found = on(most)
    yield found
    too_few, enough, stride = least, most, 1
    while found is not None and enough - too_few > 1:
        gpus = min(too_few + stride, (too_few + enough) // 2)  # it is mostly a few more
        better = on(gpus)
        if better is None:
            too_few, stride = gpus, 2 * stride
        else:
            found, enough = better, gpus
        yield found


def assigned(
    groups: Sequence[Group],
    holds: Mapping[str, Sequence[str]],
    load_ms: Mapping[str, Mapping[str, float]],
    wake_ms: Mapping[str, float],
) -> dict[str, Group]:
    """Give groups to the GPUs that lack least of them; the others get an empty one.

    Args:
        holds: by GPU, the models that it has now; there are no more groups than GPUs.
        load_ms: by GPU and model, the time to load.
        wake_ms: by GPU, the time until it can begin to.
    """
    names = [[demand.model for demand in group] for group in groups]
    gpus = list(holds)
    loads_ms, wakes_ms = [load_ms[gpu] for gpu in gpus], [wake_ms[gpu] for gpu in gpus]
    costs = costs_ms([holds[gpu] for gpu in gpus], names, loads_ms, wakes_ms)
    on_gpu: dict[str, Group] = dict.fromkeys(gpus, ())
    return on_gpu | {gpus[row]: groups[column] for column, row in enumerate(assign(costs))}


def planned(on_gpu: Mapping[str, Group], device: Device, empty_w: float) -> Plan:
    """Return the plan that each GPU gets its group; those that get none draw `empty_w`."""
    groups = list(on_gpu.values())
    return Plan(
        on_gpu={gpu: sorted(demand.model for demand in group) for gpu, group in on_gpu.items()},
        outlook=expected(groups, device, len(groups), empty_w),
        fullest_pct=max((sum(demand.sm_pct for demand in group) for group in groups), default=0.0),
        fullest_bytes=max((sum(demand.need_bytes for demand in group) for group in groups), default=0),
    )


def sent_ms(
    placements: Sequence[Mapping[str, Sequence[str]]],
    load_ms: Mapping[str, Mapping[str, float]],
    wake_ms: Mapping[str, float],
) -> float:
    """Return the time to bring in what GPUs lack from each placement to the next, one after another.

    Args:
        load_ms, wake_ms: as for `assigned`.
    """
    total_ms = 0.0
    for before, after in pairwise(placements):
        for gpu, models in after.items():
            total_ms += sum(load_ms[gpu][model] for model in models if model not in before[gpu])
            total_ms += wake_ms[gpu] if models and not before[gpu] else 0.0
    return total_ms
