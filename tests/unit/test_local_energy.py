"""The energy book: what each use took, and the meter's residual."""

import pytest
from local_bench import H100, LUTS, MODEL, Bench, of, request

from services.local_sched.attribution import with_joules
from services.local_sched.energy import IDLE, MOST_GAPS, OVERHEAD, REQUESTS, EnergyBook
from services.local_sched.meter import EnergyMeter
from shared import engine as en
from shared import events as ev


def opened(rest_w=100.0):
    book = EnergyBook(cap_w=700.0, rest_w=rest_w)
    assert book.uses_j is None and book.residual_j is None
    assert book.read(0.0, 5_000.0, 0.0) == 0.0
    return book


def test_time_is_idle_until_a_step_is_told_of():
    book = opened()
    assert book.read(1_000.0, 5_100.0, 0.0) == 0.0
    assert book.uses_j == {REQUESTS: 0.0, OVERHEAD: 0.0, IDLE: pytest.approx(100.0)}
    # From 800 to 1,200 a step ran: 80 J of idle, and 200 W more than that at rest while it did.
    book.ran([1_200.0], 400.0, 120.0, 0.0)
    assert book.uses_j == {REQUESTS: 120.0, OVERHEAD: 0.0, IDLE: pytest.approx(80.0)}
    assert book.read(1_200.0, 5_200.0, 0.0) == 0.0
    assert book.residual_j == pytest.approx(0.0)


def test_steps_side_by_side_are_one_time_without_rest():
    book = opened()
    book.ran([60.0], 40.0, 1.0, 0.0)  # from 20
    book.ran([100.0], 70.0, 1.0, 0.0)  # from 30
    book.ran([110.0], 5.0, 1.0, 0.0)  # from 105
    assert book.uses_j[IDLE] == pytest.approx(100.0 * (20 + 5) / 1000)


def test_steps_told_of_together_leave_the_pauses_between_them():
    book = opened()
    book.ran([20.0, 70.0, 120.0], 60.0, 1.0, 0.0)
    assert book.uses_j[IDLE] == pytest.approx(100.0 * (30 + 30) / 1000)
    book = opened()
    book.ran([50.0, 70.0, 120.0], 110.0, 1.0, 0.0)  # without a pause, of unequal length
    assert book.uses_j[IDLE] == pytest.approx(100.0 * 10 / 1000)


def test_a_load_is_overhead_where_no_step_runs():
    book = opened(rest_w=70.0)
    book.rests(1_000.0, 110.0, OVERHEAD)
    book.rests(3_000.0, 110.0, IDLE)
    book.ran([2_500.0], 1_000.0, 300.0, 0.0)
    book.read(4_000.0, 5_000.0, 0.0)
    assert book.uses_j == {
        REQUESTS: 300.0,
        OVERHEAD: pytest.approx(110.0),
        IDLE: pytest.approx(70.0 + 110.0),
    }


def test_what_nothing_explains_is_told_once_and_written_off():
    book = opened()
    assert book.read(250.0, 5_000.0 + 25.0 + 174.0, 0.0) == 0.0  # 700 W for 250 ms are 175 J
    assert book.residual_j == pytest.approx(174.0)
    assert book.read(500.0, 5_000.0 + 50.0 + 176.0, 0.0) == pytest.approx(176.0)
    assert book.residual_j == 0.0
    assert book.read(750.0, 5_000.0 + 75.0 + 176.0, 0.0) == 0.0
    assert book.residual_j == pytest.approx(0.0)
    assert book.read(1_000.0, 4_000.0, 0.0) < -1_000.0  # the meter was reset


def test_a_step_under_way_may_have_drawn_what_is_not_told_yet():
    book = opened()
    assert book.read(250.0, 5_000.0 + 25.0 + 500.0, 500.0) == 0.0
    assert book.residual_j == pytest.approx(500.0)


def test_an_engine_that_does_not_tell_leaves_all_unknown():
    book = opened()
    book.ran([100.0], 50.0, None, 0.0)
    assert book.read(1_000.0, 9_000.0, 0.0) == 0.0
    assert book.uses_j is None and book.residual_j is None


def test_old_gaps_are_summed_up():
    book = opened()
    for i in range(2 * MOST_GAPS):
        book.ran([20.0 * (i + 1)], 10.0, 0.0, 0.0)
    assert book.uses_j[IDLE] == pytest.approx(100.0 * 10.0 * 2 * MOST_GAPS / 1000)


# ---- in the scheduler


def sampled(bench, energy_j, after_ms=250.0):
    reading = en.DeviceSampled(state="warm", used_bytes=0, power_w=110.0, energy_j=energy_j)
    return bench.do(reading, after_ms)


def test_a_scheduler_books_loads_requests_and_what_was_in_vain():
    bench = Bench(cold_after_ms=0.0)
    sampled(bench, 1_000.0, 0.0)
    bench.do(ev.Load(model=MODEL, placement_version=1), 1_000.0)  # cold before it
    bench.do(en.EngineReady(model=MODEL.name, kv_pool_bytes=0, block_tokens=16, load_ms=1.0), 2_000.0)
    for name in ("a", "b"):
        bench.submit(request(name))
    bench.wait(500.0)
    run = bench.runs["b"]
    bench.do(ev.Abort(request_id="b", attempt=1, reason="client left"))
    outputs = tuple(
        en.StepOutput(request_id=r, token_ids=(7,), energy_j=30.0) for r in (bench.runs["a"], run)
    )
    done = en.StepDone(model=MODEL.name, plan_id=0, duration_ms=100.0, outputs=outputs, aborted_j=4.0)
    bench.do(done, 100.0)
    uses_j = bench.state.energy.uses_j
    warm_w = H100.context_idle_w
    assert uses_j[REQUESTS] == 30.0
    assert uses_j[OVERHEAD] == pytest.approx(2.0 * warm_w + 30.0 + 4.0)
    assert uses_j[IDLE] == pytest.approx(1.0 * H100.static_w + 0.5 * warm_w)


def test_what_the_meter_shows_beyond_all_uses_is_counted():
    bench = Bench(models=[MODEL])
    sampled(bench, 0.0)
    assert not of(sampled(bench, 0.25 * H100.context_idle_w), ev.Count)
    (count,) = of(sampled(bench, 1_000.0), ev.Count)
    assert count.name == "unexplained_energy_j"
    assert count.value == pytest.approx(1_000.0 - 0.5 * H100.context_idle_w)


def test_without_a_meter_nothing_is_known():
    bench = Bench(models=[MODEL])
    sampled(bench, None)
    sampled(bench, None)
    assert bench.state.energy.uses_j is None and bench.state.energy.residual_j is None


# ---- with a real meter, and engines that do not tell


def test_a_step_that_is_not_told_takes_what_the_table_says():
    bench = Bench(models=[MODEL])
    for name in ("a", "b"):
        bench.submit(request(name))
    bench.wait(10.0)
    bench.token("a", "b")
    engine, lut = bench.state.engines[MODEL.name], LUTS[MODEL.name]
    clock_mhz, share_pct = bench.state.clock_mhz, engine.plan.sm_share_pct
    decoded = tuple(en.StepOutput(request_id=bench.runs[r], token_ids=(7,)) for r in ("a", "b"))
    done = en.StepDone(model=MODEL.name, plan_id=0, duration_ms=20.0, outputs=decoded)
    told = with_joules(bench.state, engine, done)
    power_w = lut.decode_power_w(clock_mhz, share_pct, 2, 101)
    assert [output.energy_j for output in told.outputs] == pytest.approx([power_w * 0.02 / 2] * 2)
    # beside the decode of one, the other's prompt of 500 tokens takes the time that it takes, at its power
    mixed = (decoded[0], en.StepOutput(request_id=bench.runs["b"], prefilled_tokens=500))
    told = with_joules(bench.state, engine, en.StepDone(MODEL.name, 0, 50.0, mixed))
    decode_ms = lut.tbt_ms(clock_mhz, share_pct, 1, 101)
    prefill_ms = lut.ttft_ms(clock_mhz, share_pct, 500)
    decode_j, prefill_j = (output.energy_j for output in told.outputs)
    assert decode_j / prefill_j == pytest.approx(decode_ms / prefill_ms)
    decode_w = lut.decode_power_w(clock_mhz, share_pct, 1, 101)
    prefill_w = lut.prefill_power_w(clock_mhz, share_pct, 500)
    mean_w = (decode_w * decode_ms + prefill_w * prefill_ms) / (decode_ms + prefill_ms)
    assert decode_j + prefill_j == pytest.approx(mean_w * 0.05)


@pytest.mark.parametrize("wrong_by", [0.0, 0.1, -0.1])
def test_an_idle_model_that_is_wrong_shows_in_the_residual(wrong_by):
    """A device that draws more at rest than its model says; joules by a meter, as over NVML."""
    bench, meter = Bench(models=[MODEL]), EnergyMeter(H100.power_cap_w)
    real_w = H100.context_idle_w * (1.0 + wrong_by)
    started_ms, unexplained_j = bench.now_ms, 0.0
    for i in range(41):  # 10 s
        now_ms = started_ms + 250.0 * i
        meter.read(now_ms, 7_000.0 + real_w * i / 4.0, real_w)
        counted = of(sampled(bench, meter.energy_j(now_ms), 250.0 if i else 0.0), ev.Count)
        unexplained_j += sum(c.value for c in counted if c.name == "unexplained_energy_j")
    assert bench.state.energy.residual_j == pytest.approx(10.0 * H100.context_idle_w * wrong_by, abs=1e-6)
    assert unexplained_j == 0.0  # still less than the device can draw between two readings
