"""The global scheduler's core: answers, repeats, refusals, waits, silence of GPUs and of the bus."""

from collections import Counter

import msgspec
import pytest
from support import gpu_summary

from services.gateway.core import Arrived, GatewayCore
from services.gateway.settings import GatewaySettings
from services.global_sched.core import GlobalSchedCore
from services.global_sched.settings import GlobalSettings
from shared import events as ev
from shared.catalog import emulated_models
from shared.errors import ConfigError
from shared.lut import lut_for
from shared.model import (
    EngineSummary,
    Instance,
    Objectives,
    Placement,
    Request,
    StairStep,
    digest,
)
from shared.slo import objectives_for

A, B = emulated_models(2)
GIB = 1024**3
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request(
    request_id: str = "r1", attempt: int = 1, model: str = A.name, tokens: int = 200, **changes
) -> Request:
    fields = {
        "request_id": request_id,
        "attempt": attempt,
        "gateway": "gw",
        "model": model,
        "prompt_tokens": tuple(range(tokens)),
        "max_tokens": 64,
        "objectives": objectives_for(tokens),
    }
    return Request(**(fields | changes))


def summary(
    gpu: str, seq: int = 1, *engines: EngineSummary, free: int = 20 * GIB, share: int = 100, **changes
):
    fields = {
        "seq": seq,
        "free_bytes": free,
        "staircase": (StairStep(after_ms=0.0, free_bytes=free, free_sm_share_pct=share),),
        "engines": engines or (EngineSummary(model=A.name, state="ready", free_kv_bytes=free),),
    }
    return ev.SummaryChanged(summary=gpu_summary(gpu, **(fields | changes)))


def core(*gpus: str, models=(A, B), **settings) -> GlobalSchedCore:
    made = GlobalSchedCore("s1", GlobalSettings(**settings))
    for spec in models:
        assert made.step(0.0, ev.ModelRegistered(model=spec)) == []
    for gpu in gpus:
        assert made.step(0.0, summary(gpu)) == []
    return made


def sends(actions, kind=ev.Message):
    return [(a.to, a.message) for a in actions if isinstance(a, ev.Send) and isinstance(a.message, kind)]


def only(actions, kind):
    """The one message sent, which must be of this kind."""
    assert [type(message) for _, message in sends(actions)] == [kind]
    return sends(actions)[0]


def place(made: GlobalSchedCore, now_ms: float = 0.0, excluded=(), **changes):
    return made.step(now_ms, ev.Dispatch(request=request(**changes), excluded=excluded))


def ended(outcome, output_tokens):
    return ev.RequestEnded(
        request_id="r",
        model=A.name,
        tenant="t",
        outcome=outcome,
        input_tokens=200,
        output_tokens=output_tokens,
    )


class TestPlacing:
    def test_a_submit_with_its_number_prediction_and_reason(self):
        made = core("g1")
        to, submit = only(place(made), ev.Submit)
        assert (to, submit.scheduler, submit.dispatch_seq, submit.reason) == ("g1", "s1", 1, "least_energy")
        assert submit.predicted_output_tokens == 64  # bounded by max_tokens
        assert submit.request == request()
        _, second = only(place(made, request_id="r2"), ev.Submit)
        assert second.dispatch_seq == 2

    def test_numbers_are_per_gpu_and_go_on_from_an_earlier_run(self):
        made = core()
        made.step(0.0, summary("g1", admitted_through={"s1": 41, "other": 99}))
        assert only(place(made), ev.Submit)[1].dispatch_seq == 42

    def test_traced_requests_get_a_span_and_others_none(self):
        made = core("g1", "g2")
        spans = [a for a in place(made, 5.0, traceparent=TRACE, tenant="t") if isinstance(a, ev.Span)]
        assert len(spans) == 1 and spans[0].name == "global.dispatch" and spans[0].traceparent == TRACE
        attributes = spans[0].attributes
        assert attributes["festina.gpu"] in ("g1", "g2") and attributes["festina.model"] == A.name
        assert attributes["festina.tenant"] == "t" and attributes["festina.reason"] == "least_energy"
        assert attributes["festina.candidates"] == 2
        assert not any(isinstance(a, ev.Span) for a in place(made, 5.0, request_id="r2"))

    def test_equal_gpus_are_told_apart_by_free_memory(self):
        made = core()
        made.step(0.0, summary("g1", free=10 * GIB))
        made.step(0.0, summary("g2", free=30 * GIB))
        assert only(place(made), ev.Submit)[0] == "g2"

    def test_excluded_only_when_nothing_else_exists(self):
        made = core("g1", "g2")
        assert only(place(made, excluded=("g1",)), ev.Submit)[0] == "g2"
        assert only(place(made, request_id="r2", excluded=("g1", "g2")), ev.Submit)[0] in ("g1", "g2")

    @pytest.mark.parametrize(
        "changes",
        [
            {"state": "draining"},
            {"engine": "vllm"},
            {"gpu_type": "tpu"},
            {"engines": (EngineSummary(model=A.name, state="unloading"),)},
            {"engines": (EngineSummary(model=B.name, state="ready"),)},
        ],
    )
    def test_gpus_that_cannot_serve_are_not_used(self, changes):
        made = core()
        made.step(0.0, summary("bad", free=70 * GIB, **changes))
        assert sends(place(made), ev.Submit) == []
        made.step(1.0, summary("good"))
        assert only(place(made, 1.0, request_id="r2"), ev.Submit)[0] == "good"

    def test_a_drained_gpu_is_not_used_and_old_placements_are_ignored(self):
        made = core("g1", "g2")
        instances = (Instance(model=A.name, gpus=("g2",)),)
        made.step(
            0.0, ev.PlacementChanged(placement=Placement(version=3, instances=instances, drained=("g1",)))
        )
        made.step(0.0, ev.PlacementChanged(placement=Placement(version=2, drained=("g2",))))
        assert {only(place(made, request_id=f"r{i}"), ev.Submit)[0] for i in range(4)} == {"g2"}

    def test_resumed_attempts_count_their_output_in_the_prediction_and_the_context(self):
        made = core("g1")
        given = tuple(range(60))
        _, submit = only(place(made, attempt=2, output_tokens=given), ev.Submit)
        assert 60 < submit.predicted_output_tokens <= 64
        long = place(made, request_id="r2", tokens=A.context_tokens - 60, output_tokens=given)
        assert only(long, ev.Rejected)[1].status == 400

    def test_unknown_model_and_too_long_a_prompt(self):
        made = core("g1")
        to, rejected = only(place(made, model="nope"), ev.Rejected)
        assert (to, rejected.status, rejected.code) == ("gw", 404, "model_not_found")
        assert rejected.retry_after_s is None and "nope" in rejected.message
        _, rejected = only(place(made, tokens=A.context_tokens), ev.Rejected)
        assert (rejected.status, rejected.code) == (400, "context_length_exceeded")
        assert str(A.context_tokens) in rejected.message

    def test_observations_change_the_prediction(self):
        made = core("g1", prediction_window=10)
        for _ in range(10):
            made.step(1.0, ended("stop", 40))
            made.step(1.0, ended("length", 9))  # cut off by max_tokens: says nothing about its own length
        assert only(place(made, max_tokens=1000), ev.Submit)[1].predicted_output_tokens == 42

    def test_gpus_without_a_meter_are_ranked_by_latency(self):
        class Unmetered:
            """The table of a device of one type, without its meter and with the latency of its name."""

            def __init__(self, gpu_type):
                self._real = lut_for("h100-80gb", A)
                self._factor = {"slow": 2.0, "quick": 1.0}[gpu_type]
                self.device = type("Device", (), {"has_meter": False, "f_max_mhz": 0})()
                self.request_bytes = self._real.request_bytes
                self.axes = self._real.axes

            def prefill_curves(self, clock, share):
                return self._slower(*self._real.prefill_curves(1155, share))

            def decode_curves(self, clock, share, batch):
                return self._slower(*self._real.decode_curves(1155, share, batch))

            def _slower(self, ms, power_w):
                return [self._factor * each_ms for each_ms in ms], power_w

        made = GlobalSchedCore("s1", GlobalSettings(), lambda gpu_type, _: Unmetered(gpu_type))
        made.step(0.0, ev.ModelRegistered(model=A))
        made.step(0.0, summary("g1", gpu_type="slow", free=70 * GIB))
        made.step(0.0, summary("g2", gpu_type="quick"))
        to, submit = only(place(made), ev.Submit)
        assert (to, submit.reason) == ("g2", "lowest_latency")


class TestReservations:
    def test_a_burst_between_summaries_spreads_and_nobody_is_late(self):
        made = core("g1", "g2", "g3", "g4")
        placed = [only(place(made, request_id=f"r{i}"), ev.Submit) for i in range(100)]
        counts = Counter(to for to, _ in placed)
        # Energy gathers a batch on one GPU, as far as the TTFT objective leaves room for prefills.
        room = int(objectives_for(200).ttft_ms / lut_for("h100-80gb", A).ttft_ms(1155, 100, 200))
        assert {submit.reason for _, submit in placed} == {"least_energy"}
        assert len(counts) == 4 and max(counts.values()) <= room
        for gpu in counts:
            assert [s.dispatch_seq for to, s in placed if to == gpu] == list(range(1, counts[gpu] + 1))

    def test_memory_reserved_is_not_given_twice_until_the_summary_counts_it(self):
        need = lut_for("h100-80gb", A).request_bytes(200 + 64)
        made = core()
        made.step(0.0, summary("g1", free=need))
        assert only(place(made), ev.Submit)[1].reason == "least_energy"
        assert only(place(made, request_id="r2"), ev.Submit)[1].reason == "best_effort"
        made.step(1.0, summary("g1", 2, free=need, admitted_through={"s1": 1}))
        assert (
            only(place(made, 1.0, request_id="r3"), ev.Submit)[1].reason == "best_effort"
        )  # r2 is still out
        made.step(2.0, summary("g1", 3, free=need, admitted_through={"s1": 3}))
        assert only(place(made, 2.0, request_id="r4"), ev.Submit)[1].reason == "least_energy"

    def test_they_end_by_time_by_refusal_and_with_the_gpus_process(self):
        need = lut_for("h100-80gb", A).request_bytes(200 + 64)
        made = core(reservation_ttl_ms=1000.0)
        made.step(0.0, summary("g1", free=need))
        place(made)
        made.step(900.0, summary("g1", 2, free=need))
        assert only(place(made, 999.0, request_id="r2"), ev.Submit)[1].reason == "best_effort"
        made.step(2000.0, summary("g1", 3, free=need))
        assert only(place(made, 2000.0, request_id="r3"), ev.Submit)[1].reason == "least_energy"
        made.step(2001.0, ev.Refused(request_id="r3", attempt=1, gpu="g1", reason="queue full", full=True))
        assert only(place(made, 2002.0, request_id="r4"), ev.Submit)[1].reason == "least_energy"
        made.step(2003.0, summary("g1", 1, free=need, started_ms=2003.0))
        assert only(place(made, 2004.0, request_id="r5"), ev.Submit)[1].reason == "least_energy"


class TestRepeats:
    def test_the_same_attempt_is_sent_again_to_the_same_gpu_only_after_a_while(self):
        made = core("g1", "g2")
        to, submit = only(place(made, 0.0), ev.Submit)
        assert place(made, 499.0) == []
        again_to, again = only(place(made, 1000.0), ev.Submit)
        assert again_to == to and again.dispatch_seq == submit.dispatch_seq
        assert again.predicted_output_tokens == submit.predicted_output_tokens
        assert again.request.waited_ms == 1000.0  # true at the time of sending
        made.step(1200.0, summary(to, 2))
        assert place(made, 1499.0) == []

    def test_if_the_gpu_has_fallen_silent_another_is_taken(self):
        made = core("g1", "g2")
        to, _ = only(place(made, 0.0), ev.Submit)
        other = {"g1": "g2", "g2": "g1"}[to]
        made.step(1400.0, summary(other, 2))
        assert only(place(made, 1600.0), ev.Submit)[0] == other

    def test_a_higher_attempt_replaces_and_a_lower_one_is_ignored(self):
        made = core("g1")
        place(made, 0.0)
        assert only(place(made, 1.0, attempt=2), ev.Submit)[1].dispatch_seq == 2
        assert place(made, 2000.0, attempt=1) == []
        assert (
            made.step(3.0, ev.Refused(request_id="r1", attempt=1, gpu="g1", reason="queue full", full=True))
            == []
        )

    def test_a_late_lower_attempt_is_not_placed_after_a_higher_one_was_turned_away(self):
        made = core()
        assert sends(place(made, 0.0, attempt=2), ev.Deferred)
        only(made.step(1.0, ev.ModelRemoved(model=A.name)), ev.Rejected)
        made.step(2.0, ev.ModelRegistered(model=A))
        made.step(3.0, summary("g1"))
        assert place(made, 4.0, attempt=1) == []
        assert only(place(made, 5.0, attempt=2), ev.Submit)  # the rejection may have been lost
        assert only(place(made, 6.0, attempt=3), ev.Submit)

    def test_no_more_rejections_are_remembered_than_allowed(self):
        made = core(max_remembered=2)
        for i in range(3):
            place(made, 0.0, request_id=f"r{i}", attempt=2, model="nowhere")
        made.step(1.0, summary("g1"))
        assert [bool(place(made, 2.0, request_id=f"r{i}", attempt=1)) for i in (0, 1, 2)] == [
            True,
            False,
            False,
        ]

    def test_forgotten_in_the_end(self):
        made = core("g1", remember_ms=5000.0, max_remembered=2)
        for i in range(3):
            place(made, 0.0, request_id=f"r{i}")
        assert (
            only(place(made, 1.0, request_id="r0"), ev.Submit)[1].dispatch_seq == 4
        )  # pushed out: placed anew
        assert place(made, 1.0, request_id="r2") == []
        made.step(7000.0, summary("g1", 2))
        place(made, 7000.0, request_id="r9")
        assert only(place(made, 7000.0, request_id="r2"), ev.Submit)[1].dispatch_seq == 6


class TestInquiries:
    def inquire(self, made, now_ms, attempt=1):
        return made.step(now_ms, ev.Inquire(request_id="r1", attempt=attempt))

    def test_only_the_scheduler_that_sent_an_attempt_answers_and_sends_it_again(self):
        first, second = core("g1", "g2"), core("g1", "g2")
        to, submit = only(place(first, 0.0), ev.Submit)
        assert self.inquire(second, 1000.0) == []
        answers = sends(self.inquire(first, 1000.0))
        assert [(where, type(message)) for where, message in answers] == [(to, ev.Submit), ("gw", ev.Placed)]
        assert answers[0][1].dispatch_seq == submit.dispatch_seq and answers[1][1].gpu == to
        assert only(self.inquire(first, 1100.0), ev.Placed)  # sent a moment ago

    def test_one_that_waits_for_its_model_is_answered_for_as_before(self):
        made = core()
        assert sends(place(made, 0.0), ev.Deferred)
        assert only(self.inquire(made, 1000.0), ev.Deferred)

    def test_if_the_gpu_has_fallen_silent_another_is_taken(self):
        made = core("g1", "g2")
        to, _ = only(place(made, 0.0), ev.Submit)
        other = {"g1": "g2", "g2": "g1"}[to]
        made.step(1400.0, summary(other, 2))
        assert only(self.inquire(made, 1600.0), ev.Submit)[0] == other

    def test_another_attempt_than_the_one_that_is_here_is_not_answered_for(self):
        made = core("g1")
        place(made, 0.0, attempt=2)
        assert self.inquire(made, 1000.0, attempt=1) == [] == self.inquire(made, 1000.0, attempt=3)

    @pytest.mark.parametrize("asked_second", [0, 1])
    def test_a_slow_answer_is_no_second_placing_whichever_replica_is_asked(self, asked_second):
        gateway = GatewayCore("gw", GatewaySettings())
        schedulers = [core("g1", "g2"), core("g1", "g2")]
        submits, turn, now_ms = [], iter([0, asked_second] + [1 - asked_second] * 9), 0.0

        def carry(actions):
            for to, message in sends(actions):
                if isinstance(message, ev.Submit):
                    submits.append(to)
                elif isinstance(message, ev.Dispatch):
                    carry(schedulers[next(turn)].step(now_ms, message))
                elif isinstance(message, ev.Inquire):
                    for scheduler in schedulers:
                        carry(scheduler.step(now_ms, message))
                elif isinstance(message, ev.Placed):
                    carry(gateway.step(now_ms, message))

        carry(gateway.step(now_ms, Arrived(request())))
        for step in range(1, 50):  # both GPUs are alive, and neither answers for 5 s
            now_ms = 100.0 * step
            for scheduler in schedulers:
                for gpu in ("g1", "g2"):
                    carry(scheduler.step(now_ms, summary(gpu, 1 + step)))
            carry(gateway.step(now_ms, ev.Tick()))
        assert len(set(submits)) == 1 and len(submits) >= 2


class TestOutdatedEngines:
    def test_an_engine_of_another_specification_gets_nothing(self):
        made = core()
        old = EngineSummary(model=A.name, state="ready", free_kv_bytes=20 * GIB, spec="other")
        made.step(0.0, summary("g1", 1, old))
        assert sends(place(made), ev.Deferred)
        (submit,) = sends(made.step(1.0, summary("g2", 1, msgspec.structs.replace(old, spec=digest(A)))))
        assert submit[0] == "g2" and isinstance(submit[1], ev.Submit)


class TestRefusals:
    def refuse(self, made, gpu, now_ms=1.0, reason="queue full"):
        full, never = reason == "queue full", reason == "too long"
        refused = ev.Refused(request_id="r1", attempt=1, gpu=gpu, reason=reason, full=full, never=never)
        return made.step(now_ms, refused)

    def test_the_next_gpu_each_time_then_429(self):
        made = core("g1", "g2", "g3")
        tried = [only(place(made), ev.Submit)[0]]
        for _ in range(2):
            tried.append(only(self.refuse(made, tried[-1]), ev.Submit)[0])
        assert sorted(tried) == ["g1", "g2", "g3"]
        to, rejected = only(self.refuse(made, tried[-1]), ev.Rejected)
        assert (to, rejected.status, rejected.code, rejected.retry_after_s) == ("gw", 429, "overloaded", 1.0)
        assert self.refuse(made, tried[-1]) == []  # ended once

    def test_from_another_gpu_or_for_an_unknown_request_it_means_nothing(self):
        made = core("g1", "g2")
        to, _ = only(place(made), ev.Submit)
        assert self.refuse(made, {"g1": "g2", "g2": "g1"}[to]) == []
        assert made.step(1.0, ev.Refused(request_id="x", attempt=1, gpu=to, reason="queue full")) == []

    def test_a_gpu_that_no_longer_serves_the_model_means_waiting_and_scale_out(self):
        made = core("g1")
        place(made)
        actions = self.refuse(made, "g1", reason="unloading")
        assert [type(m) for _, m in sends(actions)] == [ev.ScaleOut, ev.Deferred]
        assert sends(made.step(2.0, summary("g2")), ev.Submit)[0][0] == "g2"

    def test_a_refusing_gpu_gets_another_chance_once_a_second(self):
        made = core("g1")
        place(made)
        self.refuse(made, "g1", 1.0, reason="draining")
        assert sends(made.step(500.0, summary("g1", 2))) == []
        assert only(made.step(1001.0, summary("g1", 3)), ev.Submit)[0] == "g1"
        self.refuse(made, "g1", 1002.0, reason="draining")
        submits = [sends(made.step(1002.0 + 20 * i, summary("g1", 4 + i)), ev.Submit) for i in range(50)]
        assert submits == [[]] * 50

    def test_what_fits_nowhere_is_answered_at_once(self):
        made = core("g1", "g2")
        first = only(place(made), ev.Submit)[0]
        second = only(self.refuse(made, first, reason="too long"), ev.Submit)[0]
        assert second != first
        _, rejected = only(self.refuse(made, second, reason="too long"), ev.Rejected)
        assert (rejected.status, rejected.code) == (400, "context_length_exceeded")
        assert "too long" in rejected.message and rejected.retry_after_s is None

    def test_what_does_not_fit_on_one_gpu_may_fit_on_another(self):
        made = core("g1", "g2")
        first = only(place(made), ev.Submit)[0]
        second = only(self.refuse(made, first, reason="too long"), ev.Submit)[0]
        assert ev.Deferred in [type(m) for _, m in sends(self.refuse(made, second, reason="unloading"))]
        # The one that has no room is asked again only when it has, or has another engine.
        assert sends(made.step(1100.0, summary(first, 2, free=1000))) == []
        assert only(made.step(1200.0, summary(second, 2)), ev.Submit)[0] == second

    @pytest.mark.parametrize("changed", [{"started_ms": 900.0}, {"free": 30 * GIB}, {}])
    def test_a_gpu_without_room_is_tried_again_when_it_has_changed(self, changed):
        made = core()
        made.step(0.0, summary("g1", free=1000))
        made.step(0.0, summary("g2", engines=(EngineSummary(model=A.name, state="loading"),)))
        assert only(place(made), ev.Submit)[0] == "g1"
        other = core()
        for each in (made, other):
            each.step(0.5, summary("g1", 2, free=1000))
        # A refusal for good, while another GPU has refused for now, leaves the attempt waiting.
        made.step(0.6, summary("g2", 2))
        self.refuse(made, "g1", 1.0, reason="too long")
        self.refuse(made, "g2", 2.0, reason="unloading")
        gone = (EngineSummary(model=A.name, state="unloading"),)
        made.step(3.0, summary("g2", 3, engines=gone))
        placed = sends(made.step(1500.0, summary("g1", 9, **({"free": 1000} | changed))), ev.Submit)
        assert [to for to, _ in placed] == (["g1"] if changed else [])

    def test_refused_again_and_again_it_ends_with_503(self):
        made = core("g1", model_wait_ms=2000.0)
        place(made)
        for seq in range(2, 100):
            now_ms = 500.0 * (seq - 1)
            last = self.refuse(made, "g1", now_ms - 400.0, reason="unloading")
            if sends(last, ev.Rejected):
                break
            made.step(now_ms, summary("g1", seq))
        assert sends(last, ev.Rejected)[0][1].code == "model_loading" and now_ms < 4000.0
        assert "unloading" in sends(last, ev.Rejected)[0][1].message
        assert made.wake_ms is None


class TestWaiting:
    def test_scale_out_once_and_deferred_each_then_submitted_in_order_when_ready(self):
        made = core()
        actions = place(made, 0.0)
        assert sends(actions) == [
            (A.name, ev.ScaleOut(model=A.name, scheduler="s1", reason="no_instance")),
            ("gw", ev.Deferred(request_id="r1", attempt=1, scheduler="s1", reason="model_loading")),
        ]
        only(place(made, 10.0, request_id="r2"), ev.Deferred)
        only(place(made, 20.0), ev.Deferred)  # asked for again
        loading = EngineSummary(model=A.name, state="loading")
        assert made.step(30.0, summary("g1", 1, loading)) == []
        placed = sends(made.step(500.0, summary("g1", 2)))
        assert [(to, m.request.request_id, m.request.waited_ms) for to, m in placed] == [
            ("g1", "r1", 500.0),
            ("g1", "r2", 490.0),
        ]
        assert made.wake_ms is None

    def test_scale_out_is_repeated_while_nothing_loads(self):
        made = core(scale_out_repeat_ms=2000.0)
        place(made, 0.0)
        assert made.wake_ms == 2000.0
        assert only(made.step(2000.0, ev.Tick()), ev.ScaleOut)[0] == A.name
        made.step(3500.0, summary("g1", 1, EngineSummary(model=A.name, state="loading")))
        assert made.wake_ms == 4000.0 and made.step(4000.0, ev.Tick()) == []
        assert made.wake_ms == 6000.0  # by then the loading GPU is silent
        assert only(made.step(6000.0, ev.Tick()), ev.ScaleOut)[0] == A.name

    def test_it_ends_with_503_and_says_why_the_load_failed(self):
        made = core(model_wait_ms=1000.0)
        place(made, 0.0)
        failed = EngineSummary(model=A.name, state="failed", reason="weights not found")
        made.step(500.0, summary("g1", 1, failed))
        assert made.step(999.0, ev.Tick()) == [] and made.wake_ms == 1000.0
        _, rejected = only(made.step(1000.0, ev.Tick()), ev.Rejected)
        assert (rejected.status, rejected.code, rejected.retry_after_s) == (503, "model_loading", 1.0)
        assert "weights not found" in rejected.message
        assert made.wake_ms is None

    def test_a_removed_model_ends_it_with_404(self):
        made = core()
        place(made)
        place(made, request_id="r2", model=B.name)
        _, rejected = only(made.step(1.0, ev.ModelRemoved(model=A.name)), ev.Rejected)
        assert (rejected.request_id, rejected.status) == ("r1", 404)
        assert only(place(made, 2.0, request_id="r3"), ev.Rejected)[1].status == 404

    def test_a_higher_attempt_takes_the_place_of_the_lower(self):
        made = core()
        place(made)
        only(place(made, 1.0, attempt=2), ev.Deferred)
        (placed,) = sends(made.step(2.0, summary("g1")))
        assert placed[1].request.attempt == 2

    def test_bounded(self):
        made = core(max_pending=2)
        place(made)
        place(made, request_id="r2")
        _, rejected = only(place(made, request_id="r3"), ev.Rejected)
        assert (rejected.status, rejected.code) == (503, "overloaded")

    def test_those_who_waited_are_not_turned_away_by_a_full_queue(self):
        made = core(max_queued=2)
        for i in range(4):
            place(made, request_id=f"r{i}")
        first = sends(made.step(1.0, summary("g1")), ev.Message)
        assert [m.request.request_id for _, m in first] == ["r0", "r1"]
        assert only(place(made, 2.0, request_id="new"), ev.Rejected)[1].status == 429
        then = sends(made.step(3.0, summary("g1", 2, admitted_through={"s1": 2})), ev.Submit)
        assert [m.request.request_id for _, m in then] == ["r2", "r3"]


class TestDeficit:
    def late(self, made, i, now_ms=0.0):
        return place(made, now_ms, request_id=f"late{i}", objectives=Objectives(ttft_ms=0.1, tbt_ms=100.0))

    def test_one_late_request_is_served_and_a_sustained_deficit_scales_out_once(self):
        made = core("g1", deficit_requests=3.0, deficit_window_ms=1e9)
        for i in range(2):
            _, submit = only(self.late(made, i), ev.Submit)
            assert submit.reason == "best_effort"
        third = sends(self.late(made, 2))
        assert third[0] == (A.name, ev.ScaleOut(model=A.name, scheduler="s1", reason="sustained_deficit"))
        assert isinstance(third[1][1], ev.Submit)
        assert not any(sends(self.late(made, i), ev.ScaleOut) for i in range(3, 20))

    def test_after_a_scale_out_the_count_starts_anew(self):
        made = core("g1", deficit_requests=3.0, deficit_window_ms=1e9, scale_out_repeat_ms=1.0)
        asked = [bool(sends(self.late(made, i, float(i)), ev.ScaleOut)) for i in range(7)]
        assert asked == [False, False, False, True, False, False, False]

    def test_they_must_be_a_share_of_all(self):
        made = core("g1", deficit_requests=2.0, deficit_share=0.5, deficit_window_ms=1e9)
        for i in range(6):
            place(made, request_id=f"ok{i}")
        assert not any(sends(self.late(made, i), ev.ScaleOut) for i in range(5))
        assert sends(self.late(made, 5), ev.ScaleOut)

    def test_a_wait_for_the_model_is_no_deficit(self):
        made = core(deficit_requests=1.0, scale_out_repeat_ms=1.0)
        for i in range(5):
            place(made, request_id=f"r{i}")
        actions = made.step(5000.0, summary("g1"))
        assert [type(m) for _, m in sends(actions)] == [ev.Submit] * 5
        assert {m.reason for _, m in sends(actions)} == {"best_effort"}

    def test_without_best_effort_the_late_are_refused(self):
        made = core("g1", best_effort=False)
        _, rejected = only(self.late(made, 0), ev.Rejected)
        assert (rejected.status, rejected.code) == (503, "objectives_infeasible")


class TestSilence:
    def test_a_silent_gpu_is_not_used(self):
        made = core("g1")
        assert sends(place(made, 1499.0), ev.Submit)
        actions = place(made, 1500.0, request_id="r2")
        assert [type(m) for _, m in sends(actions)] == [ev.ScaleOut, ev.Deferred]

    def test_nobody_is_silent_while_the_own_bus_is_lost_and_for_a_while_after(self):
        made = core("g1")
        made.step(100.0, ev.BusLost())
        assert sends(place(made, 60_000.0), ev.Submit)
        made.step(70_000.0, ev.BusRestored())
        assert sends(place(made, 71_499.0, request_id="r2"), ev.Submit)
        assert not sends(place(made, 71_500.0, request_id="r3"), ev.Submit)

    def test_waits_do_not_end_while_the_bus_is_lost_and_scale_out_is_asked_again_after(self):
        made = core(model_wait_ms=100_000.0)
        place(made)
        made.step(100.0, ev.BusLost())
        assert made.wake_ms is None and made.step(3000.0, ev.Tick()) == []
        assert only(made.step(3001.0, ev.BusRestored()), ev.ScaleOut)[0] == A.name
        assert made.step(3100.0, ev.BusLost()) == []
        assert only(made.step(3200.0, ev.BusRestored()), ev.ScaleOut)[0] == A.name

    def test_older_summaries_change_nothing(self):
        made = core()
        made.step(0.0, summary("g1", 5))
        made.step(0.0, summary("g1", 4, EngineSummary(model=B.name, state="ready")))
        made.step(0.0, summary("g1", 9, EngineSummary(model=B.name, state="ready"), started_ms=0.5))
        assert sends(place(made), ev.Submit)
        made.step(0.0, summary("g1", 1, EngineSummary(model=B.name, state="ready"), started_ms=2.0))
        assert not sends(place(made, request_id="r2"), ev.Submit)

    def test_ids_that_are_gone_are_forgotten(self):
        made = core(forget_after_ms=10_000.0)
        for i in range(50):
            made.step(i * 1000.0, summary(f"g{i}"))
        assert len(made._view) <= 11


def test_settings_that_make_no_sense_are_refused_by_name():
    for bad in ({"output_quantile": 1.0}, {"margin": -0.1}, {"max_pending": 0}, {"stale_after_ms": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            GlobalSettings(**bad)
