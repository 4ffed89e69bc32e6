"""The gateway's core, event by event."""

from typing import Any

from services.gateway.core import (
    STOPPED,
    AddModel,
    Arrived,
    ClientGone,
    Deliver,
    DrainGpu,
    Fail,
    GatewayCore,
    RemoveModel,
)
from services.gateway.settings import GatewaySettings
from shared import events as ev
from shared.model import GpuSummary, ModelSpec, Objectives, Placement, Request, RequestEnd
from shared.resumable import resumable
from shared.subjects import model_key

GREEDY = {"temperature": 0.0}
STOP = RequestEnd(finish_reason="stop", energy_j=7.0, energy_source="meter")
ERROR = RequestEnd(finish_reason="error", error="engine died")


def model(name: str = "m", engine: str = "vllm") -> ModelSpec:
    return ModelSpec(
        name=name,
        engine=engine,
        params=1,
        layers=1,
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        weight_bytes=1,
        kv_bytes_per_token=1,
    )


def request(request_id: str = "r", **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "gateway": "gw",
        "model": "m",
        "prompt_tokens": (1, 2),
        "max_tokens": 100,
        "objectives": Objectives(ttft_ms=250.0, tbt_ms=100.0),
        "sampling": GREEDY,
    }
    return Request(**{**fields, **changes})


def summary(gpu: str, seq: int, started_ms: float = 1.0) -> ev.SummaryChanged:
    return ev.SummaryChanged(
        summary=GpuSummary(
            gpu=gpu,
            host="h",
            gpu_type="t",
            engine="vllm",
            started_ms=started_ms,
            seq=seq,
            state="active",
            sm_clock_mhz=1000,
            total_bytes=1,
            free_bytes=1,
        )
    )


def tokens(
    gpu: str,
    first_seq: int,
    *ids: int,
    attempt: int = 1,
    end: RequestEnd | None = None,
    request_id: str = "r",
    moved_from: str = "",
) -> ev.Tokens:
    delta = ev.TokenDelta(request_id, attempt, first_seq, ids, end, moved_from)
    return ev.Tokens(gpu=gpu, deltas=(delta,))


def admitted(gpu: str, attempt: int = 1, request_id: str = "r") -> ev.Admitted:
    return ev.Admitted(request_id=request_id, attempt=attempt, gpu=gpu)


class Driver:
    """A core with a clock, and a tick whenever the core wants one. With `cut`, nothing comes from the bus."""

    cut = False

    def __init__(self, **settings: Any) -> None:
        self.core = GatewayCore("gw", GatewaySettings(**settings))
        self.now_ms = 1000.0
        self.step(ev.Tick())

    def step(self, event: ev.Message | ev.Event) -> list[ev.Action]:
        actions = self.core.step(self.now_ms, event)
        for _, alive in [] if self.cut else sends(actions, ev.GatewayAlive):
            assert self.core.step(self.now_ms, alive) == []  # it hears itself
        return actions

    def run(self, for_ms: float, beats: tuple[str, ...] = ()) -> list[ev.Action]:
        """Let time pass; the GPUs in `beats` are heard of twice a second."""
        end_ms, found = self.now_ms + for_ms, []
        beat_ms = self.now_ms
        while True:
            wake_ms = self.core.wake_ms
            assert wake_ms is not None
            next_ms = min(wake_ms, beat_ms if beats else wake_ms)
            if next_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, next_ms)
            if beats and self.now_ms >= beat_ms:
                for gpu in beats:
                    found += self.step(summary(gpu, seq=int(self.now_ms)))
                beat_ms += 500.0
            found += self.step(ev.Tick())
        self.now_ms = end_ms
        return found

    def admit(self, **changes: Any) -> None:
        self.step(Arrived(request(**changes)))
        self.step(admitted("a"))


def sends(actions: list[ev.Action], kind: type[ev.Message]) -> list[tuple[str, Any]]:
    return [(a.to, a.message) for a in actions if isinstance(a, ev.Send) and isinstance(a.message, kind)]


def only(actions: list[ev.Action], kind: type) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


# ---- dispatch


def inquiry(attempt: int = 1) -> ev.Inquire:
    return ev.Inquire(request_id="r", attempt=attempt)


def asks(actions: list[ev.Action]) -> list[type]:
    kinds = (type(message) for _, message in sends(actions, ev.Message))
    return [kind for kind in kinds if kind is not ev.GatewayAlive]


def test_an_unanswered_dispatch_is_inquired_after_before_it_is_repeated() -> None:
    d = Driver()
    d.step(Arrived(request()))
    assert asks(d.run(900.0)) == []
    assert sends(d.run(200.0), ev.Inquire) == [("any", inquiry())]
    assert asks(d.run(900.0)) == [ev.Dispatch]
    assert asks(d.run(2_000.0)) == [ev.Inquire, ev.Dispatch]


def test_while_a_scheduler_says_that_it_has_the_attempt_no_other_is_asked_to_place_it() -> None:
    d = Driver()
    d.step(Arrived(request()))
    assert asks(d.run(1_000.0)) == [ev.Inquire]
    for _ in range(5):
        d.step(ev.Placed(request_id="r", attempt=1, gpu="a"))
        assert asks(d.run(2_000.0)) == [ev.Inquire]
    assert asks(d.run(1_000.0)) == [ev.Dispatch]  # it says so no more


def test_the_gpu_that_an_attempt_was_handed_to_is_named_if_it_never_answers() -> None:
    d = Driver()
    d.step(Arrived(request()))
    d.step(ev.Placed(request_id="r", attempt=1, gpu="gpu-7"))
    (fail,) = only(d.run(60_000.0), Fail)
    assert fail.code == "dispatch_timeout" and "gpu-7 has not answered" in fail.message


def test_asks_any_scheduler_once_and_again_every_two_seconds_with_the_same_attempt() -> None:
    d = Driver()
    first = sends(d.step(Arrived(request(waited_ms=5.0))), ev.Dispatch)
    assert [(to, m.request.attempt, m.request.waited_ms, m.excluded) for to, m in first] == [
        ("any", 1, 5.0, ())
    ]
    again = sends(d.run(4500.0), ev.Dispatch)
    assert [(m.request.attempt, m.request.waited_ms) for _, m in again] == [(1, 2005.0), (1, 4005.0)]


def test_a_deferred_request_is_asked_for_every_five_seconds() -> None:
    d = Driver()
    d.step(Arrived(request()))
    d.step(ev.Deferred(request_id="r", attempt=1, scheduler="s", reason="loading"))
    assert asks(d.run(4900.0)) == []
    assert asks(d.run(200.0)) == [ev.Inquire]
    d.step(ev.Deferred(request_id="r", attempt=1, scheduler="s", reason="loading"))
    assert asks(d.run(4900.0)) == []
    assert asks(d.run(1200.0)) == [ev.Inquire, ev.Dispatch]  # it has gone


def test_admission_ends_the_asking() -> None:
    d = Driver()
    d.admit()
    assert sends(d.run(10_000.0, beats=("a",)), ev.Dispatch) == []


def test_nobody_taking_it_within_the_timeout_fails_with_503() -> None:
    d = Driver()
    d.step(Arrived(request()))
    (fail,) = only(d.run(60_000.0), Fail)
    assert (fail.status, fail.code, fail.retry_after_s) == (503, "dispatch_timeout", 1.0)
    assert d.core.inflight == 0
    assert only(d.run(60_000.0), Fail) == []


def test_a_rejection_is_the_answer() -> None:
    d = Driver()
    d.step(Arrived(request()))
    rejected = ev.Rejected(
        request_id="r", attempt=1, status=503, code="no_capacity", message="full", retry_after_s=4.0
    )
    assert only(d.step(rejected), Fail) == [Fail("r", 503, "no_capacity", "full", 4.0)]
    assert d.core.inflight == 0


def test_a_scheduler_that_does_not_know_a_registered_model_is_not_believed() -> None:
    d = Driver()
    unknown = ev.Rejected(request_id="r", attempt=1, status=404, code="model_not_found", message="no m here")
    d.step(ev.ModelRegistered(model=model()))
    d.step(Arrived(request()))
    assert d.step(unknown) == []
    assert asks(d.run(2_100.0)) == [ev.Dispatch]
    d.step(ev.ModelRemoved(model="m"))
    assert [fail.code for fail in only(d.step(unknown), Fail)] == ["model_not_found"]


def test_a_rejection_of_an_admitted_or_older_attempt_means_nothing() -> None:
    d = Driver()
    d.admit()
    assert d.step(ev.Rejected(request_id="r", attempt=1, status=503, code="c", message="m")) == []


def test_the_second_gpu_to_admit_is_told_to_stop() -> None:
    d = Driver()
    d.admit()
    assert [to for to, _ in sends(d.step(admitted("b")), ev.Abort)] == ["b"]
    assert d.step(admitted("a")) == []  # a repeat changes nothing
    assert only(d.step(tokens("a", 0, 7)), Deliver)


def test_more_than_max_inflight_is_429() -> None:
    d = Driver(max_inflight=1)
    d.step(Arrived(request("r")))
    (fail,) = only(d.step(Arrived(request("s"))), Fail)
    assert (fail.request_id, fail.status, fail.retry_after_s) == ("s", 429, 1.0)
    assert d.core.inflight == 1


# ---- tokens


def test_tokens_before_their_admission_count_as_admission() -> None:
    d = Driver()
    d.step(Arrived(request()))
    (deliver,) = only(d.step(tokens("a", 0, 7)), Deliver)
    assert (deliver.token_ids, deliver.gpu) == ((7,), "a")
    assert sends(d.run(3000.0, beats=("a",)), ev.Dispatch) == []


def test_repeats_are_trimmed_and_gaps_wait() -> None:
    d = Driver()
    d.admit()
    assert [a.token_ids for a in only(d.step(tokens("a", 0, 1, 2)), Deliver)] == [(1, 2)]
    assert [a.token_ids for a in only(d.step(tokens("a", 1, 2, 3)), Deliver)] == [(3,)]
    assert only(d.step(tokens("a", 0, 1, 2)), Deliver) == []
    d.run(60.0)
    assert d.step(tokens("a", 5, 6)) == []
    assert sends(d.run(100.0), ev.Ack) == []  # a gap is not acknowledged
    assert [a.token_ids for a in only(d.step(tokens("a", 3, 4, 5, 6)), Deliver)] == [(4, 5, 6)]


def test_acks_go_out_in_one_batch_per_gpu() -> None:
    d = Driver()
    d.admit()
    d.step(Arrived(request("s")))
    d.step(admitted("a", request_id="s"))
    acks = sends(d.step(tokens("a", 0, 1)), ev.Ack)
    acks += sends(d.step(tokens("a", 1, 2)), ev.Ack) + sends(
        d.step(tokens("a", 0, 9, request_id="s")), ev.Ack
    )
    assert acks == []
    acks = sends(d.run(60.0), ev.Ack)
    expected = (ev.AckedThrough("r", 1, 2, False), ev.AckedThrough("s", 1, 1, False))
    assert acks == [("a", ev.Ack(gateway="gw", acks=expected))]


def test_a_repeat_is_acknowledged_again_because_the_ack_was_lost() -> None:
    d = Driver()
    d.admit()
    d.step(tokens("a", 0, 1))
    d.run(60.0)
    d.step(tokens("a", 0, 1))
    assert len(sends(d.run(60.0), ev.Ack)) == 1


def test_the_end_comes_once_with_times_and_is_acknowledged_again_if_repeated() -> None:
    d = Driver()
    d.step(Arrived(request(waited_ms=10.0)))
    d.step(admitted("a"))
    d.now_ms += 100.0
    d.step(tokens("a", 0, 1))
    d.now_ms += 30.0
    d.step(tokens("a", 1, 2))
    d.now_ms += 50.0
    actions = d.step(tokens("a", 2, 3, end=STOP))
    (deliver,) = only(actions, Deliver)
    assert deliver == Deliver("r", (3,), STOP, "a", 1, ttft_ms=110.0, mean_tbt_ms=40.0)
    counted = {(c.name, c.labels.get("outcome"), c.value) for c in only(actions, ev.Count)}
    assert counted == {
        ("gateway_requests", "stop", 1.0),
        ("gateway_output_tokens", None, 3),
        ("gateway_energy_joules", None, 7.0),
        ("gateway_answers", None, 1.0),
    }
    judged = [c.labels["objectives"] for c in only(actions, ev.Count) if c.name == "gateway_answers"]
    assert judged == ["met"]
    d.run(60.0)
    assert only(d.step(tokens("a", 2, 3, end=STOP)), Deliver) == []
    ((to, ack),) = sends(d.run(60.0), ev.Ack)
    assert (to, ack.acks) == ("a", (ev.AckedThrough("r", 1, 3, True),))


def test_tokens_of_unknown_requests_and_wrong_gpus_are_stopped() -> None:
    d = Driver()
    assert [(to, m.request_id) for to, m in sends(d.step(tokens("a", 0, 1)), ev.Abort)] == [("a", "r")]
    d.admit()
    d.step(tokens("a", 0, 1))
    actions = d.step(tokens("b", 0, 1))
    assert [to for to, _ in sends(actions, ev.Abort)] == ["b"]
    assert only(actions, Deliver) == []


def test_until_its_first_token_an_attempt_belongs_to_whoever_sends_one() -> None:
    d = Driver()
    d.admit()
    actions = d.step(tokens("b", 0, 1))
    assert [to for to, _ in sends(actions, ev.Abort)] == ["a"]
    assert [a.token_ids for a in only(actions, Deliver)] == [(1,)]


def test_a_move_changes_the_gpu_that_is_listened_to() -> None:
    d = Driver()
    d.admit()
    moved = ev.Moved(request_id="r", attempt=1, source="a", destination="b")
    assert d.step(moved) == []
    assert d.step(moved) == []
    assert [a.gpu for a in only(d.step(tokens("b", 0, 1)), Deliver)] == ["b"]
    assert sends(d.step(tokens("a", 1, 2)), ev.Abort)[0][0] == "a"


def test_a_move_away_from_another_gpu_means_nothing() -> None:
    d = Driver()
    d.admit()
    d.step(ev.Moved(request_id="r", attempt=1, source="b", destination="c"))
    d.step(tokens("a", 0, 1))
    assert only(d.step(tokens("c", 1, 2)), Deliver) == []
    assert [to for to, _ in sends(d.step(ClientGone("r", "left")), ev.Abort)] == ["a"]


def test_a_moved_request_goes_on_although_the_sources_last_tokens_and_the_word_of_the_move_are_lost() -> None:
    d = Driver()
    d.admit()
    d.step(tokens("a", 0, 1, 2))
    ahead = d.step(tokens("b", 4, 5, moved_from="a"))  # what stands before it is still on its way
    assert only(ahead, Deliver) == [] and sends(ahead, ev.Abort) == []
    actions = d.step(tokens("b", 0, 1, 2, 3, 4, moved_from="a"))
    assert [(a.token_ids, a.gpu) for a in only(actions, Deliver)] == [((3, 4), "b")]
    assert [a.token_ids for a in only(d.step(tokens("b", 4, 5)), Deliver)] == [(5,)]
    assert [to for to, _ in sends(d.step(tokens("a", 2, 9)), ev.Abort)] == ["a"]


def test_a_move_before_the_first_token_is_heard_of_though_its_word_is_lost() -> None:
    d = Driver()
    d.admit()
    assert sends(d.step(tokens("b", 0, moved_from="a")), ev.Abort) == []
    assert sends(d.run(60.0), ev.Ack) == [("b", ev.Ack("gw", (ev.AckedThrough("r", 1, 0, False),)))]
    assert [to for to, _ in sends(d.step(ClientGone("r", "left")), ev.Abort)] == ["b"]


def test_tokens_of_the_source_that_come_after_the_word_of_the_move_do_not_stop_the_destination() -> None:
    d = Driver()
    d.admit()
    d.step(ev.Moved(request_id="r", attempt=1, source="a", destination="b", next_seq=2))
    late = d.step(tokens("a", 1, 2))  # what came before it has been lost
    assert only(late, Deliver) == [] and [to for to, _ in sends(late, ev.Abort)] == ["a"]
    assert [a.token_ids for a in only(d.step(tokens("b", 0, 1, 2, moved_from="a")), Deliver)] == [(1, 2)]


def test_a_destination_is_stopped_if_the_source_went_on_meanwhile() -> None:
    d = Driver()
    d.admit()
    d.step(tokens("a", 0, 1, 2, 3))
    actions = d.step(tokens("b", 0, 1, 2, moved_from="a"))
    assert only(actions, Deliver) == [] and [to for to, _ in sends(actions, ev.Abort)] == ["b"]
    assert [a.token_ids for a in only(d.step(tokens("a", 3, 4)), Deliver)] == [(4,)]


def test_a_move_of_a_request_that_is_over_stops_the_destination() -> None:
    d = Driver()
    moved = ev.Moved(request_id="r", attempt=1, source="a", destination="b")
    assert [to for to, _ in sends(d.step(moved), ev.Abort)] == ["b"]


# ---- further attempts


def test_a_failed_engine_starts_the_next_attempt_elsewhere_with_what_the_client_has() -> None:
    d = Driver()
    d.admit()
    d.step(tokens("a", 0, 1, 2))
    actions = d.step(tokens("a", 2, 3, end=ERROR))
    assert [(a.token_ids, a.end) for a in only(actions, Deliver)] == [((3,), None)]
    ((to, dispatch),) = sends(actions, ev.Dispatch)
    assert (to, dispatch.request.attempt, dispatch.request.output_tokens) == ("any", 2, (1, 2, 3))
    assert dispatch.excluded == ("a",)
    d.step(admitted("b", attempt=2))
    assert sends(d.step(tokens("a", 3, 9)), ev.Abort)[0][1].attempt == 1  # the old attempt is not believed
    (deliver,) = only(d.step(tokens("b", 3, 4, attempt=2, end=STOP)), Deliver)
    assert (deliver.token_ids, deliver.attempt) == ((4,), 2)


def test_three_failed_attempts_are_the_end() -> None:
    d = Driver()
    d.step(Arrived(request(sampling={})))  # without output any request can be started again
    fails: list[Any] = []
    for attempt, gpu in ((1, "a"), (2, "b"), (3, "a")):
        d.step(admitted(gpu, attempt))
        fails += only(d.step(tokens(gpu, 0, attempt=attempt, end=ERROR)), Fail)
    assert [(f.status, f.code) for f in fails] == [(502, "engine_error")]
    assert "engine died" in fails[0].message
    assert d.core.inflight == 0


def test_sampling_that_cannot_be_resumed_ends_with_an_honest_error() -> None:
    d = Driver()
    d.admit(sampling={"temperature": 0.7, "seed": 1})
    d.step(tokens("a", 0, 1))
    (fail,) = only(d.step(tokens("a", 1, end=ERROR)), Fail)
    assert (fail.status, fail.code) == (502, "not_resumable")


def test_an_emulated_model_can_always_be_resumed() -> None:
    d = Driver()
    d.step(ev.ModelRegistered(model=model("m", "emulated")))
    d.admit(sampling={})
    d.step(tokens("a", 0, 1))
    assert len(sends(d.step(tokens("a", 1, end=ERROR)), ev.Dispatch)) == 1


def test_what_resumable_means() -> None:
    assert resumable({"temperature": 0.0, "top_p": 0.5, "seed": 3}, False)
    assert not resumable({}, False)  # the engine's default temperature is 1
    for name, value in (("presence_penalty", 0.1), ("repetition_penalty", 1.1), ("min_tokens", 5)):
        assert not resumable({**GREEDY, name: value}, False)
        assert resumable({**GREEDY, name: value}, True)


def test_a_silent_gpu_loses_its_requests_after_the_limit_and_not_before() -> None:
    d = Driver()
    d.step(summary("a", 1))
    d.admit()
    assert sends(d.run(1400.0), ev.Dispatch) == []
    actions = d.run(500.0)
    ((_, dispatch),) = sends(actions, ev.Dispatch)
    assert (dispatch.request.attempt, dispatch.excluded) == (2, ("a",))
    assert [(to, m.attempt) for to, m in sends(actions, ev.Abort)] == [("a", 1)]
    assert d.core.registry.live_gpus() == []
    d.step(summary("a", 2))
    assert len(d.core.registry.live_gpus()) == 1


def test_silence_means_nothing_while_nothing_at_all_is_heard() -> None:
    d = Driver()
    d.step(summary("a", 1))
    d.admit()
    d.cut = True  # the link is dead, and nobody has said so
    assert sends(d.run(10_000.0), ev.Dispatch) == []
    d.cut = False
    assert len(sends(d.run(1_000.0), ev.Dispatch)) == 1


def test_a_gpu_that_is_heard_of_keeps_its_requests() -> None:
    d = Driver()
    d.admit()
    assert sends(d.run(20_000.0, beats=("a",)), ev.Dispatch) == []


def test_a_restarted_gpu_has_lost_its_requests_but_may_take_them_again() -> None:
    d = Driver()
    d.step(summary("a", 5))
    d.admit()
    assert sends(d.step(summary("a", 4)), ev.Dispatch) == []  # an old summary, late
    ((_, dispatch),) = sends(d.step(summary("a", 1, started_ms=2.0)), ev.Dispatch)
    assert (dispatch.request.attempt, dispatch.excluded) == (2, ())


def test_silence_means_nothing_while_our_own_bus_is_down() -> None:
    d = Driver()
    d.step(summary("a", 1))
    d.admit()
    d.step(ev.BusLost())
    lost = d.run(10_000.0)
    assert sends(lost, ev.Dispatch) == [] and sends(lost, ev.GatewayAlive) == []
    assert len(sends(d.step(ev.BusRestored()), ev.GatewayAlive)) == 1
    assert sends(d.run(4_000.0), ev.Dispatch) == []  # GPUs reconnect too
    assert len(sends(d.run(1_000.0), ev.Dispatch)) == 1


def test_what_waits_is_asked_for_at_once_when_the_bus_is_back() -> None:
    d = Driver()
    d.step(ev.BusLost())
    assert sends(d.step(Arrived(request())), ev.Dispatch) == []
    assert sends(d.run(5_000.0), ev.Dispatch) == []
    assert len(sends(d.step(ev.BusRestored()), ev.Dispatch)) == 1


def test_a_gateway_that_stood_still_does_not_call_gpus_lost() -> None:
    d = Driver()
    d.step(summary("a", 1))
    d.admit()
    d.now_ms += 5_000.0  # no tick meanwhile
    assert sends(d.step(ev.Tick()), ev.Dispatch) == []
    d.step(summary("a", 2))
    assert sends(d.run(1_000.0), ev.Dispatch) == []


def test_a_request_without_progress_is_started_elsewhere() -> None:
    d = Driver(stall_timeout_ms=5_000.0)
    d.admit()
    actions = d.run(5_600.0, beats=("a",))
    assert [m.request.attempt for _, m in sends(actions, ev.Dispatch)] == [2]
    assert [to for to, _ in sends(actions, ev.Abort)] == ["a"]


def test_a_loss_after_the_last_token_is_a_normal_end() -> None:
    d = Driver()
    d.step(summary("a", 1))
    d.admit(max_tokens=2)
    d.step(tokens("a", 0, 1, 2))
    (deliver,) = only(d.run(2_000.0), Deliver)
    assert deliver.end is not None
    assert (deliver.token_ids, deliver.end.finish_reason, deliver.end.energy_j) == ((), "length", None)


# ---- cancels, heartbeat, admin


def test_a_client_that_leaves_stops_the_engine_at_once() -> None:
    d = Driver()
    d.admit()
    assert [to for to, _ in sends(d.step(ClientGone("r", "left")), ev.Abort)] == ["a"]
    assert d.core.inflight == 0
    assert d.step(ClientGone("r", "left")) == []


def test_a_client_that_leaves_before_admission_stops_whoever_admits_later() -> None:
    d = Driver()
    d.step(Arrived(request()))
    assert sends(d.step(ClientGone("r", "left")), ev.Abort) == []
    assert sends(d.run(5_000.0), ev.Dispatch) == []
    assert [to for to, _ in sends(d.step(admitted("a")), ev.Abort)] == ["a"]


def test_the_gateway_shows_twice_a_second_that_it_lives() -> None:
    d = Driver()
    assert [to for to, _ in sends(d.run(5_000.0), ev.GatewayAlive)] == ["gw"] * 10


def test_nothing_due_while_the_bus_is_down_wakes_the_core_over_and_over() -> None:
    d = Driver()
    d.admit()
    d.step(tokens("a", 0, 1))
    d.step(ev.BusLost())
    d.run(1_000.0)
    wake_ms = d.core.wake_ms
    assert wake_ms is not None and wake_ms > d.now_ms


def test_admin_writes_the_store_and_tells_everybody() -> None:
    d = Driver()
    added = d.step(AddModel(model("x.y")))
    assert added == [
        ev.Put(model_key("x.y"), model("x.y")),
        ev.Send(to="x.y", message=ev.ModelRegistered(model=model("x.y"))),
    ]
    assert "x.y" in d.core.registry.models
    removed = d.step(RemoveModel("x.y"))
    assert removed == [ev.Delete(model_key("x.y")), ev.Send(to="x.y", message=ev.ModelRemoved(model="x.y"))]
    assert d.core.registry.models == {}


def test_a_drain_order_is_repeated_until_a_placement_shows_it_and_no_longer_than_a_minute() -> None:
    d = Driver()
    drain = ("a", ev.Drain(gpu="a", on=True))
    assert sends(d.step(DrainGpu("a", True)), ev.Drain) == [drain]
    d.step(ev.PlacementChanged(placement=Placement(version=1)))  # nobody has heard it
    assert sends(d.run(2_100.0), ev.Drain) == [drain, drain]
    d.step(ev.PlacementChanged(placement=Placement(version=2, drained=("a",))))
    assert sends(d.run(5_000.0), ev.Drain) == []
    undrain = ("a", ev.Drain(gpu="a", on=False))
    assert sends(d.step(DrainGpu("a", False)), ev.Drain) == [undrain]
    assert sends(d.run(120_000.0), ev.Drain) == [undrain] * 59


def test_names_that_meet_on_the_bus_conflict() -> None:
    registry = GatewayCore("gw", GatewaySettings()).registry
    registry.add(model("Llama-3.1"))
    assert registry.conflict(model("Llama-3.1")) == ""
    assert "Llama-3.1" in registry.conflict(model("llama-3-1"))
    assert "other values" in registry.conflict(model("Llama-3.1", "emulated"))
    assert registry.visible("llama-3.1", "default") is None


# ---- stop strings, energy of earlier attempts, and shares of the room


def test_a_stop_string_waits_for_the_report_and_no_longer() -> None:
    d = Driver(stop_report_ms=100.0)
    d.admit()
    d.step(tokens("a", 0, 1, 2))
    done = d.step(ClientGone("r", STOPPED))
    assert [message.reason for _, message in sends(done, ev.Abort)] == [STOPPED]
    assert only(done, Deliver) == [] and d.core.inflight == 1
    assert only(d.step(tokens("a", 2, 3)), Deliver) == []  # nobody's
    end = RequestEnd(finish_reason="stop", energy_j=3.0, energy_source="meter")
    done = d.step(tokens("a", 2, end=end))
    (last,) = only(done, Deliver)
    assert (last.token_ids, last.end) == ((), end) and d.core.inflight == 0
    (ended,) = [message for _, message in sends(done, ev.RequestEnded)]
    assert (ended.outcome, ended.energy_j, ended.output_tokens) == ("stop", 3.0, 2)
    assert only(d.run(200.0, beats=("a",)), Deliver) == []


def test_without_a_report_in_time_a_stopped_request_ends_without() -> None:
    d = Driver(stop_report_ms=100.0)
    d.admit()
    d.step(tokens("a", 0, 1))
    d.step(ClientGone("r", STOPPED))
    assert only(d.run(99.0, beats=("a",)), Deliver) == []
    (last,) = only(d.run(2.0, beats=("a",)), Deliver)
    assert last.end is not None and last.end.energy_j is None and "not report" in last.end.energy_source
    assert [m.reason for _, m in sends(d.step(tokens("a", 1, 2)), ev.Abort)] == ["not wanted any more"]


def test_a_stopped_request_is_not_started_again() -> None:
    d = Driver()
    d.admit()
    d.step(tokens("a", 0, 1))
    d.step(ClientGone("r", STOPPED))
    done = d.step(summary("a", seq=1, started_ms=1.0)) + d.step(summary("a", seq=1, started_ms=2.0))
    assert sends(done, ev.Dispatch) == [] and only(done, Deliver)[0].end is not None


def test_the_energy_of_a_failed_attempt_is_part_of_the_requests() -> None:
    d = Driver()
    d.admit()
    failed = RequestEnd(finish_reason="error", error="x", energy_j=2.0, energy_source="meter")
    d.step(tokens("a", 0, 1, end=failed))
    d.step(admitted("b", attempt=2))
    (last,) = only(d.step(tokens("b", 1, 2, attempt=2, end=STOP)), Deliver)
    assert last.end is not None and (last.end.energy_j, last.end.energy_source) == (9.0, "meter")


def test_what_a_lost_gpu_took_is_said_to_be_missing() -> None:
    d = Driver()
    d.step(summary("a", seq=1))
    d.admit()
    d.step(tokens("a", 0, 1))
    d.run(2000.0, beats=("b",))
    d.step(admitted("b", attempt=2))
    (last,) = only(d.step(tokens("b", 1, 2, attempt=2, end=STOP)), Deliver)
    assert last.end is not None and last.end.energy_j == 7.0
    assert last.end.energy_source == "meter; not counted: what a never reported"


def test_a_tenants_flood_leaves_room_for_others() -> None:
    d = Driver(max_inflight=16)
    fails = [d.step(Arrived(request(f"f{i}", tenant="flood"))) for i in range(20)]
    assert [bool(only(done, Fail)) for done in fails] == [False] * 14 + [True] * 6
    assert "its share" in only(fails[-1], Fail)[0].message
    for i in range(2):
        assert not only(d.step(Arrived(request(f"o{i}", tenant="other"))), Fail)
    assert "holds 16" in only(d.step(Arrived(request("o2", tenant="other"))), Fail)[0].message
    d.step(ClientGone("f0", "left"))
    assert only(d.step(Arrived(request("f21", tenant="flood"))), Fail)
    assert not only(d.step(Arrived(request("o3", tenant="other"))), Fail)


def test_what_is_refused_is_told_when_to_come_back() -> None:
    d = Driver(max_inflight=8, retry_after_s=5.0)
    for i in range(8):
        d.step(Arrived(request(f"r{i}", tenant="ab"[i % 2])))
    assert only(d.step(Arrived(request("x", tenant="a"))), Fail)[0].retry_after_s == 5.0  # nothing known yet
    for i in range(20):  # one ends each 2 s
        d.now_ms += 2000.0
        d.step(ClientGone(f"r{i}", "left"))
        d.step(Arrived(request(f"r{i + 8}", tenant="ab"[i % 2])))
    (fail,) = only(d.step(Arrived(request("y", tenant="a"))), Fail)
    assert fail.retry_after_s is not None and 1.8 < fail.retry_after_s < 2.3  # one too many
