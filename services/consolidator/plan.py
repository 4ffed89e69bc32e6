"""A plan for GPUs of one kind (3.5.2): who goes where, so that fewest run, at least waste, for least sent.

From what models need and what GPUs hold to a placement, and what is to be expected of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

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
    """Which models go onto which GPU, by its name; GPUs that get none are not named.

    Args:
        fullest_pct: percent of the SMs used, of the GPU on which most are.
        least: (N_sm, N_mem) of capacity planning.
        sent_ms: time to bring in what GPUs lack, one after another.
    """

    on_gpu: dict[str, list[str]]
    outlook: Outlook
    fullest_pct: float
    least: tuple[int, int]
    sent_ms: float


def expected(groups: Sequence[Group], device: Device, gpus: int, empty_w: float) -> Outlook:
    """Return what is to be expected of these groups on so many GPUs; the empty ones draw `empty_w`."""
    used = [group for group in groups if group]
    return Outlook(
        used=len(used),
        power_w=power_w(used, device) + (gpus - len(used)) * empty_w,
        ewr=ewr(used),
        served_share=min(map(served_share, used), default=1.0),
    )


def make_plan(
    demands: Sequence[Demand],
    holds: Mapping[str, Sequence[str]],
    capacity: Capacity,
    bytes_of: Mapping[str, int],
    device: Device,
    empty_w: float,
    least_served: float = 0.0,
) -> Plan | None:
    """Plan where these demands go; None if they take more GPUs than there are.

    It is N GPUs as long as objectives hold there, and more if not; models are grouped by clock as long as
    objectives hold then, and else spread.

    Args:
        demands: each fits onto an empty GPU.
        holds: by GPU, the models that it has now.
        bytes_of: what has to be sent for each model.
        empty_w: power of a GPU without a model.
        least_served: the least `served_share` of any GPU with which objectives hold.
    """
    least = least_gpus(demands, capacity)
    for gpus, spread in product(range(max(least), len(holds) + 1), (False, True)):
        groups = [group for group in pack(demands, gpus, capacity, spread).groups if group]
        if len(groups) <= len(holds) and min(map(served_share, groups), default=1.0) >= least_served:
            return _on_gpus(groups, least, holds, bytes_of, device, empty_w)
    return None


def _on_gpus(
    groups: list[list[Demand]],
    least: tuple[int, int],
    holds: Mapping[str, Sequence[str]],
    bytes_of: Mapping[str, int],
    device: Device,
    empty_w: float,
) -> Plan:
    """Give groups to the GPUs that lack least of them."""
    names = [[demand.model for demand in group] for group in groups]
    gpus = list(holds)
    bandwidths = [device.host_bytes_per_ms] * len(gpus)
    costs = costs_ms([holds[gpu] for gpu in gpus], names, bytes_of, bandwidths)
    chosen = assign(costs)
    return Plan(
        on_gpu={gpus[row]: names[column] for column, row in enumerate(chosen)},
        outlook=expected(groups, device, len(gpus), empty_w),
        fullest_pct=max((sum(demand.sm_pct for demand in group) for group in groups), default=0.0),
        least=least,
        sent_ms=float(sum(costs[row, column] for column, row in enumerate(chosen))),
    )
