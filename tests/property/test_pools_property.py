"""Dispatch among many GPUs against looking at each: after any changes the same GPU, for the same reason."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.global_sched.alike import PRESENT, Asked
from services.global_sched.dispatch import decide
from services.global_sched.estimate import Work, estimate, feasible
from services.global_sched.fleet import FEW, Fleet
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import Reservation
from shared.catalog import emulated_models
from shared.lut import lut_for
from shared.model import EngineSummary, GpuSummary, Instance, Objectives, Placement, Prefills, StairStep

A, B = emulated_models(2)
GIB = 1024**3
KV = A.kv_bytes_per_token


@st.composite
def states(draw):
    """Model A on a GPU, idle, busy or full, perhaps with B beside it; few values, so that many are alike."""
    busy, beside = draw(st.sampled_from([0, 1, 4, 30])), draw(st.sampled_from([0, 0, 8]))
    own_pct, beside_pct = (30 if busy else 0), (40 if beside else 0)
    free = draw(st.sampled_from([0, 200 * KV, 900 * KV, GIB, 4 * GIB, 4 * GIB]))
    claimed = draw(st.sampled_from([0, 0, 300 * KV]))
    stairs = [StairStep(0.0, max(0, free - claimed), 100 - own_pct - beside_pct)]
    if busy and draw(st.booleans()):
        stairs.append(StairStep(draw(st.floats(1.0, 400.0)), free + 600 * KV, 100 - own_pct - beside_pct))
    if draw(st.booleans()):
        stairs.append(StairStep(draw(st.floats(400.0, 900.0)), free + 2000 * KV, 100 - own_pct))
    prefills = draw(
        st.lists(st.builds(Prefills, st.floats(-50.0, 2000.0), st.just(2), st.integers(2, 9000)), max_size=4)
    )
    own = EngineSummary(
        model=A.name, state=draw(st.sampled_from(["ready"] * 9 + ["unloading"])),
        running=busy, queued=2 * len(prefills), context_tokens=busy * draw(st.sampled_from([300, 900, 9000])),
        sm_share_pct=own_pct, tightest_tbt_ms=draw(st.sampled_from([30.0, 100.0])) if busy else 0.0,
        prefills=tuple(sorted(prefills, key=lambda p: p.due_ms)),
    )  # fmt: skip
    other = EngineSummary(
        model=B.name, state="ready", running=beside, context_tokens=beside * 800, sm_share_pct=beside_pct,
        tightest_tbt_ms=draw(st.sampled_from([20.0, 100.0])) if beside else 0.0,
    )  # fmt: skip
    clock_mhz = draw(st.sampled_from([795, 1005, 1155, 1635]))
    gpu_type = draw(st.sampled_from(["h100-80gb", "h100-80gb", "a100-80gb"]))
    return {
        "gpu_type": gpu_type,
        "sm_clock_mhz": clock_mhz if gpu_type == "h100-80gb" else 1410,
        "free_bytes": free,
        "staircase": tuple(stairs),
        "engines": (own, other),
    }


works = st.builds(
    Work,
    model=st.just(A.name),
    input_tokens=st.integers(1, 9000),
    output_tokens=st.integers(1, 600),
    waited_ms=st.sampled_from([0.0, 5.0, 120.0, 3000.0]),
    objectives=st.builds(
        Objectives,
        ttft_ms=st.sampled_from([60.0, 250.0, 400.0, 2000.0]),
        tbt_ms=st.sampled_from([25.0, 100.0]),
    ),
)
events = st.one_of(
    st.tuples(st.just("dispatch"), st.just(0), works),
    st.tuples(st.just("dispatch"), st.just(0), works),
    st.tuples(st.just("hear"), st.integers(0, 99), states()),
    st.tuples(st.just("reserve"), st.integers(0, 99), st.sampled_from([A.name, B.name])),
    st.tuples(st.just("refuse"), st.integers(0, 99), st.none()),
    st.tuples(st.just("drain"), st.integers(0, 99), st.none()),
    st.tuples(st.just("place"), st.integers(0, 99), st.integers(0, 25)),
    st.tuples(st.just("place"), st.integers(0, 99), st.integers(0, 25)),
    st.tuples(st.just("silence"), st.integers(0, 99), st.floats(300.0, 2000.0)),
    st.tuples(st.just("lose_bus"), st.just(0), st.none()),
)


class Twin:
    """A fleet with its pool, asked beside `decide` over all of its GPUs."""

    def __init__(self, cluster):
        self.now_ms = 1e12
        self.fleet = Fleet("s", GlobalSettings(max_queued=40, forget_after_ms=2500.0), lut_for)
        self.fleet.register(A)
        self.fleet.register(B)
        self.gpus = len(cluster)
        self.seq = 0
        self.placement = Placement(version=0)
        self.sent = []
        for index, state in enumerate(cluster):
            self.hear(index, state)

    def hear(self, index, state):
        self.seq += 1
        summary = GpuSummary(
            gpu=f"g{index % self.gpus}", host="h", engine=A.engine, started_ms=1.0, seq=self.seq,
            state="active", total_bytes=80 * GIB, **state,
        )  # fmt: skip
        self.fleet.hear(self.now_ms, summary)

    def reserve(self, index, model):
        view = self.fleet.view.get(f"g{index % self.gpus}", self.now_ms)
        if view is not None:
            reservation = Reservation(model, 250 * KV, 200, self.now_ms + 200.0, self.now_ms)
            self.sent.append((view.gpu, self.fleet.reserve(view, reservation)))

    def refuse(self, index, _):
        if self.sent:
            self.fleet.release(*self.sent.pop(index % len(self.sent)))

    def drain(self, index, _):
        self._place(drained=(f"g{index % self.gpus}",))

    def place(self, first, count):
        """Some GPUs side by side are to have A, and no other is."""
        gpus = (f"g{(first + i) % self.gpus}" for i in range(count))
        self._place(instances=tuple(Instance(model=A.name, gpus=(gpu,)) for gpu in gpus))

    def _place(self, **changes):
        self.placement = replace(self.placement, version=self.placement.version + 1, **changes)
        self.fleet.place(self.placement)

    def silence(self, first, gap_ms):
        """Only every other GPU tells of itself again after a while."""
        self.now_ms += gap_ms
        views = [self.fleet.view.known(f"g{i}") for i in range(first % 2, self.gpus, 2)]
        for view in filter(None, views):
            self.seq += 1
            self.fleet.hear(self.now_ms, replace(view.summary, seq=self.seq))

    def lose_bus(self, *_):
        if self.fleet.view.bus_lost:
            self.fleet.restore(self.now_ms)
        else:
            self.fleet.view.bus_lost = True

    def dispatch(self, index, work):
        skipped = {"g0"} if work.input_tokens % 3 == 0 else set()
        views = [
            v for v in self.fleet.serving(self.now_ms, A) if v.gpu not in skipped and v.queued(A.name) < 40
        ]
        pool = self.fleet.pool(self.now_ms, A)
        if pool is None:
            assert self.fleet.view.count(A.name) <= FEW
            return
        found = pool.decide(work, self.now_ms, skipped, 0.02, told=True)
        if not views:
            assert found is None
            return
        expected = decide(views, work, self.fleet.curves, self.now_ms, 0.02)
        if found is None:
            assert expected.candidate.ttft_ms == float("inf")
            return
        assert (found.candidate, found.reason) == (expected.candidate, expected.reason)
        assert found.candidate in found.seen


@settings(max_examples=150, deadline=None)
@given(
    st.lists(states(), min_size=FEW + 1, max_size=25),
    st.lists(st.tuples(st.floats(0.0, 60.0), events), max_size=40),
    works,
)
def test_a_pool_finds_what_looking_at_each_gpu_finds(cluster, script, last):
    twin = Twin(cluster)
    for gap_ms, (act, index, value) in script:
        twin.now_ms += gap_ms
        getattr(twin, act)(index, value)
    twin.dispatch(0, last)
    twin.dispatch(0, dataclasses.replace(last, input_tokens=last.input_tokens // 3 + 1))


@settings(max_examples=100, deadline=None)
@given(states(), works)
def test_a_members_bounds_never_exclude_what_is_feasible(state, work):
    twin = Twin([state] * (FEW + 1))
    pool = twin.fleet.pool(twin.now_ms, A)
    for view in twin.fleet.serving(twin.now_ms, A):
        candidate = estimate(view, work, twin.fleet.curves, twin.now_ms)
        if feasible(candidate, work.objectives):
            (groups,) = pool.groups()
            (member,) = [m for m in pool.members(view.gpu) if m.present.share_pct == candidate.sm_share_pct]
            asked = Asked(groups.curves, work, twin.now_ms)
            assert groups.may_serve(asked, member.group, PRESENT)
            assert groups.that_may_serve(asked, PRESENT)[member.group]
            energy_j = groups.energies_j(asked)[member.group]
            assert energy_j == pytest.approx(candidate.energy_j, rel=1e-6)
