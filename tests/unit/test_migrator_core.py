"""The migrator's protocol, step by step, and each way in which it can end."""

from typing import Any

import pytest

from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared import events as ev
from shared.errors import ConfigError
from shared.model import Objectives, Request

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request(request_id: str = "r1", **fields: Any) -> Request:
    return Request(
        request_id=request_id,
        attempt=1,
        gateway="gw",
        model="m",
        prompt_tokens=(1, 2, 3),
        output_tokens=(4,),
        max_tokens=10,
        objectives=Objectives(ttft_ms=250, tbt_ms=100),
        **fields,
    )


def move(move_id: str = "mv", request_id: str = "r1") -> ev.Move:
    return ev.Move(move_id=move_id, request_id=request_id, model="m", source="src", destination="dst")


def core(**settings: Any) -> MigratorCore:
    return MigratorCore("host", MigratorSettings(weight_cache_bytes=0, **settings))


def sent(actions: list[ev.Action]) -> list[tuple[str, ev.Message]]:
    return [(action.to, action.message) for action in actions if isinstance(action, ev.Send)]


def ended(actions: list[ev.Action]) -> list[tuple[str, str, str]]:
    found = [m for _, m in sent(actions) if isinstance(m, ev.MoveEnded)]
    return [(m.move_id, m.request_id, m.outcome) for m in found]


def until(migrator: MigratorCore, stage: str, step_id: str = "mv", **fields: Any) -> list[ev.Action]:
    """Answer each step until `stage` is the one that awaits its answer; return the last actions."""
    answers = [
        (
            "release",
            ev.Released(move_id=step_id, request=request(**fields), predicted_output_tokens=7, energy_j=3.5),
        ),
        ("reserve", ev.Granted(move_id=step_id, credit_bytes=100)),
        ("adopt", ev.Adopted(move_id=step_id)),
    ]
    actions: list[ev.Action] = []
    for now_ms, (name, answer) in enumerate(answers, start=1):
        if name == stage:
            break
        actions = migrator.step(float(now_ms), answer)
    return actions


def test_a_move_goes_through_every_step_and_the_destination_commits_first() -> None:
    migrator = core()
    release = ev.Release(move_id="mv", request_id="r1", migrator="host", model="m")
    assert sent(migrator.step(0, move())) == [("src", release)]
    reserve = ev.Reserve(move_id="mv", request_id="r1", model="m", migrator="host", context_tokens=4)
    assert sent(until(migrator, "reserve", traceparent=TRACE)) == [("dst", reserve)]
    adopt = ev.Adopt(
        move_id="mv",
        request=request(traceparent=TRACE),
        predicted_output_tokens=7,
        migrator="host",
        source="src",
        energy_j=3.5,
    )
    assert sent(migrator.step(2, ev.Granted(move_id="mv", credit_bytes=100))) == [("dst", adopt)]
    commit = ev.CommitMove(move_id="mv")
    assert sent(migrator.step(3, ev.Adopted(move_id="mv"))) == [("dst", commit)]
    actions = migrator.step(4, ev.Adopted(move_id="mv", started=True))
    report = ev.MoveEnded(move_id="mv", request_id="r1", outcome="committed")
    assert sent(actions) == [("src", commit), ("host", report)]
    span = next(action for action in actions if isinstance(action, ev.Span))
    assert (span.name, span.traceparent, span.start_ms, span.end_ms, span.error) == (
        "migrate",
        TRACE,
        0,
        4,
        "",
    )
    assert span.attributes == {
        "festina.request_id": "r1",
        "festina.source": "src",
        "festina.destination": "dst",
        "festina.mode": "waiting",
        "festina.bytes": 0,
        "festina.kv_tokens": 0,
        "festina.copied_j": 0.0,
        "festina.freeze_ms": 0.0,
        "festina.stage": "commit",
    }
    steps = [action for action in actions if isinstance(action, ev.Span)][1:]
    assert [step.name for step in steps] == [
        f"migrate.{n}" for n in ("release", "reserve", "adopt", "commit")
    ]
    assert [(step.start_ms, step.end_ms) for step in steps] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(step.traceparent.split("-")[2] == span.span_id for step in steps)
    assert ev.Count(name="moves_ended", labels={"outcome": "committed", "stage": "commit"}) in actions
    assert migrator.wake_ms is None


@pytest.mark.parametrize("stage", ["release", "reserve", "adopt"])
def test_silence_at_any_step_aborts_both_sides(stage: str) -> None:
    migrator = core(step_timeout_ms=100)
    migrator.step(0, move())
    until(migrator, stage, traceparent=TRACE)
    due_ms = migrator.wake_ms
    assert due_ms is not None
    assert migrator.step(due_ms - 0.5, ev.Tick()) == []
    actions = migrator.step(due_ms, ev.Tick())
    aborts = [(to, m.move_id) for to, m in sent(actions) if isinstance(m, ev.AbortMove)]
    assert aborts == [("dst", "mv"), ("src", "mv")]
    assert ended(actions) == [("mv", "r1", "aborted")]
    spans = [action for action in actions if isinstance(action, ev.Span) and action.name == "migrate"]
    assert [span.error for span in spans] == ([] if stage == "release" else [f"no answer to {stage}"])


def test_an_unconfirmed_commit_is_repeated_and_never_told_to_the_source() -> None:
    migrator = core(step_timeout_ms=100, commit_tries=2)
    migrator.step(0, move())
    until(migrator, "commit")
    assert migrator.wake_ms == 103
    assert sent(migrator.step(103, ev.Tick())) == [("dst", ev.CommitMove(move_id="mv"))]
    actions = migrator.step(203, ev.Tick())
    assert [type(m) for _, m in sent(actions)] == [ev.AbortMove, ev.AbortMove, ev.MoveEnded]
    assert migrator.step(204, ev.Adopted(move_id="mv", started=True)) == []


def test_a_commit_names_how_often_the_request_had_moved() -> None:
    migrator = core()
    migrator.step(0, move())
    until(migrator, "commit", moves=3)
    actions = migrator.step(4, ev.Adopted(move_id="mv", started=True))
    assert sent(actions)[0] == ("src", ev.CommitMove(move_id="mv", moves=3))


def test_no_credit_aborts_with_the_destinations_reason() -> None:
    migrator = core()
    migrator.step(0, move())
    until(migrator, "reserve")
    actions = migrator.step(2, ev.Granted(move_id="mv", credit_bytes=0, reason="full"))
    order = ev.AbortMove(move_id="mv", reason="full")
    report = ev.MoveEnded(move_id="mv", request_id="r1", outcome="aborted", reason="full")
    assert sent(actions) == [("dst", order), ("src", order), ("host", report)]


def test_a_request_that_has_started_stays_where_it_is() -> None:
    migrator = core()
    migrator.step(0, move())
    actions = migrator.step(1, ev.Released(move_id="mv", request=None))
    report = ev.MoveEnded(move_id="mv", request_id="r1", outcome="aborted", reason="started or gone")
    assert sent(actions) == [("host", report)]


def test_repeats_and_answers_out_of_turn_change_nothing() -> None:
    migrator = core()
    migrator.step(0, move())
    assert migrator.step(0, move()) == []
    assert migrator.step(1, ev.Adopted(move_id="mv")) == []
    assert migrator.step(1, ev.Granted(move_id="mv", credit_bytes=1)) == []
    assert migrator.step(1, ev.Released(move_id="other", request=request())) == []
    until(migrator, "commit")
    assert migrator.step(5, ev.Adopted(move_id="mv")) == []
    migrator.step(6, ev.Adopted(move_id="mv", started=True))
    assert migrator.step(7, ev.Adopted(move_id="mv", started=True)) == []
    assert migrator.step(8, move()) == []


def test_a_series_takes_one_request_after_the_other_until_none_is_left() -> None:
    migrator = core()
    first = migrator.step(0, move(request_id="*"))
    assert sent(first) == [("src", ev.Release(move_id="mv.1", request_id="*", migrator="host", model="m"))]
    until(migrator, "commit", "mv.1")
    actions = migrator.step(4, ev.Adopted(move_id="mv.1", started=True))
    assert ended(actions) == [("mv.1", "r1", "committed")]
    following = ev.Release(move_id="mv.2", request_id="*", migrator="host", model="m")
    assert sent(actions)[-1] == ("src", following)
    actions = migrator.step(5, ev.Released(move_id="mv.2", request=None))
    report = ev.MoveEnded(move_id="mv", request_id="*", outcome="committed", reason="1 moved")
    assert sent(actions) == [("host", report)]


def test_an_abort_ends_a_series() -> None:
    migrator = core()
    migrator.step(0, move(request_id="*"))
    until(migrator, "reserve", "mv.1")
    actions = migrator.step(2, ev.Granted(move_id="mv.1", credit_bytes=0))
    assert ended(actions) == [("mv.1", "r1", "aborted"), ("mv", "*", "aborted")]
    assert migrator.wake_ms is None


def test_a_series_does_not_move_one_request_for_ever() -> None:
    migrator = core()
    migrator.step(0, move(request_id="*"))
    until(migrator, "commit", "mv.1")
    migrator.step(4, ev.Adopted(move_id="mv.1", started=True))
    actions = migrator.step(5, ev.Released(move_id="mv.2", request=request("r1")))
    assert ended(actions)[-1] == ("mv", "*", "aborted")


def test_moves_beyond_the_bounds_wait_or_are_refused() -> None:
    migrator = core(max_moves=1, max_waiting=1)
    assert len(sent(migrator.step(0, move("a")))) == 1
    assert migrator.step(0, move("b")) == []
    assert ended(migrator.step(0, move("c"))) == [("c", "r1", "aborted")]
    actions = migrator.step(1, ev.Released(move_id="a", request=None))
    assert ended(actions) == [("a", "r1", "aborted")]
    assert sent(actions)[-1][1] == ev.Release(move_id="b", request_id="r1", migrator="host", model="m")


def test_a_lost_bus_accuses_nobody_and_its_return_aborts_what_was_under_way() -> None:
    migrator = core(step_timeout_ms=100)
    migrator.step(0, move())
    assert migrator.step(10, ev.BusLost()) == []
    assert migrator.wake_ms is None
    assert migrator.step(500, ev.Tick()) == []
    assert ended(migrator.step(600, ev.BusRestored())) == [("mv", "r1", "aborted")]


def test_settings_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_moves"):
        MigratorSettings(max_moves=0)
