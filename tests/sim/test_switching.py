"""Models that take turns on one GPU: schedules worked out by hand from the numbers of the device model."""

import pytest

from shared.model import ModelSpec
from shared.silicon import load_ms
from sim.scenario import Network, Result, Scenario
from sim.systems import under
from sim.wild import model
from sim.workload import Arrival
from sim.world import run

A, B = (model(name, 48.0, 131_072, keep_alive_ms=None) for name in "ab")  # of 80 GB, so never both
DEVICE = Scenario(models=(), arrivals=()).made_of
COPY_MS = 48e9 / 55e6  # of the weights, over PCIe
ORDERS_MS = 3.0  # what an order takes to the device


def play(system: str, arrivals: list[tuple[float, ModelSpec, int]], **local: object) -> Result:
    """One GPU, no time on the network; requests of 100 tokens as (arrival, model, output)."""
    scenario = Scenario(
        models=(A, B),
        arrivals=tuple(
            Arrival(at_ms=at_ms, model=spec.name, input_tokens=100, output_tokens=out)
            for at_ms, spec, out in arrivals
        ),
        network=Network(delay_ms=0.0),
        settings=under(system, **local),
        predictor="oracle",
        horizon_ms=60_000.0,
    )
    return run(scenario, check=True)


def test_request_by_request_the_other_model_waits_for_the_end_and_its_load():
    """b comes while a runs: it waits for the last token of a, its way out (an order), and its own load."""
    played = play("serverlessllm", [(5000.0, A, 200), (6600.0, B, 10), (6700.0, A, 10)])
    first, other, late = played.requests
    assert first.first_token_ms == pytest.approx(
        5000.0 + load_ms(DEVICE, A.weight_bytes) + 2 * ORDERS_MS + 24.0, abs=12.0
    )
    ended_ms = first.token_ms[-1]
    assert ended_ms > 6700.0, "a still runs when the others come"
    switch_ms = 3 * ORDERS_MS + load_ms(DEVICE, B.weight_bytes)  # out, in, and the request
    assert other.first_token_ms == pytest.approx(ended_ms + switch_ms + 24.0, abs=12.0)
    # the later request of a has not joined the first: b had waited for longer
    assert late.first_token_ms == pytest.approx(other.token_ms[-1] + switch_ms + 24.0, abs=12.0)
    assert played.counters["local_sched.loads"] == 3


def test_between_tokens_a_model_leaves_in_the_middle_of_a_request_and_goes_on_from_its_kv():
    """a, alone, is interrupted by b for b's quota, its KV is copied and not computed again, and goes on."""
    played = play("aegaeon", [(5000.0, A, 300), (8000.0, B, 300)], quota_max_ms=1000.0)
    first, other = played.requests
    assert [record.outcome for record in played.requests] == ["stop", "stop"]
    step_ms = first.token_ms[50] - first.token_ms[49]
    pauses = [
        (a, b) for a, b in zip(first.token_ms, first.token_ms[1:], strict=False) if b - a > 10 * step_ms
    ]
    # c = 2 * 0.87 s; n = 100 / 18; busy 0.36: the largest quota is Q_MAX unless alpha is held at 0.5
    assert pauses and pauses[0][0] >= 8000.0
    # while a pauses b is brought in, runs for 1 s, and leaves: two copies of weights, and what orders take
    left_ms, back_ms = pauses[0]
    assert back_ms - left_ms == pytest.approx(1000.0 + 2 * COPY_MS, abs=12 * ORDERS_MS + 2 * step_ms)
    assert other.first_token_ms == pytest.approx(left_ms + COPY_MS, abs=60.0 + 6 * ORDERS_MS)
    assert played.counters["local_sched.kv_imports.taken"] == played.counters["local_sched.parted"] > 0
    assert "local_sched.kv_imports.computed" not in played.counters


@pytest.mark.parametrize("system", ["serverlessllm", "serverlessllm-shared", "aegaeon", "aegvoltana"])
def test_more_models_than_fit_are_all_served(system):
    """Two models of 48 GB on one GPU of 80."""
    played = play(system, [(3000.0 + 400.0 * i, (A, B)[i % 2], 40) for i in range(8)])
    assert [record.outcome for record in played.requests] == ["stop"] * 8
    assert all(record.output_tokens == 40 for record in played.requests)
    assert all(record.attempts == 1 for record in played.requests)
