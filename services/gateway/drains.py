"""Orders to drain GPUs that no placement has shown yet: they are repeated, for nobody may have heard them."""

import math

from shared.events import Drain
from shared.model import Placement


class Drains:
    """The drain orders of this gateway that are under way, the newest of each GPU.

    Args:
        repeat_ms: time between two repeats.
        give_up_ms: an order is dropped after this long: no consolidator runs.
    """

    def __init__(self, repeat_ms: float, give_up_ms: float) -> None:
        self.due_ms = math.inf
        self._repeat_ms = repeat_ms
        self._give_up_ms = give_up_ms
        self._version = 0
        self._asked: dict[str, tuple[float, Drain]] = {}  # by GPU: when first, and what

    def ask(self, now_ms: float, drain: Drain) -> None:
        """Take an order that is being sent for the first time; it replaces an earlier one for that GPU."""
        self._asked[drain.gpu] = (now_ms, drain)
        self.due_ms = min(self.due_ms, now_ms + self._repeat_ms)

    def shown(self, placement: Placement) -> None:
        """Drop the orders that a placement has carried out; one older than another seen says nothing."""
        if placement.version < self._version:
            return
        self._version = placement.version
        self._asked = {
            gpu: (asked_ms, drain)
            for gpu, (asked_ms, drain) in self._asked.items()
            if drain.on != (gpu in placement.drained)
        }
        if not self._asked:
            self.due_ms = math.inf

    def due(self, now_ms: float) -> list[Drain]:
        """Return the orders to be repeated now."""
        if now_ms < self.due_ms:
            return []
        self._asked = {
            gpu: (asked_ms, drain)
            for gpu, (asked_ms, drain) in self._asked.items()
            if now_ms - asked_ms < self._give_up_ms
        }
        self.due_ms = now_ms + self._repeat_ms if self._asked else math.inf
        return [drain for _, drain in self._asked.values()]
