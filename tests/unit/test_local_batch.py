"""Slack consumption ratio and bypassing batcher (3.4), with the numbers of Fig. 8."""

import pytest

from services.local_sched.batch import Task, fill, order, score

FIG_8 = [
    Task("P1", 2.4, 800, 50),
    Task("D1", 3.8, 400, 20),
    Task("P2", 2.0, 1400, 70),
    Task("D2", 2.8, 650, 20),
    Task("P3", 2.1, 500, 40),
    Task("D3", 3.0, 500, 20),
]


def keys(tasks):
    return [task.key for task in tasks]


def test_fig_8_step_1_sorts_by_score():
    assert keys(order(FIG_8)) == ["D1", "D3", "D2", "P1", "P3", "P2"]


def test_fig_8_step_2_bypasses_p1_for_p3():
    batch, bypassed = fill(order(FIG_8), free_bytes=10_000, free_sm_share_pct=100)
    assert keys(batch) == ["D1", "D3", "D2", "P3"]
    assert keys(bypassed) == ["P1", "P2"]


def test_memory_bypasses_as_well():
    batch, bypassed = fill(order(FIG_8), free_bytes=1_600, free_sm_share_pct=1_000)
    assert keys(batch) == ["D1", "D3", "D2"]  # 1,550 of 1,600
    assert keys(bypassed) == ["P1", "P3", "P2"]


def test_the_first_task_runs_on_what_there_is():
    batch, _ = fill([Task("P", 1.0, 0, 100), Task("Q", 0.5, 0, 10)], 0, 30)
    assert keys(batch) == ["P"]


def test_equal_scores_are_ordered_by_key():
    assert keys(order([Task("b", 1.0), Task("a", 1.0)])) == ["a", "b"]


def test_eq_4():
    assert score(20.0, 100.0, decode=True) == pytest.approx(0.2)
    assert score(20.0, 100.0, decode=True, age_ms=50.0) == pytest.approx(0.2)  # beta is 0 for decodes
    assert score(20.0, 100.0, decode=False, age_ms=50.0) == pytest.approx(0.4)
    assert score(20.0, 100.0, decode=False, age_ms=50.0, beta=0.0) == pytest.approx(0.2)


def test_late_decodes_go_first_and_late_prefills_are_best_effort_but_age():
    late_decode = score(10.0, -5.0, decode=True)
    later_decode = score(10.0, -50.0, decode=True)
    aged = score(10.0, 20.0, decode=False, age_ms=100.0)
    tight = score(10.0, 11.0, decode=False)
    fresh_late = score(10.0, 0.0, decode=False)
    old_late = score(10.0, -30_000.0, decode=False)
    assert later_decode > late_decode > aged > tight > fresh_late == 0.0
    assert old_late == pytest.approx(3.0) and old_late > tight


def test_aged_prefills_with_less_slack_go_first():
    assert score(10.0, 20.0, decode=False, age_ms=100.0) > score(10.0, 40.0, decode=False, age_ms=100.0)
