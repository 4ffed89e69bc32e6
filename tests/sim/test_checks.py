"""What the simulator's checks allow, and what they do not."""

import pytest

from services.global_sched.predict import Learnt
from services.local_sched import running
from sim import check
from sim.check import InvariantBroken
from sim.scenario import Fault, Scenario
from sim.wild import SMALL
from sim.workload import Arrival
from sim.world import run

SHORT = Learnt("scheduler-0", SMALL.name, {"S": (5.0,) * 200})
OUTGROWN = Scenario(
    models=(SMALL,),
    arrivals=(Arrival(at_ms=1_000.0, model=SMALL.name, input_tokens=40, output_tokens=120),),
    learnt=(SHORT,),
    faults=(Fault(3_000.0, "pause", "gpu-0", 1_500.0),),
)
"""A request much longer than predicted, whose scheduler stands still while its engine goes on."""


@pytest.fixture(autouse=True)
def each_event_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "EVERY", 1)


def test_an_engine_may_outrun_a_scheduler_that_stands_still() -> None:
    (record,) = run(OUTGROWN, check=True).requests
    assert (record.outcome, len(record.token_ms)) == ("stop", 120)
    assert record.attempts == 1


def test_what_a_scheduler_has_heard_of_must_be_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_grow", lambda state, now_ms, work: [])
    with pytest.raises(InvariantBroken, match="promised"):
        run(OUTGROWN, check=True)
