"""No request is lost or answered twice by a move, whatever the network and the migrator do.

Small models of two local schedulers and a gateway are joined with the real migrator by a network that loses,
delays, repeats and reorders, in virtual time.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared import events as ev
from shared.model import Objectives, Request, Struct

TTL_MS = 5_000.0
QUIET_MS = 120_000.0
WAITING, HELD, RUNNING = "waiting", "held", "running"


class FirstToken(Struct):
    """What a GPU tells the gateway, again and again until it is answered."""

    request_id: str
    gpu: str


class Taken(Struct):
    """The gateway's answer: it has the token."""

    request_id: str


def request(request_id: str) -> Request:
    return Request(
        request_id=request_id,
        attempt=1,
        gateway="gw",
        model="m",
        prompt_tokens=(1,),
        max_tokens=4,
        objectives=Objectives(ttft_ms=250, tbt_ms=100),
    )


@dataclass
class World:
    """Virtual time, and a network in which the n-th message meets the n-th fate, where there is one.

    A fate is the delays in ms of the copies that arrive; none: it is lost.
    """

    fates: dict[int, list[float]]
    now_ms: float = 0.0
    heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    inboxes: dict[str, Callable[[object], None]] = field(default_factory=dict)
    cut_from_ms: float = 0.0
    cut_until_ms: float = 0.0
    sent: int = 0
    count: int = 0

    def at(self, when_ms: float, call: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when_ms, self.count, call))

    def send(self, sender: str, to: str, message: object) -> None:
        delays = self.fates.get(self.sent, [1.0])
        self.sent += 1
        if sender == "host" and self.cut_from_ms <= self.now_ms < self.cut_until_ms:
            return
        for delay_ms in delays:
            self.at(self.now_ms + delay_ms, lambda: self.arrive(to, message))

    def arrive(self, to: str, message: object) -> None:
        if not (to == "host" and self.cut_from_ms <= self.now_ms < self.cut_until_ms):
            self.inboxes[to](message)

    def run(self, check: Callable[[], None]) -> None:
        while self.heap and self.heap[0][0] <= QUIET_MS:
            self.now_ms, _, call = heapq.heappop(self.heap)
            call()
            check()
            assert self.count < 20_000, "it goes on for ever"


@dataclass
class Gpu:
    """A local scheduler as far as moves go: it starts each waiting request `start_ms` after it could."""

    world: World
    name: str
    start_ms: float
    work: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)  # step id: request, at the source
    promised: dict[str, Request | None] = field(default_factory=dict)  # step id: adopted state, if it came

    def take(self, request_id: str) -> None:
        self.work[request_id] = WAITING
        self.world.at(self.world.now_ms + self.start_ms, lambda: self.start(request_id))

    def start(self, request_id: str) -> None:
        if self.work.get(request_id) == WAITING:
            self.work[request_id] = RUNNING
            self.report(request_id)

    def report(self, request_id: str) -> None:
        if self.work.get(request_id) == RUNNING:
            self.world.send(self.name, "gw", FirstToken(request_id=request_id, gpu=self.name))
            self.world.at(self.world.now_ms + 500.0, lambda: self.report(request_id))

    def resume(self, step_id: str) -> None:
        request_id = self.held.pop(step_id, None)
        if request_id is not None and self.work.get(request_id) == HELD:
            self.take(request_id)

    def drop(self, step_id: str) -> None:
        self.promised.pop(step_id, None)

    def answer(self, message: ev.Message) -> None:
        self.world.send(self.name, "host", message)

    def hear(self, message: object) -> None:
        match message:
            case ev.Release():
                self.release(message)
            case ev.Reserve(move_id=step_id):
                if step_id not in self.promised:
                    self.promised[step_id] = None
                    self.world.at(self.world.now_ms + 2 * TTL_MS, lambda: self.drop(step_id))
                self.answer(ev.Granted(move_id=step_id, credit_bytes=1))
            case ev.Adopt(move_id=step_id) if step_id in self.promised:
                self.promised[step_id] = message.request
                self.answer(ev.Adopted(move_id=step_id))
            case ev.CommitMove(move_id=step_id):
                self.commit(step_id)
            case ev.AbortMove(move_id=step_id):
                self.resume(step_id)
                self.drop(step_id)
            case ev.Abort(request_id=request_id):
                self.work.pop(request_id, None)
            case Taken(request_id=request_id) if self.work.get(request_id) == RUNNING:
                self.work[request_id] = "done"

    def release(self, message: ev.Release) -> None:
        waiting = [r for r, state in self.work.items() if state == WAITING]
        if message.request_id != "*":
            waiting = [r for r in waiting if r == message.request_id]
        if message.move_id not in self.held and waiting:
            self.held[message.move_id] = waiting[0]
            self.work[waiting[0]] = HELD
            self.world.at(self.world.now_ms + TTL_MS, lambda: self.resume(message.move_id))
        found = self.held.get(message.move_id)
        released = request(found) if found else None
        self.answer(ev.Released(move_id=message.move_id, request=released))

    def commit(self, step_id: str) -> None:
        given_up = self.held.pop(step_id, None)
        if given_up is not None and self.work.get(given_up) == HELD:
            del self.work[given_up]
        adopted = self.promised.get(step_id)
        if adopted is not None:
            del self.promised[step_id]
            self.take(adopted.request_id)
            moved = ev.Moved(request_id=adopted.request_id, attempt=1, source="src", destination=self.name)
            self.world.send(self.name, "gw", moved)
            self.answer(ev.Adopted(move_id=step_id, started=True))


@dataclass
class Gateway:
    """Listens to one GPU per request: the one it knows of, or else the first to send a token."""

    world: World
    current: dict[str, str]
    served: dict[str, int] = field(default_factory=dict)

    def hear(self, message: object) -> None:
        match message:
            case ev.Moved(request_id=request_id, source=source, destination=destination):
                if self.current[request_id] == source and request_id not in self.served:
                    self.current[request_id] = destination
            case FirstToken(request_id=request_id, gpu=gpu):
                current = self.current[request_id]
                if gpu != current:
                    loser = gpu if request_id in self.served else current
                    abort = ev.Abort(request_id=request_id, attempt=1, reason="runs elsewhere")
                    self.world.send("gw", loser, abort)
                    if loser == gpu:
                        return
                if request_id not in self.served:
                    self.current[request_id] = gpu
                    self.served[request_id] = 1
                self.world.send("gw", gpu, Taken(request_id=request_id))


class Migrator:
    """The core, and a shell of a few lines."""

    def __init__(self, world: World, dies_ms: float) -> None:
        self.core = MigratorCore("host", MigratorSettings(weight_cache_bytes=0))
        self.world = world
        self.dies_ms = dies_ms
        self.ended: list[str] = []

    def hear(self, event: object) -> None:
        if self.world.now_ms >= self.dies_ms:
            return
        assert isinstance(event, ev.Message | ev.Event)
        for action in self.core.step(self.world.now_ms, event):
            if isinstance(action, ev.Send) and isinstance(action.message, ev.MoveEnded):
                self.ended.append(action.message.move_id)
            elif isinstance(action, ev.Send):
                self.world.send("host", action.to, action.message)
        wake_ms = self.core.wake_ms
        if wake_ms is not None and wake_ms <= QUIET_MS:
            self.world.at(wake_ms, lambda: self.hear(ev.Tick()) if self.core.wake_ms == wake_ms else None)


delay_ms = st.sampled_from([0.5, 1.0, 5.0, 300.0, 1_500.0, 6_000.0, 13_000.0])
fates_of_some = st.dictionaries(st.integers(0, 40), st.lists(delay_ms, max_size=2), max_size=8)


@settings(max_examples=300, deadline=None)
@given(
    fates=fates_of_some,
    ids=st.sampled_from([("r1", ["r1"]), ("*", ["r1"]), ("*", ["r1", "r2", "r3"])]),
    source_start_ms=st.sampled_from([2.0, 800.0, 20_000.0]),
    dies_ms=st.sampled_from([float("inf"), 1.5, 3.5, 5.5, 6.5, 1_000.0]),
    cut=st.tuples(st.sampled_from([0.5, 2.5, 4.5, 1_000.0]), st.sampled_from([0.0, 0.0, 50.0, 7_000.0])),
)
def test_a_request_is_never_lost_and_served_once(
    fates: dict[int, list[float]],
    ids: tuple[str, list[str]],
    source_start_ms: float,
    dies_ms: float,
    cut: tuple[float, float],
) -> None:
    moved, requests = ids
    world = World(fates, cut_from_ms=cut[0], cut_until_ms=cut[0] + cut[1])
    source, destination = Gpu(world, "src", source_start_ms), Gpu(world, "dst", 2.0)
    gateway = Gateway(world, dict.fromkeys(requests, "src"))
    migrator = Migrator(world, dies_ms)
    world.inboxes = {"src": source.hear, "dst": destination.hear, "gw": gateway.hear, "host": migrator.hear}
    for request_id in requests:
        source.take(request_id)
    move = ev.Move(move_id="mv", request_id=moved, model="m", source="src", destination="dst")
    world.at(0.0, lambda: migrator.hear(move))
    if cut[1]:
        world.at(cut[0], lambda: migrator.hear(ev.BusLost()))
        world.at(cut[0] + cut[1], lambda: migrator.hear(ev.BusRestored()))

    def nobody_is_without() -> None:
        for request_id in requests:
            assert request_id in source.work or request_id in destination.work, "nobody has the request"

    world.run(nobody_is_without)
    for request_id in requests:
        assert gateway.served.get(request_id) == 1
        owners = [gpu.name for gpu in (source, destination) if request_id in gpu.work]
        assert owners == [gateway.current[request_id]]
        assert gateway.current[request_id] in ("src", "dst")
    assert not source.held and not destination.promised
    if dies_ms == float("inf"):
        assert migrator.ended.count("mv") == 1
        assert migrator.core.wake_ms is None


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8))
def test_on_a_good_network_all_waiting_requests_move(count: int) -> None:
    requests = [f"r{i}" for i in range(count)]
    world = World({})
    source, destination = Gpu(world, "src", 20_000.0), Gpu(world, "dst", 2.0)
    gateway, migrator = Gateway(world, dict.fromkeys(requests, "src")), Migrator(world, float("inf"))
    world.inboxes = {"src": source.hear, "dst": destination.hear, "gw": gateway.hear, "host": migrator.hear}
    for request_id in requests:
        source.take(request_id)
    move = ev.Move(move_id="mv", request_id="*", model="m", source="src", destination="dst")
    world.at(0.0, lambda: migrator.hear(move))
    world.run(lambda: None)
    assert not source.work and sorted(destination.work) == sorted(requests)
    assert migrator.ended == [f"mv.{i + 1}" for i in range(count)] + ["mv"]
