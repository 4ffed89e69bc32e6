"""The bus and the store of a world: the subject map's routes, without a wire."""

from collections.abc import Callable
from typing import Any

import msgspec

from services.global_sched.predict import Learnt
from shared import events as ev
from shared.model import GpuSummary, ModelSpec, Placement
from shared.subjects import GPU_KEYS, LEARNT_KEYS, MODEL_KEYS, PLACEMENT_KEY, subject_of, subscriptions
from sim.chance import Chance
from sim.nodes import Node
from sim.scenario import Network

Deliver = Callable[[float, Node, ev.Message], None]


class Bus:
    """Carries messages between nodes by the subscriptions of `shared/subjects.py`.

    A message is not encoded: its type is frozen, so a reader may have the writer's own object.

    Args:
        nodes: everyone on it, whether up or not.
        deliver: called with (time, reader, message) for each copy that is to arrive.
    """

    def __init__(self, nodes: list[Node], network: Network, chance: Chance, deliver: Deliver) -> None:
        self._network = network
        self._chance = chance
        self._deliver = deliver
        self._readers: dict[type, list[tuple[str, str, Node]]] = {}
        for node in nodes:
            for subject, queue, message_type in subscriptions(node.service, node.ident):
                self._readers.setdefault(message_type, []).append((subject, queue, node))
        self._routes: dict[tuple[type, str], tuple[list[Node], list[Node]]] = {}
        self._latest: dict[tuple[int, int], float] = {}  # on each connection: nothing overtakes what is sent
        self._cut_ms: dict[tuple[str, str], float] = {}  # pairs of nodes without a link, until then
        self._stale: dict[str, tuple[float, float]] = {}  # GPU -> (until, delay) of its summaries
        self._plain = not (network.jitter_ms or network.loss or network.duplication or network.reordering)

    def cut(self, one: str, other: str, until_ms: float) -> None:
        """Lose what two nodes send each other until then."""
        self._cut_ms[one, other] = self._cut_ms[other, one] = until_ms

    def hold_summaries(self, gpu: str, until_ms: float, delay_ms: float) -> None:
        """Bring the summaries that a GPU sends until then this much later."""
        self._stale[gpu] = (until_ms, delay_ms)

    def send(self, now_ms: float, sender: Node, to: str, message: ev.Message) -> None:
        """Publish a message: a copy to every reader, and to one of each queue group."""
        if sender.bus_lost:
            return
        kind = type(message)
        route = self._routes.get((kind, to))
        if route is None:
            route = self._routes[kind, to] = self._route(kind, to)
        everyone, group = route
        if self._plain and not self._stale and not self._cut_ms:
            at_ms = now_ms + self._network.delay_ms
            for reader in everyone:
                self._deliver(at_ms, reader, message)
        else:
            for reader in everyone:
                self._carry(now_ms, sender, reader, message)
        listening = [reader for reader in group if reader.hears] if group else ()
        if listening:
            first = len(listening) == 1
            self._carry(now_ms, sender, listening[0] if first else self._chance.pick(listening), message)

    def _route(self, kind: type[ev.Message], to: str) -> tuple[list[Node], list[Node]]:
        subject = subject_of(kind, to).split(".")
        everyone: list[Node] = []
        group: list[Node] = []
        for pattern, queue, node in self._readers.get(kind, ()):
            if all(p in ("*", s) for p, s in zip(pattern.split("."), subject, strict=True)):
                (group if queue else everyone).append(node)
        return everyone, group

    def _carry(self, now_ms: float, sender: Node, reader: Node, message: ev.Message) -> None:
        network = self._network
        at_ms = now_ms + network.delay_ms
        if self._stale and isinstance(message, ev.SummaryChanged):
            until_ms, delay_ms = self._stale.get(sender.ident, (0.0, 0.0))
            if now_ms < until_ms:
                self._deliver(at_ms + delay_ms, reader, message)
                return
        if self._cut_ms and now_ms < self._cut_ms.get((sender.ident, reader.ident), 0.0):
            return
        if self._plain:
            self._deliver(at_ms, reader, message)
            return
        chance = self._chance
        if chance.happens(network.loss):
            return
        if chance.happens(network.duplication):
            self._deliver(at_ms + chance.between(0.0, network.late_ms), reader, message)
        if chance.happens(network.reordering):
            self._deliver(at_ms + chance.between(0.0, network.late_ms), reader, message)
            return
        connection = (sender.index, reader.index)
        at_ms = max(at_ms + chance.between(0.0, network.jitter_ms), self._latest.get(connection, 0.0))
        self._latest[connection] = at_ms
        self._deliver(at_ms, reader, message)


class Store:
    """What outlives a process, in memory; values may expire."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[msgspec.Struct, float]] = {}

    def put(self, now_ms: float, key: str, value: msgspec.Struct, ttl_ms: float = 0.0) -> None:
        """Write a value; it is gone after `ttl_ms` unless that is 0."""
        self._values[key] = (value, now_ms + ttl_ms if ttl_ms else float("inf"))

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._values.pop(key, None)

    def flush(self) -> None:
        """Lose everything."""
        self._values.clear()

    def read(self, now_ms: float, prefix: str) -> list[Any]:
        """Return the values of the keys that start so and have not expired, by key."""
        keys = sorted(key for key in self._values if key.startswith(prefix))
        return [self._values[key][0] for key in keys if now_ms < self._values[key][1]]

    def models(self, now_ms: float) -> list[ModelSpec]:
        """Return the registered models."""
        return self.read(now_ms, MODEL_KEYS)

    def placement(self, now_ms: float) -> Placement | None:
        """Return the stored placement."""
        return next(iter(self.read(now_ms, PLACEMENT_KEY)), None)

    def summaries(self, now_ms: float) -> list[GpuSummary]:
        """Return the GPUs' summaries."""
        return self.read(now_ms, GPU_KEYS)

    def learnt(self, now_ms: float) -> list[Learnt]:
        """Return what the global schedulers have learnt."""
        return self.read(now_ms, LEARNT_KEYS)
