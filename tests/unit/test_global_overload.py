"""The global scheduler with more work than it can place: who is told so, when, and for how long."""

from test_global_core import GIB, A, core, ended, only, place, sends, summary

from shared import events as ev
from shared.model import EngineSummary


def busy(gpu, seq, **queued_of):
    """A summary of a GPU where so many of each tenant wait."""
    engine = EngineSummary(
        model=A.name, state="ready", free_kv_bytes=GIB, queued=sum(queued_of.values()), queued_of=queued_of
    )
    return summary(gpu, seq, engine)


def served(made, per_s, until_s):
    """Let so many requests end per second."""
    for i in range(int(per_s * until_s)):
        made.step(1000.0 * i / per_s, ended("length", 10))


def test_a_request_that_cannot_start_in_time_is_told_so_at_once():
    made = core("g1", max_start_ms=10_000.0, stale_after_ms=1e9)
    served(made, per_s=2.0, until_s=40.0)
    made.step(40_000.0, busy("g1", 2, flood=30))
    _, rejected = only(place(made, 40_000.0, tenant="flood"), ev.Rejected)
    assert (rejected.status, rejected.code) == (429, "overloaded")
    assert 4.5 < rejected.retry_after_s < 5.5  # 30 wait, 20 start within 10 s, the other 10 take 5 s
    only(place(made, 40_000.0, request_id="r2", tenant="other"), ev.Submit)  # tenants take turns
    only(place(made, 40_000.0, request_id="r3", attempt=2, tenant="flood"), ev.Submit)  # it has begun


def test_while_the_pace_is_not_known_nobody_is_turned_away():
    made = core("g1", max_start_ms=10_000.0, stale_after_ms=1e9)
    made.step(0.0, busy("g1", 2, flood=300))
    only(place(made, 0.0, tenant="flood"), ev.Submit)


def test_full_queues_say_when_an_eighth_of_them_is_gone():
    made = core("g1", max_queued=40, max_start_ms=1e9, stale_after_ms=1e9)
    served(made, per_s=1.0, until_s=60.0)
    made.step(60_000.0, busy("g1", 2, flood=40))
    _, rejected = only(place(made, 60_000.0), ev.Rejected)
    assert rejected.code == "overloaded" and 4.5 < rejected.retry_after_s < 5.5


def test_the_last_places_of_the_waiting_room_are_for_others():
    made = core(max_pending=16)
    answers = [sends(place(made, request_id=f"f{i}", tenant="flood")) for i in range(16)]
    kinds = [[type(m) for _, m in answer if not isinstance(m, ev.ScaleOut)] for answer in answers]
    assert kinds == [[ev.Deferred]] * 14 + [[ev.Rejected]] * 2
    assert [type(m) for _, m in sends(place(made, request_id="o", tenant="other"))] == [ev.Deferred]


def test_tenants_take_turns_when_their_model_is_ready():
    made = core(max_queued=4)
    for i in range(4):
        place(made, request_id=f"f{i}", tenant="flood")
    for i in range(2):
        place(made, request_id=f"o{i}", tenant="other")
    placed = [m.request.request_id for _, m in sends(made.step(1.0, summary("g1")), ev.Submit)]
    assert placed == ["f0", "o0", "f1", "o1"]


def test_a_clients_own_fault_says_nothing_of_the_gpus():
    made = core("g1", deficit_requests=1.0, deficit_share=0.0)
    for i in range(20):
        _, rejected = only(place(made, request_id=f"r{i}", tokens=A.context_tokens), ev.Rejected)
        assert (rejected.status, rejected.retry_after_s) == (400, None)
    only(place(made, request_id="fine"), ev.Submit)
