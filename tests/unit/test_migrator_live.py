"""The migrator's steps for a request that runs: prepare, credit, stage, freeze; and each way they can end."""

from typing import Any

import pytest

from services.migrator.actions import ChunkSent, CloseStage, OpenStage, SendChunk, StageOpened
from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared import events as ev
from shared.model import Objectives, Request

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BLOCK = 1_000  # bytes; of 16 tokens


class Lab:
    """A migrator, and what it said last."""

    def __init__(self, request_id: str = "r1", host: str = "", **settings: Any) -> None:
        chosen = {"chunk_bytes": 4 * BLOCK, "network_bytes_s": 1e9, **settings}
        self.core = MigratorCore("host", MigratorSettings(weight_cache_bytes=0, **chosen))
        self.now_ms = 0.0
        self.said: list[ev.Action] = []
        move = ev.Move(
            move_id="mv",
            request_id=request_id,
            model="m",
            source="src",
            destination="dst",
            destination_host=host,
        )
        self.hear(move)

    def hear(self, event: ev.Message | ev.Event, after_ms: float = 1.0) -> list[ev.Action]:
        self.now_ms += after_ms
        self.said = self.core.step(self.now_ms, event)
        return self.said

    @property
    def sent(self) -> list[tuple[str, ev.Message]]:
        return [(a.to, a.message) for a in self.said if isinstance(a, ev.Send)]

    def order(self, kind: type[Any]) -> Any:
        (found,) = [m for _, m in self.sent if isinstance(m, kind)]
        return found

    def prepared(self, mode: str = "kv", context_tokens: int = 160, stage_bytes: int = 0) -> None:
        """Let the source say that the request runs, and how it is to move."""
        self.hear(ev.Released(move_id="mv", request=None, running=True))
        assert self.order(ev.Prepare).request_id == "r1"
        answer = ev.Prepared(
            move_id="mv",
            request_id="r1",
            mode=mode,
            context_tokens=context_tokens,
            kv_bytes=-(-context_tokens // 16) * BLOCK,
            block_tokens=16,
            block_stage_bytes=stage_bytes,
            traceparent=TRACE,
        )
        self.hear(answer)

    def granted(self, blocks: int) -> None:
        self.hear(ev.Granted(move_id="mv", credit_bytes=blocks * BLOCK))

    def staged(self, first: int, blocks: int, total: int) -> None:
        told = ev.KvStaged(
            move_id="mv", first_block=first, blocks=blocks, total_blocks=total, n_bytes=blocks * BLOCK
        )
        self.hear(told)

    def frozen(self, first: int = 0, blocks: int = 0, kv_tokens: int = 0) -> None:
        last = ev.KvStaged(
            move_id="mv",
            first_block=first,
            blocks=blocks,
            total_blocks=first + blocks,
            n_bytes=blocks * BLOCK,
            energy_j=0.5,
        )
        self.hear(ev.Released(move_id="mv", request=request(), kv_tokens=kv_tokens, staged=last))

    def commit(self) -> None:
        self.hear(ev.Adopted(move_id="mv"))
        assert self.sent == [("dst", ev.CommitMove(move_id="mv"))]
        self.hear(ev.Adopted(move_id="mv", started=True), after_ms=7.0)
        assert self.sent[0] == ("src", ev.CommitMove(move_id="mv"))

    @property
    def ended(self) -> list[tuple[str, str]]:
        return [(m.outcome, m.reason) for _, m in self.sent if isinstance(m, ev.MoveEnded)]


def request() -> Request:
    return Request(
        request_id="r1",
        attempt=1,
        gateway="gw",
        model="m",
        prompt_tokens=(1, 2, 3),
        output_tokens=(4,),
        max_tokens=10,
        objectives=Objectives(ttft_ms=250, tbt_ms=100),
        traceparent=TRACE,
    )


def test_kv_is_staged_within_credit_and_the_rest_after_a_freeze() -> None:
    lab = Lab()
    lab.prepared()  # ten blocks
    reserve = lab.order(ev.Reserve)
    assert reserve.partial and reserve.context_tokens == 176  # and one more
    lab.granted(3)
    assert (lab.order(ev.StageKv).first_block, lab.order(ev.StageKv).blocks) == (0, 3)  # less than a chunk
    lab.staged(0, 3, 10)
    assert lab.order(ev.Reserve).context_tokens + 1 == 12 * 16  # asked again: all, and room to grow
    lab.granted(3)
    assert lab.said == []  # nothing new
    lab.granted(12)
    assert (lab.order(ev.StageKv).first_block, lab.order(ev.StageKv).blocks) == (3, 4)
    lab.staged(3, 4, 10)
    freeze = lab.order(ev.Release)  # three blocks are less than a chunk
    assert freeze.freeze and (freeze.first_block, freeze.blocks) == (7, 5) and freeze.stage
    lab.frozen(7, 4, kv_tokens=163)
    adopt = lab.order(ev.Adopt)
    assert (adopt.stage, adopt.kv_tokens, adopt.source) == (freeze.stage, 163, "src")
    lab.commit()
    counts = {a.name: a.value for a in lab.said if isinstance(a, ev.Count)}
    assert counts["moved_kv_bytes"] == 11 * BLOCK and counts["move_freeze_ms"] == 9.0
    whole, *steps = [a for a in lab.said if isinstance(a, ev.Span)]
    assert whole.attributes["festina.bytes"] == 11 * BLOCK and whole.attributes["festina.copied_j"] == 0.5
    of = {step.name: step.attributes for step in steps}
    assert of["migrate.stage"] == {"festina.bytes": 7 * BLOCK, "festina.times": 2}
    assert of["migrate.freeze"]["festina.bytes"] == 4 * BLOCK
    assert lab.core.wake_ms is None  # an emulated engine needs no stage


def test_a_request_that_moves_by_its_tokens_is_frozen_once_there_is_memory_for_it() -> None:
    lab = Lab()
    lab.prepared("tokens")
    assert not lab.order(ev.Reserve).partial
    lab.granted(11)
    freeze = lab.order(ev.Release)
    assert freeze.freeze and freeze.stage == "" and freeze.blocks == 0
    lab.frozen()
    assert lab.order(ev.Adopt).kv_tokens == 0
    lab.commit()
    assert ev.Count(name="moved_requests", labels={"mode": "tokens"}) in lab.said


def test_a_request_with_little_left_to_copy_goes_on_until_there_is_credit_for_all_of_it() -> None:
    lab = Lab()
    lab.prepared()
    lab.granted(8)
    lab.staged(0, 4, 10)
    lab.staged(4, 4, 11)  # three blocks are left, and granted are none
    assert lab.order(ev.Reserve).context_tokens + 1 == 13 * 16
    lab.granted(11)
    assert lab.order(ev.Reserve).partial  # its next tokens may need one more
    lab.granted(12)
    assert lab.order(ev.Release).freeze


def test_a_request_that_had_better_stay_stays() -> None:
    lab = Lab()
    lab.hear(ev.Released(move_id="mv", request=None, running=True))
    lab.hear(ev.Prepared(move_id="mv", request_id="r1", mode="stay", reason="it ends sooner"))
    assert lab.ended == [("aborted", "it ends sooner")]


def test_a_stage_is_opened_and_closed_once_it_has_been_read() -> None:
    lab = Lab()
    lab.prepared(stage_bytes=900)
    (opening,) = lab.said
    assert isinstance(opening, OpenStage) and (opening.block_bytes, opening.blocks) == (900, 26)
    lab.hear(StageOpened("mv"))
    lab.granted(20)
    lab.staged(0, 4, 10)
    lab.staged(4, 4, 10)
    lab.frozen(8, 3, kv_tokens=170)
    lab.commit()
    assert CloseStage(opening.stage, "") not in lab.said
    assert lab.core.wake_ms == lab.now_ms + 30_000
    assert lab.hear(ev.KvLoaded(move_id="mv", tokens=170)) == [CloseStage(opening.stage, "")]
    assert lab.hear(ev.KvLoaded(move_id="mv", tokens=170)) == []


def test_a_stage_that_nobody_reads_is_closed_in_time() -> None:
    lab = Lab(import_timeout_ms=5_000)
    lab.prepared(context_tokens=40, stage_bytes=900)
    stage = lab.said[0].stage  # type: ignore[attr-defined]
    lab.hear(StageOpened("mv"))
    lab.granted(9)
    lab.frozen(0, 3, kv_tokens=41)
    lab.commit()
    assert lab.hear(ev.Tick(), 5_000) == [CloseStage(stage, "")]


def test_without_room_for_a_stage_the_tokens_move() -> None:
    lab = Lab()
    lab.prepared(stage_bytes=900)
    lab.hear(StageOpened("mv", reason="full"))
    lab.granted(11)
    assert lab.order(ev.Release).stage == ""


def test_kv_that_cannot_be_copied_is_left() -> None:
    lab = Lab()
    lab.prepared()
    lab.granted(11)
    lab.hear(ev.KvStaged(move_id="mv", reason="the engine cannot"))
    assert lab.order(ev.Release).stage == ""
    lab.frozen(0, 0, kv_tokens=64)
    assert lab.order(ev.Adopt).kv_tokens == 0


def test_between_hosts_each_chunk_is_sent_before_the_next_is_copied() -> None:
    lab = Lab(host="other")
    lab.prepared(stage_bytes=900)
    lab.hear(StageOpened("mv"))
    lab.granted(11)
    lab.staged(0, 4, 10)
    (chunk,) = lab.said
    assert isinstance(chunk, SendChunk) and (chunk.host, chunk.first_block, chunk.blocks) == ("other", 0, 4)
    lab.hear(ChunkSent("mv", n_bytes=4 * BLOCK, took_ms=1.0))
    assert lab.order(ev.StageKv).first_block == 4
    lab.staged(4, 4, 10)
    lab.hear(ChunkSent("mv", n_bytes=4 * BLOCK, took_ms=1.0))
    lab.frozen(8, 3, kv_tokens=170)
    assert isinstance(lab.said[0], SendChunk)
    lab.hear(ChunkSent("mv", reason="it is gone"))
    assert lab.order(ev.Adopt).kv_tokens == 0  # computed again there
    lab.commit()
    assert CloseStage(chunk.stage, "other") in lab.said


STAGES = ("prepare", "open", "credit", "stage", "freeze", "adopt", "commit")


def until(stage: str, **settings: Any) -> Lab:
    """Take a move as far as the step that awaits an answer."""
    lab = Lab(**settings)
    if stage == "prepare":
        lab.hear(ev.Released(move_id="mv", request=None, running=True))
        return lab
    steps = {
        "open": lambda: lab.prepared(stage_bytes=900),
        "credit": lambda: lab.hear(StageOpened("mv")),
        "stage": lambda: lab.granted(11),
        "freeze": lambda: (lab.staged(0, 4, 10), lab.staged(4, 4, 10)),
        "adopt": lambda: lab.frozen(8, 3, kv_tokens=170),
        "commit": lambda: lab.hear(ev.Adopted(move_id="mv")),
    }
    for name, step in steps.items():
        step()
        if name == stage:
            break
    return lab


@pytest.mark.parametrize("stage", STAGES)
def test_silence_at_any_step_goes_back_to_what_was(stage: str) -> None:
    lab = until(stage, credit_tries=1, commit_tries=1)
    lab.hear(ev.Tick(), 1_000)
    assert [to for to, m in lab.sent if isinstance(m, ev.AbortMove)] == ["dst", "src"]
    assert lab.ended == [("aborted", f"no answer to {stage}")]
    assert any(isinstance(a, CloseStage) for a in lab.said) == (stage != "prepare")
    assert lab.core.wake_ms is None


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_request_that_ends_meanwhile_ends_its_move(stage: str) -> None:
    lab = until(stage)
    lab.hear(ev.Released(move_id="mv", request=None))
    assert lab.ended == [("aborted", "ended or gone")]
    assert ("dst", ev.AbortMove(move_id="mv", reason="ended or gone")) in lab.sent


def test_while_there_is_no_memory_both_sides_are_kept_waiting() -> None:
    lab = Lab(credit_tries=2)
    lab.prepared()
    lab.hear(ev.Granted(move_id="mv", credit_bytes=0))
    assert lab.said == []
    lab.hear(ev.Tick(), 1_000)
    assert [(to, type(m)) for to, m in lab.sent] == [("dst", ev.Reserve), ("src", ev.Prepare)]
    lab.hear(ev.Tick(), 1_000)
    assert lab.ended == [("aborted", "no answer to credit")]


def test_all_of_a_model_are_moved_the_waiting_ones_first() -> None:
    lab = Lab("**")
    assert lab.order(ev.Release).request_id == "*"
    lab.hear(ev.Released(move_id="mv.1", request=None))
    prepare = lab.order(ev.Prepare)
    assert (prepare.move_id, prepare.request_id) == ("mv.2", "*")
    answer = ev.Prepared(
        move_id="mv.2", request_id="r1", mode="tokens", context_tokens=16, kv_bytes=BLOCK, block_tokens=16
    )
    lab.hear(answer)
    lab.hear(ev.Released(move_id="mv.2", request=None))  # it has ended: on to the next
    assert lab.order(ev.Prepare).move_id == "mv.3"
    lab.hear(ev.Prepared(move_id="mv.3", request_id="*", mode="stay"))
    assert lab.ended == [("committed", "0 moved")]
