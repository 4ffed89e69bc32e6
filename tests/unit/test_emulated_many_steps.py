"""Decode steps that the emulated GPU takes many at a time, against the same taken one by one."""

from itertools import pairwise
from typing import Any

import pytest
from test_emulated import KV_BYTES, gpu_with, request, spec

from shared.engine import Order, RunRequest, SetPlan, StepDone, StopRequest, UnloadEngine
from shared.model import Plan

MODEL = spec()


def asks(request_id: str, prompt: int = 100, max_tokens: int = 200) -> RunRequest:
    return request(request_id, prompt, max_tokens)


class Played:
    """A device that was given orders at their times; what it reported, with the time of each token."""

    def __init__(self, report_steps: int, orders: list[tuple[float, Order]], until_ms: float) -> None:
        self.gpu = gpu = gpu_with(MODEL, report_steps=report_steps)
        self.reports: list[tuple[float, StepDone]] = []
        for at_ms, order in [*orders, (until_ms, None)]:
            while (wake_ms := gpu.wake_ms) is not None and wake_ms <= at_ms:
                done = [event for event in gpu.advance(wake_ms) if isinstance(event, StepDone)]
                self.reports += [(wake_ms, event) for event in done]
            if order is not None:
                gpu.order(at_ms, order)
        gpu.advance(until_ms)

    def tokens(self, request_id: str) -> list[tuple[float, int]]:
        """Return (ms, token) of all that a request got."""
        found = []
        for at_ms, report in self.reports:
            for output in report.outputs:
                made = len(output.token_ids)
                if output.request_id == request_id and made:
                    ages_ms = (report.ages_ms or (0.0,))[-made:]
                    found += [
                        (at_ms - age, token) for age, token in zip(ages_ms, output.token_ids, strict=True)
                    ]
        return found

    def energy_j(self, request_id: str) -> float:
        outputs = [out for _, report in self.reports for out in report.outputs]
        return sum(out.energy_j or 0.0 for out in outputs if out.request_id == request_id)


def both(orders: list[tuple[float, Order]], until_ms: float = 20_000.0) -> tuple[Played, Played]:
    return Played(1, orders, until_ms), Played(32, orders, until_ms)


def same(each: Any, many: Any, *request_ids: str) -> None:
    """The same tokens, within 0.05 ms and 0.1 % of the joules."""
    for request_id in request_ids:
        expected, found = each.tokens(request_id), many.tokens(request_id)
        assert [token for _, token in found] == [token for _, token in expected]
        assert [at_ms for at_ms, _ in found] == pytest.approx([at_ms for at_ms, _ in expected], abs=0.05)
        assert many.energy_j(request_id) == pytest.approx(each.energy_j(request_id), rel=1e-3)
    assert many.gpu.energy_j == pytest.approx(each.gpu.energy_j, rel=1e-4)


def test_many_steps_alone_take_exactly_as_long_and_as_much_as_one_by_one() -> None:
    each, many = both([(10_000.0, asks("r", max_tokens=200))])
    same(each, many, "r")
    assert many.reports[-1][0] == pytest.approx(each.reports[-1][0], abs=1e-6)
    assert many.energy_j("r") == pytest.approx(each.energy_j("r"), rel=1e-9)
    assert len(each.reports) == 200 and len(many.reports) == 1 + -(-199 // 32)


def test_one_that_comes_meanwhile_waits_for_the_step_under_way_only() -> None:
    orders: list[tuple[float, Order]] = [(10_000.0, asks("r")), (10_300.0, asks("s", prompt=3000))]
    each, many = both(orders)
    same(each, many, "r", "s")
    # and its prompt shows in the times of the other's tokens, as it does one by one
    gaps = [b - a for (a, _), (b, _) in pairwise(many.tokens("r"))]
    assert max(gaps) > 5 * min(gaps)


def test_of_those_that_go_on_meanwhile_the_tokens_are_told_later() -> None:
    orders: list[tuple[float, Order]] = [(10_000.0, asks("r")), (10_200.0, asks("s", max_tokens=4))]
    each, many = both(orders)
    same(each, many, "r", "s")
    first, end = [i for i, (_, report) in enumerate(many.reports) if report.untold]
    assert [out.request_id for _, report in many.reports[first : end + 1] for out in report.outputs] == [
        "s",
        "s",
    ]
    assert many.reports[end][1].steps == 3 == len(many.reports[end][1].outputs[0].token_ids)
    later = many.reports[end + 1][1]
    assert len(later.outputs[0].token_ids) == 32 == len(later.ages_ms) > later.steps
    assert sum(report.steps for _, report in many.reports) == 200
    spent_ms = [sum(report.duration_ms for _, report in played.reports) for played in (each, many)]
    assert spent_ms[1] == pytest.approx(spent_ms[0], abs=0.05)


def test_of_one_stopped_in_the_step_nothing_is_told_later() -> None:
    orders: list[tuple[float, Order]] = [(10_000.0, asks("r")), (10_000.0, asks("s", max_tokens=5))]
    stop = StopRequest(model="a", request_id="r")
    first = Played(32, [*orders, (10_003.0, stop)], 20_000.0).reports[0][1]
    assert [out.request_id for out in first.outputs] == ["s"] and first.untold == 0


def test_a_plan_holds_from_the_next_step_on() -> None:
    slow = SetPlan(model="a", plan=Plan(plan_id=1, sm_share_pct=20))
    each, many = both([(10_000.0, asks("r")), (10_400.0, slow)])
    same(each, many, "r")


def test_what_is_held_is_told_of_before_it_pauses() -> None:
    hold = SetPlan(model="a", plan=Plan(plan_id=1, held=frozenset({"r"})))
    each, many = both([(10_000.0, asks("r")), (10_400.0, hold)])
    same(each, many, "r")
    assert 1 < len(many.tokens("r")) < 200 and many.gpu.wake_ms is None


def test_memory_that_a_cut_leaves_over_is_given_back() -> None:
    orders: list[tuple[float, Order]] = [(10_000.0, asks("r")), (10_200.0, asks("s", max_tokens=1))]
    each, many = both(orders, 10_300.0)
    (engine,) = many.gpu.engines.values()
    assert engine.blocks == sum(sequence.blocks for sequence in engine.sequences.values())
    ahead = 32 * KV_BYTES
    assert each.gpu.used_bytes <= many.gpu.used_bytes <= each.gpu.used_bytes + ahead
    _, ended = both(orders)
    assert ended.gpu.used_bytes == MODEL.weight_bytes


@pytest.mark.parametrize("order", [StopRequest(model="a", request_id="r"), UnloadEngine(model="a")])
def test_energy_that_nobody_was_told_of_is_overhead(order: Order) -> None:
    _, many = both([(10_000.0, asks("r")), (10_450.0, order)])
    gpu = many.gpu
    assert gpu.request_energy_j == pytest.approx(many.energy_j("r"), rel=1e-9)
    loaded_j = Played(32, [], 20_000.0).gpu.overhead_energy_j
    assert gpu.overhead_energy_j > loaded_j


def test_the_last_moments_are_reported_step_by_step() -> None:
    gpu = Played(32, [(10_000.0, asks("r"))], 10_100.0).gpu
    gpu.report_each_step(10_100.0)
    reports = []
    while gpu.wake_ms is not None and gpu.wake_ms < 10_200.0:
        reports += gpu.advance(gpu.wake_ms)
    made = [len(report.outputs[0].token_ids) for report in reports if isinstance(report, StepDone)]
    assert made[0] > 1 and set(made[1:]) == {1}
