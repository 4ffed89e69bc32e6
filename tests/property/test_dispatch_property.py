"""Dispatch against exhaustive search on small clusters, and the core's promises under random events."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from support import gpu_summary

from services.global_sched.core import GlobalSchedCore
from services.global_sched.curves import Curves
from services.global_sched.dispatch import decide, first_in_time, least_energy, soonest
from services.global_sched.estimate import Candidate, Work, estimate, feasible
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView, Reservation
from shared import events as ev
from shared.catalog import emulated_models
from shared.lut import lut_for
from shared.model import EngineSummary, Objectives, Request, StairStep

A, B = emulated_models(2)
GIB = 1024**3
SLO = Objectives(ttft_ms=200.0, tbt_ms=100.0)

candidates = st.lists(
    st.builds(
        Candidate,
        gpu=st.just(""),
        available_ms=st.sampled_from([0.0, 5.0, 5.0, 80.0, math.inf]),
        ttft_ms=st.floats(100.0, 300.0),
        tbt_ms=st.floats(50.0, 120.0),
        keeps_others=st.sampled_from([True, True, True, False]),
        energy_j=st.one_of(st.none(), st.floats(99.0, 104.0)),
        latency_ms=st.floats(990.0, 1040.0),
        free_bytes=st.integers(0, 3),
        sm_share_pct=st.sampled_from([10, 50, 100]),
    ),
    max_size=8,
).map(lambda cs: [replace(c, gpu=f"g{i}") for i, c in enumerate(cs)])


@given(candidates)
def test_least_energy_is_what_exhaustive_search_finds(cs):
    good = [c for c in cs if c.ttft_ms <= 200.0 and c.tbt_ms <= 100.0 and c.keeps_others]
    metered = any(c.energy_j is not None for c in good)
    good = [c for c in good if (c.energy_j is not None) == metered]

    def cost(c):
        return c.energy_j if metered else c.latency_ms

    got = least_energy(cs, SLO, 0.02)
    if not good:
        assert got is None
        return
    assert got in good
    assert all(cost(got) <= 1.02 * cost(c) for c in good)
    for other in good:
        if all(cost(other) <= 1.02 * cost(c) for c in good) and other is not got:
            assert (got.free_bytes, got.sm_share_pct) >= (other.free_bytes, other.sm_share_pct)
    assert least_energy(list(reversed(cs)), SLO, 0.02) is got  # order of arrival is no criterion


@given(candidates)
def test_first_in_time_is_the_earliest_of_the_feasible(cs):
    got = first_in_time(cs, SLO)
    good = [c for c in cs if feasible(c, SLO)]
    assert (got is None) == (not good)
    if got is not None:
        assert got in good and got.available_ms == min(c.available_ms for c in good)


@given(candidates.filter(bool))
def test_soonest_never_harms_others_without_need(cs):
    got = soonest(cs, SLO)
    assert got.keeps_others or not any(c.keeps_others for c in cs)
    alike = [
        c for c in cs if c.keeps_others == got.keeps_others and (c.tbt_ms <= 100.0) == (got.tbt_ms <= 100.0)
    ]
    assert got.ttft_ms == min(c.ttft_ms for c in alike)


@cache
def curves_of(gpu_type, model):
    spec = {A.name: A, B.name: B}.get(model)
    return Curves(lut_for(gpu_type, spec)) if spec else None


@st.composite
def gpus(draw):
    """A GPU with model A ready, perhaps busy, perhaps with B beside it and with dispatches on their way."""
    busy = draw(st.integers(0, 40))
    beside = draw(st.integers(0, 20))
    own_pct = draw(st.sampled_from([10, 30, 50])) if busy else 0
    beside_pct = draw(st.sampled_from([10, 30, 40])) if beside else 0
    stairs = [
        StairStep(
            after_ms=0.0,
            free_bytes=draw(st.integers(0, 2)) * GIB,
            free_sm_share_pct=100 - own_pct - beside_pct,
        )
    ]
    if draw(st.booleans()):
        stairs.append(
            StairStep(
                after_ms=draw(st.floats(1.0, 200.0)), free_bytes=4 * GIB, free_sm_share_pct=100 - own_pct
            )
        )
    engines = (
        EngineSummary(
            model=A.name, state="ready", free_kv_bytes=stairs[0].free_bytes,
            running=busy, context_tokens=busy * 800, sm_share_pct=own_pct,
            tightest_tbt_ms=100.0 if busy else 0.0,
        ),
        EngineSummary(
            model=B.name, state="ready", running=beside, context_tokens=beside * 800, sm_share_pct=beside_pct,
            tightest_tbt_ms=draw(st.sampled_from([20.0, 100.0])) if beside else 0.0,
        ),
    )  # fmt: skip
    return {
        "sm_clock_mhz": draw(st.sampled_from([795, 1155, 1635])),
        "staircase": tuple(stairs),
        "free_bytes": stairs[0].free_bytes,
        "engines": engines,
    }, draw(st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(gpus(), min_size=1, max_size=6),
    st.integers(1, 4000),
    st.floats(0.0, 300.0),
    st.sampled_from([60.0, 250.0, 2000.0]),
)
def test_the_choice_equals_exhaustive_search(cluster, input_tokens, waited_ms, ttft_ms):
    view = ClusterView("s", 1500.0, 600_000.0, 3000.0)
    views = []
    for index, (fields, in_flight) in enumerate(cluster):
        views.append(view.hear(0.0, gpu_summary(f"g{index}", **fields)))
        for _ in range(in_flight):
            views[-1].reserve(Reservation(A.name, GIB // 8, 300, 15.0, 0.0))
    work = Work(A.name, input_tokens, 300, waited_ms, Objectives(ttft_ms=ttft_ms, tbt_ms=100.0))
    decision = decide(views, work, curves_of, 0.0, 0.02)

    now = [c for c in (estimate(v, work, curves_of, 0.0) for v in views) if feasible(c, work.objectives)]
    boosted = [estimate(v, work, curves_of, 0.0, boost=True) for v in views]
    in_time = [c for c in boosted if feasible(c, work.objectives)]
    if now:
        least = min(c.energy_j for c in now)
        tied = [c for c in now if c.energy_j <= least * 1.02]
        best = max((c.free_bytes, c.sm_share_pct) for c in tied)
        assert decision.reason == "least_energy" and decision.candidate in tied
        assert (decision.candidate.free_bytes, decision.candidate.sm_share_pct) == best
    elif in_time:
        assert decision.reason == "f_max" and decision.candidate in in_time
        assert decision.candidate.available_ms == min(c.available_ms for c in in_time)
    else:
        assert decision.reason == "best_effort" and decision.candidate in boosted
    for chosen in (decision.candidate, *now):  # what is called feasible has the memory when it says so
        if math.isfinite(chosen.available_ms):
            v = next(v for v in views if v.gpu == chosen.gpu)
            need = lut_for("h100-80gb", A).request_bytes(input_tokens + 300)
            step = [s for s in v.summary.staircase if s.after_ms <= chosen.available_ms][-1]
            assert step.free_bytes - v.reserved_bytes >= need


class Cluster:
    """The core among random events, with what its gateway and GPUs would see."""

    def __init__(self):
        self.core = GlobalSchedCore("s", GlobalSettings(model_wait_ms=4000.0, max_pending=4, remember_ms=1e9))
        self.now_ms = 0.0
        self.seq = 0
        self.waiting: set[tuple[str, int]] = set()
        self.at: dict[tuple[str, int], str] = {}
        self.newest: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        self.feed(ev.ModelRegistered(model=A))

    def feed(self, event):
        for action in self.core.step(self.now_ms, event):
            if isinstance(action, ev.Send):
                self.hear(action.to, action.message)

    def hear(self, to, message):
        if isinstance(message, ev.Submit):
            key = (message.request.request_id, message.request.attempt)
            assert key[1] == self.newest[key[0]], "only the newest attempt is placed"
            if self.at.get(key) != to:  # a new placing, not a repeat
                assert message.dispatch_seq > self.numbers[to]
                self.numbers[to] = message.dispatch_seq
            self.at[key] = to
            self.waiting.discard(key)
        elif isinstance(message, ev.Deferred):
            self.waiting.add((message.request_id, message.attempt))
        elif isinstance(message, ev.Rejected):
            self.waiting.discard((message.request_id, message.attempt))

    def pass_time(self, gap_ms):
        self.now_ms += gap_ms
        while self.core.wake_ms is not None and self.core.wake_ms <= self.now_ms:
            due_ms = self.core.wake_ms
            self.feed(ev.Tick())
            assert self.core.wake_ms is None or self.core.wake_ms > due_ms  # never the same moment twice

    def ask(self, index, attempt):
        request_id = f"r{index}"
        self.newest[request_id] = max(attempt, self.newest[request_id])
        self.waiting = {k for k in self.waiting if k[0] != request_id or k[1] == self.newest[request_id]}
        request = Request(
            request_id=request_id,
            attempt=attempt,
            gateway="gw",
            model=A.name,
            prompt_tokens=(1,) * 50,
            max_tokens=20,
            objectives=SLO,
        )
        self.feed(ev.Dispatch(request=request))

    def refuse(self, index, reason):
        key = (f"r{index}", self.newest[f"r{index}"])
        if key in self.at:
            gpu = self.at.pop(key)
            self.feed(
                ev.Refused(request_id=key[0], attempt=key[1], gpu=gpu, reason=reason, full="full" in reason)
            )

    def summarise(self, index, ready):
        self.seq += 1
        engines = (EngineSummary(model=A.name, state="ready" if ready else "unloading", free_kv_bytes=GIB),)
        stairs = (StairStep(after_ms=0.0, free_bytes=GIB, free_sm_share_pct=100),)
        heard = gpu_summary(f"g{index}", seq=self.seq, engines=engines, staircase=stairs, free_bytes=GIB)
        self.feed(ev.SummaryChanged(summary=heard))

    def bus(self, lost, _):
        self.feed(ev.BusLost() if lost else ev.BusRestored())

    def remove(self, *_):
        self.feed(ev.ModelRemoved(model=A.name))
        assert not self.waiting
        self.feed(ev.ModelRegistered(model=A))


events = st.one_of(
    st.tuples(st.just(Cluster.ask), st.integers(0, 5), st.integers(1, 3)),
    st.tuples(st.just(Cluster.refuse), st.integers(0, 5), st.sampled_from(["queue full", "unloading"])),
    st.tuples(st.just(Cluster.summarise), st.integers(0, 2), st.booleans()),
    st.tuples(st.just(Cluster.bus), st.booleans(), st.none()),
    st.tuples(st.just(Cluster.remove), st.none(), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1500.0), events), max_size=60))
def test_only_the_newest_attempt_is_placed_and_every_wait_ends(script):
    cluster = Cluster()
    for gap_ms, (act, x, y) in script:
        cluster.pass_time(gap_ms)
        act(cluster, x, y)
    cluster.feed(ev.BusRestored())
    for _ in range(20):
        cluster.pass_time(1000.0)
    assert not cluster.waiting and cluster.core.wake_ms is None
