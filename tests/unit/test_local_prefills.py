"""In which order an engine computes prompts, how much at a time, and what is told of it."""

from itertools import permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_bench import H100, LUTS, MODEL, OTHER, Bench, of, request

from services.local_sched.batch import Task, order, prefill_order
from services.local_sched.core import LocalSchedCore
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.model import Objectives
from shared.slo import objectives_for


def task(key, score, latency_ms, slack_ms):
    return Task(key, score, late=slack_ms <= 0, latency_ms=latency_ms, slack_ms=slack_ms)


def keys(tasks):
    return [each.key for each in tasks]


def test_eq_4_decides_where_all_are_in_time():
    tasks = [task("a", 0.1, 10.0, 100.0), task("b", 0.9, 80.0, 90.0), task("late", 0.0, 10.0, -5.0)]
    assert keys(prefill_order(tasks, {})) == keys(order(tasks)) == ["b", "a", "late"]


def test_a_short_prompt_goes_before_long_ones_that_would_make_it_late():
    tasks = [task(f"L{i}", 0.17, 340.0, 1980.0) for i in range(4)] + [task("S", 0.04, 10.0, 250.0)]
    assert keys(prefill_order(tasks, {})) == ["S", "L0", "L1", "L2", "L3"]


def test_what_comes_after_another_needs_time_to_spare():
    tasks = [task("long", 0.9, 50.0, 500.0), task("short", 0.5, 10.0, 100.0)]
    assert keys(prefill_order(tasks, {}, 40.0)) == ["long", "short"]
    assert keys(prefill_order(tasks, {}, 41.0)) == ["short", "long"]
    assert keys(prefill_order([tasks[1]], {}, 1e9)) == ["short"]


def test_where_not_all_fit_the_longest_gives_way():
    tasks = [task("long", 0.9, 90.0, 100.0), task("b", 0.5, 30.0, 110.0), task("c", 0.4, 30.0, 120.0)]
    assert keys(prefill_order(tasks, {})) == ["b", "c", "long"]


def test_the_late_come_last_but_for_those_that_starve():
    tasks = [
        task("late", 0.3, 30.0, -3_000.0),
        task("hopeless", 0.8, 30.0, 20.0),
        task("starved", 1.2, 30.0, -12_000.0),
        task("tight", 0.2, 30.0, 65.0),
    ]
    assert keys(prefill_order(tasks, {})) == ["starved", "tight", "hopeless", "late"]
    outgrown = Task("outgrown", float("inf"), latency_ms=5.0, slack_ms=400.0)
    assert keys(prefill_order([*tasks, outgrown], {}))[0] == "outgrown"


def in_time(tasks):
    end_ms, count = 0.0, 0
    for each in tasks:
        end_ms += each.latency_ms
        count += end_ms <= each.slack_ms
    return count


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.99), st.integers(1, 50), st.integers(-20, 150)), min_size=1, max_size=6
    )
)
def test_as_many_as_possible_are_in_time(drawn):
    tasks = [task(str(i), score, float(ms), float(slack)) for i, (score, ms, slack) in enumerate(drawn)]
    got = prefill_order(tasks, {})
    assert sorted(keys(got)) == sorted(keys(tasks))
    assert in_time(got) == max(in_time(p) for p in permutations(tasks))


class Device:
    """The core with the emulated GPU, in virtual time; keeps when first tokens came."""

    def __init__(self, **changed):
        self.core = LocalSchedCore(
            "gpu0", "host0", "emulated", H100, LocalSettings(gateway_lease_ms=1e12, **changed), 0.0,
            lut_for=lambda device, model: LUTS[model.name],
        )  # fmt: skip
        self.gpu = EmulatedGpu(H100, vocab=VocabSlice(token_ids=(5, 6, 7), eos_id=1))
        self.now_ms, self.sent_ms, self.ttft_ms = 0.0, {}, {}
        self.feed(ev.Load(model=MODEL, placement_version=1))
        self.run(10_000.0)

    def feed(self, event):
        for action in self.core.step(self.now_ms, event):
            if isinstance(action, en.Order):
                self.gpu.order(self.now_ms, action)
            elif isinstance(action, ev.Send) and isinstance(action.message, ev.Tokens):
                for delta in action.message.deltas:
                    self.ttft_ms.setdefault(delta.request_id, self.now_ms - self.sent_ms[delta.request_id])

    def run(self, ms):
        end_ms = self.now_ms + ms
        while (due_ms := min(t for t in (self.core.wake_ms, self.gpu.wake_ms) if t is not None)) <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            for event in self.gpu.advance(self.now_ms):
                self.feed(event)
            if self.core.wake_ms <= self.now_ms:
                self.feed(ev.Tick())
        self.now_ms = end_ms

    def submit(self, request_id, prompt):
        self.sent_ms[request_id] = self.now_ms
        asked = msgspec.structs.replace(
            request(request_id, prompt=prompt, max_tokens=16), objectives=objectives_for(prompt)
        )
        number = len(self.sent_ms)
        self.feed(ev.Submit(request=asked, scheduler="s", dispatch_seq=number, predicted_output_tokens=16))


def test_a_short_prompt_that_comes_after_long_ones_is_in_time():
    for after_ms in (1.0, 20.0, 100.0, 333.0):
        device = Device()
        for i in range(4):
            device.submit(f"L{i}", 8000)
        device.run(after_ms)
        device.submit("S", 200)
        device.run(5_000.0)
        assert device.ttft_ms["S"] <= 250.0
        assert all(device.ttft_ms[f"L{i}"] <= 2000.0 for i in range(4))


def test_short_prompts_among_long_ones_are_in_time_at_a_low_clock():
    device = Device()
    for i in range(24):
        device.submit(f"r{i}", 200 if i % 4 else 8000)
        device.run(80.0)
    device.run(5_000.0)
    assert len(device.ttft_ms) == 24
    for request_id, ttft_ms in device.ttft_ms.items():
        assert ttft_ms <= (250.0 if int(request_id[1:]) % 4 else 2000.0)
    assert device.gpu.sm_clock_mhz < H100.f_max_mhz


def test_in_an_overload_short_prompts_are_in_time_and_nobody_is_left_behind():
    device = Device()
    for i in range(20):
        device.submit(f"L{i}", 8000)
    for i in range(5):
        device.run(200.0)
        device.submit(f"S{i}", 200)
    device.run(20_000.0)
    assert len(device.ttft_ms) == 25
    assert all(device.ttft_ms[f"S{i}"] <= 250.0 for i in range(5))
    in_time = sum(device.ttft_ms[f"L{i}"] <= 2000.0 for i in range(20))
    assert in_time >= 2000.0 / LUTS[MODEL.name].ttft_ms(H100.f_max_mhz, 100, 8000) - 3


def plans_of(actions):
    return [order.plan for order in of(actions, en.SetPlan)]


def ask(bench, request_id, prompt, ttft_ms, after_ms=10.0):
    bench.wait(after_ms)
    asked = request(request_id, prompt=prompt)
    bench.submit(msgspec.structs.replace(asked, objectives=Objectives(ttft_ms=ttft_ms, tbt_ms=100.0)))


def test_the_plan_names_the_order_only_where_it_is_not_that_of_arrival():
    bench = Bench(models=[MODEL])
    ask(bench, "a", 8000, 2000.0)
    ask(bench, "b", 8000, 2000.0)
    bench.wait(10.0)
    assert [plan.order for plan in plans_of(bench.actions)][-1] == ()
    ask(bench, "short", 200, 250.0)
    bench.wait(10.0)
    assert plans_of(bench.actions)[-1].order == tuple(bench.runs[i] for i in ("short", "a", "b"))
    before = len(plans_of(bench.actions))
    bench.token("short")
    bench.wait(10.0)
    # What is left of the order stands: a and b come as they would without it.
    assert all(
        plan.order[-2:] == (bench.runs["a"], bench.runs["b"]) for plan in plans_of(bench.actions)[before:]
    )


def test_a_chunk_is_over_before_a_request_that_comes_meanwhile_is_late():
    bench = Bench(models=[MODEL])
    ask(bench, "a", 8000, 2000.0)
    bench.wait(10.0)
    plan, lut = plans_of(bench.actions)[-1], LUTS[MODEL.name]
    assert lut.ttft_ms(bench.state.asked_mhz, plan.sm_share_pct, plan.chunk_tokens) <= 0.3 * 250.0
    patient = msgspec.structs.replace(MODEL, objectives=Objectives(ttft_ms=10_000.0, tbt_ms=100.0))
    bench = Bench(models=[patient])
    ask(bench, "a", 8000, 10_000.0)
    bench.wait(10.0)
    assert plans_of(bench.actions)[-1].chunk_tokens == 8192


def test_a_chunk_ends_before_the_first_of_its_prompts_is_late():
    bench = Bench(models=[MODEL], fixed_clock_mhz=1635)
    ask(bench, "a", 8000, 2000.0)
    ask(bench, "short", 200, 30.0)
    bench.wait(10.0)
    plan = plans_of(bench.actions)[-1]
    assert plan.order[0] == bench.runs["short"]
    assert LUTS[MODEL.name].ttft_ms(1635, plan.sm_share_pct, plan.chunk_tokens) <= 30.0


def test_the_summary_tells_what_is_to_be_prefilled_and_by_when():
    bench = Bench(models=[MODEL])
    ask(bench, "a", 8000, 2000.0)
    ask(bench, "short", 200, 700.0)
    run = bench.runs["a"]
    partly = en.StepOutput(request_id=run, prefilled_tokens=3000)
    bench.do(en.StepDone(model=MODEL.name, plan_id=0, duration_ms=9.0, outputs=(partly,)))
    sent_ms = bench.now_ms
    engine = bench.engine()
    aged_ms = bench.state.summarized_ms - sent_ms
    assert [(p.count, p.tokens) for p in engine.prefills] == [(1, 200), (1, 5000)]
    assert [p.due_ms for p in engine.prefills] == pytest.approx([700.0 - aged_ms, 1990.0 - aged_ms])
    bench.token("short")
    assert [p.tokens for p in bench.engine().prefills] == [5000]


def test_neighbours_are_told_of_together():
    bench = Bench(models=[MODEL])
    for i in range(30):
        ask(bench, f"r{i:02}", 1000 + i, 2000.0, after_ms=1.0)
    found = bench.engine().prefills
    assert [p.count for p in found] == [4, 4, 4, 4, 4, 4, 4, 2]
    assert sum(p.tokens for p in found) == sum(1000 + i for i in range(30))
    assert sorted(p.due_ms for p in found) == [p.due_ms for p in found]


def test_what_an_engine_could_do_without_is_told_as_free():
    bench = Bench(models=[MODEL, OTHER], pacing="off")
    bench.submit(request("r1", max_tokens=500), predicted=400)
    bench.wait(10.0)
    bench.token("r1")
    bench.wait(10.0)
    summary = bench.summary()
    engine = next(e for e in summary.engines if e.model == MODEL.name)
    assert bench.state.engines[MODEL.name].plan.sm_share_pct > engine.sm_share_pct > 0
    assert summary.staircase[0].free_sm_share_pct == 100 - engine.sm_share_pct
    lut, clock_mhz = LUTS[MODEL.name], bench.state.asked_mhz
    assert lut.tbt_ms(clock_mhz, engine.sm_share_pct, 1, 101) <= 85.0


def test_an_engine_with_a_pool_of_its_own_has_a_staircase_of_its_own():
    pool_bytes = 4096 * MODEL.kv_bytes_per_token
    bench = Bench(kv_pool_bytes=pool_bytes)
    for model in (MODEL, OTHER):
        bench.do(ev.Load(model=model, placement_version=1))
        ready = en.EngineReady(model=model.name, kv_pool_bytes=pool_bytes, block_tokens=16, load_ms=1.0)
        bench.do(ready)
    most = bench.state.ledger.most_tokens(MODEL.name)
    bench.submit(request("a", prompt=most - 160, max_tokens=100), predicted=100)
    bench.submit(request("waits", prompt=100, max_tokens=28), predicted=28)
    bench.submit(request("b", model=OTHER.name, prompt=160, max_tokens=16), predicted=16)
    summary = bench.summary()
    mine, other = (next(e for e in summary.engines if e.model == m.name) for m in (MODEL, OTHER))
    block_bytes = 16 * MODEL.kv_bytes_per_token
    assert mine.free_kv_bytes < 8 * block_bytes
    # Nothing of it is free as long as "a" runs, and then all but what "waits" takes.
    assert mine.staircase[0].free_bytes == 0
    assert mine.staircase[-1].free_bytes == most * MODEL.kv_bytes_per_token - 8 * block_bytes
    assert other.staircase[-1].free_bytes == pool_bytes
    # What ends in pools frees nothing of the device.
    assert {step.free_bytes for step in summary.staircase} == {summary.free_bytes}
    assert summary.staircase[-1].free_sm_share_pct == mine.staircase[-1].free_sm_share_pct == 100
