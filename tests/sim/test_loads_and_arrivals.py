"""Models that come and go, in virtual time: where loads come from, and requests that arrive meanwhile."""

import pytest
from msgspec.structs import replace

from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared.devices import DEVICES
from shared.silicon import load_ms
from sim.scenario import Fault, RequestRecord, Scenario, Settings
from sim.wild import MEDIUM, SMALL
from sim.workload import Arrival
from sim.world import World

H100 = DEVICES["h100-80gb"]
FROM_DISK_MS, FROM_HOST_MS = (load_ms(H100, MEDIUM.weight_bytes, source) for source in ("disk", "host"))


def asked(*at_ms: float, output_tokens: int = 20) -> tuple[Arrival, ...]:
    name = MEDIUM.name
    return tuple(Arrival(at, name, input_tokens=100, output_tokens=output_tokens) for at in sorted(at_ms))


def orders(world: World, kind: type[en.Order]) -> list[tuple[float, en.Order]]:
    """The orders of a kind that devices were given, with their times."""
    assert world.story is not None
    return [(line.at_ms, line.what) for line in world.story._lines if isinstance(line.what, kind)]


def all_served(requests: list[RequestRecord]) -> bool:
    return all(r.outcome == "stop" and r.output_tokens == r.expected_tokens for r in requests)


def waited_ms(requests: list[RequestRecord]) -> list[float]:
    return [(r.first_token_ms or 0.0) - r.arrived_ms for r in requests]


def test_a_model_comes_back_from_host_memory_until_its_migrator_restarts() -> None:
    crash = Fault(45_000.0, "crash", "host-0", for_ms=100.0)
    kept = Settings(local=LocalSettings(cold_after_ms=1e9))
    scenario = Scenario(
        models=(MEDIUM,), arrivals=asked(20_000.0, 40_000.0, 60_000.0), faults=(crash,), settings=kept
    )
    world = World(scenario, check=True)
    result = world.run()
    loads = [order.source for _, order in orders(world, en.LoadEngine) if isinstance(order, en.LoadEngine)]
    assert loads == ["disk", "host", "host", "disk"]  # placed at the start, and then asked for three times
    assert all_served(result.requests)
    near, again, far = waited_ms(result.requests)
    assert FROM_HOST_MS < near < FROM_HOST_MS + 300 and again == pytest.approx(near, abs=100)
    assert FROM_DISK_MS < far < FROM_DISK_MS + 300


def test_a_gpu_that_has_gone_cold_takes_longer() -> None:
    world = World(Scenario(models=(MEDIUM,), arrivals=asked(60_000.0)), check=True)
    result = world.run()
    [waited] = waited_ms(result.requests)
    assert all_served(result.requests) and 3_000 + FROM_HOST_MS < waited < 3_300 + FROM_HOST_MS
    last = result.devices[0].samples[-1]
    assert 0 < last.sleeping_ms < last.empty_ms


def test_a_request_that_arrives_while_its_model_is_unloaded_is_served() -> None:
    """Before the order is given, while it is on its way to the device, and after."""
    scenario = Scenario(models=(MEDIUM,), arrivals=asked(10_000.0), least_ms=20_000.0)
    world = World(scenario, check=True)
    world.run()
    at_ms = orders(world, en.UnloadEngine)[-1][0]
    assert at_ms > 10_000.0
    unloading = 0
    for after_ms in (-3.0, -0.6, -0.3, 0.0, 0.3, 1.0, 2.0, 2.7, 3.0, 3.3, 10.0, 500.0):
        again = World(replace(scenario, arrivals=asked(10_000.0, at_ms + after_ms)), check=True)
        assert all_served(again.run().requests), f"{after_ms} ms after the order to unload"
        unloading += at_ms in [at for at, _ in orders(again, en.UnloadEngine)] and after_ms < 3.0
    assert unloading >= 4  # it did arrive meanwhile


def test_requests_that_arrive_while_their_model_moves_are_served() -> None:
    """Their GPU is drained and, 4 s later, the other one."""
    faults = (
        Fault(10_000.0, "drain", "gpu-0", for_ms=4_000.0),
        Fault(16_000.0, "drain", "gpu-1", for_ms=4_000.0),
    )
    every = asked(*(9_000.0 + 150.0 * number for number in range(80)), output_tokens=60)
    scenario = Scenario(models=(MEDIUM, SMALL), arrivals=every, gpus=2, hosts=2, faults=faults)
    world = World(scenario, check=True)
    result = world.run()
    assert all_served(result.requests)
    assert len(orders(world, en.UnloadEngine)) >= 2 and len({r.gpu for r in result.requests}) == 2
