"""What the shells of services tell their cores of the store, as `shared/runtime.py` does live.

At its start a service hears all that the store knows. While its bus is away it misses news; once that is back
it hears what has changed meanwhile, in two looks (`KnownModels.news`).
"""

import math
from functools import partial
from typing import TYPE_CHECKING

from services.global_sched.predict import LearntRead
from shared import events as ev
from shared.subjects import GLOBAL, ROUTES
from sim.nodes import GpuNode, Node

if TYPE_CHECKING:
    from sim.world import World

REREAD_MS = 5_000.0  # between the two times; `REREAD_S` there
MODEL_NEWS = frozenset({ev.ModelRegistered, ev.ModelRemoved})
NOTED = MODEL_NEWS | {ev.BusRestored}


class Shells:
    """The shells of one world."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def start(self, node: Node) -> None:
        """Start a service: a new core, which is told what the store knows."""
        world, now_ms = self._world, self._world.now_ms
        node.offset_ms, node.last_ms = node.wall_ms, -math.inf
        node.life += 1
        node.bus_lost, node.armed_ms = False, math.inf
        node.models.specs = {}
        models = tuple(world.store.models(now_ms))
        placement = world.store.placement(now_ms)
        if isinstance(node, GpuNode):
            world.hardware.make(node)
        node.core = node.make(node.clock_ms(now_ms), models, placement)
        world.feed(node, ev.Tick())
        if isinstance(node, GpuNode):
            world.hardware.read(node, node.life)
        self._retell_luts(node)
        for model in models:
            self._retell(node, ev.ModelRegistered(model=model))
        self._retell_placement(node)
        for summary in world.store.summaries(now_ms):
            self._retell(node, ev.SummaryChanged(summary=summary))
        if node.service == GLOBAL:
            for learnt in sorted(world.store.learnt(now_ms), key=lambda each: each.scheduler == node.ident):
                world.feed(node, LearntRead(learnt=learnt))

    def note(self, node: Node, event: ev.Message | ev.Event) -> None:
        """Keep in step with what a core knows of the models; read the store once its bus is back."""
        node.models.note(event)
        if isinstance(event, ev.BusRestored):
            node.rereads += 1
            self._world.later(0.0, partial(self._reread, node, node.life, node.rereads, None))

    def _reread(self, node: Node, life: int, reread: int, missing: set[str] | None) -> None:
        """Tell what has changed in the store, and of models gone that were `missing` at the look before."""
        world = self._world
        if life != node.life or reread != node.rereads:
            return
        if world.now_ms < node.paused_until_ms:
            again = partial(self._reread, node, life, reread, missing)
            world.later(node.paused_until_ms - world.now_ms, again)
            return
        self._retell_luts(node)
        told, missing_now = node.models.news(world.store.models(world.now_ms), missing)
        for message in told:
            self._retell(node, message)
        self._retell_placement(node)
        if missing is None:
            world.later(REREAD_MS, partial(self._reread, node, life, reread, missing_now))

    def _retell_luts(self, node: Node) -> None:
        if node.service in ROUTES[ev.LutStored].readers:
            for _, packed in sorted(self._world.luts.items()):
                self._world.feed(node, ev.LutRead(packed=packed))

    def _retell_placement(self, node: Node) -> None:
        placement = self._world.store.placement(self._world.now_ms)
        if placement is not None:
            self._retell(node, ev.PlacementChanged(placement=placement))

    def _retell(self, node: Node, message: ev.Message) -> None:
        if node.service in ROUTES[type(message)].readers:
            self._world.feed(node, message)
