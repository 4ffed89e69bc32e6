"""A scheduler's energy book beside what the emulated device knows it has drawn, by use."""

import pytest

from services.local_sched.energy import IDLE, OVERHEAD, REQUESTS
from shared.catalog import emulated_models
from shared.devices import device_for
from sim.chance import Chance
from sim.scenario import FAST, Fault, Scenario, Settings
from sim.workload import generate
from sim.world import World

H100 = device_for("h100-80gb")


def world(settings: Settings) -> World:
    """Some load on two GPUs; every third client leaves."""
    chance, models = Chance(7), emulated_models(4)
    load = generate("sharegpt", models=models, rps_per_llm=0.5, minutes=0.4, seed=7)
    leaves = [
        Fault(arrival.at_ms + chance.between(50.0, 4_000.0), "cancel", f"r{number}")
        for number, arrival in enumerate(load.arrivals)
        if number % 3 == 0
    ]
    leaves.sort(key=lambda fault: fault.at_ms)
    return World(
        Scenario(models=models, arrivals=load.arrivals, gpus=2, faults=tuple(leaves), settings=settings)
    )


@pytest.mark.parametrize(
    ("settings", "part"),
    [(Settings(), 0.0), (FAST, 5e-3)],  # steps that are told of together are taken to have been equally long
)
def test_the_book_is_the_devices(settings: Settings, part: float) -> None:
    played = world(settings)
    played.run()
    assert "local_sched.unexplained_energy_j" not in played.counters
    for node in played.gpus:
        assert node.gpu is not None
        book = node.local.state.energy
        uses_j = book.uses_j
        assert uses_j is not None and book.residual_j is not None
        requests_j, overhead_j, idle_j = node.uses_j
        # An order takes 3 ms to the device, in which the book has it do already what it is to do.
        off_j = 0.003 * len(node.gpu.engines) * H100.context_idle_w + part * node.gpu.energy_j
        # For the device a request is stopped when it hears of it; what it told meanwhile was in vain as well.
        assert requests_j - 5.0 < uses_j[REQUESTS] <= requests_j + 1e-6
        assert uses_j[REQUESTS] + uses_j[OVERHEAD] == pytest.approx(requests_j + overhead_j, abs=off_j)
        assert uses_j[IDLE] == pytest.approx(idle_j, abs=off_j)
        assert overhead_j > 0.0 and abs(book.residual_j) <= 2 * off_j
        period_s = played.scenario.device_sample_ms / 1000
        assert abs(book.residual_j) <= period_s * H100.power_cap_w
