"""Whatever is submitted, aborted, moved or dies: the memory ledger never overdraws, and ends at zero."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.local_sched.core import LocalSchedCore
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.ledger import Ledger, staircase
from services.local_sched.made_up import VocabSlice
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.lut import build
from shared.model import ModelSpec, Objectives, Request

H100 = DEVICES["h100-80gb"]
MODELS = emulated_models(2)
LUTS = {model.name: build(H100, model) for model in MODELS}
VOCAB = VocabSlice(token_ids=(5, 6, 7), eos_id=1)


class Loop:
    """The core and the emulated GPU, in virtual time."""

    def __init__(self, free_tokens, **changed):
        settings = LocalSettings(gateway_lease_ms=1e12, **changed)
        self.core = LocalSchedCore(
            "gpu0", "host0", "emulated", H100, settings, 0.0, lut_for=lambda device, model: LUTS[model.name]
        )
        self.gpu = EmulatedGpu(H100, vocab=VOCAB)
        self.now_ms = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.ended = {}
        self.feed(ev.Tick())
        for model in MODELS:
            self.feed(ev.Load(model=model, placement_version=1))
        self.run(20_000.0)
        ledger = self.core.state.ledger
        ledger.capacity_bytes -= ledger.free_bytes - free_tokens * MODELS[0].kv_bytes_per_token

    def feed(self, event):
        for action in self.core.step(self.now_ms, event):
            if isinstance(action, en.Order):
                self.gpu.order(self.now_ms, action)
            elif isinstance(action, ev.Send) and isinstance(action.message, ev.Tokens):
                for delta in action.message.deltas:
                    self.take(delta)
        ledger = self.core.state.ledger
        assert ledger.free_bytes >= 0
        assert self.core.wake_ms is not None

    def take(self, delta):
        """Keep each token once, as a gateway does."""
        have = self.tokens.setdefault(delta.request_id, [])
        assert delta.first_seq <= len(have), "a gap in the output"
        have[delta.first_seq :] = have[delta.first_seq :] or delta.token_ids
        have.extend(delta.token_ids[len(have) - delta.first_seq :])
        if delta.end and delta.request_id not in self.ended:
            self.ended[delta.request_id] = delta.end

    def run(self, ms):
        """Let the device and the core do what is due within `ms`."""
        end_ms = self.now_ms + ms
        while True:
            wakes = [t for t in (self.core.wake_ms, self.gpu.wake_ms) if t is not None]
            due_ms = max(self.now_ms, min(wakes))
            if due_ms > end_ms:
                break
            self.now_ms = due_ms
            for event in self.gpu.advance(self.now_ms):
                self.feed(event)
            if self.core.wake_ms <= self.now_ms:
                self.feed(ev.Tick())
        self.now_ms = end_ms

    def settle(self):
        """Run until no request is left; moves that nobody ends expire on the way."""
        for _ in range(600):
            if not self.core.state.works and not self.core.state.moves.transfers:
                return
            self.run(100.0)
        raise AssertionError(f"not ended: {self.core.state.works}")

    def submit(self, request, predicted):
        self.feed(
            ev.Submit(request=request, scheduler="s", dispatch_seq=1, predicted_output_tokens=predicted)
        )


def request(request_id, model, prompt, max_tokens, attempt=1):
    return Request(
        request_id=request_id,
        attempt=attempt,
        gateway="g",
        model=model,
        prompt_tokens=tuple(range(prompt)),
        max_tokens=max_tokens,
        objectives=Objectives(ttft_ms=400.0, tbt_ms=100.0),
        sampling={"ignore_eos": True},
    )


submits = st.tuples(
    st.just("submit"),
    st.integers(0, 60),
    st.integers(0, 1),
    st.integers(1, 1500),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 2),
)
aborts = st.tuples(st.just("abort"), st.integers(0, 60), st.integers(1, 2))
holds = st.tuples(st.sampled_from(["release", "commit", "undo"]), st.integers(0, 60))
pauses = st.tuples(st.just("pause"), st.floats(0.0, 400.0))
steps = st.lists(
    st.one_of(submits, submits, submits, aborts, holds, pauses, pauses), min_size=20, max_size=60
)


def apply(loop, step, longest):
    match step:
        case ("submit", number, model, prompt, output, predicted, attempt):
            asked = request(f"r{number}", MODELS[model].name, prompt, output, attempt)
            loop.submit(asked, predicted)  # mispredicted more often than not
            longest[asked.request_id] = max(longest.get(asked.request_id, 0), prompt + output)
        case ("abort", number, attempt):
            loop.feed(ev.Abort(request_id=f"r{number}", attempt=attempt, reason="x"))
        case ("release", number):
            loop.feed(ev.Release(move_id=f"m{number}", request_id=f"r{number}", migrator="h"))
        case ("commit", number):
            loop.feed(ev.CommitMove(move_id=f"m{number}"))
        case ("undo", number):
            loop.feed(ev.AbortMove(move_id=f"m{number}", reason="x"))
        case ("pause", ms):
            loop.run(ms)


@settings(max_examples=20, deadline=None)
@given(steps, st.sampled_from([1_600, 4_000, 100_000]))
def test_random_work_leaves_the_ledger_at_zero(script, free_tokens):
    loop, longest = Loop(free_tokens), {}
    for step in script:
        apply(loop, step, longest)
    loop.settle()
    state = loop.core.state
    assert state.works == {} and state.queue == {} and state.moves.transfers == {}
    assert all(pool.holders == {} for pool in state.ledger.pools.values())
    assert all(not engine.running for engine in state.engines.values())
    for request_id, end in loop.ended.items():
        if end.finish_reason != "length":  # it alone is more than the device holds
            assert end.finish_reason == "error" and "out of memory" in end.error
            assert longest[request_id] > min(state.ledger.most_tokens(model.name) for model in MODELS)


def test_a_thousand_requests_and_aborts_each_end_once():
    loop = Loop(40_000)
    for number in range(1_000):
        model = MODELS[number % 2].name
        loop.submit(request(f"r{number}", model, 20 + number * 37 % 700, 1 + number % 40), 1 + number % 29)
        if number % 5 == 0:
            loop.feed(ev.Abort(request_id=f"r{number - number % 7}", attempt=1, reason="x"))
        loop.run(float(number % 40))
    loop.settle()
    state = loop.core.state
    assert state.works == {}
    assert all(pool.holders == {} for pool in state.ledger.pools.values())
    assert len(loop.ended) > 800
    for request_id, end in loop.ended.items():
        number = int(request_id[1:])
        assert end.finish_reason == "length" and len(loop.tokens[request_id]) == 1 + number % 40
        assert end.energy_j > 0.0


def test_objectives_are_met_under_light_load_below_the_highest_clock():
    loop = Loop(100_000)
    for number in range(40):
        loop.submit(request(f"r{number}", MODELS[number % 2].name, 300, 60), 60)
        loop.run(100.0)
        assert loop.core.state.asked_mhz < H100.f_max_mhz
    loop.settle()
    assert len(loop.ended) == 40
    for end in loop.ended.values():
        assert end.queue_ms + end.prefill_ms <= 400.0
        assert end.decode_ms / 59 <= 100.0


ledger_ops = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "release"]),
        st.sampled_from("ab"),
        st.integers(0, 5),
        st.integers(0, 300),
    ),
    max_size=40,
)


@given(ledger_ops, st.sampled_from([0, 2_000]))
def test_the_ledger_counts_like_a_dictionary(ops, pool_bytes):
    ledger, held = Ledger(6_000), {}
    for name in "ab":
        spec = ModelSpec(
            name=name, engine="emulated", params=1, layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1,
            weight_bytes=500, kv_bytes_per_token=2,
        )  # fmt: skip
        assert ledger.open(spec, pool_bytes if name == "a" else 0, 16)
    for op, model, holder, tokens in ops:
        if op == "release":
            ledger.release(model, str(holder))
            held.pop((model, holder), None)
        else:
            blocks = max(-(-tokens // 16), held.get((model, holder), 0))
            wanted = {**held, (model, holder): blocks}
            used = {m: 32 * sum(b for (o, _), b in wanted.items() if o == m) for m in "ab"}
            room = {"a": pool_bytes or 5_000 - used["b"], "b": 5_000 - (pool_bytes or used["a"])}
            fits = used[model] <= room[model]
            assert ledger.reserve(model, str(holder), tokens) == fits
            held = wanted if fits else held
    for (model, holder), blocks in held.items():
        assert ledger.held_tokens(model, str(holder)) == 16 * blocks
    used = {m: 32 * sum(b for (o, _), b in held.items() if o == m) for m in "ab"}
    assert ledger.free_bytes == 5_000 - (pool_bytes or used["a"]) - used["b"]


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0.0, 1e4), st.integers(0, 50), st.integers(0, 20)), max_size=30),
)
def test_the_staircase_never_promises_too_early(free_bytes, ends):
    steps = staircase(free_bytes, 10, ends)
    assert 1 <= len(steps) <= 8
    for step in steps[1:]:
        free_by_then = free_bytes + sum(freed for after_ms, freed, _ in ends if after_ms <= step.after_ms)
        assert step.free_bytes <= free_by_then
    assert steps[-1].free_bytes == free_bytes + sum(freed for _, freed, _ in ends)
