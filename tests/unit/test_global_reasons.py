"""Each decision tells its phase, a sentence and what it chose from; many GPUs are searched, few looked at."""

import pytest
from test_global_core import GIB, TRACE, A, core, ended, only, place, sends, summary

from services.global_sched.fleet import FEW
from services.global_sched.reasons import MOST
from shared import events as ev
from shared.lut import lut_for
from shared.model import EngineSummary, Objectives, Placement, StairStep, digest


def told(actions):
    """The attributes of the decision's span, without their common prefix."""
    (span,) = [a for a in actions if isinstance(a, ev.Span)]
    return {name.removeprefix("festina.decision."): value for name, value in span.attributes.items()}


class TestPhases:
    def test_at_the_current_clock_with_the_candidates(self):
        made = core()
        for gpu, clock_mhz in (("cheap", 1005), ("dear", 1635)):
            made.step(0.0, summary(gpu, sm_clock_mhz=clock_mhz))
        found = told(place(made, traceparent=TRACE))
        assert found["phase"] == "current_clock" and found["chosen"] == 0
        chosen, other = found["candidates"]
        assert (chosen.gpu, chosen.sm_clock_mhz, chosen.sm_share_pct, chosen.why) == (
            "cheap",
            1005,
            100,
            "chosen",
        )
        assert other.gpu == "dear" and other.energy_j > chosen.energy_j and other.why.endswith("more energy")
        assert chosen.slack_ms == pytest.approx(250.0 - chosen.ttft_ms) and chosen.free_bytes == 20 * GIB
        assert "cheap at 1005 MHz" in found["reason"]

    def test_a_boost_and_what_was_wrong_with_the_others(self):
        made = core()
        made.step(0.0, summary("slow", sm_clock_mhz=795))
        made.step(0.0, summary("full", free=0))
        lut = lut_for("h100-80gb", A)
        tight_ms = (lut.ttft_ms(795, 100, 200) + lut.ttft_ms(1635, 100, 200)) / 2
        tight = Objectives(ttft_ms=tight_ms, tbt_ms=100.0)
        found = told(place(made, traceparent=TRACE, objectives=tight))
        assert found["phase"] == "boost"
        assert [c.gpu for c in found["candidates"]] == ["slow", "full"]
        assert found["candidates"][0].sm_clock_mhz == 1635
        assert found["candidates"][1].why == "its memory does not come free"

    def test_best_effort_and_its_refusal(self):
        hurried = {"traceparent": TRACE, "objectives": Objectives(ttft_ms=0.1, tbt_ms=100.0)}
        found = told(place(core("g1"), **hurried))
        assert found["phase"] == "best_effort" and "late" in found["reason"]
        found = told(place(core("g1", best_effort=False), **hurried))
        assert found["phase"] == "refused" and "Try again" in found["reason"]
        assert "late" in found["candidates"][0].why

    def test_an_activation_counts_the_load_against_the_deadline(self):
        made = core("elsewhere", models=(A,))
        made.step(0.0, summary("elsewhere", 2, EngineSummary(model="other", state="ready")))
        found = told(place(made, traceparent=TRACE, objectives=Objectives(ttft_ms=60_000.0, tbt_ms=100.0)))
        assert found["phase"] == "activate" and "in time for" in found["reason"] and "MHz" in found["reason"]
        found = told(place(made, request_id="r2", traceparent=TRACE))
        assert "too late for" in found["reason"] and "from disk" in found["reason"]

    def test_an_activation_from_host_memory_is_sooner_than_one_from_disk(self):
        made = core("near", "far", models=(A,))
        for gpu, host in (("near", "h1"), ("far", "h2")):
            made.step(0.0, summary(gpu, 2, EngineSummary(model="other", state="ready"), host=host))
        lut = lut_for("h100-80gb", A)
        from_disk_ms, from_host_ms = lut.load_ms("disk"), lut.load_ms("host")
        assert from_disk_ms > 3 * from_host_ms
        between = Objectives(ttft_ms=(from_disk_ms + from_host_ms) / 2, tbt_ms=100.0)
        hurried = {"traceparent": TRACE, "objectives": between}
        assert "too late for" in told(place(made, **hurried))["reason"]
        made.step(0.0, ev.HostWeights(host="h1", specs=(digest(A),)))
        found = told(place(made, request_id="r2", **hurried))
        assert "in time for" in found["reason"] and "from host memory" in found["reason"]
        made.step(0.0, summary("near", 3, EngineSummary(model="x", state="failed"), host="h1", state="cold"))
        assert "too late for" in told(place(made, request_id="r3", **hurried))["reason"]

    def test_a_refusal_without_a_look_at_gpus(self):
        found = told(place(core(), model="nope", traceparent=TRACE))
        assert found["phase"] == "refused" and "nope" in found["reason"] and "candidates" not in found


class TestManyGpus:
    def many(self, **settings):
        return core(*(f"g{i:02}" for i in range(FEW + 12)), **settings)

    def test_the_roomiest_of_equals_is_found_and_told_of(self):
        made = self.many()
        made.step(0.0, summary("g07", 2, free=30 * GIB))
        actions = place(made, traceparent=TRACE)
        assert only(actions, ev.Submit)[0] == "g07"
        found = told(actions)
        assert found["phase"] == "current_clock" and found["festina.candidates"] == FEW + 12
        assert 1 <= len(found["candidates"]) <= MOST and found["candidates"][0].gpu == "g07"

    def test_refused_excluded_drained_silent_and_full_gpus_are_passed_by(self):
        made = self.many(max_queued=1)
        gone = ["g00", "g01", "g02"]
        made.step(0.0, ev.PlacementChanged(placement=Placement(version=1, drained=("g00",))))
        made.step(0.0, summary("g01", 2, state="draining"))
        used = [
            only(place(made, request_id=f"r{i}", excluded=("g02",)), ev.Submit)[0] for i in range(FEW + 9)
        ]
        assert len(set(used)) == len(used) and not set(used) & set(gone)
        refused = ev.Refused(request_id="r0", attempt=1, gpu=used[0], reason="queue full", full=True)
        assert only(made.step(1.0, refused), ev.Submit)[0] == "g02"  # excluded, but no other is left
        assert only(place(made, 2.0, request_id="last"), ev.Submit)[0] == used[0]
        assert [type(m) for _, m in sends(place(made, 1600.0, request_id="late"))] == [
            ev.ScaleOut,
            ev.Deferred,
        ]

    def test_a_gpu_is_found_again_when_it_has_memory_again(self):
        made = core()
        for i in range(FEW + 2):
            made.step(0.0, summary(f"g{i:02}", free=0))
        assert only(place(made), ev.Submit)[1].reason == "best_effort"
        made.step(1.0, summary("g05", 2, free=GIB))
        to, submit = only(place(made, 1.0, request_id="r2"), ev.Submit)
        assert (to, submit.reason) == ("g05", "least_energy")

    def test_the_wait_for_memory_is_weighed(self):
        made = core()
        for i in range(FEW + 2):
            stairs = (StairStep(0.0, 0, 100), StairStep(50.0 + i, GIB, 100))
            made.step(0.0, summary(f"g{i:02}", free=0, staircase=stairs))
        found = told(place(made, traceparent=TRACE))
        assert found["phase"] == "current_clock" and found["candidates"][0].ttft_ms > 50.0

    def test_crowded_queues_still_turn_requests_away(self):
        made = self.many(max_start_ms=10_000.0, stale_after_ms=1e9)
        for i in range(80):
            made.step(500.0 * i, ended("length", 10))
        waiting = EngineSummary(
            model=A.name, state="ready", free_kv_bytes=GIB, queued=30, queued_of={"flood": 30}
        )
        for i in range(FEW + 12):
            made.step(40_000.0, summary(f"g{i:02}", 2, waiting))
        assert only(place(made, 40_000.0, tenant="flood"), ev.Rejected)[1].status == 429
