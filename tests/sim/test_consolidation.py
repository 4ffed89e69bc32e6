"""Consolidation at work (3.5): fewer GPUs when load falls, more when it returns, and peace in between.

The device is an eighth as fast as an H100, so that few requests are a load.
"""

from dataclasses import replace

import numpy as np
import pytest

from services.consolidator.settings import ConsolidatorSettings
from shared.devices import device_for
from sim.report import Report, report
from sim.scenario import Result, Scenario, Settings
from sim.wild import model
from sim.workload import Arrival
from sim.world import World

H100 = device_for("h100-80gb")
SPEEDS = ("weight_bytes_per_ms", "kv_bytes_per_ms", "matmul_flop_per_ms", "attn_flop_per_ms")
SLOW = replace(H100, **{name: getattr(H100, name) / 8 for name in SPEEDS})
KEEP_ALIVE_MS = 10_000.0
MODELS = tuple(model(f"m{i}", 6.0 + i / 2, 114_688, keep_alive_ms=KEEP_ALIVE_MS) for i in range(6))
GPUS, PEAK_RPS = 4, 0.5


def arrivals(parts: tuple[tuple[float, float], ...], seed: int) -> tuple[Arrival, ...]:
    """Poisson arrivals at each model; `parts` are (seconds, part of the peak rate) one after another."""
    made = []
    for index, each in enumerate(MODELS):
        rng, start_s = np.random.default_rng((seed, index)), 3.0
        for seconds, part in parts:
            for at_s in np.sort(rng.random(rng.poisson(PEAK_RPS * part * seconds))) * seconds:
                tokens = rng.integers((50, 20), (250, 80)).tolist()
                made.append(Arrival((start_s + at_s) * 1000.0, each.name, *tokens))
            start_s += seconds
    return tuple(sorted(made, key=lambda arrival: (arrival.at_ms, arrival.model)))


def played(policy: str, *parts: tuple[float, float], seed: int = 5) -> tuple[Result, Report, list[int]]:
    """Play it; returns with the result the GPUs with a model at each whole second."""
    settings = ConsolidatorSettings(
        consolidation=policy,
        window_ms=30_000.0,
        observe_ms=15_000.0,
        consolidate_ms=8_000.0,
        dwell_ms=15_000.0,
        trigger_gap_ms=2_000.0,
    )
    scenario = Scenario(
        models=MODELS,
        arrivals=arrivals(parts, seed),
        gpus=GPUS,
        device=SLOW,
        settings=Settings(consolidator=settings),
    )
    result = World(scenario, check=policy == "ewr").run()
    active: dict[int, int] = {}
    for device in result.devices:
        for sample in device.samples:
            second = round(sample.at_ms / 1000.0)
            active[second] = active.get(second, 0) + (sample.residents > 0)
    end_ms = 1000.0 * (3.0 + sum(seconds for seconds, _ in parts))
    return result, report(result, SLOW, 0.0, end_ms), [active[second] for second in range(int(end_ms / 1000))]


def test_gpus_follow_a_step_down_and_back_and_joules_are_saved() -> None:
    day = ((60.0, 1.0), (80.0, 0.2), (60.0, 1.0))
    _, never_report, _ = played("none", *day)
    result, numbers, active = played("ewr", *day)
    assert min(active[63:143]) == 1  # all six fit on one GPU; the bound
    assert max(active[150:]) >= 3  # they are back
    assert numbers.attainment.request is not None and never_report.attainment.request is not None
    assert numbers.attainment.request >= never_report.attainment.request - 0.02
    assert numbers.energy_j.cold < never_report.energy_j.cold
    assert numbers.energy_j.off < 0.95 * never_report.energy_j.off
    assert numbers.energy_j.warm < 1.02 * never_report.energy_j.warm  # an emptied GPU saves nothing there
    assert all(asked.outcome in ("stop", "length") for asked in result.requests)


@pytest.mark.parametrize("seed", [5, 10, 11])
def test_constant_load_does_not_go_back_and_forth(seed: int) -> None:
    """The first plans may prove too tight; from then on nothing changes for ten keep-alives."""
    seconds = 90.0 + 10 * KEEP_ALIVE_MS / 1000.0
    result, numbers, active = played("ewr", (seconds, 1.0), seed=seed)
    assert len(set(active[93:])) == 1, active
    assert result.counters["consolidator.consolidations.fewer_gpus"] <= 3
    assert numbers.attainment.request is not None and numbers.attainment.request > 0.95
