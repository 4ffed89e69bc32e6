"""One world: the cores that serve, on emulated devices, in virtual time.

Everything is an event in one heap, ordered by (time, rank, sequence). At one moment faults come first, then
devices, then messages, then the ticks that cores asked for; so a world is the same whenever it is played.
"""

import heapq
import math
import struct
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Any

from services.gateway.events import Deliver, Fail
from shared import engine as en
from shared import events as ev
from shared.subjects import GATEWAY, learnt_key, model_key
from sim import faults
from sim.chance import Chance
from sim.check import Checks, InvariantBroken
from sim.clients import Clients
from sim.hardware import Hardware
from sim.network import Bus, Store
from sim.nodes import GpuNode, Node, build_nodes
from sim.scenario import Result, Scenario
from sim.shells import MODEL_NEWS, NOTED, Shells
from sim.story import Story
from sim.wakes import Wakes

FAULT, DEVICE, MESSAGE, TICK, ARRIVAL, SAMPLE = range(6)  # ranks
REST_CHECK_MS = 1_000.0
LAST_STEPS_MS = 250.0  # before the horizon engines begin to report each step, so that no token is left out
REST_WITHIN_MS = 900_000.0  # after the last arrival and fault, every timeout of every service included

_entry = struct.Struct("<dHH").pack


class World:
    """One run of a scenario.

    Args:
        check: whether to check the invariants, and remember what happened for the story of a failure.
        replay: the command that plays this world again, for the report of a failure.
    """

    def __init__(self, scenario: Scenario, *, check: bool = False, replay: str = "") -> None:
        self.scenario = scenario
        self.now_ms = 0.0
        self.events = 0
        self.story = Story() if check else None
        self.clients = Clients(scenario, self.feed, self.complain if check else None)
        self.nodes = build_nodes(scenario, self.clients.true_tokens)
        self.by_name = {node.ident: node for node in self.nodes}
        self.gpus = [node for node in self.nodes if isinstance(node, GpuNode)]
        self.gateways = [node for node in self.nodes if node.service == GATEWAY]
        self.bus = Bus(self.nodes, scenario.network, Chance(scenario.seed), self._carry)
        self.store = Store()
        self.luts: dict[str, bytes] = {}  # in the store as well, packed
        self.total_bytes = scenario.made_of.total_bytes  # of each GPU
        self.counters: dict[str, float] = {}
        self.hardware = Hardware(self)
        self._shells = Shells(self)
        self._wakes = Wakes(self)
        self._checks = Checks(self) if check else None
        self._replay = replay
        self._heap: list[tuple[float, int, int, Any, Any]] = []
        self._order = count()
        self._hash = blake2b(digest_size=16)
        self._kinds: dict[type, int] = {}
        self._performers: dict[type, Callable[[Node, Any], None]] = {
            ev.Send: self._send,
            ev.Put: lambda node, a: self.store.put(self.now_ms, a.key, a.value, a.ttl_ms),
            ev.Delete: lambda node, a: self.store.delete(a.key),
            ev.Count: self._count,
            ev.Span: lambda node, a: None,
            Deliver: self._to_client,
            Fail: self._to_client,
        }
        self._performers |= dict.fromkeys(en.Order.__subclasses__(), self.hardware.order)

    # ---- running

    def run(self, progress: Callable[[float], None] | None = None) -> Result:
        """Play the scenario to its end.

        Args:
            progress: called with the part of the time that has passed, now and then.

        Raises:
            InvariantBroken: something that must never happen has happened.
        """
        scenario = self.scenario
        for model in scenario.models:
            self.store.put(0.0, model_key(model.name), model)
        for learnt in scenario.learnt:
            self.store.put(0.0, learnt_key(learnt.scheduler, learnt.model), learnt)
        for node in self.nodes:
            self.start(node)
        for index, arrival in enumerate(scenario.arrivals):
            self._push(arrival.at_ms, ARRIVAL, index, None)
        for fault in scenario.faults:
            self._push(fault.at_ms, FAULT, None, lambda fault=fault: self._fault(fault))
        for node in self.gpus:
            self._push(0.0, SAMPLE, None, lambda node=node: self.hardware.record(node, scenario.sample_ms))
        last_ms = max((a.at_ms for a in scenario.arrivals), default=0.0)
        last_ms = max([last_ms, scenario.least_ms, *(f.at_ms + f.for_ms for f in scenario.faults)])
        end_ms = scenario.horizon_ms
        if end_ms is not None:
            self._push(max(0.0, end_ms - LAST_STEPS_MS), FAULT, None, self.hardware.report_each_step)
        else:
            self.later(last_ms, lambda: self._look_for_rest(last_ms + REST_WITHIN_MS))
        self._loop(math.inf if end_ms is None else end_ms, end_ms or last_ms + 1.0, progress)
        return self._result()

    def _loop(self, end_ms: float, expected_ms: float, progress: Callable[[float], None] | None) -> None:
        heap = self._heap
        told = 0
        while heap and heap[0][0] <= end_ms:
            at_ms, rank, _, who, what = heapq.heappop(heap)
            self.now_ms = at_ms
            if rank == DEVICE:
                self.hardware.due(who, what)
            elif rank == MESSAGE:
                self._message(who, what)
            elif rank == TICK:
                self._wakes.due(who, what)
            elif rank == ARRIVAL:
                self.clients.arrive(at_ms, who, self.gateways)
            else:
                what()
            if progress is not None and self.events - told >= 20_000:
                told = self.events
                progress(min(1.0, at_ms / expected_ms))
        if end_ms < math.inf:
            self.now_ms = end_ms

    def _push(self, at_ms: float, rank: int, who: Any, what: Any) -> None:
        heapq.heappush(self._heap, (at_ms, rank, next(self._order), who, what))

    def later(self, after_ms: float, act: Callable[[], None]) -> None:
        """Do something after a time, before all else of that moment."""
        self._push(self.now_ms + after_ms, FAULT, None, act)

    def at_device(self, at_ms: float, node: GpuNode) -> None:
        """Let a device report at that time."""
        self._push(at_ms, DEVICE, node, node.life)

    def at_tick(self, at_ms: float, node: Node) -> None:
        """Look at that time whether a core wants a tick."""
        self._push(at_ms, TICK, node, node.life)

    def at_end(self, after_ms: float, act: Callable[[], None]) -> None:
        """Do something after a time, after all else of that moment."""
        self._push(self.now_ms + after_ms, SAMPLE, None, act)

    def complain(self, what: str, *about: str) -> None:
        """Report a broken invariant. Raises InvariantBroken."""
        story = self.story.about(*about) if self.story else "(not kept: run it with checks)"
        raise InvariantBroken(f"at {self.now_ms:.3f} ms: {what}", self.scenario.seed, self._replay, story)

    # ---- services

    def start(self, node: Node) -> None:
        """Start a service."""
        self._shells.start(node)

    def stop(self, node: Node) -> None:
        """End a service's process, with all that it holds."""
        if node.core is None:
            return
        if isinstance(node, GpuNode):
            node.end_device(node.clock_ms(self.now_ms))
        node.core = None
        node.life += 1
        if node.service == GATEWAY:
            self.clients.gateway_gone(self.now_ms, node)

    def any_gateway(self) -> Node | None:
        """Return a gateway that is up."""
        return next((node for node in self.gateways if node.core is not None), None)

    def feed(self, node: Node, event: ev.Message | ev.Event) -> None:
        """Let a core take one event, and do what it says."""
        core = node.core
        if core is None:
            return
        kind = type(event)
        code = self._kinds.get(kind)
        if code is None:
            code = self._kinds[kind] = len(self._kinds)
        self._hash.update(_entry(self.now_ms, node.index, code))
        self.events += 1
        if kind in NOTED:
            self._shells.note(node, event)
        if self.story is not None:
            self.story.add(self.now_ms, node.ident, event)
        try:
            actions = core.step(node.clock_ms(self.now_ms), event)
            wake_ms = core.wake_ms
        except InvariantBroken:
            raise
        except Exception as error:
            self.complain(f"{node.ident} broke on {kind.__name__}: {error!r}", *_names(event), node.ident)
        performers = self._performers
        for action in actions:
            performers[type(action)](node, action)
        if self._checks is not None:
            self._checks.after(node)
        self._wakes.arm(node, wake_ms)

    # ---- messages, clients, faults

    def _send(self, node: Node, action: ev.Send) -> None:
        if self._checks is not None:
            self._checks.sent(node, action)
        self.bus.send(self.now_ms, node, action.to, action.message)

    def _carry(self, at_ms: float, reader: Node, message: ev.Message) -> None:
        self._push(at_ms, MESSAGE, reader, message)

    def _message(self, node: Node, message: ev.Message) -> None:
        if self.now_ms < node.paused_until_ms:
            self._push(node.paused_until_ms, MESSAGE, node, message)
        elif node.hears:
            if type(message) in MODEL_NEWS:
                node.models.hear(message)
            self.feed(node, message)

    def _to_client(self, node: Node, action: Deliver | Fail) -> None:
        if self.story is not None:
            self.story.add(self.now_ms, node.ident, action)
        if isinstance(action, Deliver):
            self.clients.deliver(self.now_ms, action)
        else:
            self.clients.fail(self.now_ms, action)

    def _count(self, node: Node, action: ev.Count) -> None:
        name = f"{node.service}.{action.name}"
        for label in ("side", "outcome", "reason"):
            if label in action.labels:
                name = f"{name}.{action.labels[label]}"
        self.counters[name] = self.counters.get(name, 0.0) + action.value

    def _fault(self, fault: Any) -> None:
        if self.story is not None:
            self.story.add(self.now_ms, fault.target, fault)
        faults.happen(self, fault)

    # ---- the end

    def _look_for_rest(self, give_up_ms: float) -> None:
        """End the world once nothing is outstanding."""
        checks = self._checks or Checks(self)
        unrest = checks.unrest() if not self.clients.open else [("requests are open", "")]
        if not unrest:
            for node in self.gpus:
                if node.core is not None and self._checks is not None:
                    self._checks.look(node)
            self._heap.clear()
        elif self.now_ms >= give_up_ms:
            what, about = (checks.unrest() or unrest)[0]
            self.complain(f"not at rest: {what}", about)
        else:
            self.later(REST_CHECK_MS, lambda: self._look_for_rest(give_up_ms))

    def _result(self) -> Result:
        for node in self.gpus:
            self.hardware.record(node)
            energy_j = self.hardware.records[node.ident].samples[-1].energy_j
            self._hash.update(struct.pack("<d", energy_j))
        requests = list(self.clients.records.values())
        for asked in requests:
            if not asked.outcome:
                asked.outcome, asked.ended_ms = "unfinished", self.now_ms
            self._hash.update(f"{asked.outcome} {asked.output_tokens} {asked.ended_ms!r}".encode())
        return Result(
            requests=requests,
            devices=list(self.hardware.records.values()),
            counters=dict(sorted(self.counters.items())),
            ended_ms=self.now_ms,
            events=self.events,
            trace_hash=self._hash.hexdigest(),
        )


def _names(event: object) -> list[str]:
    names = [getattr(event, "request_id", ""), getattr(event, "move_id", "")]
    names.append(getattr(getattr(event, "request", None), "request_id", ""))
    return [name for name in names if name]


def run(
    scenario: Scenario,
    *,
    check: bool = False,
    progress: Callable[[float], None] | None = None,
    replay: str = "",
) -> Result:
    """Play a scenario and return what came of it.

    Args:
        check: check the invariants as well.
        progress: called with the part of the time that has passed.
        replay: the command that plays it again, for the report of a failure.

    Raises:
        InvariantBroken: only with `check`, or where a core breaks.
    """
    return World(scenario, check=check, replay=replay).run(progress)
