"""The least energy for which a setting can be served at all: a fluid lower bound, to hold policies against.

Work is divided at will over GPUs and over the clocks that schedulers choose from; nothing waits, is loaded,
moved or computed twice; engines run on whatever share of the SMs takes least. What no policy escapes:

- **Steps.** A request of n output tokens that meets its objectives gets them in n steps of its model between
  ``arrival`` and ``arrival + TTFT + (n - 1) * TBT`` (attainment by request: the mean TBT counts). Requests
  whose times do not overlap share no step, so a model runs at least as many steps as any choice of such
  requests has tokens (`fewest_steps`; where many overlap, about a step per TBT). Each reads all weights.
- **Work.** Every prompt and token is computed, and every token reads the KV of its context.
- **Rates.** All engines of a GPU together read and compute no faster than the card at its clock
  (`silicon.contention`).
- **Memory.** The longer a step waits, the longer requests hold KV (Little's law). A model's weights are
  there, once, while it has a request.
- **Power.** ``max(idle, static + dynamic)`` of each GPU that is on (`shared/silicon.py`), by idle accounting
  as in `sim/report.py`.

These are linear in the part of each model's work that is done at each step interval and clock, so the least
energy is a small linear program. That a model's work is spread evenly over its steps is assumed: no other
division takes less at one clock and share, since a step's time is convex in its tokens. The formulation is
ours; the sources of the device model stand in `shared/device_table.py`.

Two things that a system may do are not in it: a model that leaves memory while it has requests (token-level
switching) needs less memory; one that answers late, or not at all, needs less of everything.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linprog

from shared.devices import Device
from shared.lut import CLOCK_FLOOR_MHZ, CLOCK_STRIDE_MHZ
from shared.model import ModelSpec, Struct
from shared.silicon import StepWork, dynamic_parts_w, rates, step_ms, step_work
from shared.slo import TBT_MS, objectives_for
from sim.report import Energy
from sim.workload import Arrival

INTERVALS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)  # between steps, as parts of TBT

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Bound(Struct):
    """What a setting takes at least.

    Args:
        energy_j: by idle accounting; None where not even this fluid can serve it: too little memory or speed.
        gpus: that must be on in the mean, for the least energy with empty ones off.
        clock_mhz, step_interval_ms: means over the work, likewise.
        kv_bytes: mean KV memory at the longest step interval, whether or not it is there.
    """

    span_ms: float
    requests: int
    output_tokens: int
    energy_j: Energy | None
    gpus: float | None
    clock_mhz: float | None
    step_interval_ms: float | None
    kv_bytes: float


class _Uses(Struct):
    """What a model's work takes: rows by step interval; and columns by clock, but in `memory`.

    `bandwidth` and `compute` in GPUs kept busy, `dynamic_w` in W, `memory` in bytes: means over the span.
    """

    intervals_ms: Floats
    bandwidth: Floats
    compute: Floats
    dynamic_w: Floats
    memory: Floats
    kv_bytes: float


def bound(
    models: Sequence[ModelSpec], arrivals: Sequence[Arrival], device: Device, gpus: int, span_ms: float
) -> Bound:
    """Return the least energy for these requests on so many GPUs within `span_ms`, all of them on time."""
    clocks = _clocks_mhz(device)
    by_model: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        by_model.setdefault(arrival.model, []).append(arrival)
    uses = [_uses(m, by_model[m.name], device, clocks, span_ms) for m in models if m.name in by_model]
    seconds = span_ms / 1000
    watts, found = {}, None
    for accounting in ("warm", "cold", "off"):
        found = _least(uses, device, gpus, accounting)
        if found is not None:
            watts[accounting] = float(found[0])
    served = len(watts) == 3 and found is not None
    shares: Floats = np.zeros(0) if found is None else found[2]
    where = [np.broadcast_to(clocks, use.dynamic_w.shape).ravel() for use in uses]
    waits = [np.broadcast_to(use.intervals_ms[:, None], use.dynamic_w.shape).ravel() for use in uses]
    return Bound(
        span_ms=span_ms,
        requests=len(arrivals),
        output_tokens=sum(arrival.output_tokens for arrival in arrivals),
        energy_j=Energy(**{name: w * seconds for name, w in watts.items()}) if served else None,
        gpus=float(found[1]) if served and found else None,
        clock_mhz=float(shares @ np.concatenate(where)) / len(uses) if served and uses else None,
        step_interval_ms=float(shares @ np.concatenate(waits)) / len(uses) if served and uses else None,
        kv_bytes=sum(use.kv_bytes for use in uses),
    )


def fewest_steps(arrivals: Sequence[Arrival], interval_ms: float, model: ModelSpec) -> tuple[int, int]:
    """Return (steps, those of them that decode) that a model needs at least, with that long between steps.

    The heaviest choice of requests that do not overlap (weighted interval scheduling).
    """
    spans = sorted(
        (
            arrival.at_ms
            + (model.objectives or objectives_for(arrival.input_tokens)).ttft_ms
            + (arrival.output_tokens - 1) * interval_ms,
            arrival.at_ms,
            arrival.output_tokens,
        )
        for arrival in arrivals
    )
    ends = [end for end, _, _ in spans]
    best = [(0, 0)]
    for index, (_, start, tokens) in enumerate(spans):
        steps, decodes = best[bisect_right(ends, start, 0, index)]
        best.append(max(best[-1], (steps + tokens, decodes + tokens - 1)))
    return best[-1]


def _clocks_mhz(device: Device) -> Floats:
    """Return the clocks that schedulers choose from, and that of a device nobody governs."""
    stride = [
        clock
        for clock in device.clocks_mhz
        if CLOCK_FLOOR_MHZ <= clock <= device.f_max_mhz and (clock - CLOCK_FLOOR_MHZ) % CLOCK_STRIDE_MHZ == 0
    ]
    return np.array(sorted({*stride, device.f_max_mhz, device.default_clock_mhz}), float)


def _uses(
    model: ModelSpec, arrivals: Sequence[Arrival], device: Device, clocks: Floats, span_ms: float
) -> _Uses:
    """Return what a model's requests take, at each step interval and clock."""
    inputs = np.array([arrival.input_tokens for arrival in arrivals], float)
    outputs = np.array([arrival.output_tokens for arrival in arrivals], float)
    contexts = float(
        np.sum((outputs - 1) * (inputs + outputs / 2))
    )  # summed over decodes: in + 1 ... in + n - 1
    whole = step_work(
        device,
        model,
        decode_batch=float(np.sum(outputs - 1)),
        decode_context_tokens=contexts,
        prefill_tokens=float(inputs.sum()),
    )
    per_prompt = step_work(device, model, decode_batch=0, decode_context_tokens=0, prefill_tokens=inputs)
    # `whole` counts the logits of one prompt only
    logits = 2.0 * model.vocab_tokens * model.hidden * (len(arrivals) - 1)
    matmul_flops, attn_flops = whole.matmul_flops + logits, float(np.sum(per_prompt.attn_flops))
    tbt_ms = model.objectives.tbt_ms if model.objectives else TBT_MS
    intervals_ms = np.array(INTERVALS) * tbt_ms
    fewest = np.array([fewest_steps(arrivals, interval, model) for interval in intervals_ms.tolist()], float)
    decodes, steps = fewest[:, 1], fewest[:, :1]
    weight_bytes: Any = whole.weight_bytes * steps
    overhead_ms: Any = whole.overhead_ms * steps
    work = StepWork(
        weight_bytes=weight_bytes[..., None],
        matmul_flops=matmul_flops,
        kv_bytes=whole.kv_bytes,
        attn_flops=attn_flops,
        overhead_ms=overhead_ms[..., None],
    )
    shares = np.array(device.sm_sizes_pct) / 100
    grid_mhz = clocks[:, None]
    ms = step_ms(device, work, grid_mhz, shares)  # a step's time is homogeneous: all of them as one
    joules = sum(dynamic_parts_w(device, grid_mhz, shares, *rates(work, ms))) * ms / 1000
    read = StepWork(weight_bytes, 0.0, whole.kv_bytes, 0.0, 0.0)
    multiply = StepWork(0.0, matmul_flops, 0.0, attn_flops, 0.0)
    return _Uses(
        intervals_ms=intervals_ms,
        bandwidth=step_ms(device, read, clocks, 1.0) / span_ms,
        compute=np.broadcast_to(step_ms(device, multiply, clocks, 1.0) / span_ms, (len(steps), len(clocks))),
        dynamic_w=joules.min(axis=-1) / (span_ms / 1000),
        memory=(
            model.weight_bytes * np.minimum(1.0, decodes * intervals_ms / span_ms)
            + whole.kv_bytes * intervals_ms / span_ms
        ),
        kv_bytes=whole.kv_bytes * tbt_ms / span_ms,
    )


def _least(
    uses: Sequence[_Uses], device: Device, gpus: int, accounting: str
) -> tuple[float, float, Floats] | None:
    """Return (W, GPUs on, part of each model's work by interval and clock); None if there is no solution.

    Variables: those parts; GPUs at each clock; GPUs on; W above static power.
    """
    parts = sum(use.dynamic_w.size for use in uses)
    clocks = uses[0].dynamic_w.shape[1] if uses else 0
    size, on, above = parts + clocks + 2, parts + clocks, parts + clocks + 1
    idle_w = device.context_idle_w - device.static_w
    cost = np.zeros(size)
    cost[above] = 1.0
    cost[on] = device.static_w if accounting == "off" else 0.0
    constant_w = 0.0 if accounting == "off" else device.static_w * gpus

    at_clock = np.tile(np.eye(clocks), parts // clocks if clocks else 0)
    rows = np.zeros((2 * clocks + 4, size))
    limits = np.zeros(2 * clocks + 4)
    for first, name in ((0, "bandwidth"), (clocks, "compute")):
        rows[first : first + clocks, :parts] = at_clock * _flat([getattr(use, name) for use in uses])
        rows[first : first + clocks, parts:on] = -np.eye(clocks)
    used, memory, dynamic, floor = range(2 * clocks, 2 * clocks + 4)
    rows[used, parts:on], rows[used, on] = 1.0, -1.0
    held = [np.broadcast_to(use.memory[:, None], use.dynamic_w.shape) for use in uses]
    rows[memory, :parts], rows[memory, on] = _flat(held) / device.total_bytes, -1.0
    rows[dynamic, :parts], rows[dynamic, above] = _flat([use.dynamic_w for use in uses]), -1.0
    rows[floor, above] = -1.0
    if accounting == "warm":
        limits[floor] = -idle_w * gpus
    else:
        rows[floor, on] = idle_w
    owners = np.repeat(np.arange(len(uses)), [use.dynamic_w.size for use in uses])
    whole = np.zeros((len(uses), size))
    whole[:, :parts] = np.arange(len(uses))[:, None] == owners
    bounds = [(0.0, None)] * on + [(0.0, float(gpus)), (0.0, None)]
    solved = linprog(cost, rows, limits, whole, np.ones(len(uses)), bounds)
    if not solved.success:
        return None
    return constant_w + float(solved.fun), float(solved.x[on]), solved.x[:parts]


def _flat(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0)
