"""KV of an emulated engine, out to stages and in from them: blocks, tokens, time, energy."""

import dataclasses

import pytest
from msgspec.structs import replace

from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice
from shared import engine as en
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.events import Event
from shared.model import Objectives, Plan, Request
from shared.silicon import transfer_ms

H100 = DEVICES["h100-80gb"]
MODEL = emulated_models(1)[0]
VOCAB = VocabSlice(token_ids=tuple(range(1000, 1256)), eos_id=2)
TOKEN_BYTES = MODEL.kv_bytes_per_token


def request(name: str = "r1", prompt: int = 100, output: tuple[int, ...] = ()) -> Request:
    return Request(
        request_id=name,
        attempt=1,
        gateway="g",
        model=MODEL.name,
        prompt_tokens=tuple(range(prompt)),
        output_tokens=output,
        max_tokens=60,
        objectives=Objectives(ttft_ms=400.0, tbt_ms=100.0),
        sampling={"ignore_eos": True},
    )


class Lab:
    """A device with one engine, and what it has reported."""

    def __init__(self, **more: int) -> None:
        self.gpu = EmulatedGpu(H100, vocab=VOCAB, control_delay_ms=0.0, **more)
        self.now_ms = 0.0
        self.gpu.advance(0.0)
        self.do(en.LoadEngine(model=MODEL))
        self.until(en.EngineReady)

    def do(self, *orders: en.Order) -> None:
        for order in orders:
            self.gpu.order(self.now_ms, order)

    def until(self, kind: type[Event], most: int = 300) -> list[Event]:
        """Let it run until something of this kind happens; return all that has."""
        events: list[Event] = []
        while not any(isinstance(event, kind) for event in events):
            assert self.gpu.wake_ms is not None and most, f"no {kind.__name__}"
            most -= 1
            self.now_ms = max(self.now_ms, self.gpu.wake_ms)
            events += self.gpu.advance(self.now_ms)
        return events

    def tokens(self, count: int) -> list[int]:
        made: list[int] = []
        while len(made) < count:
            for event in self.until(en.StepDone):
                if isinstance(event, en.StepDone):
                    made += [token for output in event.outputs for token in output.token_ids]
        return made


def export(first_block: int = 0, blocks: int = 100, stage: str = "s", run: str = "r1") -> en.ExportKv:
    return en.ExportKv(
        model=MODEL.name, request_id=run, move_id="m", first_block=first_block, blocks=blocks, stage=stage
    )


def hold(*runs: str) -> en.SetPlan:
    return en.SetPlan(model=MODEL.name, plan=Plan(plan_id=2, held=frozenset(runs)))


def exported(events: list[Event]) -> en.KvExported:
    (found,) = [event for event in events if isinstance(event, en.KvExported)]
    return found


def test_full_blocks_are_copied_while_the_request_goes_on() -> None:
    lab = Lab()
    lab.do(en.RunRequest(model=MODEL.name, request=request()))
    lab.tokens(1)  # 100 tokens of KV: six full blocks, and four tokens in the seventh
    before_j = lab.gpu.overhead_energy_j
    lab.do(export(1, 100))
    told = exported(lab.until(en.KvExported))
    assert (told.first_block, told.blocks, told.total_blocks, told.tokens) == (1, 5, 7, 96)
    assert told.n_bytes == 80 * TOKEN_BYTES and told.reason == ""
    assert told.took_ms == pytest.approx(float(transfer_ms(H100, told.n_bytes, "pcie")))
    assert told.energy_j == pytest.approx(H100.w_per_tb_per_s * told.n_bytes / 1e12)
    assert lab.gpu.overhead_energy_j - before_j == pytest.approx(told.energy_j)
    assert lab.tokens(3)


@pytest.mark.parametrize("report_steps", [1, 32])
def test_a_held_request_is_copied_whole_after_all_it_has_made_was_told(report_steps: int) -> None:
    lab = Lab(report_steps=report_steps)
    lab.do(en.RunRequest(model=MODEL.name, request=request()))
    made = len(lab.tokens(5))
    lab.now_ms += 20.0  # in the middle of a step
    for event in lab.gpu.advance(lab.now_ms):
        if isinstance(event, en.StepDone):
            made += len(event.outputs[0].token_ids)
    lab.do(hold("r1"), export(3))
    events = lab.until(en.KvExported)
    assert isinstance(events[-1], en.KvExported)
    for event in events[:-1]:
        assert isinstance(event, en.StepDone)
        made += sum(len(output.token_ids) for output in event.outputs)
    told = exported(events)
    assert told.tokens == 100 + made - 1  # the last token's KV is not computed yet
    assert told.blocks == told.total_blocks - 3 == -(-told.tokens // 16) - 3
    assert lab.gpu.wake_ms is None  # it stands still
    lab.do(hold())
    assert lab.tokens(1)


def test_without_a_stage_a_copy_only_waits_for_the_hold() -> None:
    lab = Lab()
    lab.do(en.RunRequest(model=MODEL.name, request=request()))
    lab.tokens(2)
    lab.do(hold("r1"), export(0, 0, ""))
    told = exported(lab.until(en.KvExported))
    assert (told.blocks, told.tokens, told.n_bytes, told.took_ms) == (0, 0, 0, 0.0)


def test_what_is_not_there_is_answered_too_and_in_order() -> None:
    lab = Lab()
    lab.do(en.RunRequest(model=MODEL.name, request=request()))
    lab.tokens(1)
    lab.do(export(0, 2), export(0, 2, run="nobody"), en.StopRequest(model=MODEL.name, request_id="r1"))
    told = [event for event in lab.until(en.KvExported) if isinstance(event, en.KvExported)]
    while len(told) < 2:
        told += [event for event in lab.until(en.KvExported) if isinstance(event, en.KvExported)]
    assert [bool(each.reason) for each in told] == [True, True] and lab.gpu.used_bytes == MODEL.weight_bytes


def test_a_request_that_brings_its_kv_goes_on_where_it_was() -> None:
    here, there = Lab(), Lab()
    here.do(en.RunRequest(model=MODEL.name, request=request()))
    so_far = here.tokens(10)
    moved = request(output=tuple(so_far))
    there.do(en.RunRequest(model=MODEL.name, request=moved, stage="s", kv_tokens=109))
    started_ms = there.now_ms
    events = there.until(en.KvImported)
    (taken,) = [event for event in events if isinstance(event, en.KvImported)]
    assert len(events) == 1 and (taken.tokens, taken.reason) == (109, "")
    assert there.now_ms - started_ms == pytest.approx(float(transfer_ms(H100, 109 * TOKEN_BYTES, "pcie")))
    (done,) = [event for event in there.until(en.StepDone) if isinstance(event, en.StepDone)]
    assert done.outputs[0].prefilled_tokens == 1
    assert list(done.outputs[0].token_ids) == here.tokens(1)
    assert (
        there.gpu.request_energy_j + there.gpu.overhead_energy_j + there.gpu.idle_energy_j
        == pytest.approx(there.gpu.energy_j)
    )


def test_kv_that_finds_no_memory_is_computed_again() -> None:
    lab = Lab()
    tokens = (H100.total_bytes - MODEL.weight_bytes) // TOKEN_BYTES
    big = request(prompt=tokens + 100)
    lab.do(en.RunRequest(model=MODEL.name, request=big, stage="s", kv_tokens=tokens + 50))
    (told,) = [event for event in lab.until(en.KvImported) if isinstance(event, en.KvImported)]
    assert told.tokens == 0 and "memory" in told.reason


# ---- of evicted requests


def evict(blocks: int, run: str = "r1") -> tuple[en.Order, en.Order]:
    """What a scheduler orders: the KV into a stage of the engine's own, and the request out of it."""
    out = replace(export(blocks=blocks, stage=run, run=run), move_id="", room_blocks=blocks)
    return out, en.StopRequest(model=MODEL.name, request_id=run)


def come_back(kv_tokens: int, output: tuple[int, ...] = (), prompt: int = 100) -> en.RunRequest:
    back = request("r1~2", prompt=prompt, output=output)
    return en.RunRequest(model=MODEL.name, request=back, stage="r1", kv_tokens=kv_tokens, own_stage=True)


def imported(events: list[Event]) -> en.KvImported:
    (found,) = [event for event in events if isinstance(event, en.KvImported)]
    return found


def test_an_evicted_request_keeps_its_memory_until_its_kv_is_copied_and_comes_back_with_it() -> None:
    lab = Lab()
    lab.do(en.RunRequest(model=MODEL.name, request=request()))
    made = lab.tokens(20)
    engine = lab.gpu.engines[MODEL.name]
    lab.do(*evict(blocks=7))
    lab.gpu.advance(lab.now_ms)
    assert not engine.sequences and engine.blocks == engine.copies.leaving_blocks == 8
    began_ms = lab.now_ms
    report = exported(lab.until(en.KvExported))
    assert (report.move_id, report.blocks, report.tokens, report.reason) == ("", 7, 112, "")
    assert lab.now_ms - began_ms == pytest.approx(transfer_ms(H100, 112 * TOKEN_BYTES, "pcie"))
    assert engine.blocks == engine.copies.leaving_blocks == 0 and engine.copies.kept == {"r1": 112}
    lab.do(come_back(112, tuple(made)))
    taken = imported(lab.until(en.KvImported))
    assert (taken.tokens, taken.own_stage, taken.reason) == (112, True, "") and engine.copies.kept == {}
    assert engine.sequences["r1~2"].computed_tokens == 112 and len(lab.tokens(1)) == 1


def test_memory_that_is_still_leaving_is_waited_for_by_kv_that_comes_in() -> None:
    lab = Lab()
    lab.do(en.RunRequest(model=MODEL.name, request=request(prompt=3_000)))
    lab.tokens(2)
    device = lab.gpu.device
    room_bytes = 16 * 16 * TOKEN_BYTES
    lab.gpu.device = dataclasses.replace(device, total_bytes=lab.gpu.used_bytes + room_bytes)
    lab.do(*evict(blocks=187))
    lab.do(come_back(2_992, (1, 2), prompt=3_000))
    assert imported(lab.until(en.KvImported)).tokens == 2_992


def test_a_stage_that_is_dropped_or_was_never_made_is_not_there() -> None:
    lab = Lab()
    lab.do(en.RunRequest(model=MODEL.name, request=request()))
    lab.tokens(20)
    lab.do(*evict(blocks=7), en.FreeStage(model=MODEL.name, stage="r1"))
    lab.until(en.KvExported)
    assert lab.gpu.engines[MODEL.name].copies.kept == {}
    lab.do(*evict(blocks=7))  # of a request that is gone already
    assert exported(lab.until(en.KvExported)).reason == "the request is not here"
    lab.do(come_back(112))
    none = imported(lab.until(en.KvImported))
    assert none.tokens == 0 and "no such stage" in none.reason
    assert len(lab.tokens(1)) == 1  # it is computed
