"""What the shells of services tell their cores of the store, as `shared/runtime.py` does live.

At its start a service hears all that the store knows. While its bus is away it misses news; once that is back
it hears what has changed meanwhile. The store is read twice for this, for the writer of a change may be late
with it: a model counts as removed only if it is missing both times, and nobody has spoken of it since.
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
        node.models = {}
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
        match event:
            case ev.ModelRegistered(model=model):
                node.models[model.name] = model
            case ev.ModelRemoved(model=name):
                node.models.pop(name, None)
            case ev.BusRestored():
                node.models_heard.clear()
                node.rereads += 1
                self._world.later(0.0, partial(self._reread, node, node.life, node.rereads, None))

    def heard(self, node: Node, message: ev.Message) -> None:
        """Note of which models the bus has brought news."""
        if isinstance(message, ev.ModelRegistered):
            node.models_heard.add(message.model.name)
        elif isinstance(message, ev.ModelRemoved):
            node.models_heard.add(message.model)

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
        stored = {model.name: model for model in world.store.models(world.now_ms)}
        for name, model in stored.items():
            if node.models.get(name) != model and name not in node.models_heard:
                self._retell(node, ev.ModelRegistered(model=model))
        now_missing = node.models.keys() - stored.keys() - node.models_heard
        for name in sorted(now_missing & (missing or set())):
            self._retell(node, ev.ModelRemoved(model=name))
        self._retell_placement(node)
        if missing is None:
            world.later(REREAD_MS, partial(self._reread, node, life, reread, set(now_missing)))

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
