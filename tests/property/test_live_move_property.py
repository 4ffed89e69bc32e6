"""Running requests move with their KV: credits are conserved and each request ends once, whatever happens.

The real cores of a gateway, two local schedulers on emulated GPUs, and a migrator, in virtual time. What
migrator and GPUs say of moves lies in a bag, from which messages arrive in any order, twice, or never; either
GPU and the migrator may die at any moment, and start again with nothing.
"""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.core import GatewayCore
from services.gateway.events import Arrived, ClientGone, Deliver, Fail
from services.gateway.settings import GatewaySettings
from services.local_sched.core import LocalSchedCore
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice, answer
from services.local_sched.moves import DESTINATION, SOURCE, holder
from services.local_sched.settings import LocalSettings
from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared import engine as en
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.lut import build
from shared.model import Objectives, Request

H100 = DEVICES["h100-80gb"]
MODEL = emulated_models(2)[1]  # 13 MB of KV a block
LUT = build(H100, MODEL)
VOCAB = VocabSlice(token_ids=tuple(range(1000, 1256)), eos_id=2)
BLOCK_BYTES = H100.block_tokens * MODEL.kv_bytes_per_token
MEMORY = MODEL.weight_bytes + 100 * BLOCK_BYTES  # little: a move has to wait for credit
MARGIN = 1.0 - MEMORY / H100.total_bytes
OF_MOVES = (
    *(ev.Prepare, ev.Prepared, ev.Reserve, ev.Granted, ev.StageKv, ev.KvStaged, ev.Release, ev.Released),
    *(ev.Adopt, ev.Adopted, ev.CommitMove, ev.AbortMove, ev.Moved, ev.KvLoaded),
)
REST_MS = 120_000.0


class Pool:
    """All cores, their devices, and what is under way between them."""

    def __init__(self) -> None:
        self.now_ms = 1_000.0
        self.gateway = GatewayCore("g", GatewaySettings(max_attempts=100))
        self.gpus: dict[str, LocalSchedCore] = {}
        self.devices: dict[str, EmulatedGpu] = {}
        self.bag: list[tuple[str, ev.Message]] = []
        self.asked: dict[str, Request] = {}
        self.got: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.at_first: dict[str, str] = {}
        self.lose_tokens = 0
        self.committed = 0
        self.seqs = count(1)
        self.start_migrator()
        self.feed("g", ev.ModelRegistered(model=MODEL))
        for gpu in ("src", "dst"):
            self.start(gpu)
        while any(
            engine.state != "ready" for core in self.gpus.values() for engine in core.state.engines.values()
        ):
            self.wait(500.0)

    def start_migrator(self) -> None:
        chosen = MigratorSettings(chunk_bytes=8 * BLOCK_BYTES, host_bytes_s=1e12, weight_cache_bytes=0)
        self.migrator = MigratorCore("host", chosen)
        self.lives = getattr(self, "lives", 0) + 1

    def start(self, gpu: str) -> None:
        chosen = LocalSettings(memory_margin=MARGIN)
        core = LocalSchedCore(gpu, "host", "emulated", H100, chosen, self.now_ms, lut_for=lambda *_: LUT)
        self.gpus[gpu], self.devices[gpu] = core, EmulatedGpu(H100, vocab=VOCAB)
        self.devices[gpu].advance(self.now_ms)
        self.feed(gpu, ev.Tick())
        self.feed(gpu, ev.Load(model=MODEL, placement_version=1))

    # ---- events

    def feed(self, name: str, event: ev.Message | ev.Event) -> None:
        core = {"g": self.gateway, "host": self.migrator, **self.gpus}[name]
        for action in core.step(self.now_ms, event):
            if isinstance(action, en.Order):
                self.devices[name].order(self.now_ms, action)
            elif isinstance(action, ev.Send):
                self.send(action.to, action.message)
            elif isinstance(action, Deliver):
                self.deliver(action)
            elif isinstance(action, Fail):
                self.end(action.request_id, action.code)

    def send(self, to: str, message: ev.Message) -> None:
        if isinstance(message, OF_MOVES):
            self.bag.append((to, message))
        elif isinstance(message, ev.Tokens) and self.lose_tokens:
            self.lose_tokens -= 1
        elif isinstance(message, ev.Dispatch):
            self.place(message.request)
        elif isinstance(message, ev.SummaryChanged):
            self.feed("g", message)
        elif isinstance(message, ev.GatewayAlive):
            for gpu in self.gpus:
                self.feed(gpu, message)
        elif isinstance(message, ev.MoveEnded):
            self.committed += message.outcome == "committed"
        elif to in ("g", *self.gpus):
            self.feed(to, message)

    def place(self, request: Request) -> None:
        gpu = self.at_first.get(request.request_id, "src")
        submit = ev.Submit(
            request=request, scheduler="s", dispatch_seq=next(self.seqs), predicted_output_tokens=100
        )
        self.feed(gpu, submit)

    def deliver(self, told: Deliver) -> None:
        self.got[told.request_id] += told.token_ids
        if told.end is not None:
            self.end(told.request_id, told.end.finish_reason)

    def end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ends, f"{request_id} has ended twice"
        self.ends[request_id] = how

    # ---- time

    def wait(self, for_ms: float) -> None:
        end_ms = self.now_ms + for_ms
        while True:
            wakes = [(device.wake_ms, 0, gpu) for gpu, device in self.devices.items()]
            wakes += [(core.wake_ms, 1, gpu) for gpu, core in self.gpus.items()]
            wakes += [(self.gateway.wake_ms, 1, "g"), (self.migrator.wake_ms, 1, "host")]
            at_ms, kind, name = min((w for w in wakes if w[0] is not None), key=lambda wake: wake[:2])
            if at_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, at_ms)
            if kind:
                self.feed(name, ev.Tick())
            else:
                for event in self.devices[name].advance(self.now_ms):
                    self.feed(name, event)
        self.now_ms = end_ms

    def take(self, index: int) -> tuple[str, ev.Message]:
        return self.bag.pop(index % len(self.bag))

    def flow(self, for_ms: float) -> None:
        """Let all messages arrive in their order, each a millisecond after it was sent."""
        end_ms = self.now_ms + for_ms
        while self.now_ms < end_ms:
            self.wait(1.0 if self.bag else min(5.0, end_ms - self.now_ms))
            for to, message in [self.bag.pop(0) for _ in range(len(self.bag))]:
                self.feed(to, message)

    # ---- what must hold

    def check(self) -> None:
        for gpu, core in self.gpus.items():
            state = core.state
            assert state.ledger.free_bytes >= 0
            pool = state.ledger.pools[MODEL.name]
            moves = state.moves.transfers
            mine = {holder(m): t for m, t in moves.items() if t.side == DESTINATION and not t.committed}
            for held, blocks in pool.holders.items():
                assert held in state.works or held in mine, f"{gpu} keeps memory for {held}"
                if held in mine and mine[held].request is None:
                    assert blocks * pool.block_bytes == mine[held].credit_bytes
            for held, transfer in mine.items():
                assert bool(transfer.credit_bytes) == (held in pool.holders)
            going = [t for t in moves.values() if t.side == SOURCE and t.frozen and not t.committed]
            frozen = {state.works[t.request_id].run_id for t in going}
            assert state.engines[MODEL.name].frozen == frozen
        for request_id, request in self.asked.items():
            got = self.got[request_id]
            told = answer(request, VOCAB, MODEL.context_tokens).tokens(0, len(got)) if got else ()
            assert tuple(got) == told, f"the stream of {request_id} is broken"

    def rest(self) -> None:
        """Let everything come to its end, and look at what is left."""
        self.lose_tokens = 0
        end_ms = self.now_ms + REST_MS
        while self.now_ms < end_ms and not self.is_at_rest():
            self.flow(500.0)
        self.check()
        assert self.ends.keys() == self.asked.keys()
        for request_id, how in self.ends.items():
            if how == "length":
                assert len(self.got[request_id]) == self.asked[request_id].max_tokens
        for core in self.gpus.values():
            open_moves = [t for t in core.state.moves.transfers.values() if not t.committed]
            assert not core.state.works and not open_moves
            assert not core.state.ledger.pools[MODEL.name].holders, "credits are outstanding at rest"
        assert self.migrator.wake_ms is None

    def is_at_rest(self) -> bool:
        busy = any(core.state.works or core.state.moves.open for core in self.gpus.values())
        return not (busy or self.bag or self.gateway.inflight or self.migrator.wake_ms is not None)


def request(name: str, prompt: int, output: int) -> Request:
    return Request(
        request_id=name,
        attempt=1,
        gateway="g",
        model=MODEL.name,
        prompt_tokens=tuple(range(prompt)),
        max_tokens=output,
        objectives=Objectives(ttft_ms=400.0, tbt_ms=100.0),
        sampling={"ignore_eos": True},
    )


class Moves(RuleBasedStateMachine):
    """Everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.names = count(1)

    @initialize(
        each=st.booleans(),
        crowd=st.sampled_from([0, 0, 1, 2]),
        after_ms=st.floats(0.0, 90.0),
    )
    def begin(self, each: bool, crowd: int, after_ms: float) -> None:
        """Begin somewhere in the middle of a move, perhaps to a GPU with little memory."""
        self.ask("src", 600, 120)
        for _ in range(crowd):
            self.ask("dst", 600, 60)
        self.pool.flow(150.0)
        self.move(each, 0, False)
        self.pool.flow(after_ms)

    @rule(
        at=st.sampled_from(["src", "src", "src", "dst"]),
        prompt=st.sampled_from([40, 300, 600]),
        output=st.sampled_from([10, 60, 120]),
    )
    def ask(self, at: str, prompt: int, output: int) -> None:
        name = f"r{next(self.names)}"
        asked = request(name, prompt, output)
        self.pool.asked[name], self.pool.got[name], self.pool.at_first[name] = asked, [], at
        self.pool.feed("g", Arrived(request=asked))

    @rule(each=st.booleans(), index=st.integers(0, 20), back=st.sampled_from([False, False, True]))
    def move(self, each: bool, index: int, back: bool) -> None:
        names = list(self.pool.asked)
        if not names:
            return
        source, destination = ("dst", "src") if back else ("src", "dst")
        move = ev.Move(
            move_id=f"m{next(self.names)}",
            request_id="**" if each else names[index % len(names)],
            model=MODEL.name,
            source=source,
            destination=destination,
        )
        self.pool.feed("host", move)

    @precondition(lambda self: self.pool.bag)
    @rule(index=st.integers(0, 20), again=st.sampled_from([False, False, False, True]))
    def arrive(self, index: int, again: bool) -> None:
        to, message = self.pool.take(index)
        if again:
            self.pool.bag.append((to, message))
        self.pool.feed(to, message)

    @precondition(lambda self: self.pool.bag)
    @rule(index=st.integers(0, 20))
    def lose(self, index: int) -> None:
        self.pool.take(index)

    @rule()
    def lose_tokens(self) -> None:
        self.pool.lose_tokens += 2

    @rule(ms=st.sampled_from([1.0, 4.0, 20.0, 1_100.0, 1_100.0, 5_100.0]))
    def wait(self, ms: float) -> None:
        self.pool.wait(ms)

    @rule(ms=st.sampled_from([2.0, 5.0, 9.0, 15.0, 40.0, 200.0]))
    def flow(self, ms: float) -> None:
        self.pool.flow(ms)

    @rule(who=st.sampled_from(["src", "dst", "host"]))
    def die(self, who: str) -> None:
        if who == "host":
            self.pool.start_migrator()
        else:
            self.pool.wait(1.0)
            self.pool.start(who)

    @rule()
    def lose_all(self) -> None:
        self.pool.bag.clear()

    @rule(index=st.integers(0, 20))
    def leave(self, index: int) -> None:
        names = [name for name in self.pool.asked if name not in self.pool.ends]
        if names:
            name = names[index % len(names)]
            self.pool.feed("g", ClientGone(request_id=name, reason="gone"))
            self.pool.ends.setdefault(name, "gone")

    @invariant()
    def credits_and_streams(self) -> None:
        self.pool.check()

    def teardown(self) -> None:
        self.pool.rest()


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def test_on_a_good_network_a_running_request_moves_with_its_kv() -> None:
    pool = Pool()
    asked = request("r1", 600, 120)
    pool.asked["r1"], pool.got["r1"] = asked, []
    pool.feed("g", Arrived(request=asked))
    pool.flow(200.0)
    before = len(pool.got["r1"])
    assert 0 < before < 60
    move = ev.Move(move_id="m", request_id="r1", model=MODEL.name, source="src", destination="dst")
    pool.feed("host", move)
    pool.flow(250.0)
    assert pool.committed == 1 and not pool.gpus["src"].state.works
    work = pool.gpus["dst"].state.works["r1"]
    assert work.arrival is None and work.prefilled_tokens > 600, "its KV was taken along"
    pool.rest()
    assert pool.ends == {"r1": "length"}
