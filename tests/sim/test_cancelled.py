"""A thousand clients that leave at random moments, in virtual time: every book is back at zero."""

import pytest

from services.gateway.core import GatewayCore
from services.global_sched.core import GlobalSchedCore
from services.local_sched.settings import LocalSettings
from sim.chance import Chance
from sim.nodes import GpuNode
from sim.scenario import Fault, Scenario, Settings
from sim.wild import MEDIUM, SMALL, THICK
from sim.workload import Arrival
from sim.world import World

REQUESTS = 1_000
SPAN_MS = 20_000.0
FIRST_MS = 100.0  # models are still loading


def crowd(seed: int) -> Scenario:
    """Requests that come all the time, more than the GPUs hold, and each of whose clients leaves."""
    chance = Chance(seed)
    models = (SMALL, MEDIUM, THICK)
    arrivals = tuple(
        Arrival(
            at_ms=FIRST_MS + SPAN_MS * number / REQUESTS,
            model=chance.pick(models).name,
            input_tokens=1 + chance.below(chance.pick((50, 500, 3_000))),
            output_tokens=1 + chance.below(chance.pick((10, 100, 600))),
        )
        for number in range(REQUESTS)
    )
    leaves = tuple(
        Fault(
            a.at_ms + chance.between(0.0, chance.pick((2.0, 50.0, 1_000.0, 5_000.0))), "cancel", f"r{number}"
        )
        for number, a in enumerate(arrivals)
    )
    return Scenario(
        models=models,
        arrivals=arrivals,
        gpus=2,
        gateways=2,
        schedulers=2,
        seed=seed,
        faults=tuple(sorted(leaves, key=lambda fault: fault.at_ms)),
        settings=Settings(local=LocalSettings(max_running=32)),
    )


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_left_of_a_thousand_clients(seed: int) -> None:
    world = World(crowd(seed), check=True)
    result = world.run()
    outcomes = [record.outcome for record in result.requests]
    assert len(outcomes) == REQUESTS and set(outcomes) <= {"cancelled", "stop", "length", "overloaded"}
    assert outcomes.count("cancelled") > REQUESTS / 3
    for node in world.nodes:
        core = node.core
        if isinstance(core, GatewayCore):
            assert core.inflight == 0
        elif isinstance(core, GlobalSchedCore):
            assert (core.waiting, core.reserved) == (0, (0, 0))
        elif isinstance(node, GpuNode):
            state = node.local.state
            assert not state.works and not state.queue and state.outbox.unacknowledged == 0
            assert all(not pool.holders for pool in state.ledger.pools.values())
            assert not any(engine.running for engine in state.engines.values())
            assert node.gpu is not None
            assert not any(engine.sequences for engine in node.gpu.engines.values())
