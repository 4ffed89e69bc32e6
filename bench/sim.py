"""How much faster than real time the simulator is: 8 GPUs, 24 models, 48 requests/s (Aegaeon-style)."""

import time
from typing import NamedTuple

from shared.catalog import emulated_models
from sim.collector import collecting_rarely
from sim.scenario import FAST, Scenario, Settings
from sim.wild import scenario as wild
from sim.workload import generate
from sim.world import run as play

MODELS, GPUS, RPS_PER_LLM, SECONDS = 24, 8, 2.0, 20.0
REPEATS = 3


def _loaded(rps_per_llm: float = RPS_PER_LLM, settings: Settings = FAST) -> Scenario:
    """Return a scenario that is timed."""
    models = emulated_models(MODELS)
    load = generate("sharegpt", models=models, rps_per_llm=rps_per_llm, minutes=SECONDS / 60, seed=1)
    return Scenario(
        models=models,
        arrivals=load.arrivals,
        gpus=GPUS,
        hosts=2,
        settings=settings,
        horizon_ms=SECONDS * 1000,
    )


class Speed(NamedTuple):
    """Simulated seconds per second by the clock on the wall, and per second of this process's CPU time.

    They differ where others use the machine. `events_per_s` is by CPU time.
    """

    wall: float
    cpu: float
    events_per_s: float


def _speed(scenario: Scenario) -> Speed:
    """Return how fast a scenario is played, the best of a few times."""
    found = []
    for _ in range(REPEATS):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = play(scenario)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        found.append(Speed(SECONDS / wall_s, SECONDS / cpu_s, result.events / cpu_s))
    return Speed(*map(max, zip(*found, strict=True)))


def _soaked(seeds: int) -> float:
    """Return how many scenarios of the soak are played per second, checks included."""
    started = time.process_time()
    for seed in range(seeds):
        play(wild(seed), check=True)
    return seeds / (time.process_time() - started)


def run() -> dict[str, float]:
    """Time the simulator; look-up tables are built before, once for all."""
    with collecting_rarely():
        play(_loaded())
        full = _speed(_loaded())
        quarter = _speed(_loaded(RPS_PER_LLM / 4))
        by_step = _speed(_loaded(settings=Settings()))
    return {
        "sim.realtime_factor": full.wall,
        "sim.realtime_factor_cpu": full.cpu,
        "sim.realtime_factor_12_rps": quarter.wall,
        "sim.realtime_factor_12_rps_cpu": quarter.cpu,
        "sim.realtime_factor_step_by_step": by_step.wall,
        "sim.realtime_factor_step_by_step_cpu": by_step.cpu,
        "sim.events_per_s": full.events_per_s,
        "sim.soak_seeds_per_s": _soaked(8),
    }
