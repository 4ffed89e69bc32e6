"""The emulated GPU against arithmetic on the device model, and its real-time shell."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from services.local_sched.clocks import snapped
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.engine_emulated import EmulatedEngines
from services.local_sched.made_up import Answer, VocabSlice, answer, output_length
from shared.devices import DEVICES
from shared.engine import (
    ClockApplied,
    EngineEnded,
    EngineReady,
    LoadEngine,
    Order,
    OutOfMemory,
    RunRequest,
    SetClock,
    SetPlan,
    StepDone,
    StopRequest,
    UnloadEngine,
)
from shared.errors import ConfigError
from shared.events import Event
from shared.model import ModelSpec, Objectives, Plan, Request
from shared.silicon import (
    capped_clock_mhz,
    contention,
    load_ms,
    power_w,
    rates,
    step_alone,
    step_ms,
    step_work,
)

H100 = DEVICES["h100-80gb"]
VOCAB = VocabSlice(tuple(range(100, 200)), eos_id=2)
KV_BYTES = 2 * 28 * 8 * 128 * 2
BLOCK_BYTES = KV_BYTES * H100.block_tokens


def spec(name: str = "a", weight_bytes: int = 6_000_000_000, **changes: Any) -> ModelSpec:
    shape = {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128}
    return ModelSpec(
        name=name,
        engine="emulated",
        params=weight_bytes // 2,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=KV_BYTES,
        **shape | changes,
    )


def request(
    request_id: str = "r", prompt: int = 100, max_tokens: int = 4, model: str = "a", **changes: Any
) -> RunRequest:
    sampling = {"ignore_eos": True} | changes.pop("sampling", {})
    taken = Request(
        request_id=request_id,
        attempt=1,
        gateway="g",
        model=model,
        prompt_tokens=tuple(range(prompt)),
        max_tokens=max_tokens,
        objectives=Objectives(ttft_ms=250.0, tbt_ms=100.0),
        sampling=sampling,
        **changes,
    )
    return RunRequest(model=model, request=taken)


def gpu_with(*models: ModelSpec, device: Any = H100, **settings: Any) -> EmulatedGpu:
    """A device on which these models are loaded, at 10,000 ms."""
    gpu = EmulatedGpu(device, vocab=VOCAB, **settings)
    for model in models:
        gpu.order(0.0, LoadEngine(model=model))
    gpu.advance(10_000.0)
    return gpu


def give(gpu: EmulatedGpu, now_ms: float, *orders: Order) -> None:
    for order in orders:
        gpu.order(now_ms, order)


def timed(gpu: EmulatedGpu, until_ms: float = 100_000.0) -> list[tuple[float, Event]]:
    """Run the device event by event; return what happened with the times."""
    happened: list[tuple[float, Event]] = []
    while (wake_ms := gpu.wake_ms) is not None and wake_ms <= until_ms:
        happened += [(wake_ms, event) for event in gpu.advance(wake_ms)]
    gpu.advance(until_ms)
    return happened


def tokens_of(events: list[Any], request_id: str) -> tuple[int, ...]:
    steps = [event for event in events if isinstance(event, StepDone)]
    return tuple(
        t for step in steps for out in step.outputs if out.request_id == request_id for t in out.token_ids
    )


def test_one_request_takes_the_time_and_energy_of_its_steps() -> None:
    gpu = gpu_with(spec())
    give(gpu, 10_000.0, request(prompt=100, max_tokens=4))
    happened = timed(gpu, 20_000.0)

    prefill = step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=100)
    decodes = [step_work(H100, spec(), decode_batch=1, decode_context_tokens=n) for n in (101, 102, 103)]
    end_ms, total_j = 10_003.0, 0.0
    assert len(happened) == 4
    for (at_ms, step), work in zip(happened, [prefill, *decodes], strict=True):
        ms, watts, _ = step_alone(H100, work, 1980, 1.0)
        end_ms += ms
        total_j += watts * ms / 1000
        assert isinstance(step, StepDone)
        assert at_ms == pytest.approx(end_ms, abs=1e-6)
        assert step.duration_ms == pytest.approx(ms, abs=1e-6)
        assert step.outputs[0].energy_j == pytest.approx(watts * ms / 1000)
    outputs = [step.outputs[0] for _, step in happened if isinstance(step, StepDone)]
    assert [out.prefilled_tokens for out in outputs] == [100, 0, 0, 0]
    assert [len(out.token_ids) for out in outputs] == [1, 1, 1, 1]
    assert [out.finish_reason for out in outputs] == ["", "", "", "length"]
    assert gpu.request_energy_j == pytest.approx(total_j)
    assert gpu.used_bytes == spec().weight_bytes


def test_a_decode_step_by_hand() -> None:
    """6 GB at 2.82e9 B/ms and 2 * 3e9 FLOP at 824e9 * 1980/1830 FLOP/ms, KV of 101 tokens, 28 layers."""
    gpu = gpu_with(spec())
    give(gpu, 10_000.0, request(prompt=100, max_tokens=2))
    decode = timed(gpu)[-1][1]
    assert isinstance(decode, StepDone)
    weights_ms, matmul_ms = 6e9 / 2.82e9, 6e9 / (824e9 * 1980 / 1830)
    hand_ms = (weights_ms**2.2 + matmul_ms**2.2) ** (1 / 2.2) + 101 * KV_BYTES / 2.85e9 + 28 * 0.027 + 1.0
    tb_per_s = (6e9 + 101 * KV_BYTES) / hand_ms / 1e9
    tflop_per_s = 6e9 / hand_ms / 1e9
    assert decode.duration_ms == pytest.approx(hand_ms, abs=1e-6)
    hand_w = 70 + 268 + 55.5 * tb_per_s + 1.14 * tflop_per_s
    assert decode.outputs[0].energy_j == pytest.approx(hand_w * hand_ms / 1000)


def test_states_and_idle_energy() -> None:
    gpu = EmulatedGpu(H100, vocab=VOCAB)
    assert gpu.advance(0.0) == []
    gpu.advance(1000.0)
    assert gpu.state == "sleeping"
    assert gpu.idle_energy_j == pytest.approx(110.0)
    gpu.order(1000.0, LoadEngine(model=spec()))
    loading_ms = load_ms(H100, spec().weight_bytes)
    gpu.advance(1003.0)
    assert gpu.state == "active"
    assert gpu.used_bytes == spec().weight_bytes
    assert gpu.wake_ms == pytest.approx(1003.0 + loading_ms)
    assert gpu.advance(1003.0 + loading_ms) == [
        EngineReady(
            model="a",
            kv_pool_bytes=H100.total_bytes - spec().weight_bytes,
            block_tokens=16,
            load_ms=loading_ms,
        )
    ]
    gpu.advance(2003.0 + loading_ms)
    sample = gpu.sample(2003.0 + loading_ms)
    assert (sample.state, sample.power_w) == ("warm", 110.0)
    assert gpu.overhead_energy_j == pytest.approx(0.110 * loading_ms)
    assert gpu.idle_energy_j == pytest.approx(110.0 + 0.003 * 110 + 110.0)
    assert sample.energy_j == pytest.approx(gpu.overhead_energy_j + gpu.idle_energy_j)


def test_two_engines_slow_each_other_down_while_they_overlap() -> None:
    gpu = gpu_with(spec("a"), spec("b"))
    for name, pct in (("a", 40), ("b", 60)):
        give(gpu, 10_000.0, SetPlan(model=name, plan=Plan(plan_id=1, sm_share_pct=pct)))
    give(gpu, 10_000.0, request("ra", prompt=4000, max_tokens=1))
    gpu.advance(10_010.0)
    give(gpu, 10_010.0, request("rb", prompt=1000, max_tokens=1, model="b"))
    happened = timed(gpu)

    work_a = step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=4000)
    work_b = step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=1000)
    alone_a_ms, alone_a_w, _ = step_alone(H100, work_a, 1980, 0.4)
    scales = contention(H100, [0.4, 0.6])

    def together(clock_mhz: int) -> tuple[float, float, float, float]:
        a_ms = step_ms(H100, work_a, clock_mhz, 0.4, *scales)
        b_ms = step_ms(H100, work_b, clock_mhz, 0.6, *scales)
        read, done = (x + y for x, y in zip(rates(work_a, a_ms), rates(work_b, b_ms), strict=True))
        return a_ms, b_ms, read, done

    clock_mhz = 1980
    for _ in range(2):  # the second time at the rates of the clock that the first found
        a_ms, b_ms, read, done = together(clock_mhz)
        clock_mhz = capped_clock_mhz(H100, clock_mhz, 1.0, read, done)
    a_ms, b_ms, read, done = together(clock_mhz)
    assert a_ms > alone_a_ms
    b_end_ms = 10_013.0 + b_ms
    left = 1 - 10.0 / alone_a_ms - b_ms / a_ms  # of a's step, when b's ends
    a_end_ms = b_end_ms + left * alone_a_ms
    assert [event.model for _, event in happened if isinstance(event, StepDone)] == ["b", "a"]
    assert [at_ms for at_ms, _ in happened] == pytest.approx([b_end_ms, a_end_ms], abs=1e-6)
    both_w = power_w(H100, clock_mhz, 1.0, read, done)
    total_j = (alone_a_w * (alone_a_ms * left + 10.0) + both_w * b_ms) / 1000
    assert gpu.request_energy_j == pytest.approx(total_j)
    tb_a, tb_b = rates(work_a, a_ms)[0], rates(work_b, b_ms)[0]
    b_w = 110 * 0.6 + (both_w - 110) * (0.6 + tb_b / (tb_a + tb_b)) / 2
    b_step = happened[0][1]
    assert isinstance(b_step, StepDone)
    assert b_step.outputs[0].energy_j == pytest.approx(b_w * b_ms / 1000)


def test_the_power_cap_lowers_the_clock() -> None:
    """A long prefill on the whole device would draw more than the device may, and so takes longer."""
    gpu = gpu_with(spec())
    give(gpu, 10_000.0, request(prompt=8000, max_tokens=1))
    gpu.advance(10_010.0)
    assert 600.0 < gpu.sample(10_010.0).power_w <= 690.0  # type: ignore[operator]
    work = step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=8000)
    step = timed(gpu)[0][1]
    assert isinstance(step, StepDone)
    assert step.duration_ms > 1.01 * step_ms(H100, work, 1980, 1.0)


def test_shares_above_the_whole_are_scaled_to_it() -> None:
    def run(pct: int) -> list[tuple[float, Event]]:
        gpu = gpu_with(spec("a"), spec("b"))
        for name in "ab":
            give(gpu, 10_000.0, SetPlan(model=name, plan=Plan(plan_id=1, sm_share_pct=pct)))
            give(gpu, 10_000.0, request(name, model=name))
        return timed(gpu)

    assert run(100) == run(50)


def test_prompts_share_a_chunk_oldest_first_beside_decodes() -> None:
    gpu = gpu_with(spec())
    give(gpu, 10_000.0, SetPlan(model="a", plan=Plan(plan_id=7, chunk_tokens=100)))
    give(
        gpu,
        10_000.0,
        *(request(name, prompt=n, max_tokens=2) for name, n in (("x", 30), ("y", 90), ("z", 50))),
    )
    steps = [event for _, event in timed(gpu) if isinstance(event, StepDone)]
    seen = [
        {out.request_id: (out.prefilled_tokens, len(out.token_ids)) for out in step.outputs} for step in steps
    ]
    assert seen == [
        {"x": (30, 1), "y": (70, 0)},
        {"x": (0, 1), "y": (20, 1), "z": (50, 1)},
        {"y": (0, 1), "z": (0, 1)},
    ]
    assert {step.plan_id for step in steps} == {7}
    parts = [
        step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=n) for n in (30, 70)
    ]
    whole = step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=100)
    first = replace(whole, attn_flops=sum(part.attn_flops for part in parts))
    assert steps[0].duration_ms == pytest.approx(step_alone(H100, first, 1980, 1.0)[0], abs=1e-6)


def test_prompts_take_turns_in_the_order_of_the_plan_and_others_come_after() -> None:
    gpu = gpu_with(spec())
    prompts = (request(name, prompt=n, max_tokens=1) for name, n in (("x", 150), ("y", 30), ("z", 50)))
    give(gpu, 10_000.0, SetPlan(model="a", plan=Plan(plan_id=7, chunk_tokens=100)), *prompts)
    gpu.advance(10_001.0)
    order = Plan(plan_id=8, order=("z",), chunk_tokens=100)
    give(gpu, 10_001.0, SetPlan(model="a", plan=order))
    steps = [event for _, event in timed(gpu) if isinstance(event, StepDone)]
    assert [{out.request_id: out.prefilled_tokens for out in step.outputs} for step in steps] == [
        {"x": 100},
        {"z": 50, "x": 50},  # what is half computed makes way, and y came after x
        {"y": 30},
    ]


def test_energy_of_a_step_is_split_by_tokens_and_bytes() -> None:
    gpu = gpu_with(spec())
    give(gpu, 10_000.0, request("x", prompt=100, max_tokens=1), request("y", prompt=300, max_tokens=1))
    step = timed(gpu)[0][1]
    assert isinstance(step, StepDone)
    x_j, y_j = (out.energy_j or 0.0 for out in step.outputs)
    x_bytes, y_bytes = 3e9 + 100 * KV_BYTES, 3e9 + 300 * KV_BYTES
    assert x_j / (x_j + y_j) == pytest.approx((0.25 + x_bytes / (x_bytes + y_bytes)) / 2)
    assert x_j + y_j == pytest.approx(gpu.request_energy_j)


def test_orders_take_the_control_delay_and_plans_wait_for_the_step_to_end() -> None:
    gpu = gpu_with(spec(), control_delay_ms=2.0)
    give(gpu, 10_000.0, request(prompt=4000, max_tokens=2))
    assert gpu.wake_ms == 10_002.0
    gpu.advance(10_005.0)
    give(gpu, 10_005.0, SetPlan(model="a", plan=Plan(plan_id=5, sm_share_pct=50)))
    prefill, decode = (event for _, event in timed(gpu))
    assert isinstance(prefill, StepDone) and isinstance(decode, StepDone)
    assert (prefill.plan_id, decode.plan_id) == (0, 5)
    work = step_work(H100, spec(), decode_batch=1, decode_context_tokens=4001)
    assert decode.duration_ms == pytest.approx(step_alone(H100, work, 1980, 0.5)[0], abs=1e-6)


def test_decode_steps_keep_the_interval_of_the_plan_and_prompts_do_not_wait_for_it() -> None:
    gpu = gpu_with(spec())
    paced = SetPlan(model="a", plan=Plan(plan_id=1, step_interval_ms=50.0))
    give(gpu, 10_000.0, paced, request(max_tokens=6))
    happened = [(10_003.0, None), *timed(gpu, 10_120.0)]  # a prompt, and decodes from 10,053 and 10,103 on
    assert len(happened) == 4
    starts = [at_ms - event.duration_ms for at_ms, event in happened[1:] if isinstance(event, StepDone)]
    assert starts == pytest.approx([10_003.0, 10_053.0, 10_103.0])
    give(gpu, 10_120.0, request("other", max_tokens=2))
    together, alone, *rest = timed(gpu, 10_400.0)
    starts = [at_ms - event.duration_ms for at_ms, event in (together, alone) if isinstance(event, StepDone)]
    assert starts == pytest.approx([10_123.0, 10_173.0])
    assert isinstance(together[1], StepDone) and len(together[1].outputs) == 2
    ended = [out.request_id for _, event in (alone, *rest) for out in event.outputs if out.finish_reason]  # type: ignore[attr-defined]
    assert ended == ["other", "r"]
    assert gpu.wake_ms is None


def test_a_plan_without_an_interval_ends_the_wait() -> None:
    gpu = gpu_with(spec())
    give(
        gpu,
        10_000.0,
        SetPlan(model="a", plan=Plan(plan_id=1, step_interval_ms=5_000.0)),
        request(max_tokens=2),
    )
    assert len(timed(gpu, 11_000.0)) == 1
    give(gpu, 11_000.0, SetPlan(model="a", plan=Plan(plan_id=2)))
    ((at_ms, step),) = timed(gpu, 12_000.0)
    assert isinstance(step, StepDone) and at_ms - step.duration_ms == pytest.approx(11_003.0)


def test_a_clock_in_the_middle_of_a_step_stretches_the_rest() -> None:
    gpu = gpu_with(spec())
    give(gpu, 10_000.0, request(prompt=2000, max_tokens=1))
    gpu.advance(10_007.0)
    give(gpu, 10_007.0, SetClock(sm_clock_mhz=1000))
    applied, step = (event for _, event in timed(gpu))
    assert isinstance(applied, ClockApplied) and isinstance(step, StepDone)
    assert (applied.asked_mhz, applied.applied_mhz) == (1000, 990)
    assert "does not offer" in applied.reason
    work = step_work(H100, spec(), decode_batch=0, decode_context_tokens=0, prefill_tokens=2000)
    fast_ms, slow_ms = (step_alone(H100, work, clock_mhz, 1.0)[0] for clock_mhz in (1980, 990))
    assert step.duration_ms == pytest.approx(7.0 + (1 - 7.0 / fast_ms) * slow_ms, abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "offered"), [(1980, 1980), (1004, 990), (5000, 1980), (0, 345), (345, 345)]
)
def test_offered_clock(asked: int, offered: int) -> None:
    assert snapped(H100.clocks_mhz, asked) == offered


def test_a_hold_changes_when_but_not_what() -> None:
    free = gpu_with(spec())
    give(free, 10_000.0, request(max_tokens=20))
    straight = [event for _, event in timed(free)]

    gpu = gpu_with(spec())
    give(gpu, 10_000.0, request(max_tokens=20))
    before = gpu.advance(10_030.0)
    give(gpu, 10_030.0, SetPlan(model="a", plan=Plan(plan_id=1, held=frozenset({"r"}))))
    before += gpu.advance(11_000.0)
    assert gpu.wake_ms is None
    assert gpu.state == "warm"
    assert 0 < len(tokens_of(before, "r")) < 20
    assert gpu.used_bytes > spec().weight_bytes
    give(gpu, 11_000.0, SetPlan(model="a", plan=Plan(plan_id=2)))
    after = [event for _, event in timed(gpu)]
    assert tokens_of(before + after, "r") == tokens_of(straight, "r")


def test_a_resumed_attempt_goes_on_with_the_same_tokens() -> None:
    first = gpu_with(spec())
    sampling = {"ignore_eos": False, "seed": 11}
    give(first, 10_000.0, request(max_tokens=2000, sampling=sampling))
    whole = [event for _, event in timed(first)]
    tokens = tokens_of(whole, "r")
    assert len(tokens) >= 16 and tokens[-1] == VOCAB.eos_id

    second = gpu_with(spec())
    give(second, 10_000.0, request(max_tokens=2000, sampling=sampling, output_tokens=tokens[:7]))
    rest = [event for _, event in timed(second)]
    assert tokens_of(rest, "r") == tokens[7:]
    assert isinstance(rest[0], StepDone) and rest[0].outputs[0].prefilled_tokens == 107
    last = rest[-1]
    assert isinstance(last, StepDone) and last.outputs[0].finish_reason == "stop"


def test_out_of_memory_is_said_once_and_ends_when_memory_is_freed() -> None:
    """Room for 10 blocks of 16 tokens: x takes 7, y 3 and then waits for its 49th token."""
    gpu = gpu_with(spec(), device=replace(H100, total_bytes=spec().weight_bytes + 10 * BLOCK_BYTES))
    give(gpu, 10_000.0, request("x", prompt=97, max_tokens=12), request("y", prompt=46, max_tokens=12))
    happened = timed(gpu)
    kinds = [event for _, event in happened if isinstance(event, OutOfMemory)]
    assert kinds == [OutOfMemory(model="a", request_id="y")]
    x_ended_ms = max(at for at, e in happened if isinstance(e, StepDone) and e.outputs[0].request_id == "x")
    y_times = [
        at for at, e in happened if isinstance(e, StepDone) for out in e.outputs if out.request_id == "y"
    ]
    assert len([at for at in y_times if at <= x_ended_ms]) == 3  # 46 computed, then 47, 48
    assert len(y_times) == 12
    assert gpu.used_bytes == spec().weight_bytes


def test_out_of_memory_is_said_again_after_progress() -> None:
    gpu = gpu_with(spec(), device=replace(H100, total_bytes=spec().weight_bytes + 10 * BLOCK_BYTES))
    give(gpu, 10_000.0, request("x", prompt=97, max_tokens=12), request("y", prompt=46, max_tokens=40))
    give(gpu, 10_000.0, request("z", prompt=96, max_tokens=2))  # takes its 6 blocks, and starves, once x ends
    events = [event for _, event in timed(gpu, 11_000.0)]
    starved = [event.request_id for event in events if isinstance(event, OutOfMemory)]
    assert starved == ["z", "y", "z", "y"]
    gpu.order(11_000.0, StopRequest(model="a", request_id="z"))
    events += [event for _, event in timed(gpu)]
    assert len(tokens_of(events, "y")) == 40


def test_stopping_frees_memory_and_charges_the_step_to_overhead() -> None:
    gpu = gpu_with(spec())
    gpu_overhead_j = gpu.overhead_energy_j
    give(gpu, 10_000.0, request(prompt=4000, max_tokens=50))
    gpu.advance(10_010.0)
    assert gpu.used_bytes == spec().weight_bytes + 250 * BLOCK_BYTES
    gpu.order(10_010.0, StopRequest(model="a", request_id="r"))
    gpu.advance(10_013.0)
    assert gpu.used_bytes == spec().weight_bytes
    [(_, step)] = timed(gpu)
    assert isinstance(step, StepDone) and step.outputs == ()
    assert gpu.request_energy_j == pytest.approx(0.0, abs=1e-9)
    assert gpu.overhead_energy_j > gpu_overhead_j + 1.0


def test_unloading_ends_all_at_once() -> None:
    gpu = gpu_with(spec(), spec("b"))
    give(gpu, 10_000.0, request(prompt=4000))
    gpu.advance(10_010.0)
    give(gpu, 10_010.0, UnloadEngine(model="a"), request("late"), UnloadEngine(model="a"))
    assert timed(gpu) == [(10_013.0, EngineEnded(model="a"))]
    assert gpu.used_bytes == spec("b").weight_bytes
    assert gpu.request_energy_j == pytest.approx(0.0, abs=1e-9)
    assert gpu.state == "warm"


def test_a_load_that_does_not_fit_is_refused_with_the_bytes() -> None:
    device = replace(H100, total_bytes=10_000_000_000)
    gpu = gpu_with(spec(), device=device)
    gpu.order(10_000.0, LoadEngine(model=spec("b")))
    [(_, ended)] = timed(gpu)
    assert isinstance(ended, EngineEnded)
    assert ended.reason == "out of memory: weights and KV pool take 6000000000 bytes, 4000000000 are free"


def test_a_fixed_pool_is_used_from_the_start_and_bounds_its_engine() -> None:
    gpu = EmulatedGpu(H100, vocab=VOCAB, elastic_kv=False)
    gpu.order(0.0, LoadEngine(model=spec(), kv_pool_bytes=4 * BLOCK_BYTES))
    gpu.order(0.0, LoadEngine(model=spec("b")))
    ended, ready = (event for _, event in timed(gpu, 10_000.0))
    assert isinstance(ready, EngineReady) and ready.kv_pool_bytes == 4 * BLOCK_BYTES
    assert isinstance(ended, EngineEnded) and "kv_pool_bytes" in ended.reason
    give(gpu, 10_000.0, request("x", prompt=60), request("y", prompt=60))
    events = [event for _, event in timed(gpu)]
    assert events[0] == OutOfMemory(model="a", request_id="y")
    assert len(tokens_of(events, "x")) == len(tokens_of(events, "y")) == 4
    assert gpu.used_bytes == spec().weight_bytes + 4 * BLOCK_BYTES


def test_a_device_without_a_meter_has_no_energy() -> None:
    gpu = gpu_with(spec(weight_bytes=300_000_000), device=DEVICES["cpu"])
    gpu.advance(60_000.0)
    give(gpu, 60_000.0, request(prompt=10, max_tokens=1))
    [(_, step)] = timed(gpu)
    assert isinstance(step, StepDone) and step.outputs[0].energy_j is None
    sample = gpu.sample(100_000.0)
    assert (sample.power_w, sample.energy_j) == (None, None)


# ---- made-up tokens


def made_up(max_tokens: int = 4000, prompt: int = 50, context_tokens: int = 8192, **sampling: Any) -> Answer:
    order = request(prompt=prompt, max_tokens=max_tokens, sampling={"ignore_eos": False} | sampling)
    return answer(order.request, VOCAB, context_tokens)


def written(said: Answer) -> tuple[list[int], str]:
    tokens: list[int] = []
    reason = ""
    while not reason:
        token_id, reason = said.token(len(tokens))
        tokens.append(token_id)
    return tokens, reason


def test_answers_depend_on_prompt_and_seed_alone() -> None:
    assert written(made_up()) == written(made_up(temperature=0.7))
    assert written(made_up(seed=1)) != written(made_up(seed=2))
    assert written(made_up(prompt=51)) != written(made_up(prompt=50))


def test_answers_end_as_asked() -> None:
    tokens, reason = written(made_up())
    assert (reason, tokens[-1]) == ("stop", VOCAB.eos_id)
    assert set(tokens[:-1]) <= set(VOCAB.token_ids)
    assert written(made_up(max_tokens=5)) == (tokens[:5], "length")
    assert written(made_up(context_tokens=59)) == (tokens[:9], "length")
    long, reason = written(made_up(ignore_eos=True))
    assert (len(long), reason) == (4000, "length")
    assert VOCAB.eos_id not in long
    assert written(made_up(min_tokens=3000))[0][-2:] == [long[2999], VOCAB.eos_id]
    first = tokens.index(tokens[6])
    assert written(made_up(stop_token_ids=[tokens[6]])) == (tokens[: first + 1], "stop")
    later = tokens.index(tokens[6], 7) if tokens[6] in tokens[7:] else len(tokens) - 1
    assert len(written(made_up(stop_token_ids=[tokens[6]], min_tokens=7))[0]) == later + 1


def test_output_lengths_follow_the_workload() -> None:
    lengths = [output_length((i + 0.5) / 10_000) for i in range(10_000)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 16
    assert sum(lengths) / len(lengths) == pytest.approx(296, rel=0.02)
    assert (output_length(0.5), output_length(0.95)) == (259, 773)
    drawn = sorted(made_up(seed=seed).length or 0 for seed in range(2000))
    assert drawn[1000] == pytest.approx(259, rel=0.1)
    assert drawn[1900] == pytest.approx(773, rel=0.1)


def test_a_vocabulary_needs_tokens_without_the_end() -> None:
    with pytest.raises(ConfigError, match="leave the end token out"):
        VocabSlice((1, 2), eos_id=2)
    with pytest.raises(ConfigError, match="got 0 tokens"):
        VocabSlice((), eos_id=2)


# ---- real time


async def test_the_shell_reports_what_the_device_does() -> None:
    """Times are scaled so that the loop is always late; the reports are those of an undisturbed device."""
    pure = EmulatedGpu(H100, vocab=VOCAB)
    pure.order(0.0, LoadEngine(model=spec()))
    pure.order(0.0, request(max_tokens=10))
    expected = pure.advance(1e6)

    started = time.monotonic()
    events: list[Event] = []
    ended = asyncio.Event()

    def report(event: Event) -> None:
        events.append(event)
        if len(events) == len(expected):
            ended.set()

    engines = EmulatedEngines(
        gpu=EmulatedGpu(H100, vocab=VOCAB),
        now_ms=lambda: (time.monotonic() - started) * 10_000,
        report=report,
    )
    await engines.start()
    engines.perform(LoadEngine(model=spec()))
    engines.perform(request(max_tokens=10))
    await asyncio.wait_for(ended.wait(), 5.0)
    assert [type(event) for event in events] == [type(event) for event in expected]
    assert tokens_of(events, "r") == tokens_of(list(expected), "r")
    for seen, wanted in zip(events[1:], expected[1:], strict=True):
        assert isinstance(seen, StepDone) and isinstance(wanted, StepDone)
        assert seen.duration_ms == pytest.approx(wanted.duration_ms, abs=1e-6)
    assert engines.sample().state == "warm"
    await engines.close()


async def test_the_shell_is_silent_before_its_time_and_after_its_end() -> None:
    clock_ms = 0.0
    events: list[Event] = []
    gpu = EmulatedGpu(H100, vocab=VOCAB, control_delay_ms=5.0)
    engines = EmulatedEngines(gpu=gpu, now_ms=lambda: clock_ms, report=events.append)
    await engines.start()
    engines.perform(SetClock(sm_clock_mhz=990))
    await asyncio.sleep(0.02)
    assert events == []
    clock_ms = 5.0
    await asyncio.sleep(0.02)
    assert events == [ClockApplied(asked_mhz=990, applied_mhz=990)]
    engines.perform(SetClock(sm_clock_mhz=1980))
    await engines.close()
    clock_ms = 20.0
    await asyncio.sleep(0.02)
    assert len(events) == 1
