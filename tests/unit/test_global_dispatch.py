"""The three phases of dispatch (3.3), with the numbers of Figure 6, and one GPU's estimate by hand."""

import math
from dataclasses import replace
from functools import cache

import pytest
from support import gpu_summary

from services.global_sched.curves import Curves
from services.global_sched.dispatch import (
    Decision,
    decide,
    first_in_time,
    lacks_capacity,
    least_energy,
    soonest,
)
from services.global_sched.estimate import IN_CHUNKS, Candidate, Work, estimate
from services.global_sched.view import ClusterView, Reservation
from shared.catalog import emulated_models
from shared.lut import lut_for
from shared.model import EngineSummary, Objectives, Prefills, StairStep
from shared.silicon import contention

SLO = Objectives(ttft_ms=200.0, tbt_ms=100.0)
A, B = emulated_models(2)
GIB = 1024**3


def candidate(gpu: str, **changes: object) -> Candidate:
    base = Candidate(
        gpu=gpu,
        available_ms=0.0,
        ttft_ms=100.0,
        tbt_ms=20.0,
        keeps_others=True,
        energy_j=30.0,
        latency_ms=1000.0,
        free_bytes=10,
        sm_share_pct=50,
    )
    return replace(base, **changes)


class TestFigure6:
    def test_phase_one_skips_220_and_accepts_152(self):
        late, on_time = candidate("a", ttft_ms=220.0, energy_j=1.0), candidate("b", ttft_ms=152.0)
        assert least_energy([late, on_time], SLO, 0.02) is on_time
        assert least_energy([late], SLO, 0.02) is None

    def test_phase_two_takes_30_joules_over_42(self):
        dear, cheap = (
            candidate("a", ttft_ms=152.0, energy_j=42.0),
            candidate("b", ttft_ms=152.0, energy_j=30.0),
        )
        assert least_energy([dear, cheap], SLO, 0.02) is cheap

    def test_phase_three_takes_the_first_available_that_makes_185_at_f_max(self):
        first = candidate("a", available_ms=10.0, ttft_ms=240.0)
        second = candidate("b", available_ms=20.0, ttft_ms=185.0)
        third = candidate("c", available_ms=30.0, ttft_ms=150.0)
        assert first_in_time([third, second, first], SLO) is second
        assert first_in_time([first], SLO) is None


def test_within_two_percent_memory_decides_then_sm_share_then_id():
    least = candidate("a", energy_j=100.0, free_bytes=5)
    roomier = candidate("b", energy_j=101.9, free_bytes=9, sm_share_pct=10)
    outside = candidate("c", energy_j=102.1, free_bytes=99)
    assert least_energy([least, roomier, outside], SLO, 0.02) is roomier
    freer = candidate("z", energy_j=100.0, free_bytes=9, sm_share_pct=90)
    assert least_energy([least, roomier, freer], SLO, 0.02) is freer
    same = replace(freer, gpu="y")
    assert least_energy([freer, same], SLO, 0.02) is same


def test_without_a_meter_latency_ranks_among_its_like_and_never_against_joules():
    slow = candidate("cpu0", energy_j=None, latency_ms=900.0)
    quick = candidate("cpu1", energy_j=None, latency_ms=400.0)
    assert least_energy([slow, quick], SLO, 0.02) is quick
    metered = candidate("gpu", energy_j=5000.0, latency_ms=9000.0)
    assert least_energy([slow, quick, metered], SLO, 0.02) is metered


def test_tbt_and_neighbours_are_part_of_feasibility():
    assert least_energy([candidate("a", tbt_ms=100.1)], SLO, 0.02) is None
    assert least_energy([candidate("a", keeps_others=False)], SLO, 0.02) is None
    assert first_in_time([candidate("a", keeps_others=False)], SLO) is None


def test_soonest_spares_others_first():
    quick = candidate("a", ttft_ms=300.0, keeps_others=False)
    slow = candidate("b", ttft_ms=900.0)
    jerky = candidate("c", ttft_ms=400.0, tbt_ms=150.0)
    assert soonest([quick, slow, jerky], SLO) is slow
    assert soonest([quick, jerky], SLO) is jerky
    assert soonest([quick], SLO) is quick


def engine(model: str, **changes: object) -> EngineSummary:
    return EngineSummary(**{"model": model, "state": "ready", "free_kv_bytes": 20 * GIB, **changes})


def view_of(*engines: EngineSummary, gpu_type: str = "h100-80gb", **changes: object):
    cluster = ClusterView("s", 1500.0, 600_000.0, 3000.0)
    fields = {
        "gpu_type": gpu_type,
        "free_bytes": 20 * GIB,
        "staircase": (StairStep(after_ms=0.0, free_bytes=20 * GIB, free_sm_share_pct=100),),
        "engines": engines,
    }
    view = cluster.hear(0.0, gpu_summary("g", **(fields | changes)))
    assert view is not None
    return cluster, view


@cache
def curves_of(gpu_type: str, model: str) -> Curves | None:
    spec = {A.name: A, B.name: B}.get(model)
    return Curves(lut_for(gpu_type, spec)) if spec else None


WORK = Work(
    A.name,
    input_tokens=500,
    output_tokens=200,
    waited_ms=7.0,
    objectives=Objectives(ttft_ms=400.0, tbt_ms=100.0),
)


class TestEstimate:
    def test_an_idle_gpu_is_the_table_itself(self):
        _, view = view_of(engine(A.name))
        lut, got = lut_for("h100-80gb", A), estimate(view, WORK, curves_of, 0.0)
        assert got.ttft_ms == pytest.approx(7.0 + lut.ttft_ms(1155, 100, 500))
        assert got.tbt_ms == pytest.approx(lut.tbt_ms(1155, 100, 1, 600))
        assert got.energy_j == pytest.approx(lut.request_energy_j(1155, 100, 500, 200, 1))
        assert got.keeps_others and got.available_ms == 0.0 and got.sm_share_pct == 100

    def test_it_waits_for_memory_and_takes_the_share_free_then(self):
        need = lut_for("h100-80gb", A).request_bytes(700)
        stairs = (
            StairStep(after_ms=0.0, free_bytes=need - 1, free_sm_share_pct=80),
            StairStep(after_ms=90.0, free_bytes=need, free_sm_share_pct=40),
        )
        _, view = view_of(engine(A.name), staircase=stairs)
        assert estimate(view, WORK, curves_of, 89.0).available_ms == 1.0
        assert estimate(view, WORK, curves_of, 500.0).available_ms == 0.0
        got = estimate(view, WORK, curves_of, 30.0)  # the summary is 30 ms old
        assert (got.available_ms, got.sm_share_pct) == (60.0, 40)
        assert got.ttft_ms == pytest.approx(7.0 + 60.0 + lut_for("h100-80gb", A).ttft_ms(1155, 40, 500))

    def test_reservations_take_memory_and_time(self):
        need = lut_for("h100-80gb", A).request_bytes(700)
        stairs = (StairStep(after_ms=0.0, free_bytes=2 * need, free_sm_share_pct=100),)
        own = engine(A.name, free_kv_bytes=2 * need)
        _, view = view_of(own, staircase=stairs, free_bytes=2 * need)
        alone = estimate(view, WORK, curves_of, 0.0)
        view.reserve(Reservation(A.name, need, 500, 300.0, 0.0))
        second = estimate(view, WORK, curves_of, 0.0)
        before_ms = IN_CHUNKS * lut_for("h100-80gb", A).ttft_ms(1155, 100, 500)
        assert second.ttft_ms == pytest.approx(alone.ttft_ms + before_ms)
        assert second.tbt_ms > alone.tbt_ms
        assert second.free_bytes == need
        view.reserve(Reservation(A.name, need, 500, 300.0, 0.0))
        assert math.isinf(estimate(view, WORK, curves_of, 0.0).ttft_ms)

    def test_an_engine_with_its_own_pool_has_its_own_room(self):
        need = lut_for("h100-80gb", A).request_bytes(700)
        full = (StairStep(after_ms=0.0, free_bytes=0, free_sm_share_pct=100),)
        roomy = (StairStep(after_ms=0.0, free_bytes=need, free_sm_share_pct=100),)
        later = (*full, StairStep(after_ms=50.0, free_bytes=need, free_sm_share_pct=40))
        _, view = view_of(engine(A.name, staircase=roomy), staircase=full, free_bytes=0)
        assert view.available(A.name, need, 0.0) == (0.0, 100)
        _, view = view_of(engine(A.name, staircase=later), engine(B.name), staircase=roomy)
        assert view.available(A.name, need, 0.0) == (50.0, 40)
        view.reserve(Reservation(A.name, need, 500, 300.0, 0.0))
        assert view.available(A.name, need, 0.0)[0] == math.inf
        assert view.available(B.name, need, 0.0) == (0.0, 100)  # of other memory than what A's pool reserves
        view.reserve(Reservation(B.name, need, 500, 300.0, 0.0))
        assert view.available(B.name, need, 0.0)[0] == math.inf

    def test_what_is_due_before_it_is_prefilled_before_it(self):
        lut = lut_for("h100-80gb", A)
        alone_ms, each_ms = lut.ttft_ms(1155, 100, 500), IN_CHUNKS * lut.ttft_ms(1155, 100, 2000)
        waiting = (Prefills(-5.0, 1, 2000), Prefills(300.0, 2, 4000), Prefills(2000.0, 3, 6000))
        _, view = view_of(engine(A.name, running=6, prefills=waiting))
        assert estimate(view, WORK, curves_of, 0.0).ttft_ms == pytest.approx(7.0 + 2 * each_ms + alone_ms)
        # The summary is 20 ms old: so much has been computed since.
        aged = estimate(view, WORK, curves_of, 20.0)
        assert aged.ttft_ms == pytest.approx(7.0 + 2 * each_ms - 20.0 + alone_ms)
        long = replace(WORK, objectives=Objectives(ttft_ms=2100.0, tbt_ms=100.0))
        assert estimate(view, long, curves_of, 0.0).ttft_ms == pytest.approx(7.0 + 5 * each_ms + alone_ms)
        late = replace(WORK, waited_ms=1000.0)
        assert estimate(view, late, curves_of, 0.0).ttft_ms == pytest.approx(1000.0 + 6 * each_ms + alone_ms)

    def test_a_backlog_that_leaves_no_time_makes_a_gpu_infeasible(self):
        each_ms = lut_for("h100-80gb", A).ttft_ms(1155, 100, 8000)
        long = replace(WORK, input_tokens=8000, objectives=Objectives(ttft_ms=2000.0, tbt_ms=100.0))
        fit = int((2000.0 - 7.0 - each_ms) / (IN_CHUNKS * each_ms))
        for count, feasible in ((fit, True), (fit + 1, False)):
            _, view = view_of(engine(A.name, prefills=(Prefills(1900.0, count, count * 8000),)))
            assert (estimate(view, long, curves_of, 0.0).ttft_ms <= 2000.0) == feasible

    def test_it_makes_nobody_late_who_would_be_in_time(self):
        alone_ms = lut_for("h100-80gb", A).ttft_ms(1155, 100, 500)
        after_ms = IN_CHUNKS * lut_for("h100-80gb", A).ttft_ms(1155, 100, 8000)
        for due_ms, keeps in (
            (alone_ms + after_ms + 1.0, True),  # both in time
            (alone_ms + after_ms - 1.0, False),
            (after_ms - 1.0, True),  # late in any case
        ):
            _, view = view_of(engine(A.name, prefills=(Prefills(due_ms, 1, 8000),)))
            hurried = replace(WORK, objectives=Objectives(ttft_ms=7.0 + after_ms - 2.0, tbt_ms=100.0))
            assert estimate(view, hurried, curves_of, 0.0).keeps_others == keeps

    def test_running_neighbours_slow_it_and_are_kept_within_their_objective(self):
        running = engine(B.name, running=4, context_tokens=4000, sm_share_pct=50, tightest_tbt_ms=100.0)
        stairs = (StairStep(after_ms=0.0, free_bytes=20 * GIB, free_sm_share_pct=50),)
        _, view = view_of(engine(A.name), running, staircase=stairs)
        got = estimate(view, WORK, curves_of, 0.0)
        bandwidth, compute = contention(lut_for("h100-80gb", A).device, [0.5, 0.5])
        assert got.ttft_ms == pytest.approx(7.0 + lut_for("h100-80gb", A).ttft_ms(1155, 50, 500) / compute)
        beside_ms = lut_for("h100-80gb", B).tbt_ms(1155, 50, 4, 1000) / bandwidth
        assert got.keeps_others == (beside_ms <= 100.0)
        tight = engine(
            B.name, running=4, context_tokens=4000, sm_share_pct=50, tightest_tbt_ms=beside_ms * 0.99
        )
        _, view = view_of(engine(A.name), tight, staircase=stairs)
        assert not estimate(view, WORK, curves_of, 0.0).keeps_others

    def test_a_busy_engine_shares_its_own_part_of_the_sms_and_its_tbt(self):
        own = engine(A.name, running=3, context_tokens=1500, sm_share_pct=60, tightest_tbt_ms=1.0)
        stairs = (StairStep(after_ms=0.0, free_bytes=20 * GIB, free_sm_share_pct=10),)
        _, view = view_of(own, staircase=stairs)
        got = estimate(view, WORK, curves_of, 0.0)
        assert got.sm_share_pct == 70
        assert got.tbt_ms == pytest.approx(lut_for("h100-80gb", A).tbt_ms(1155, 70, 4, (1500 + 600) / 4))
        assert not got.keeps_others  # nothing runs at 1 ms a token

    def test_boost_is_f_max_and_cpu_has_no_joules(self):
        _, view = view_of(engine(A.name))
        assert (
            estimate(view, WORK, curves_of, 0.0, boost=True).ttft_ms
            < estimate(view, WORK, curves_of, 0.0).ttft_ms
        )
        _, cpu = view_of(engine(A.name), gpu_type="cpu", sm_clock_mhz=0)
        assert estimate(cpu, WORK, curves_of, 0.0).energy_j is None

    def test_no_share_at_all_is_infeasible(self):
        stairs = (StairStep(after_ms=0.0, free_bytes=20 * GIB, free_sm_share_pct=0),)
        _, view = view_of(engine(A.name), staircase=stairs)
        decision = decide([view], WORK, curves_of, 0.0, 0.02)
        assert decision.reason == "best_effort" and lacks_capacity(decision, WORK)


def test_fallback_raises_the_clock_only_when_needed():
    lut = lut_for("h100-80gb", A)
    slow, fast = lut.ttft_ms(795, 100, 500), lut.ttft_ms(lut.device.f_max_mhz, 100, 500)
    _, view = view_of(engine(A.name), sm_clock_mhz=795)
    tight = replace(WORK, waited_ms=0.0, objectives=Objectives(ttft_ms=(slow + fast) / 2, tbt_ms=100.0))
    assert decide([view], tight, curves_of, 0.0, 0.02).reason == "f_max"
    loose = replace(tight, objectives=Objectives(ttft_ms=slow * 1.01, tbt_ms=100.0))
    assert decide([view], loose, curves_of, 0.0, 0.02).reason == "least_energy"


def test_late_by_its_own_past_is_no_lack_of_capacity():
    late = Decision(candidate("a", ttft_ms=5000.0), "best_effort")
    assert not lacks_capacity(late, replace(WORK, waited_ms=4900.0, objectives=SLO))
    assert lacks_capacity(late, replace(WORK, waited_ms=0.0, objectives=SLO))
