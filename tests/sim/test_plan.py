"""How a plan looks for the number of GPUs, and what it makes of a few windows of a long trace."""

import math
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from shared.devices import device_for
from sim import tables
from sim.nodes import lut_of
from sim.plan import Plan, fewest, plan
from sim.tasks import Case, Counts, Played, Task, banded_cases, play_task
from sim.tries import Tries
from sim.wild import SMALL
from sim.windows import Window, excerpt, gpus_filled, playing_order, ranked, split, total
from sim.workload import Arrival

H100 = device_for("h100-80gb")
MODEL = replace(SMALL, keep_alive_ms=30_000.0)


def arrivals(count: int, gap_ms: float) -> tuple[Arrival, ...]:
    return tuple(Arrival(i * gap_ms, MODEL.name, input_tokens=100, output_tokens=20) for i in range(count))


LONG = Case(models=(MODEL,), arrivals=arrivals(6_000, 500.0), gpus=1, device=H100)  # 50 minutes


def window(gpus: float, requests: int = 10) -> Window:
    return Window(from_ms=0.0, until_ms=1000.0, first=0, past=requests, gpus=gpus)


# ---- the search


@pytest.mark.parametrize("first", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9])
def test_the_fewest_gpus_are_found_from_wherever_the_search_begins(needed: int, first: float) -> None:
    asked: list[int] = []

    def meets(gpus: int) -> bool:
        asked.append(gpus)
        return gpus >= needed

    counts = list(range(1, 9))
    wanted = counts.index(needed) if needed < 9 else len(counts)
    assert fewest(counts, 0.0, first, meets) == wanted
    assert len(asked) == len(set(asked)) <= 6


def test_what_work_alone_fills_is_not_tried_with_less() -> None:
    asked: list[int] = []
    fewest([1, 2, 3, 4], 2.5, 2.5, lambda gpus: bool(asked.append(gpus)) or gpus >= 3)
    assert asked == [3]
    assert fewest([1, 2], 2.5, 2.5, lambda gpus: False) == 2  # the most is tried all the same


# ---- windows


def test_work_in_gpus_is_what_the_table_says() -> None:
    # 20 requests in 10 s: prefills of 100 tokens, and 19 decode steps each; as if each token took 100 ms,
    # 20 * 19 * 0.1 s / 10 s = 3.8 requests are decoded together, with 100 + 20 / 2 tokens of context
    lut = lut_of(H100, MODEL)
    prefill_ms = lut.ttft_ms(1635, 100, 100)
    decode_ms = lut.tbt_ms(1635, 100, 3.8, 110)
    found = gpus_filled(arrivals(20, 500.0), 10_000.0, {MODEL.name: lut})
    assert found == pytest.approx((20 * prefill_ms + 20 * 19 / 3.8 * decode_ms) / 10_000.0)


def test_windows_hold_every_request_once() -> None:
    cut = split(LONG.arrivals, {MODEL.name: lut_of(H100, MODEL)})
    assert sum(one.requests for one in cut) == len(LONG.arrivals)
    assert all(a.past == b.first and a.until_ms == b.from_ms for a, b in pairwise(cut))
    assert cut[0].span_ms == pytest.approx(60_000.0, rel=0.01)  # two requests a second: as long as allowed
    assert len(split(arrivals(3, 10.0), {MODEL.name: lut_of(H100, MODEL)})) == 12


def test_every_window_is_played_once_the_busiest_first() -> None:
    windows = [window(gpus) for gpus in (0.3, 0.0, 0.9, 0.5, 0.5, 0.1, 0.0)]
    order = playing_order(windows)
    assert sorted(order) == list(range(7)) and order[:2] == [2, 6]
    assert playing_order([window(1.0)]) == [0]
    assert ranked(windows)[:2] == [6, 1]  # of the two idle ones, the one before which less was going on


def test_an_excerpt_is_what_came_before_and_what_comes_after() -> None:
    other = replace(MODEL, name="other")
    rows = [Arrival(t * 1000.0, MODEL.name, 10, 7) for t in range(0, 200, 2)]
    rows += [Arrival(90_500.0, "other", 10, 5), Arrival(1_000.0, "gone", 10, 5)]
    rows.sort(key=lambda row: row.at_ms)
    first = next(i for i, row in enumerate(rows) if row.at_ms >= 120_000.0)
    kept_ms = {MODEL.name: 30_000.0, other.name: 30_000.0, "gone": 30_000.0}
    taken = excerpt(rows, Window(120_000.0, 140_000.0, first, first + 10, 0.0), kept_ms)
    # the window is 30 s of keep-alive, 10 s of loading and 15 s of warm-up after the start
    assert (taken.from_ms, taken.until_ms) == (55_000.0, 75_000.0)
    shown = [(row.at_ms - 55_000.0 + 120_000.0, row.model) for row in taken.arrivals]
    assert shown[:3] == [(90_500.0, "other"), (104_000.0, MODEL.name), (106_000.0, MODEL.name)]
    assert shown[-1] == (144_000.0, MODEL.name)  # 5 s on
    learnt = {one.model: one for one in taken.learnt}
    assert learnt[MODEL.name].output_tokens["S"][-1] == 7.0 and learnt["gone"].scheduler == "scheduler-0"


def test_a_total_is_exact_where_rates_go_with_the_rank() -> None:
    sizes = [10.0, 20.0, 0.0, 30.0, 10.0, 10.0, 50.0]
    order = list(range(7))
    rates = [0.0, 1.0, 9.0, 2.0, 3.0, 4.0, 5.0]  # by rank among those that are not empty
    figures = {i: rates[i] * sizes[i] for i in order}
    every = total(figures, sizes, order)
    assert every.value == every.low == every.high == sum(figures.values())
    some = total({i: figures[i] for i in (0, 1, 2, 4, 6)}, sizes, order)
    assert some.value == pytest.approx(every.value) and some.high - some.low == pytest.approx(0.0, abs=1e-6)
    few = total({i: figures[i] for i in (0, 6)}, sizes, order)
    assert (few.low, few.high) == (-math.inf, math.inf)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    held, wide = 0, []
    for _ in range(200):
        figures = 10.0 + np.sqrt(np.arange(60)) + rng.normal(0.0, 1.0, 60)
        windows = [window(float(i)) for i in range(60)]
        chosen = playing_order(windows)[:12]
        found = total({i: float(figures[i]) for i in chosen}, [1.0] * 60, ranked(windows))
        held += found.low <= figures.sum() <= found.high
        wide.append(found.high - found.low)
    assert 0.88 <= held / 200 <= 1.0
    assert np.median(wide) < 0.12 * 60 * 15


def test_a_window_is_played_as_in_the_whole_run() -> None:
    base = replace(LONG, arrivals=arrivals(400, 500.0))
    tries = Tries(base, played_none, whole=False)
    whole = play_task(tries._task(base))
    alone = play_task(tries._task(base, 6))[6]
    assert alone.tokens == pytest.approx(whole[6].tokens, abs=2)
    assert alone.energy_j == pytest.approx(whole[6].energy_j, rel=0.02)
    assert (alone.on_time, alone.gpu_ms) == (whole[6].on_time, pytest.approx(whole[6].gpu_ms))


# ---- the plan


def played_none(name: str, tasks: Sequence[Task], for_s: float, least: int) -> list[Played]:
    return []


def player(
    share: Callable[[int], float], tasks_in_time: int
) -> tuple[list[str], Callable[..., list[Played]]]:
    """As if this share of the requests were on time, and each GPU drew 1 kW; the knee costs a tenth more."""
    calls: list[str] = []

    def play(name: str, tasks: Sequence[Task], for_s: float, least: int) -> list[Played]:
        calls.append(name)
        count = len(tasks) if for_s == math.inf else max(least, min(tasks_in_time, len(tasks)))
        return [
            Played({i: came(task, low, high) for i, low, high in task.counted}, 1.0) for task in tasks[:count]
        ]

    def came(task: Task, low_ms: float, high_ms: float) -> Counts:
        requests = sum(low_ms <= one.at_ms < high_ms for one in task.played.arrivals)
        seconds, more = (high_ms - low_ms) / 1000.0, 1.1 if "knee_mhz = 700" in task.case.changed else 1.0
        on_time = share(task.case.gpus) * requests
        return Counts(
            on_time=on_time,  # type: ignore[arg-type]
            tokens_on_time=20 * on_time,  # type: ignore[arg-type]
            tokens=20 * requests,
            energy_j=1000.0 * seconds * task.case.gpus * more,
            gpu_ms=task.case.gpus * seconds * 1000.0,
        )

    return calls, play


def planned(
    budget_s: float, left_s: float, tasks_in_time: int = 0, target: float = 0.7
) -> tuple[Plan, list[str]]:
    calls, play = player(lambda gpus: min(1.0, gpus / 4), tasks_in_time)
    return plan(LONG, range(1, 9), target, play, budget_s, lambda: left_s), calls


@pytest.mark.parametrize(("budget_s", "left_s", "whole"), [(math.inf, math.inf, True), (45.0, 9.0, False)])
def test_a_plan_whole_or_sampled(budget_s: float, left_s: float, whole: bool) -> None:
    answer, _ = planned(budget_s, left_s)
    assert (answer.needed_gpus, answer.chosen.gpus, answer.sure) == (3, 3, True)
    assert answer.chosen.whole == whole
    hours = LONG.span_ms / 3.6e6
    assert answer.energy_kwh.value == pytest.approx(3.0 * hours, rel=1e-3)
    assert answer.energy_kwh.most == pytest.approx(3.3 * hours, rel=1e-3)
    assert answer.energy_kwh.least == answer.energy_kwh.value
    assert answer.attainment.value == pytest.approx(0.75)
    reached = answer.chosen.attainment
    assert (reached.high - reached.low > 0.0) != whole
    said = shown(answer)
    assert "3 x h100-80gb are the fewest tried that bring 70% of the requests on time" in said
    assert ("Sampled: of 50 windows of 60 s" in said) != whole and "cold (70 W)" in said


def test_a_trace_is_played_whole_on_the_chosen_gpus_where_there_is_time() -> None:
    answer, calls = planned(10_000.0, 9_000.0)
    assert answer.chosen.whole and not answer.tried[0].whole
    assert calls[-1] == "bands of the device model"


def test_without_time_there_are_no_bands() -> None:
    answer, _ = planned(1.0, 0.0)
    assert answer.bands == () and answer.chosen.windows == 6
    assert "No time was left" in shown(answer)


def test_no_number_of_gpus_may_be_enough() -> None:
    _, play = player(lambda gpus: 0.5, 0)
    answer = plan(LONG, [1, 2], 0.9, play, 45.0, lambda: 1.0)
    assert (answer.needed_gpus, answer.chosen.gpus) == (None, 2)
    assert "No number of GPUs that was tried brings 90%" in shown(answer)


def test_what_more_windows_say_counts() -> None:
    # the search plays six windows; in those that are played on the chosen GPUs after that all are late
    _, play = player(lambda gpus: 1.0, 0)
    calls = 0

    def worse_later(name: str, tasks: Sequence[Task], for_s: float, least: int) -> list[Played]:
        nonlocal calls
        calls += name == "1 GPUs"
        if calls < 2 or name != "1 GPUs":
            return play(name, tasks, for_s, least)
        return [
            replace(one, counts={i: replace(c, on_time=0) for i, c in one.counts.items()})
            for one in play(name, tasks, math.inf, least)
        ]

    answer = plan(LONG, [1, 2], 0.95, worse_later, 45.0, lambda: 1.0)
    assert answer.needed_gpus == 2 and answer.tried[0].attainment.value < 0.5


def shown(answer: Plan) -> str:
    console = Console(width=200, record=True, file=StringIO())
    for part in tables.planned(answer, LONG, price=0.5):
        console.print(part)
    return console.export_text()


def test_bands_change_one_number_each() -> None:
    cases = banded_cases(replace(LONG, arrivals=()))
    changed = [
        (c.device.bandwidth_knee_mhz, c.device.step_overhead_ms, c.device.context_idle_w) for c in cases
    ]
    assert changed == [
        (700, 1.0, 110),
        (1400, 1.0, 110),
        (1100, 0.5, 110),
        (1100, 2.0, 110),
        (1100, 1.0, 90),
        (1100, 1.0, 130),
    ]
