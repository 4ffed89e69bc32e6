"""How much faster than real time the simulator is: 8 GPUs, 24 models, 48 requests/s (Aegaeon-style)."""

import time

from shared.catalog import emulated_models
from sim.collector import collecting_rarely
from sim.scenario import FAST, Scenario, Settings
from sim.wild import scenario as wild
from sim.workload import generate
from sim.world import run as play

MODELS, GPUS, RPS_PER_LLM, SECONDS = 24, 8, 2.0, 20.0


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


def _factor(scenario: Scenario) -> tuple[float, float]:
    """Return (simulated seconds per second of this core, events per second)."""
    started = time.process_time()
    result = play(scenario)
    seconds = time.process_time() - started
    return SECONDS / seconds, result.events / seconds


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
        factor, events = _factor(_loaded())
        quarter, _ = _factor(_loaded(RPS_PER_LLM / 4))
        by_step, _ = _factor(_loaded(settings=Settings()))
    return {
        "sim.realtime_factor": factor,
        "sim.realtime_factor_12_rps": quarter,
        "sim.realtime_factor_step_by_step": by_step,
        "sim.events_per_s": events,
        "sim.soak_seeds_per_s": _soaked(8),
    }
