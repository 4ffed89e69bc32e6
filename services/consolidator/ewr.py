"""What a placement wastes: the Energy Waste Ratio (3.5.1), and the power that the look-up tables predict.

A group is the demands on one GPU. The paper's ratio takes power as the cube of the clock; measured power is
flatter below about 1 GHz, so both are reported.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from services.consolidator.demand import Demand
from shared.devices import Device

Group = Sequence[Demand]


def group_clock_mhz(group: Group) -> float:
    """F_g: the highest clock that any model of the group prefers; 0 for an empty group."""
    return max((demand.clock_mhz for demand in group), default=0.0)


def waste(groups: Iterable[Group]) -> float:
    """E_waste (Eq. 5), up to a constant factor: t_l * (F_g^3 - F_l^3) summed over all models."""
    total = 0.0
    for group in groups:
        cubed = group_clock_mhz(group) ** 3
        total += sum(demand.busy * (cubed - demand.clock_mhz**3) for demand in group)
    return total


def optimal(groups: Iterable[Group]) -> float:
    """E_optimal (Eq. 6): every model at its own clock."""
    return sum(demand.busy * demand.clock_mhz**3 for group in groups for demand in group)


def ewr(groups: Sequence[Group]) -> float:
    """EWR (Eq. 7): 0 where all clocks agree, or nothing runs."""
    least = optimal(groups)
    return waste(groups) / least if least else 0.0


def power_w(groups: Iterable[Group], device: Device) -> float:
    """Return the mean power of the GPUs of these groups, each at the clock of its group.

    A GPU draws its static power while any of its models runs and that of an idle context otherwise, and on
    top what each of its models draws at its clock. Models run independently of each other.
    """
    total = 0.0
    for group in groups:
        clock_mhz, idle = group_clock_mhz(group), 1.0
        for demand in group:
            idle *= 1.0 - demand.busy
            if demand.watts:
                total += float(np.interp(clock_mhz, demand.clocks_mhz, demand.watts))
        total += idle * device.context_idle_w + (1.0 - idle) * device.static_w
    return total


def served_share(group: Group) -> float:
    """Predict which part of the SM share that a GPU's models need to be on time they will find, 0 to 1.

    Each model needs its least share for the part of the time in which it runs, independently of the others;
    what they need beyond 100 % at one time is late.
    """
    chances = np.zeros(101)  # that the models so far need so many percent together
    chances[0] = 1.0
    mean_pct = 0.0
    for demand in group:
        pct = min(100, round(demand.least_pct))
        runs = chances * demand.busy
        chances = chances - runs
        chances[pct:] += runs[: 101 - pct]
        mean_pct += demand.busy * pct
    if mean_pct == 0.0:
        return 1.0
    found_pct = float(chances @ np.arange(101)) + 100.0 * (1.0 - float(chances.sum()))
    return min(1.0, found_pct / mean_pct)
