"""The emulated GPU under arbitrary orders: bookkeeping, and independence of how it is advanced."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice, answer
from shared.devices import DEVICES
from shared.engine import (
    EngineEnded,
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
from shared.events import Event
from shared.model import ModelSpec, Objectives, Plan, Request

VOCAB = VocabSlice(tuple(range(100, 150)), eos_id=2)
MODELS = tuple(
    ModelSpec(
        name=name,
        engine="emulated",
        params=weight_bytes // 2,
        layers=layers,
        hidden=2048,
        heads=16,
        kv_heads=8,
        head_dim=128,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=2 * layers * 8 * 128 * 2,
    )
    for name, weight_bytes, layers in (
        ("a", 2_000_000_000, 16),
        ("b", 6_000_000_000, 28),
        ("c", 1_000_000_000, 8),
    )
)
# Room for all weights and some thousand tokens, so that memory runs out now and then.
DEVICE = replace(DEVICES["h100-80gb"], total_bytes=9_000_000_000 + 300_000_000)
END_MS = 60_000.0

times = st.floats(0.0, 1500.0)
names = st.sampled_from(["a", "b", "c"])
ids = st.sampled_from([f"r{i}" for i in range(8)])
plans = st.builds(
    Plan,
    plan_id=st.integers(1, 99),
    held=st.frozensets(ids, max_size=3),
    chunk_tokens=st.sampled_from([0, 64, 1000, 8192]),
    sm_share_pct=st.sampled_from([0, 10, 30, 50, 80, 100]),
    step_interval_ms=st.sampled_from([0.0, 0.0, 20.0, 70.0]),
)
changes = st.one_of(
    st.tuples(times, st.builds(SetPlan, model=names, plan=plans)),
    st.tuples(times, st.builds(SetClock, sm_clock_mhz=st.integers(300, 2100))),
    st.tuples(times, st.builds(StopRequest, model=names, request_id=ids)),
    st.tuples(times, st.builds(UnloadEngine, model=st.just("c"))),
)
runs = st.lists(
    st.tuples(times, names, st.integers(1, 3000), st.integers(1, 60)),
    min_size=1,
    max_size=8,
)


def order_list(
    runs: list[tuple[float, str, int, int]], changes: list[tuple[float, Order]]
) -> list[tuple[float, Order]]:
    orders: list[tuple[float, Order]] = [(0.0, LoadEngine(model=model)) for model in MODELS]
    for i, (at_ms, model, prompt, max_tokens) in enumerate(runs):
        request = Request(
            request_id=f"r{i}",
            attempt=1,
            gateway="g",
            model=model,
            prompt_tokens=(i,) * prompt,
            max_tokens=max_tokens,
            objectives=Objectives(ttft_ms=250.0, tbt_ms=100.0),
        )
        orders.append((at_ms, RunRequest(model=model, request=request)))
    return sorted([*orders, *changes], key=lambda order: order[0])


def play(
    orders: list[tuple[float, Order]], pause_ms: float, elastic: bool, report_steps: int = 1
) -> tuple[EmulatedGpu, list[Event]]:
    """Give the orders at their times, and look at the device every `pause_ms` besides."""
    gpu = EmulatedGpu(DEVICE, vocab=VOCAB, elastic_kv=elastic, report_steps=report_steps)
    events = gpu.advance(0.0)
    looks = math.ceil(END_MS / pause_ms) if pause_ms else 0
    script: list[tuple[float, Order | None]] = [*orders, *((i * pause_ms, None) for i in range(looks))]
    for at_ms, order in sorted(script, key=lambda entry: entry[0]):
        events += gpu.advance(at_ms)
        check(gpu)
        if order is not None:
            gpu.order(at_ms, order)
    return gpu, events + gpu.advance(END_MS)


def check(gpu: EmulatedGpu) -> None:
    assert 0 <= gpu.used_bytes <= DEVICE.total_bytes
    uses_j = gpu.request_energy_j + gpu.overhead_energy_j + gpu.idle_energy_j
    assert math.isclose(gpu.energy_j, uses_j, rel_tol=1e-9, abs_tol=1e-9)
    assert min(gpu.request_energy_j, gpu.overhead_energy_j, gpu.idle_energy_j) >= -1e-9


@settings(max_examples=40, deadline=None)
@given(runs, st.lists(changes, max_size=12), st.floats(7.0, 900.0))
def test_how_often_the_device_is_advanced_makes_no_difference(
    runs: list[tuple[float, str, int, int]], changes: list[tuple[float, Order]], pause_ms: float
) -> None:
    orders = order_list(runs, changes)
    coarse, coarse_events = play(orders, 0.0, True)
    fine, fine_events = play(orders, pause_ms, True)
    assert coarse_events == fine_events
    assert coarse.sample(END_MS) == fine.sample(END_MS)
    assert coarse.idle_energy_j == fine.idle_energy_j
    assert coarse.overhead_energy_j == fine.overhead_energy_j


@settings(max_examples=60, deadline=None)
@given(runs, st.lists(changes, max_size=12), st.sampled_from((1, 1, 2, 7, 32)))
def test_energy_adds_up_and_requests_get_their_own_tokens_once(
    runs: list[tuple[float, str, int, int]], changes: list[tuple[float, Order]], report_steps: int
) -> None:
    orders = order_list(runs, changes)
    gpu, events = play(orders, 0.0, True, report_steps)
    check(gpu)
    # Nothing runs at the end: what is still there is held, starved or has no share.
    assert gpu.wake_ms is None
    steps = [event for event in events if isinstance(event, StepDone)]
    outputs = [out for step in steps for out in step.outputs]
    assert math.isclose(
        sum(out.energy_j or 0.0 for out in outputs), gpu.request_energy_j, rel_tol=1e-9, abs_tol=1e-6
    )

    requests = {o.request.request_id: o.request for _, o in orders if isinstance(o, RunRequest)}
    for request_id, request in requests.items():
        said = answer(request, VOCAB, 8192)
        got = [out for out in outputs if out.request_id == request_id]
        tokens = [token for out in got for token in out.token_ids]
        assert tokens == [said.token(i)[0] for i in range(len(tokens))]
        assert [out.finish_reason for out in got[:-1]] == [""] * len(got[:-1])
        assert sum(out.prefilled_tokens for out in got) <= len(request.prompt_tokens)
        if tokens:
            assert sum(out.prefilled_tokens for out in got) == len(request.prompt_tokens)


@settings(max_examples=40, deadline=None)
@given(runs, st.sampled_from((1, 1, 7, 32)))
def test_undisturbed_requests_all_end_and_free_their_memory(
    runs: list[tuple[float, str, int, int]], report_steps: int
) -> None:
    gpu, events = play(order_list(runs, []), 0.0, True, report_steps)
    starved = {event.request_id for event in events if isinstance(event, OutOfMemory)}
    ended = [
        out.request_id
        for event in events
        if isinstance(event, StepDone)
        for out in event.outputs
        if out.finish_reason
    ]
    assert len(ended) == len(set(ended))
    stuck = {f"r{i}" for i in range(len(runs))} - set(ended)
    assert stuck <= starved
    if not stuck:
        assert gpu.used_bytes == sum(model.weight_bytes for model in MODELS)
        assert gpu.state == "warm"


@settings(max_examples=20, deadline=None)
@given(runs, st.lists(changes, max_size=8))
def test_engines_that_may_not_load_take_nothing(
    runs: list[tuple[float, str, int, int]], changes: list[tuple[float, Order]]
) -> None:
    gpu, events = play(order_list(runs, changes), 0.0, False)
    assert [event.model for event in events if isinstance(event, EngineEnded)] == ["a", "b", "c"]
    assert not [event for event in events if isinstance(event, StepDone)]
    assert (gpu.state, gpu.used_bytes, gpu.request_energy_j) == ("sleeping", 0, 0.0)
