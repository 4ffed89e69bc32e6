"""The joint sweep over clocks and SM shares, with the numbers of Fig. 8 step 3."""

import math

import pytest

from services.local_sched import tune
from services.local_sched.divide import proportional
from services.local_sched.grid import CHUNK_TOKENS, Load, coarse, grid_of
from services.local_sched.tune import Candidate, choose
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.lut import build

H100 = DEVICES["h100-80gb"]
MODEL = emulated_models(1)[0]
LUT = build(H100, MODEL)
CLOCKS = tuple(int(clock) for clock in LUT.clocks_mhz[::-1])
FIG_8 = [  # shares of P1, D1, D2, D3
    Candidate(900, (50, 20, 30, 20), 36.0),
    Candidate(1100, (40, 20, 20, 20), 40.0),
    Candidate(1300, (30, 20, 20, 20), 48.0),
]


def test_fig_8_step_3():
    assert not tune.feasible(FIG_8[0])  # 120 %
    assert sum(share or 0 for share in FIG_8[1].shares_pct) == 100
    assert choose(FIG_8) == FIG_8[1]


def test_no_candidate_fits():
    assert choose([FIG_8[0], Candidate(1300, (30, None), 1.0)]) is None


def test_the_current_clock_is_kept_while_it_may_not_switch_or_gains_too_little():
    assert choose(FIG_8, current_mhz=1300, may_switch=False) == FIG_8[2]
    assert choose(FIG_8, current_mhz=1300, min_gain=0.2) == FIG_8[2]  # saves 16.7 %
    assert choose(FIG_8, current_mhz=1300, min_gain=0.1) == FIG_8[1]


def test_a_clock_at_which_a_deadline_is_missed_is_left_at_once():
    assert choose(FIG_8, current_mhz=900, may_switch=False) == FIG_8[1]


def profile(load, clocks=CLOCKS):
    return grid_of(load.lut, clocks).profile(load)


def points(*profiles, **how):
    return tune.candidates(tune.sweep(H100, profiles, len(CLOCKS), **how), CLOCKS)


def test_where_memory_is_short_only_the_widest_shares_of_each_clock_are_weighed():
    load = profile(Load(LUT, 8, 500.0, 85.0, 100.0))
    assert {(c.sm_clock_mhz, c.shares_pct[0]) for c in points(load)} >= {(1635, 10), (1635, 100)}
    assert [c.shares_pct for c in points(load, wide=True)] == [(100,)] * len(CLOCKS)


def test_below_the_first_clock_that_does_not_do_nothing_is_weighed():
    tight = profile(Load(LUT, prefills=((4000, 1.02 * LUT.ttft_ms(1335, 100, 4000)),)))
    found = points(tight)
    assert found[-1] == Candidate(1245, (None,), math.inf)
    assert {c.sm_clock_mhz for c in found} == {clock for clock in CLOCKS if clock >= 1245}


def test_round_numbers_are_never_below_and_close():
    assert [coarse(n, 6) for n in (0.2, 63, 64, 65, 1000, 8191)] == [1, 63, 64, 66, 1008, 8192]
    assert all(n <= coarse(n, 5) <= n * (1 + 1 / 16) for n in range(1, 5000))


def test_equal_energy_goes_to_the_lower_clock():
    assert choose([Candidate(1300, (10,), 5.0), Candidate(1100, (20,), 5.0)]) == Candidate(1100, (20,), 5.0)


@pytest.mark.parametrize(
    ("needs", "shares"),
    [
        ((100.0, 100.0), (50, 50)),
        ((30.0, 60.0), (30, 70)),
        ((100.0, 1.0), (90, 10)),
        ((10.0,), (100,)),
        ((1.0,) * 3, (40, 30, 30)),
    ],
)
def test_proportional(needs, shares):
    assert proportional(needs, H100.sm_sizes_pct) == shares


def test_a_device_without_partitions_gives_each_engine_all():
    assert proportional((3.0, 1.0), (100,)) == (100, 100)


def test_one_decode_chooses_a_point_that_keeps_its_tbt():
    found = points(profile(Load(LUT, 8, 500.0, 85.0, 100.0)))
    best = choose(found)
    assert best is not None and best.shares_pct[0] is not None
    assert LUT.tbt_ms(best.sm_clock_mhz, best.shares_pct[0], 8, 500.0) <= 85.0
    assert best.sm_clock_mhz < H100.f_max_mhz  # a decode needs no top clock
    assert best.energy_j == min(c.energy_j for c in found if tune.feasible(c))


def test_a_tighter_prefill_needs_a_larger_share():
    need = []
    for slack_ms in (2000.0, 150.0):
        load = profile(Load(LUT, prefills=((2000, slack_ms),)))
        need.append(tune.least_shares(H100, [load], len(CLOCKS) - 1)[0])
    assert need[0] is not None and (need[1] is None or need[1] > need[0])


def test_prefills_of_one_engine_queue_behind_each_other():
    alone = float(LUT.ttft_ms(CLOCKS[0], 100, 1000))
    load = profile(Load(LUT, prefills=((1000, 3 * alone), (1000, 3 * alone))))
    assert load.prefill_ms[-1][0] / load.slack_ms == pytest.approx(2 / 3, rel=1e-3)
    one = profile(Load(LUT, prefills=((1000, 3 * alone),)))
    assert one.prefill_ms[-1][0] / one.slack_ms == pytest.approx(1 / 3, rel=1e-3)


def test_the_impossible_falls_back_to_the_highest_clock_in_proportion_to_need():
    hopeless = profile(Load(LUT, prefills=((8000, 1.0),)))
    easy = profile(Load(LUT, 1, 100.0, 1000.0, 10.0))
    assert choose(points(hopeless, easy)) is None
    last = tune.fallback(H100, [hopeless, easy], CLOCKS)
    assert last.sm_clock_mhz == H100.f_max_mhz
    assert last.shares_pct == (90, 10) and math.isnan(last.energy_j)


def test_without_a_meter_the_fastest_wins():
    cpu = DEVICES["cpu"]
    profiles = [profile(Load(build(cpu, MODEL), 1, 100.0, 1e9, 2.0), (0,)) for _ in range(2)]
    best = choose(tune.candidates(tune.sweep(cpu, profiles, 1, 200), (0,)), budget_pct=200)
    assert best is not None and best.shares_pct == (100, 100) and best.energy_j > 0.0


def test_chunks_shrink_with_the_room_that_decodes_leave():
    grid = grid_of(LUT, CLOCKS)
    for room_ms in (-1.0, 10.0, 40.0, 1e6):
        chunk = tune.largest_chunk(grid, 0, len(H100.sm_sizes_pct) - 1, room_ms, 1.0)
        fitting = [size for size in CHUNK_TOKENS if LUT.ttft_ms(1635, 100, size) <= room_ms]
        assert chunk == max(fitting, default=256)
