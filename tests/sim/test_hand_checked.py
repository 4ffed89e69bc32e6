"""Small worlds whose times and joules can be worked out by hand, from the numbers of the device model."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.consolidator.settings import ConsolidatorSettings
from services.gateway.settings import GatewaySettings
from services.global_sched.settings import GlobalSettings
from services.local_sched.settings import LocalSettings
from shared.devices import DEVICES
from shared.model import ModelSpec
from sim.scenario import Network, Result, Scenario, Settings
from sim.wild import model
from sim.workload import Arrival
from sim.world import run

MODEL: ModelSpec = model("m", 16.0, 131_072, keep_alive_ms=None)  # 8e9 parameters, 32 layers
PINNED = LocalSettings(fixed_clock_mhz=1980, pacing="off")
ORDER_MS = 3.0  # an order takes this long to the device
LOADED_MS = 200 + 16e9 / 6e6 + (64 << 20) / 55e6  # from disk, the last chunk copied after it is read
STEP_OVERHEAD_MS = 32 * 0.027 + 1.0


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """A device that is not partitioned, so that every step has all its SMs."""
    DEVICES["h100-whole"] = replace(
        DEVICES["h100-80gb"], name="h100-whole", sm_size_min_pct=100, sm_size_step_pct=100
    )
    yield
    del DEVICES["h100-whole"]


def alone(arrivals: list[tuple[float, int, int]], **more: object) -> Result:
    """One GPU, one model, no time on the network, the clock pinned to the highest."""
    scenario = Scenario(
        models=(MODEL,),
        arrivals=tuple(
            Arrival(at_ms=at_ms, model="m", input_tokens=i, output_tokens=o) for at_ms, i, o in arrivals
        ),
        gpu_type="h100-whole",
        network=Network(delay_ms=0.0),
        settings=Settings(local=PINNED),
        horizon_ms=20_000.0,
        **more,  # type: ignore[arg-type]
    )
    return run(scenario, check=True)


def step_ms(tokens: int, kv_tokens: int, attended_tokens: float) -> float:
    """A step at 1980 MHz on all SMs: (weights^2.2 + products^2.2)^(1/2.2) + KV + attention + overhead."""
    speed = 1980 / 1830
    weights_ms = 16e9 / 2.82e9
    products_ms = 2 * 8e9 * tokens / (824e9 * speed)
    attention_ms = 4 * 32 * 32 * 128 * attended_tokens / (365e9 * speed)
    kv_ms = 131_072 * kv_tokens / 2.85e9
    return (weights_ms**2.2 + products_ms**2.2) ** (1 / 2.2) + kv_ms + attention_ms + STEP_OVERHEAD_MS


def prefill_ms(tokens: int) -> float:
    return step_ms(tokens, 0, tokens * tokens / 2)


def step_j(ms: float, tokens: int, kv_tokens: int, attended_tokens: float) -> float:
    """70 W of the board, 268 W of SMs at 1980 MHz, 55.5 W per TB/s read, 1.14 W per TFLOP/s."""
    terabytes = (16e9 + 131_072 * kv_tokens) / 1e12
    teraflops = (2 * 8e9 * tokens + 4 * 32 * 32 * 128 * attended_tokens) / 1e12
    return (70 + 268) * ms / 1e3 + 55.5 * terabytes + 1.14 * teraflops


def test_three_prompts_one_after_another_take_their_prefills_and_the_rest_is_idle() -> None:
    prompts = (20, 30, 40)
    result = alone([(5_000.0 + 1_000 * k, n, 1) for k, n in enumerate(prompts)])
    for record, tokens in zip(result.requests, prompts, strict=True):
        assert record.outcome == "stop" and record.first_token_ms is not None
        assert record.first_token_ms - record.arrived_ms == pytest.approx(
            ORDER_MS + prefill_ms(tokens), abs=1e-6
        )
        expected_j = step_j(prefill_ms(tokens), tokens, 0, tokens * tokens / 2)
        assert record.energy_j == pytest.approx(expected_j, rel=1e-9)
    device = result.devices[0]
    busy_s = sum(prefill_ms(n) for n in prompts) / 1e3
    loading_s = LOADED_MS / 1e3
    load_ordered_s = 1.5 + ORDER_MS / 1e3  # the consolidator lets the cluster settle first
    assert device.samples[-1].sleeping_ms == pytest.approx(load_ordered_s * 1e3, abs=1e-6)
    assert device.overhead_j == pytest.approx(110 * loading_s, rel=1e-9)
    idle_j = 110 * (20 - loading_s - busy_s)  # before the load as well: a process stands ready
    assert device.idle_j == pytest.approx(idle_j, rel=1e-9)
    assert device.request_j == pytest.approx(sum(r.energy_j or 0 for r in result.requests), rel=1e-9)


def test_a_decode_step_reads_the_weights_once_and_the_context_so_far() -> None:
    result = alone([(5_000.0, 20, 4)])
    (record,) = result.requests
    gaps = [b - a for a, b in zip(record.token_ms, record.token_ms[1:], strict=False)]
    # a token's step attends to what was computed before it, and to itself
    assert gaps == pytest.approx([step_ms(1, 21 + k, 0) for k in range(3)], abs=1e-6)


def test_joules_of_the_memory_are_the_bytes_that_were_read() -> None:
    outputs = (1, 40, 90)
    result = alone([(5_000.0 + 4_000 * k, 50, n) for k, n in enumerate(outputs)])
    assert [record.outcome for record in result.requests] == ["stop"] * 3
    read = 0
    for tokens in outputs:
        read += 16_000_000_000 * tokens + 131_072 * sum(50 + k for k in range(1, tokens))
    assert result.devices[0].samples[-1].parts_j[3] == pytest.approx(55.5e-12 * read, rel=1e-9)


def test_three_at_once_share_their_steps_and_their_joules_add_up_to_the_meter() -> None:
    result = alone([(5_000.0, 20, 10)] * 3)
    device = result.devices[0]
    assert device.request_j == pytest.approx(sum(r.energy_j or 0 for r in result.requests), rel=1e-9)
    # one prefill of all three prompts, then nine steps that read the weights once for all
    steps = [step_ms(60, 0, 3 * 20 * 20 / 2)] + [step_ms(3, 3 * (20 + k), 0) for k in range(1, 10)]
    for record in result.requests:
        assert record.token_ms[-1] - record.arrived_ms == pytest.approx(ORDER_MS + sum(steps), abs=1e-6)


def test_a_week_of_one_request_an_hour_does_not_drift() -> None:
    minute, hour = 60_000.0, 3_600_000.0
    slow = Settings(
        gateway=GatewaySettings(
            alive_interval_ms=10 * minute, check_interval_ms=10 * minute, gpu_silent_ms=3 * hour
        ),
        scheduler=GlobalSettings(stale_after_ms=hour),
        local=LocalSettings(
            fixed_clock_mhz=1980, pacing="off", heartbeat_ms=10 * minute, gateway_lease_ms=hour
        ),
        consolidator=ConsolidatorSettings(
            tick_ms=10 * minute, gpu_gone_ms=hour, peer_silent_ms=hour, scale_out_dwell_ms=hour
        ),
    )
    week = 7 * 24
    scenario = Scenario(
        models=(MODEL,),
        arrivals=tuple(
            Arrival(at_ms=(k + 0.5) * hour, model="m", input_tokens=20, output_tokens=5) for k in range(week)
        ),
        gpu_type="h100-whole",
        settings=slow,
        network=Network(delay_ms=0.0),
        horizon_ms=week * hour,
        device_sample_ms=10 * minute,
        sample_ms=hour,
    )
    result = run(scenario, check=True)
    spans = [record.token_ms[-1] - record.arrived_ms for record in result.requests]
    assert spans == pytest.approx([spans[0]] * week, abs=2e-6)
    device, last = result.devices[0], result.devices[0].samples[-1]
    assert last.energy_j == pytest.approx(device.request_j + device.overhead_j + device.idle_j, rel=1e-12)
    assert last.busy_ms + last.warm_ms + last.empty_ms == pytest.approx(week * hour, rel=1e-12)
    assert device.request_j == pytest.approx(week * (result.requests[0].energy_j or 0), rel=1e-7)
