"""What a run came to: energy, attainment, latencies and clocks over a window of it.

Energy names its idle accounting. A device without engines is taken as ``warm`` (it keeps its context),
``cold`` (its process has ended) or ``off`` (no power at all; what switching it off and on costs is not
counted), whichever of them it was: the local scheduler's settings say that, and the emulated meter counts it.
Joules per token and the energy by part are those of ``cold``.

A token is late if it reaches the client after ``arrival + TTFT + i * TBT`` (i from 0): tokens that came early
are buffered, as in Aegaeon. Attainment is then counted in three ways:

- ``request``: requests whose first token met TTFT and whose mean time between tokens met TBT (the paper's).
- ``strict``: those of them of whose tokens at most 1 % are late.
- ``token``: tokens that are not late, of all the tokens asked for; one that never came is late.

Requests that failed count as missed, with all that they asked for; those whose client left are not counted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.devices import Device
from shared.model import Struct
from shared.slo import met
from sim.scenario import DeviceRecord, RequestRecord, Result

LATE_SHARE = 0.01  # of a request's tokens may be late in the strict count
FINISHED = ("stop", "length")

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Energy(Struct):
    """Joules of all devices, by what a device without engines draws."""

    warm: float
    cold: float
    off: float


class EnergyParts(Struct):
    """Joules by cause: being powered, holding a context, clocking SMs, reading memory, computing."""

    floor: float
    context: float
    clock: float
    hbm: float
    compute: float


class Attainment(Struct):
    """Shares from 0 to 1, None if there was nothing to count; see the module's docstring."""

    request: float | None
    strict: float | None
    token: float | None


class Latency(Struct):
    """Median and tail."""

    p50: float | None
    p99: float | None


class Clocks(Struct):
    """SM clocks of devices on which requests ran, over time and devices."""

    p10: float | None
    p50: float | None
    p90: float | None


class Report(Struct):
    """The numbers of a run, as ``festina sim --json`` prints them.

    Args:
        output_tokens: that reached clients within the window.
        ttft_ms: over requests that got a token. This, `tbt_ms` and `attainment` are of the requests that
            arrived in the window.
        tbt_ms: over all gaps between two tokens of one request.
        active_gpus_mean: devices with an engine, mean over the window.
        loads, migrations, clock_switches: models loaded, requests moved, clocks asked for, in the whole run.
        wall_s: what the run took.
    """

    energy_j: Energy
    energy_parts_j: EnergyParts
    output_tokens: int
    j_per_token: float | None
    attainment: Attainment
    ttft_ms: Latency
    tbt_ms: Latency
    clock_mhz: Clocks
    active_gpus_mean: float
    loads: int
    migrations: int
    clock_switches: int
    wall_s: float
    trace_hash: str


def report(result: Result, device: Device, from_ms: float, until_ms: float) -> Report:
    """Return the numbers of a run over the window [from_ms, until_ms)."""
    parts_j, empty_ms = window_totals(result.devices, device, from_ms, until_ms)
    cold_j = sum(parts_j)
    arrived = [r for r in result.requests if from_ms <= r.arrived_ms < until_ms]
    tokens = tokens_between(result.requests, from_ms, until_ms)
    samples = [
        sample
        for record in result.devices
        for sample in record.samples
        if from_ms <= sample.at_ms <= until_ms and sample.running
    ]
    clocks = [float(sample.clock_mhz) for sample in samples]
    span_ms = until_ms - from_ms
    return Report(
        energy_j=by_idle_accounting(cold_j, device, empty_ms),
        energy_parts_j=EnergyParts(*parts_j),
        output_tokens=tokens,
        j_per_token=cold_j / tokens if tokens else None,
        attainment=attainment(arrived),
        ttft_ms=Latency(*quantiles([r.token_ms[0] - r.arrived_ms for r in arrived if r.token_ms], 0.5, 0.99)),
        tbt_ms=Latency(*quantiles(gaps_ms(arrived), 0.5, 0.99)),
        clock_mhz=Clocks(*quantiles(clocks, 0.1, 0.5, 0.9)),
        active_gpus_mean=len(result.devices) - empty_ms / span_ms,
        loads=_counted(result, "local_sched.loads"),
        migrations=_counted(result, "local_sched.moves.source"),
        clock_switches=_counted(result, "local_sched.clock_switches"),
        wall_s=result.wall_s,
        trace_hash=result.trace_hash,
    )


def by_idle_accounting(cold_j: float, device: Device, empty_ms: float) -> Energy:
    """Return the joules in each state that devices without engines may be in.

    Args:
        cold_j: the joules if they are cold.
        empty_ms: how long devices were without engines, all together.
    """
    return Energy(
        warm=cold_j + (device.context_idle_w - device.static_w) * empty_ms / 1000,
        cold=cold_j,
        off=cold_j - device.static_w * empty_ms / 1000,
    )


def attainment(requests: Sequence[RequestRecord]) -> Attainment:
    """Count attainment over these requests in the three ways of the module's docstring."""
    counted = [r for r in requests if r.outcome != "cancelled"]
    if not counted:
        return Attainment(request=None, strict=None, token=None)
    late = [late_tokens(r) for r in counted]
    on_time = [request_met(r) for r in counted]
    strictly = [
        ok and n <= LATE_SHARE * r.output_tokens for ok, n, r in zip(on_time, late, counted, strict=True)
    ]
    in_time = sum(r.output_tokens - n for r, n in zip(counted, late, strict=True))
    asked = sum(max(r.expected_tokens, r.output_tokens) for r in counted)
    return Attainment(
        request=sum(on_time) / len(counted), strict=sum(strictly) / len(counted), token=in_time / asked
    )


def request_met(request: RequestRecord) -> bool:
    """Say whether a request finished, its first token met TTFT and its mean time between tokens TBT."""
    if request.outcome not in FINISHED or not request.token_ms:
        return False
    first_ms, last_ms = request.token_ms[0], request.token_ms[-1]
    mean_tbt_ms = (last_ms - first_ms) / max(1, request.output_tokens - 1)
    return met(request.objectives, first_ms - request.arrived_ms, mean_tbt_ms)


def late_tokens(request: RequestRecord) -> int:
    """Return how many of the tokens that came are later than ``arrival + TTFT + i * TBT``.

    The hundredth of a nanosecond allowed is for rounding: times are sums of many floats.
    """
    objectives = request.objectives
    due_ms = request.arrived_ms + objectives.ttft_ms + objectives.tbt_ms * np.arange(request.output_tokens)
    return int(np.count_nonzero(np.asarray(request.token_ms) > due_ms + 1e-8))


def gaps_ms(requests: Sequence[RequestRecord]) -> Floats:
    """Return the times between tokens that follow each other in one request."""
    gaps = [np.diff(r.token_ms) for r in requests if r.output_tokens > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)


def tokens_between(requests: Sequence[RequestRecord], from_ms: float, until_ms: float) -> int:
    """Return how many tokens reached clients in [from_ms, until_ms)."""
    bounds = np.array([from_ms, until_ms])
    before = [np.searchsorted(r.token_ms, bounds) for r in requests if r.token_ms]
    return int(sum(upper - lower for lower, upper in before))


def window_totals(
    devices: Sequence[DeviceRecord], device: Device, from_ms: float, until_ms: float
) -> tuple[list[float], float]:
    """Return (joules by part, ms without an engine) of all devices within a window.

    The joules are those of devices that are cold whenever they have no engine. Between two samples all is
    taken to grow evenly.
    """
    totals = np.zeros(8)
    for record in devices:
        at_ms = [0.0, *(sample.at_ms for sample in record.samples)]
        rows = ((*s.parts_j, s.empty_ms, s.sleeping_ms, s.off_ms) for s in record.samples)
        for index, values in enumerate(zip(*rows, strict=True)):
            lower, upper = np.interp((from_ms, until_ms), at_ms, [0.0, *values])
            totals[index] += upper - lower
    floor_j, context_j, *above_j, empty_ms, sleeping_ms, off_ms = totals.tolist()
    if device.has_meter:
        floor_j += device.static_w * off_ms / 1000
        context_j -= (device.context_idle_w - device.static_w) * sleeping_ms / 1000
    return [floor_j, context_j, *above_j], empty_ms


def metered_j(devices: Sequence[DeviceRecord], from_ms: float, until_ms: float) -> float:
    """Return the joules that all devices drew within a window, in whatever states they were."""
    joules = 0.0
    for record in devices:
        at_ms = [0.0, *(sample.at_ms for sample in record.samples)]
        energy_j = [0.0, *(sample.energy_j for sample in record.samples)]
        lower, upper = np.interp((from_ms, until_ms), at_ms, energy_j)
        joules += float(upper - lower)
    return joules


def quantiles(values: "Sequence[float] | Floats", *at: float) -> list[float | None]:
    """Return these quantiles, linear between neighbours; None each if there are no values."""
    return [None] * len(at) if len(values) == 0 else list(np.quantile(values, at).tolist())


def _counted(result: Result, name: str) -> int:
    return int(result.counters.get(name, 0))
