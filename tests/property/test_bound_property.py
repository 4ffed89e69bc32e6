"""No system that brings every request in time draws less than the fluid lower bound of what it was asked."""

import pytest

from shared.catalog import pool_models
from shared.devices import device_for
from shared.systems import SYSTEMS
from sim.bound import bound
from sim.report import report, request_met
from sim.scenario import FAST, Scenario
from sim.systems import under
from sim.workload import Arrival, generate
from sim.world import run

DEVICE = device_for("h100-80gb")
SETTINGS = (  # workload, models, requests per second and model, GPUs, seed
    ("sharegpt-first", 1, 0.3, 1, 1),
    ("sharegpt", 4, 0.5, 2, 3),
)
WARM_MS = 5_000.0  # in which each model is asked for once, and loaded


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_system_in_time_draws_less_than_the_bound(system: str) -> None:
    compared = 0
    for workload, llms, rps, gpus, seed in SETTINGS:
        models = pool_models(llms)
        made = generate(workload, models=models, rps_per_llm=rps, minutes=0.25, seed=seed).arrivals
        asked = tuple(one for one in made if one.at_ms > WARM_MS)
        first = [Arrival(at_ms=0.0, model=model.name, input_tokens=100, output_tokens=2) for model in models]
        settings = under(system, FAST)
        result = run(
            Scenario(models=models, arrivals=(*first, *asked), gpus=gpus, settings=settings, seed=seed)
        )
        if sum(request_met(r) for r in result.requests if r.arrived_ms > WARM_MS) < len(asked):
            continue
        compared += 1
        least = bound(models, asked, DEVICE, gpus, result.ended_ms).energy_j
        drawn = report(result, DEVICE, 0.0, result.ended_ms).energy_j
        assert least is not None
        assert drawn.warm >= least.warm and drawn.cold >= least.cold and drawn.off >= least.off
    assert compared or not system.startswith("festina")  # else nothing was shown
