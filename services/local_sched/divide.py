"""How the SMs of a device are divided among its engines, and what each division leaves of their speed."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shared.devices import Device
from shared.silicon import contention

KEPT = 4096
"""Divisions that are remembered per device: sweeps ask for few, again and again."""


class Division(NamedTuple):
    """A share of the SMs for each engine.

    Args:
        shares_pct, total_pct: what each gets, and all together.
        bandwidth, compute: what is left of each engine's speed when all run at one moment.
        filled: the division, by the places of its shares, that fills the device in proportion to this one.
    """

    shares_pct: tuple[int, ...]
    total_pct: int
    bandwidth: float
    compute: float
    filled: tuple[int, ...]


class Divider:
    """The divisions of one device, by the places of the shares among its sizes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], Division] = {}

    def __call__(self, places: tuple[int, ...]) -> Division:
        """Return the division in which each engine has the share of its place."""
        return self._known.get(places) or self._divide(places)

    def _divide(self, places: tuple[int, ...]) -> Division:
        sizes_pct = self._device.sm_sizes_pct
        shares_pct = tuple(sizes_pct[place] for place in places)
        scales = contention(self._device, [share / 100 for share in shares_pct])
        filled = tuple(sizes_pct.index(share) for share in proportional(shares_pct, sizes_pct))
        if len(self._known) >= KEPT:
            self._known.clear()
        made = self._known[places] = Division(shares_pct, sum(shares_pct), *scales, filled)
        return made


@lru_cache(maxsize=64)
def divider_of(device: Device) -> Divider:
    """Return the divisions of a device."""
    return Divider(device)


def proportional(
    needs: Sequence[float], sizes_pct: tuple[int, ...], budget_pct: int = 100
) -> tuple[int, ...]:
    """Return shares in proportion to `needs`, each one of the device's ascending sizes.

    They add up to at most `budget_pct`, except where even the smallest size for each is more than that.
    """
    if len(sizes_pct) == 1:  # a device that is not partitioned
        return tuple(sizes_pct[0] for _ in needs)
    ideal_pct = [budget_pct * need / sum(needs) for need in needs]
    index = [0] * len(needs)
    left_pct = budget_pct - sizes_pct[0] * len(needs)

    def growth_pct(engine: int) -> int:
        larger = index[engine] + 1
        return sizes_pct[larger] - sizes_pct[index[engine]] if larger < len(sizes_pct) else budget_pct + 1

    while growing := [engine for engine in range(len(needs)) if growth_pct(engine) <= left_pct]:
        furthest = max(growing, key=lambda engine: ideal_pct[engine] - sizes_pct[index[engine]])
        left_pct -= growth_pct(furthest)
        index[furthest] += 1
    return tuple(sizes_pct[i] for i in index)
