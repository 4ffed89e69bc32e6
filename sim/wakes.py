"""The ticks that the cores of a world ask for."""

import math
from typing import TYPE_CHECKING

from shared import events as ev
from sim.nodes import Node

if TYPE_CHECKING:
    from sim.world import World

TICKS_AT_ONCE = 100  # a core that asks for more ticks at one moment would never let its process rest


class Wakes:
    """Wakes every core of one world when it wants."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def arm(self, node: Node, wake_ms: float | None) -> None:
        """See to it that a core is woken when it asks; one entry of the heap counts at a time."""
        if wake_ms is None:
            return
        at_ms = wake_ms - node.offset_ms
        if at_ms < self._world.now_ms:
            at_ms = self._world.now_ms
        if at_ms < node.armed_ms:
            node.armed_ms = at_ms
            self._world.at_tick(at_ms, node)

    def due(self, node: Node, life: int) -> None:
        """Give a core its tick, if this is still the time at which it wants one."""
        if life != node.life or self._world.now_ms != node.armed_ms:
            return  # another entry has taken its place
        if self._world.now_ms < node.paused_until_ms:
            node.armed_ms = node.paused_until_ms
            self._world.at_tick(node.armed_ms, node)
            return
        node.armed_ms = math.inf
        core = node.core
        assert core is not None
        wake_ms = core.wake_ms
        if wake_ms is None:
            return
        due_ms = wake_ms - node.offset_ms
        if due_ms > self._world.now_ms:  # put off since
            self.arm(node, wake_ms)
            return
        node.last_ms = max(node.last_ms, wake_ms)
        self._count_tick(node)
        self._world.feed(node, ev.Tick())

    def _count_tick(self, node: Node) -> None:
        node.ticks_at_once = node.ticks_at_once + 1 if node.ticked_ms == self._world.now_ms else 0
        node.ticked_ms = self._world.now_ms
        if node.ticks_at_once > TICKS_AT_ONCE:
            self._world.complain(f"{node.ident} asks for tick after tick at one moment", node.ident)
