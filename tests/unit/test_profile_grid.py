"""What the profiler measures and what it skips (3.2.1)."""

import math

import pytest

from services.local_sched.profile_grid import DECODE, PREFILL, Grid, Point, Sweep, clocks_of, grid_for
from services.local_sched.profile_stats import (
    Effort,
    at_nominal,
    beyond_memory,
    estimate,
    foresee,
    oddities,
    samples_of,
)
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.lut import build

H100 = device_for("h100-80gb")
QWEN = emulated_models(1)[0]


def line(lengths: tuple[int, ...], clocks: tuple[int, ...] = (1005,)) -> Grid:
    return Grid(clocks, (100,), lengths, (1,), (64,), pool_tokens=10**6)


def played(sweep: Sweep, ms_of) -> list[Point]:
    measured = []
    while (point := sweep.next()) is not None:
        measured.append(point)
        sweep.record(point, ms_of(point), None)
    return measured


def test_the_clocks_are_the_papers_with_f_max_and_the_default() -> None:
    found = clocks_of(H100, H100.clocks_mhz)
    assert found == (795, 885, 975, 1065, 1155, 1245, 1335, 1425, 1515, 1605, 1635, 1980)
    assert clocks_of(H100, (800, 1000, 1600)) == (800, 1000, 1600, 1980)  # snapped to what the driver offers
    cpu = device_for("cpu")
    assert clocks_of(cpu, cpu.clocks_mhz) == (0,)


def test_a_dimension_that_cannot_be_moved_has_one_value_and_a_reason() -> None:
    grid = grid_for(H100, QWEN, pool_bytes=10**10, max_batch=16, fixed_clock="no right", fixed_share="no way")
    assert (grid.clocks_mhz, grid.shares_pct) == ((1980,), (100,))
    assert grid.fixed == (("SM clock", "no right"), ("SM share", "no way"))
    assert grid.batches == (1, 2, 4, 8, 16)
    assert grid_for(H100, QWEN, pool_bytes=10**10, max_batch=16).fixed == ()


def test_a_straight_line_is_measured_at_its_ends_and_middle_only() -> None:
    sweep = Sweep(line((100, 200, 300, 400, 500)), PREFILL, 0.02)
    measured = played(sweep, lambda point: 5.0 + 0.1 * point.tokens)
    assert [point.tokens for point in measured] == [100, 500, 300]
    assert [point.tokens for point in sweep.skipped] == [200, 400]
    assert {p.tokens: ms for p, (ms, _) in sweep.readings().items()} == pytest.approx(
        {100: 15.0, 200: 25.0, 300: 35.0, 400: 45.0, 500: 55.0}
    )


def test_a_bend_is_measured_where_it_is() -> None:
    sweep = Sweep(line(tuple(range(100, 1000, 100))), PREFILL, 0.02)
    measured = played(sweep, lambda point: 10.0 + max(0, point.tokens - 500))
    # ends, the middle (far off the line), then both halves are straight
    assert [point.tokens for point in measured] == [100, 900, 500, 300, 700]


def test_without_tolerance_everything_is_measured() -> None:
    sweep = Sweep(line((100, 200, 300, 400, 500), (795, 1005, 1635)), PREFILL, 0.0)
    assert len(played(sweep, lambda point: 1.0)) == 15
    assert sweep.total == 15 and not sweep.skipped


def test_what_is_known_already_is_not_asked_for_and_decisions_stay_the_same() -> None:
    lut = build(H100, QWEN)
    grid = grid_for(H100, QWEN, pool_bytes=40 * 10**9, max_batch=64)
    ms_of = lambda p: float(lut.ttft_ms(p.sm_clock_mhz, p.sm_share_pct, p.tokens))  # noqa: E731
    whole = Sweep(grid, PREFILL, 0.03)
    measured = played(whole, ms_of)
    for done in (1, len(measured) // 2, len(measured)):
        resumed = Sweep(grid, PREFILL, 0.03)
        for point in measured[:done]:
            resumed.record(point, ms_of(point), None)
        assert played(resumed, ms_of) == measured[done:]
        assert resumed.readings() == whole.readings()


def test_skipped_points_are_as_good_as_the_tolerance_promises() -> None:
    lut = build(H100, QWEN)
    grid = grid_for(H100, QWEN, pool_bytes=40 * 10**9, max_batch=64)
    sweep = Sweep(grid, DECODE, 0.03)
    ms_of = lambda p: float(lut.tbt_ms(p.sm_clock_mhz, p.sm_share_pct, p.batch, p.tokens))  # noqa: E731
    measured = played(sweep, ms_of)
    errors = [abs(ms / ms_of(point) - 1) for point, (ms, _) in sweep.readings().items()]

    assert len(measured) < 0.6 * sweep.total
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.1


def test_points_beyond_the_memory_are_left_out_and_then_made_up_from_smaller_batches() -> None:
    grid = Grid((1005,), (100,), (64,), (1, 2, 4), (100, 1000), pool_tokens=2 * (1000 + 64))
    sweep = Sweep(grid, DECODE, 0.0)
    ms_of = lambda p: 10.0 + p.batch + 0.01 * p.batch * p.tokens  # noqa: E731
    measured = played(sweep, ms_of)
    assert (1000, 4) not in {(p.tokens, p.batch) for p in measured}
    made = beyond_memory(grid, sweep.readings())
    assert {(p.tokens, p.batch): ms for p, (ms, _) in made.items()} == pytest.approx(
        {(1000, 4): 10.0 + 4 + 40.0}
    )


def test_the_largest_batch_comes_first_so_that_smaller_ones_are_part_of_it() -> None:
    grid = Grid((1005,), (100,), (64,), (1, 2, 4), (100, 1000), pool_tokens=10**6)
    measured = played(Sweep(grid, DECODE, 0.0), lambda p: 1.0)
    assert [(p.tokens, p.batch) for p in measured][:4] == [(100, 4), (100, 1), (1000, 4), (1000, 1)]


def test_estimate_by_hand() -> None:
    found = estimate([10.0, 11.0, 12.0])  # sd 1, t(2) = 4.30
    assert found.ms == 11.0
    assert found.half_width == pytest.approx(4.30 / math.sqrt(3) / 11.0)
    assert estimate([10.0]).half_width == math.inf
    assert estimate([5.0] * 4).half_width == 0.0


def test_an_outlier_is_left_out_but_never_one_of_a_few() -> None:
    found = estimate([10.0, 10.1, 9.9, 10.0, 30.0, 10.05])
    assert found.outliers == 1 and found.ms == pytest.approx(10.01)
    assert estimate([10.0, 10.0, 30.0]).outliers == 0


def test_effort_ends_when_it_is_precise_or_spent() -> None:
    effort = Effort(precision=0.01, least=3, most=6, most_ms=1000.0)
    assert not effort.enough([10.0, 10.0])
    assert effort.enough([10.0, 10.0, 10.0])
    assert not effort.enough([10.0, 14.0, 10.0, 14.0])
    assert effort.enough([10.0, 14.0, 10.0, 14.0, 10.0, 14.0])
    assert effort.enough([400.0, 500.0, 300.0])
    assert not Effort(least_ms=100.0).enough([10.0] * 5)


def test_what_breaks_the_order_is_called_odd() -> None:
    short, long, slow = (Point(PREFILL, t, 1, f, 100) for t, f in ((256, 1005), (512, 1005), (512, 795)))
    assert oddities({short: 10.0, long: 20.0, slow: 25.0}) == []
    assert oddities({short: 10.0, long: 8.0, slow: 25.0}) == [(short, long)]
    assert oddities({short: 10.0, long: 20.0, slow: 15.0}) == [(long, slow)]
    assert oddities({short: 10.0, long: 9.8}) == []  # within the noise


def test_a_batch_that_grew_is_put_back_to_its_context() -> None:
    at = [Point(DECODE, context, 4, 1005, 100) for context in (100, 200)]
    found = at_nominal([(at[0], 104.0, 10.4), (at[1], 210.0, 21.0)])  # 0.1 ms a token
    assert found == pytest.approx({at[0]: 10.0, at[1]: 20.0})


def test_samples_name_their_phase_and_lengths() -> None:
    readings = {Point(PREFILL, 256, 1, 1005, 50): (9.0, 300.0), Point(DECODE, 64, 4, 1005, 50): (5.0, None)}
    decode, prefill = samples_of(readings)
    assert (prefill.phase, prefill.input_tokens, prefill.latency_ms, prefill.power_w) == (
        PREFILL,
        256,
        9.0,
        300,
    )
    assert (decode.batch, decode.context_tokens, decode.power_w) == (4, 64, None)


def test_the_plan_of_a_whole_profile_fits_the_papers_forty_minutes() -> None:
    grid = grid_for(H100, QWEN, pool_bytes=H100.total_bytes - QWEN.weight_bytes, max_batch=256)
    plan = foresee(grid, 0.03, Effort(), build(H100, QWEN))
    assert len(plan.cost_ms) + plan.skipped > 7000
    assert sum(plan.cost_ms.values()) / 60_000 < 40
