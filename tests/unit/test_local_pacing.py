"""Decode pacing: when a plan lets decode steps wait for their time."""

from dataclasses import replace
from functools import partial

import pytest
from local_bench import H100, MODEL, OTHER, Bench, of, request

from services.local_sched.pacing import pace_part, pace_parts
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.errors import ConfigError
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
    assert interval_ms(bench) == pytest.approx(70.0)


def test_nothing_waits_where_there_is_no_meter():
    bench = decoding(Bench(device=replace(H100, has_meter=False), models=[MODEL]))
    assert interval_ms(bench) == 0.0


def test_nothing_waits_while_memory_is_short():
    bench = decoding(Bench(models=[MODEL], short_memory=1.0))
    assert interval_ms(bench) == 0.0


def test_steps_wait_for_less_as_memory_goes():
    longest_for = partial(pace_part, longest=0.8, ample=0.5)
    assert longest_for(room_bytes=10**9, held_bytes=0) == 0.8
    assert longest_for(room_bytes=5 * 10**9, held_bytes=10**10) == 0.8  # just ample
    assert longest_for(room_bytes=10**9, held_bytes=10**10) == pytest.approx(0.16)
    assert longest_for(room_bytes=0, held_bytes=10**10) == 0.0


def test_ample_memory_is_more_than_none():
    with pytest.raises(ConfigError, match="ample_memory must be positive, not 0"):
        LocalSettings(ample_memory=0.0)


def test_what_is_free_is_for_the_models_at_work_by_their_weights():
    bench = Bench(models=[MODEL, OTHER], ample_memory=100.0)
    bench.submit(request("r1", prompt=8000))
    bench.submit(request("r2", prompt=2000, model=OTHER.name))
    engines = list(bench.state.engines.values())
    pools = [bench.state.ledger.pools[engine.spec.name] for engine in engines]
    weights = [engine.spec.weight_bytes for engine in engines]
    expected = []
    for pool, weight_bytes in zip(pools, weights, strict=True):
        room_bytes = bench.state.ledger.free_bytes * weight_bytes / sum(weights)
        expected.append(0.7 * room_bytes / (100.0 * pool.held_bytes))
    found = pace_parts(bench.state, engines)
    assert 0.0 < min(expected) < max(expected) < 0.7
    assert found == pytest.approx([int(20 * part) / 20 for part in expected])
    assert pace_parts(bench.state, engines[:1])[0] > found[0]  # the other has nothing to do


def test_an_engine_with_its_own_pool_has_its_room_to_itself():
    bench = Bench(elastic_kv=False, ample_memory=40.0)
    for model in (MODEL, OTHER):
        bench.do(ev.Load(model=model, placement_version=1))
        bench.do(en.EngineReady(model=model.name, kv_pool_bytes=4 << 30, block_tokens=16, load_ms=1.0))
    bench.submit(request("r1", prompt=3000))
    engine = bench.state.engines[MODEL.name]
    held_bytes = bench.state.ledger.pools[MODEL.name].held_bytes
    expected = 0.7 * ((4 << 30) - held_bytes) / (40.0 * held_bytes)
    assert 0.05 < expected < 0.7
    assert pace_parts(bench.state, [engine]) == pytest.approx([int(20 * expected) / 20])


def test_nothing_waits_while_models_find_no_room():
    bench = decoding(Bench(models=[MODEL]))
    for version, short, expected_ms in ((5, True, 0.0), (6, False, 70.0)):
        bench.do(ev.PlacementChanged(placement=Placement(version=version, room_short=short)))
        bench.wait(bench.state.settings.replan_ms)
        assert interval_ms(bench) == pytest.approx(expected_ms)


def test_a_plan_goes_out_again_when_only_its_interval_changes():
    bench = decoding(Bench(models=[MODEL]), steps=1)
    before = bench.state.engines[MODEL.name].plan
    bench.token("r1", after_ms=180.0)
    plans = [order.plan for order in of(bench.wait(10.0), en.SetPlan)]
    assert [plan.step_interval_ms for plan in plans] == [0.0] and plans[0].plan_id > before.plan_id
