"""What to do when there is more work than room: whose work comes in, and when to try again.

Every service bounds its queues with these: `has_room` divides a bounded room among tenants, `turns` says who
of those in it goes next, and `DrainRate` how long that takes, from what was served lately.
"""

import math
from collections.abc import Mapping, Sequence

NEWCOMERS_PART = 8
"""One place in so many is kept for tenants that have less than their share."""

MAX_WAIT_S = 60.0


def has_room(
    held: Mapping[str, int], weights: Mapping[str, float], tenant: str, weight: float, capacity: int
) -> bool:
    """Say whether one more of `tenant` may enter a room of `capacity` places (weighted max-min fairness).

    A tenant may take what nobody else wants, but the last places are for those that hold less than their
    share. So a flood never fills the room, and while others want places, what it gives back goes to them
    until every tenant has its share or all it wants. A share is capacity * weight / the weights of all who
    hold something, of the asker, and of one more who may come.

    Args:
        held: places that each tenant holds; none of 0.
        weights: weight of each tenant in `held`.
        tenant, weight: who asks. Cost: linear in the tenants, and constant while the room is mostly empty.
    """
    total = sum(held.values())
    if total < capacity - capacity // NEWCOMERS_PART:
        return True
    if total >= capacity:
        return False
    others = sum(weights[name] for name in held if name != tenant)
    return held.get(tenant, 0) < capacity * weight / (others + weight + 1.0)


def turns(holders: Sequence[tuple[str, float]]) -> list[int]:
    """Return the order in which waiting work of several tenants goes on, as indices into `holders`.

    `holders` names (tenant, weight) of each piece of work, the first come first. Tenants take turns: the k-th
    piece of a tenant of weight w has its turn at k / w; those of one tenant keep their order.
    """
    taken: dict[str, float] = {}
    keyed = []
    for i, (tenant, weight) in enumerate(holders):
        taken[tenant] = taken.get(tenant, 0.0) + 1.0 / weight
        keyed.append((taken[tenant], i))
    return [i for _, i in sorted(keyed)]


def ahead(waiting: Mapping[str, int], tenant: str, weight: float) -> float:
    """Return how many pieces of work start before the next one of `tenant`, where tenants take turns.

    `waiting` counts by tenant; the weights of the others are not known here and taken as 1.
    """
    own = waiting.get(tenant, 0)
    others = 0.0
    for name, count in waiting.items():
        if name != tenant:
            others += min(float(count), (own + 1) / weight)
    return own + others


class DrainRate:
    """How fast something empties: its departures per second, with exponential forgetting.

    Nothing is known of the rate before some departures were seen, nor when the last one is long ago.

    Args:
        window_ms: time constant of the forgetting.
    """

    def __init__(self, window_ms: float = 10_000.0) -> None:
        self._window_ms = window_ms
        self._since_ms = self._at_ms = -math.inf
        self._count = 0.0

    def note(self, now_ms: float) -> None:
        """Count a departure."""
        if now_ms - self._at_ms >= self._window_ms:
            self._since_ms, self._at_ms, self._count = now_ms, now_ms, 0.0
        self._count = self._count * math.exp((self._at_ms - now_ms) / self._window_ms) + 1.0
        self._at_ms = now_ms

    def per_s(self, now_ms: float) -> float | None:
        """Return departures per second; None while it is not known."""
        seen_ms = now_ms - self._since_ms
        enough = seen_ms >= self._window_ms or (self._count >= 4.0 and seen_ms >= self._window_ms / 10.0)
        if not enough or now_ms - self._at_ms >= self._window_ms:
            return None
        kept = self._count * math.exp((self._at_ms - now_ms) / self._window_ms)
        return kept / (self._window_ms * -math.expm1(-seen_ms / self._window_ms)) * 1000.0

    def wait_s(self, now_ms: float, departures: float) -> float | None:
        """Return how long until so many have left; None while it is not known."""
        rate = self.per_s(now_ms)
        return None if rate is None else departures / rate

    def retry_after_s(self, now_ms: float, departures: float, otherwise_s: float) -> float:
        """Return what to tell a refused client: when so many have left, from 1 to 60 s."""
        wait_s = self.wait_s(now_ms, departures)
        return otherwise_s if wait_s is None else min(MAX_WAIT_S, max(1.0, wait_s))
