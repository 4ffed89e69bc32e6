"""The numbers of a run, against sums done by hand."""

import numpy as np
import pytest
from msgspec.structs import replace

from shared.devices import device_for
from shared.model import Objectives
from sim.figures import attainment_over_time
from sim.report import (
    attainment,
    gaps_ms,
    late_tokens,
    metered_j,
    quantiles,
    report,
    request_met,
    tokens_between,
)
from sim.scenario import DeviceRecord, DeviceSample, RequestRecord, Result

H100 = device_for("h100-80gb")


def request(
    *token_ms: float, arrived_ms: float = 0.0, wanted: int | None = None, outcome: str = "stop"
) -> RequestRecord:
    """A request with objectives of 250 and 100 ms."""
    return RequestRecord(
        request_id="r",
        model="m",
        tenant="default",
        objectives=Objectives(ttft_ms=250.0, tbt_ms=100.0),
        arrived_ms=arrived_ms,
        input_tokens=100,
        expected_tokens=len(token_ms) if wanted is None else wanted,
        token_ms=list(token_ms),
        outcome=outcome,
    )


def every(gap_ms: float, count: int, first_ms: float) -> list[float]:
    return [first_ms + i * gap_ms for i in range(count)]


def sample(
    at_ms: float, empty_ms: float, *parts_j: float, clock_mhz: int = 1000, running: int = 1
) -> DeviceSample:
    floor, context, clock, hbm, compute = parts_j
    return DeviceSample(
        at_ms=at_ms,
        clock_mhz=clock_mhz,
        power_w=0.0,
        residents=0,
        running=running,
        waiting=0,
        energy_j=sum(parts_j),
        parts_j=(floor, context, clock, hbm, compute),
        busy_ms=at_ms - empty_ms,
        warm_ms=0.0,
        empty_ms=empty_ms,
    )


def result(requests: list[RequestRecord], devices: list[DeviceRecord]) -> Result:
    counters = {
        "local_sched.loads": 3.0,
        "local_sched.moves.source": 2.0,
        "local_sched.moves.destination": 2.0,
    }
    return Result(requests, devices, counters, ended_ms=3000.0, events=0, trace_hash="abc", wall_s=1.5)


def test_a_token_is_late_after_arrival_plus_ttft_plus_i_tbt() -> None:
    # due at 250, 350, 450, 550
    assert late_tokens(request(250.0, 350.0, 450.0, 550.0)) == 0
    assert late_tokens(request(251.0, 350.0, 451.0, 550.0)) == 2
    assert late_tokens(request(1250.0, 1351.0, arrived_ms=1000.0)) == 1


def test_early_tokens_buffer_a_pause() -> None:
    # ten tokens by 100 ms, then none until 1,000 ms: a gap of 900 ms, but that token is due at 250 + 1,000
    burst = request(*every(10.0, 10, 10.0), 1000.0)
    assert late_tokens(burst) == 0
    assert request_met(burst)  # mean (1,000 - 10) / 10 = 99 ms


def test_a_request_is_met_by_ttft_and_mean_tbt() -> None:
    assert request_met(request(250.0, 350.0))
    assert not request_met(request(251.0, 260.0))  # TTFT
    assert not request_met(request(10.0, 111.0))  # mean TBT 101
    assert request_met(request(10.0))  # one token has no gap
    assert not request_met(request())
    assert not request_met(request(10.0, 20.0, outcome="unfinished"))


def test_strict_lets_one_token_in_a_hundred_be_late() -> None:
    # 200 tokens: on time except `late` in the middle, after a pause that later tokens make up for
    def paused(late: int) -> RequestRecord:
        due = [250.0 + 100.0 * i for i in range(200)]
        times = [d - 1.0 for d in due]
        for i in range(50, 50 + late):
            times[i] = due[i] + 0.5
        return request(*times)

    two, three = paused(2), paused(3)
    assert request_met(two) and request_met(three)
    both = attainment([two, three])
    assert (both.request, both.strict) == (1.0, 0.5)
    assert both.token == pytest.approx(395 / 400)


def test_what_never_came_is_late_and_who_left_is_not_counted() -> None:
    done = request(100.0, 150.0, 200.0, 250.0)
    failed = request(100.0, wanted=6, outcome="no_capacity")
    left = request(100.0, wanted=50, outcome="cancelled")
    counted = attainment([done, failed, left])
    assert counted.request == counted.strict == 0.5
    assert counted.token == pytest.approx(5 / 10)
    assert attainment([left]).request is None


def test_tokens_and_gaps() -> None:
    requests = [request(100.0, 200.0, 300.0), request(250.0), request()]
    assert tokens_between(requests, 200.0, 300.0) == 2  # from its start, not to its end
    assert gaps_ms(requests).tolist() == [100.0, 100.0]
    assert len(gaps_ms([])) == 0
    assert quantiles([], 0.5, 0.99) == [None, None]
    assert quantiles([1.0, 2.0, 3.0], 0.5, 0.99) == pytest.approx([2.0, 2.98])


def test_energy_over_the_window_by_part_and_by_idle_accounting() -> None:
    # Over 3 s: one GPU busy at 200 W (70 floor, 40 clock, 60 memory, 30 compute), one cold for the first 2 s
    # and then warm at 110 W. The window is [1 s, 3 s).
    busy = DeviceRecord(
        "gpu-0",
        [
            sample(t * 1000.0, 0.0, 70.0 * t, 0.0, 40.0 * t, 60.0 * t, 30.0 * t, clock_mhz=900 + 100 * t)
            for t in range(4)
        ],
    )
    late = DeviceRecord(
        "gpu-1",
        [
            sample(2000.0, 2000.0, 140.0, 0.0, 0.0, 0.0, 0.0, running=0),
            sample(3000.0, 2000.0, 210.0, 40.0, 0.0, 0.0, 0.0, running=0),
        ],
    )
    # tokens at 500 (before the window), 1000 and 1100 (in it)
    numbers = report(
        result([request(500.0, arrived_ms=400.0), request(1000.0, 1100.0, arrived_ms=1000.0)], [busy, late]),
        H100,
        1000.0,
        3000.0,
    )
    assert (numbers.energy_parts_j.floor, numbers.energy_parts_j.context) == (280.0, 40.0)
    assert (numbers.energy_parts_j.clock, numbers.energy_parts_j.hbm) == (80.0, 120.0)
    assert numbers.energy_parts_j.compute == 60.0
    assert numbers.energy_j.cold == 580.0
    assert numbers.energy_j.warm == 580.0 + 40.0  # one GPU, cold for 1 s of the window: 110 instead of 70 W
    assert numbers.energy_j.off == 580.0 - 70.0
    assert numbers.output_tokens == 2
    assert numbers.j_per_token == 290.0
    assert numbers.active_gpus_mean == 1.5
    assert (numbers.clock_mhz.p10, numbers.clock_mhz.p50, numbers.clock_mhz.p90) == (1020.0, 1100.0, 1180.0)
    assert (numbers.ttft_ms.p50, numbers.tbt_ms.p50) == (0.0, 100.0)
    assert (numbers.loads, numbers.migrations, numbers.clock_switches) == (3, 2, 0)
    assert (numbers.wall_s, numbers.trace_hash) == (1.5, "abc")


def test_what_it_is_asleep_or_off_counts_as_the_accounting_says() -> None:
    # Without engines for 4 s: asleep at 110 W for 1 s, then cold at 70 W for 1 s, then off for 2 s.
    last = replace(sample(4000.0, 4000.0, 140.0, 40.0, 0.0, 0.0, 0.0), sleeping_ms=1000.0, off_ms=2000.0)
    numbers = report(result([], [DeviceRecord("gpu-0", [last])]), H100, 0.0, 4000.0)
    assert (numbers.energy_j.warm, numbers.energy_j.cold, numbers.energy_j.off) == (440.0, 280.0, 0.0)
    assert (numbers.energy_parts_j.floor, numbers.energy_parts_j.context) == (280.0, 0.0)
    assert metered_j([DeviceRecord("gpu-0", [last])], 0.0, 4000.0) == 180.0


def test_samples_between_the_window_s_ends_are_interpolated() -> None:
    device = DeviceRecord("gpu-0", [sample(4000.0, 4000.0, 280.0, 0.0, 0.0, 0.0, 0.0, running=0)])
    numbers = report(result([], [device]), H100, 1000.0, 3000.0)
    assert numbers.energy_j.cold == pytest.approx(140.0)
    assert numbers.energy_j.off == pytest.approx(0.0)
    assert numbers.active_gpus_mean == pytest.approx(0.0)
    assert (numbers.j_per_token, numbers.ttft_ms.p50, numbers.attainment.token) == (None, None, None)


def test_attainment_over_time() -> None:
    requests = [request(100.0), request(900.0, arrived_ms=1.0), request(2100.0, arrived_ms=2000.0)]
    middles, shares = attainment_over_time(result(requests, []), bins=2)
    assert shares == [0.5, 1.0]
    assert middles == pytest.approx([500.25, 1500.75])
    assert attainment_over_time(result([], []), bins=2) == ([], [])


def test_late_tokens_agree_with_a_plain_count() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        times = sorted(rng.uniform(0, 2000, size=rng.integers(1, 30)).tolist())
        late = sum(t > 250.0 + 100.0 * i for i, t in enumerate(times))
        assert late_tokens(request(*times)) == late
