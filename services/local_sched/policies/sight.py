"""What a system's rules see of a GPU when they choose its shares, and then its clock."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.local_sched.divide import Division, divider_of, proportional
from services.local_sched.grid import Load, Profile
from services.local_sched.settings import LocalSettings
from shared.devices import Device
from shared.lut import Lut


class Sight(NamedTuple):
    """A GPU, and what there is to do on it; sequences are by engine that has work.

    Args:
        clocks_mhz: the clocks to choose from, from the highest down.
        loads, profiles: what each engine has to do, and what that takes.
        lengths: (input, predicted output) in tokens of each of its requests.
        steps_ms: time of its decode steps, as measured; 0 before the first.
        residents: the tables of all models on the GPU, with work or without; `places` says which have work.
        waits: a request waits for memory.
        free_part: part of the memory for KV that is free.
        clock_mhz: the clock in force.
    """

    device: Device
    settings: LocalSettings
    clocks_mhz: tuple[int, ...]
    loads: Sequence[Load]
    profiles: list[Profile]
    lengths: Sequence[Sequence[tuple[int, int]]]
    steps_ms: Sequence[float]
    residents: Sequence[Lut]
    places: Sequence[int]
    waits: bool
    free_part: float
    clock_mhz: int


Shares = Callable[[Sight], tuple[int, ...]]
"""Returns a share per engine, in percent; together more than the whole, they slow one another down."""

Clock = Callable[[Sight, tuple[int, ...]], int]
"""Returns the place of a clock, given the shares."""


def everything(sight: Sight) -> tuple[int, ...]:
    """Let every engine use all SMs: nobody partitions them."""
    return (sight.device.sm_sizes_pct[-1],) * len(sight.profiles)


def default(sight: Sight, shares_pct: tuple[int, ...]) -> int:
    """Leave the clock as it is when nobody governs it: the only one that there is to choose then."""
    return 0


def at_least(sight: Sight, clock_mhz: int) -> int:
    """Return the place of the lowest clock that is not below this one; of the highest if there is none."""
    return max(0, sum(clock >= clock_mhz for clock in sight.clocks_mhz) - 1)


def divided(sight: Sight, shares_pct: tuple[int, ...]) -> tuple[tuple[int, ...], Division]:
    """Return the places of the shares that engines have while all of them run, and what slows them."""
    sizes_pct = sight.device.sm_sizes_pct
    if sum(shares_pct) > 100:
        shares_pct = proportional(shares_pct, sizes_pct)
    places = tuple([sizes_pct.index(share) for share in shares_pct])
    return places, divider_of(sight.device)(places)
