"""What `FAST` changes of a world: how many events it takes, and next to nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.catalog import emulated_models
from shared.devices import device_for
from sim.report import report
from sim.scenario import FAST, Network, Result, Scenario, Settings
from sim.wild import scenario
from sim.workload import generate
from sim.world import World, run

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 0.75
PLAY = "from tests.sim.test_many_steps_at_once import played, FAST; print(played(FAST).trace_hash)"


def played(settings: Settings) -> Result:
    models = emulated_models(6)
    load = generate("sharegpt", models=models, rps_per_llm=0.8, minutes=MINUTES, seed=3)
    return run(Scenario(models=models, arrivals=load.arrivals, gpus=2, hosts=2, settings=settings))


def test_energy_attainment_and_times_stay_and_events_are_few() -> None:
    each, many = played(Settings()), played(FAST)
    window = (MINUTES * 20_000, MINUTES * 60_000)
    one, other = (report(result, device_for("h100-80gb"), *window) for result in (each, many))
    assert [len(r.token_ms) for r in many.requests] == [len(r.token_ms) for r in each.requests]
    assert all(a <= b for r in many.requests for a, b in zip(r.token_ms, r.token_ms[1:], strict=False))
    assert other.j_per_token == pytest.approx(one.j_per_token, rel=0.01)
    assert other.attainment.request == pytest.approx(one.attainment.request, abs=0.01)
    assert other.attainment.token == pytest.approx(one.attainment.token, abs=0.01)
    assert other.tbt_ms.p50 == pytest.approx(one.tbt_ms.p50, rel=0.03)
    assert many.events < each.events / 2


def test_tokens_to_the_last_moment_are_counted() -> None:
    base = scenario(5)
    cut_off = replace(base, faults=(), network=Network(), horizon_ms=4_000.0)
    local = replace(cut_off.settings.local, report_steps=32)
    world = World(replace(cut_off, settings=replace(cut_off.settings, local=local)))
    each, many = run(cut_off), world.run()
    devices = [node.gpu for node in world.gpus if node.gpu is not None]
    left = [s.made_tokens for gpu in devices for e in gpu.engines.values() for s in e.sequences.values()]
    assert len(left) > 5 and not any(left)
    counts = [sum(r.output_tokens for r in result.requests) for result in (each, many)]
    assert counts[1] == many.counters["local_sched.tokens"] == pytest.approx(counts[0], rel=0.02)


def test_the_same_seed_is_the_same_trace_whatever_python_hashes_with() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PLAY], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == played(FAST).trace_hash, done.stderr


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_breaks_an_invariant(seed: int) -> None:
    base = scenario(seed)
    local = replace(base.settings.local, report_steps=(2, 5, 32)[seed % 3])
    run(replace(base, settings=replace(base.settings, local=local)), check=True)
