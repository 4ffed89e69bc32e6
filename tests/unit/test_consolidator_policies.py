"""The consolidator's pure policies, against the paper's Fig. 9 and numbers worked out by hand."""

from dataclasses import replace

import pytest

from services.consolidator.capacity import Capacity, best_fit_decreasing, least_gpus
from services.consolidator.demand import Demand, Wanted, need_bytes
from services.consolidator.ewr import ewr, optimal, power_w, served_share, waste
from services.consolidator.mapping import assign, costs_ms
from services.consolidator.pack import Packing, pack
from services.consolidator.plan import assigned, groupings, planned, sent_ms
from services.consolidator.preference import prefer
from services.consolidator.window import Load, Windows
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.events import RequestEnded
from shared.lut import build
from shared.model import Objectives

H100 = device_for("h100-80gb")
MODEL = emulated_models(1)[0]
LUT = build(H100, MODEL)
MEDIUM = Objectives(ttft_ms=400.0, tbt_ms=100.0)

# Fig. 9 prints clocks and outcomes only. Shares and memory are such that its steps follow; the execution
# times are such that its swap pays: with equal ones it would lose against placing red on the first GPU.
CAPACITY = Capacity(95.0, 95)
PURPLE = Demand("purple", sm_pct=20, need_bytes=40, clock_mhz=1325, busy=0.2)
BLUE = Demand("blue", sm_pct=20, need_bytes=45, clock_mhz=1250, busy=0.2)
GREEN = Demand("green", sm_pct=20, need_bytes=40, clock_mhz=1200, busy=0.1)
RED = Demand("red", sm_pct=20, need_bytes=45, clock_mhz=1125, busy=0.4)
FIG_9 = (RED, GREEN, BLUE, PURPLE)


def names(packing: Packing) -> list[set[str]]:
    return [{demand.model for demand in group} for group in packing.groups]


# ---- 3.5.2, Fig. 9


def test_fig_9_capacity_planning_takes_one_gpu_for_sms_and_two_for_memory() -> None:
    assert least_gpus(FIG_9, CAPACITY) == (1, 2)


def test_fig_9_places_three_directly_and_swaps_green_for_red() -> None:
    assert names(pack((PURPLE, BLUE, GREEN), 2, CAPACITY)) == [{"purple"}, {"blue", "green"}]
    packing = pack(FIG_9, 2, CAPACITY)
    assert names(packing) == [{"purple", "green"}, {"blue", "red"}]
    assert (packing.direct, packing.swaps, packing.fallbacks, packing.opened) == (3, 1, 0, 0)


@pytest.mark.parametrize(
    "green",
    [
        replace(GREEN, busy=0.4),  # its own waste on the first GPU is what red would have there: no gain
        replace(GREEN, need_bytes=50, sm_pct=20),  # too large for the first GPU
    ],
)
def test_fig_9_falls_back_to_the_first_gpu_where_the_swap_does_not_help(green: Demand) -> None:
    purple = PURPLE if green.need_bytes <= 40 else replace(PURPLE, need_bytes=50)
    packing = pack((purple, BLUE, green, RED), 2, CAPACITY)
    assert names(packing) == [{"purple", "red"}, {"blue", "green"}]
    assert (packing.direct, packing.swaps, packing.fallbacks, packing.opened) == (3, 0, 1, 0)


def test_fallback_tries_every_gpu_before_a_new_one() -> None:
    """Algorithm 1 looks at one candidate; the third closest has room here."""
    full = [Demand(f"f{mhz}", need_bytes=90, clock_mhz=mhz, busy=0.1) for mhz in (1500, 1400)]
    roomy = Demand("roomy", need_bytes=30, clock_mhz=1600, busy=0.1)
    late = Demand("late", need_bytes=60, clock_mhz=1000, busy=0.1)
    packing = pack([*full, roomy, late], 3, CAPACITY)
    assert names(packing) == [{"roomy", "late"}, {"f1500"}, {"f1400"}]
    assert packing.opened == 0
    packing = pack([*full, roomy, late, replace(late, model="later")], 3, CAPACITY)
    assert names(packing)[3] == {"later"} and packing.opened == 1


def test_copies_of_a_model_are_kept_apart() -> None:
    twice = [Demand("m", copy, sm_pct=10, need_bytes=10, clock_mhz=900, busy=0.5) for copy in (0, 1)]
    assert names(pack(twice, 1, CAPACITY)) == [{"m"}, {"m"}]


# ---- 3.5.1


def test_ewr_by_hand() -> None:
    """Clocks 2 and 1 on one GPU, times 3 and 5: waste 5 * (8 - 1) = 35 of 3 * 8 + 5 * 1 = 29."""
    fast, slow = Demand("f", clock_mhz=2, busy=3), Demand("s", clock_mhz=1, busy=5)
    assert waste([[fast, slow]]) == 35 and optimal([[fast, slow]]) == 29
    assert ewr([[fast, slow]]) == pytest.approx(35 / 29)
    assert ewr([[fast], [slow]]) == 0.0 and ewr([]) == 0.0


def test_fig_9_swap_by_hand() -> None:
    """In units of 1e9: 1325^3 = 2.326, 1250^3 = 1.953, 1200^3 = 1.728, 1125^3 = 1.424."""
    swapped = waste([[PURPLE, GREEN], [BLUE, RED]]) / 1e9
    instead = waste([[PURPLE, RED], [BLUE, GREEN]]) / 1e9
    assert swapped == pytest.approx(0.1 * (2.3262 - 1.728) + 0.4 * (1.9531 - 1.4238), abs=1e-3)
    assert instead == pytest.approx(0.4 * (2.3262 - 1.4238) + 0.1 * (1.9531 - 1.728), abs=1e-3)


def test_power_of_a_group_is_at_its_highest_clock_and_idle_only_when_nothing_runs() -> None:
    one = Demand("a", clock_mhz=1000, busy=0.5, clocks_mhz=(800.0, 1200.0), watts=(40.0, 60.0))
    two = Demand("b", clock_mhz=1200, busy=0.5, clocks_mhz=(800.0, 1200.0), watts=(10.0, 30.0))
    assert power_w([[one]], H100) == pytest.approx(0.5 * 110 + 0.5 * 70 + 50)
    assert power_w([[one, two]], H100) == pytest.approx(0.25 * 110 + 0.75 * 70 + 60 + 30)
    assert power_w([[]], H100) == 110


def test_served_share_by_hand() -> None:
    """Two models, each half the time in need of 80 %: a quarter of the time 160 %, 100 % of it found."""
    one = Demand("a", busy=0.5, least_pct=80)
    assert served_share([one]) == 1.0
    assert served_share([one, replace(one, model="b")]) == pytest.approx((0.5 * 80 + 0.25 * 100) / 80)
    assert served_share([]) == 1.0


# ---- phase one


def ended(model: str, input_tokens: int, output_tokens: int) -> RequestEnded:
    return RequestEnded(
        request_id="r",
        model=model,
        tenant="t",
        outcome="stop",
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        ttft_ms=100.0,
        mean_tbt_ms=10.0,
    )


def test_a_window_tells_rate_lengths_and_latency_and_forgets() -> None:
    windows = Windows(300_000.0)
    windows.listen(0.0)
    for second in range(100):
        windows.note(1000.0 * second, ended("m", 100 if second % 2 else 300, 11))
    load = windows.load(100_000.0, "m")
    assert load is not None and windows.load(100_000.0, "other") is None
    assert load.rate_per_s == pytest.approx(1.0, rel=0.2)
    assert (load.input_tokens, load.output_tokens, load.latency_ms) == (200.0, 11.0, 200.0)
    later = windows.load(300_000.0, "m")
    assert later is not None and later.rate_per_s == pytest.approx(
        90 / 290
    )  # without the bucket that has just left
    assert windows.load(500_000.0, "m") is None


def test_a_window_follows_a_rise_at_once_and_a_fall_slowly() -> None:
    windows = Windows(300_000.0)
    windows.listen(0.0)
    for second in range(600):
        for _ in range(1 if second < 540 else 10):
            windows.note(1000.0 * second, ended("m", 1, 1))
    risen = windows.load(600_000.0, "m")
    assert risen is not None and risen.rate_per_s > 8.0
    for second in range(600, 720):
        windows.note(1000.0 * second, ended("m", 1, 1))
    fallen = windows.load(720_000.0, "m")
    assert fallen is not None and 2.0 < fallen.rate_per_s < 4.0


def test_preferred_configuration_weighs_phases_by_time_and_by_energy() -> None:
    load = Load(rate_per_s=0.01, input_tokens=700, output_tokens=300, latency_ms=0.0)
    found = prefer(LUT, load, MEDIUM)
    clocks, shares = LUT.clocks_mhz[:, None], LUT.shares_pct[None, :]
    prefill_ms = LUT.ttft_ms(clocks, shares, 700)
    prefill_j = LUT.request_energy_j(clocks, shares, 700, 1)
    step_ms = LUT.tbt_ms(clocks, shares, 1, 850)
    decode_j = LUT.request_energy_j(clocks, shares, 700, 300) - prefill_j
    best: list[tuple[float, float, int, int]] = []
    for ms, joules, times, limit in ((prefill_ms, prefill_j, 1, 400), (step_ms, decode_j, 299, 100)):
        least = min(
            (joules[c, s], ms[c, s] * times, c, s)
            for c in range(len(LUT.clocks_mhz))
            for s in range(len(LUT.shares_pct))
            if ms[c, s] <= limit
        )
        best.append(least)
    (jp, tp, cp, sp), (jd, td, cd, sd) = best
    share = (LUT.shares_pct[sp] * tp + LUT.shares_pct[sd] * td) / (tp + td)  # Eq. 8
    clock = (jp * LUT.clocks_mhz[cp] + jd * LUT.clocks_mhz[cd]) / (jp + jd)  # Eq. 9
    assert found.sm_share_pct == pytest.approx(share, rel=1e-5)
    assert found.sm_clock_mhz == pytest.approx(clock, rel=1e-5)
    assert found.latency_ms == pytest.approx(tp + td, rel=1e-5)
    assert found.busy == pytest.approx(0.01 * (tp + td) / 1000, rel=1e-5)
    assert found.meets


def test_an_impossible_objective_gets_the_fastest_configuration_and_says_so() -> None:
    load = Load(1.0, 700, 300, 0.0)
    found = prefer(LUT, load, Objectives(ttft_ms=1.0, tbt_ms=100.0))
    assert not found.meets and found.least_pct == 100.0
    wanted = Wanted(LUT, load, Objectives(ttft_ms=1.0, tbt_ms=100.0), 1 << 30, 2.33)
    assert wanted.fewest_copies(Capacity(95.0, 76 * 10**9)) is None


def test_memory_by_littles_law() -> None:
    """4 requests a second for 4 s: 16 in service, and two standard deviations of 4 more."""
    load = Load(rate_per_s=4.0, input_tokens=100, output_tokens=60, latency_ms=0.0)
    kv_bytes = 160 * MODEL.kv_bytes_per_token  # ten whole blocks of 16 tokens
    assert need_bytes(LUT, load, 4000.0, 0.0, 0) == MODEL.weight_bytes + 16 * kv_bytes
    assert need_bytes(LUT, load, 4000.0, 2.0, 0) == MODEL.weight_bytes + 24 * kv_bytes
    assert need_bytes(LUT, load, 0.001, 2.0, 10**9) == MODEL.weight_bytes + 10**9


def test_a_load_too_large_for_one_gpu_is_shared_by_as_few_copies_as_can() -> None:
    wanted = Wanted(LUT, Load(60.0, 700, 300, 0.0), MEDIUM, 1 << 30, 2.33)
    capacity = Capacity(95.0, int(0.95 * H100.total_bytes))
    copies = wanted.fewest_copies(capacity)
    assert copies is not None and len(copies) > 1
    assert all(capacity.holds(copy) for copy in copies)
    fewer = wanted.copies(len(copies) - 1)[0]
    assert not (capacity.holds(fewer) and fewer.meets)


def test_best_fit_decreasing_is_no_lower_bound() -> None:
    assert best_fit_decreasing([38, 38, 28, 28, 28, 28], 95) == 3  # the optimum is 2
    assert best_fit_decreasing([], 95) == 0


# ---- F


def test_a_relabelling_of_gpus_moves_nothing() -> None:
    holds = [{"a", "b"}, {"c"}, {"d"}]
    groups = [{"d"}, {"a", "b"}, {"c"}]
    costs = costs_ms(holds, groups, [dict.fromkeys("abcd", 10.0)] * 3, [0.0] * 3)
    assert assign(costs) == [2, 0, 1]
    assert sum(costs[row, column] for column, row in enumerate(assign(costs))) == 0.0


def test_loads_and_wake_ups_decide_who_moves() -> None:
    """The large model stays, even if two small ones move for it; disks and cold GPUs cost more."""
    holds, groups = [{"large"}, {"small", "tiny"}], [{"large", "small", "tiny"}]
    near = {"large": 30.0, "small": 9.0, "tiny": 5.0}
    costs = costs_ms(holds, groups, [near, near], [0.0, 0.0])
    assert costs.ravel().tolist() == [14.0, 30.0] and assign(costs) == [0]
    on_disk = {model: 10 * time_ms for model, time_ms in near.items()}
    assert assign(costs_ms(holds, groups, [on_disk, near], [0.0, 0.0])) == [1]  # 140 against 30
    assert assign(costs_ms(holds, groups, [near, near], [17.0, 0.0])) == [1]  # 31 against 30
    empty = costs_ms([set(), set()], [{"tiny"}], [near, near], [3.0, 0.0])
    assert empty.ravel().tolist() == [9.0, 6.0]


def test_a_plan_packs_onto_gpus_that_have_the_models() -> None:
    demands = [replace(each, clocks_mhz=(800.0,), watts=(10.0,)) for each in FIG_9]
    holds = {"g1": ["red"], "g2": ["blue"], "g3": ["green"], "g4": ["purple"], "g5": []}
    load_ms = {"red": 40.0, "blue": 50.0, "green": 10.0, "purple": 20.0}
    [groups] = groupings(demands, len(holds), CAPACITY)
    assert groups is not None
    of_gpu, wake_ms = dict.fromkeys(holds, load_ms), dict.fromkeys(holds, 7.0)
    plan = planned(assigned(groups, holds, of_gpu, wake_ms), H100, 0.0)
    assert {gpu: models for gpu, models in plan.on_gpu.items() if models} == {
        "g2": ["blue", "red"],  # the larger of each pair stays
        "g4": ["green", "purple"],
    }
    assert plan.outlook.used == 2
    assert sent_ms([holds, plan.on_gpu], of_gpu, wake_ms) == 40.0 + 10.0
    assert sent_ms([holds, plan.on_gpu, holds], of_gpu, wake_ms) == 2 * (40.0 + 10.0) + 2 * 7.0
    assert list(groupings(demands, 1, CAPACITY)) == [None]
