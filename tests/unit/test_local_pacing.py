"""Decode pacing: when a plan lets decode steps wait for their time."""

from dataclasses import replace

import pytest
from local_bench import H100, MODEL, Bench, of, request

from shared import engine as en
from shared import events as ev
from shared.model import Placement


def interval_ms(bench):
    """The interval of the plan in force."""
    return bench.state.engines[MODEL.name].plan.step_interval_ms


def decoding(bench, steps=2, after_ms=20.0):
    bench.submit(request("r1", prompt=100))
    for _ in range(steps):
        bench.token("r1", after_ms=after_ms)
    bench.wait(10.0)
    return bench


def test_decodes_wait_for_a_part_of_the_shortest_tbt():
    bench = decoding(Bench(models=[MODEL], pace_part=0.6))
    assert interval_ms(bench) == pytest.approx(60.0)
    assert bench.state.engines[MODEL.name].pace_ms == pytest.approx(60.0)


def test_pacing_can_be_switched_off():
    assert interval_ms(decoding(Bench(models=[MODEL], pacing="off"))) == 0.0


def test_one_that_is_behind_its_pace_does_not_wait():
    bench = decoding(Bench(models=[MODEL]), steps=1)
    bench.token("r1", after_ms=180.0)  # its second token is 80 ms late
    bench.wait(10.0)
    assert interval_ms(bench) == 0.0
    for _ in range(2):
        bench.token("r1", after_ms=20.0)
    bench.wait(bench.state.settings.replan_ms)
    assert interval_ms(bench) == pytest.approx(50.0)


def test_nothing_waits_where_there_is_no_meter():
    bench = decoding(Bench(device=replace(H100, has_meter=False), models=[MODEL]))
    assert interval_ms(bench) == 0.0


def test_nothing_waits_while_memory_is_short():
    bench = decoding(Bench(models=[MODEL], ample_memory=1.0))
    assert interval_ms(bench) == 0.0


def test_nothing_waits_while_models_find_no_room():
    bench = decoding(Bench(models=[MODEL]))
    for version, short, expected_ms in ((5, True, 0.0), (6, False, 50.0)):
        bench.do(ev.PlacementChanged(placement=Placement(version=version, room_short=short)))
        bench.wait(bench.state.settings.replan_ms)
        assert interval_ms(bench) == pytest.approx(expected_ms)


def test_a_plan_goes_out_again_when_only_its_interval_changes():
    bench = decoding(Bench(models=[MODEL]), steps=1)
    before = bench.state.engines[MODEL.name].plan
    bench.token("r1", after_ms=180.0)
    plans = [order.plan for order in of(bench.wait(10.0), en.SetPlan)]
    assert [plan.step_interval_ms for plan in plans] == [0.0] and plans[0].plan_id > before.plan_id
