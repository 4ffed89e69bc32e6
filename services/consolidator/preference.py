"""The configuration a model prefers under its load: (SM_l, F_l) of 3.5.2 and Appendix E."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.consolidator.window import Load
from shared.lut import Lut
from shared.model import Objectives

BATCH_ROUNDS = 4  # in which a batch and the time of its step settle on each other
MOST_BATCH = 512.0

Grid = NDArray[np.float64]
"""Values over (clock, share) of a look-up table."""


@dataclass(frozen=True, slots=True)
class Preference:
    """What a model wants of a GPU.

    Args:
        sm_share_pct, sm_clock_mhz: SM_l (Eq. 8) and F_l (Eq. 9).
        busy: part of the time in which it runs at that configuration, 0 to 1; t_l of Eqs. 5 and 6.
        whole_pct: percent of the time of a whole GPU that it takes at least, with decodes as slow, and so in
            batches as large, as the objective lets them be.
        latency_ms: W of Little's law, prefill and all decode steps of a request.
        least_pct: the part of a device that it needs, while it runs, to meet its objectives at the highest
            clock.
        watts: its mean power above the device's static power, at each of the table's `clocks_mhz`.
        meets: whether any configuration meets its objectives under this load.
    """

    sm_share_pct: float
    sm_clock_mhz: float
    busy: float
    whole_pct: float
    latency_ms: float
    least_pct: float
    watts: tuple[float, ...]
    meets: bool


def prefer(lut: Lut, load: Load, objectives: Objectives) -> Preference:
    """Return what a model prefers: for each phase, what meets its objective with the least energy.

    A phase that cannot meet it takes the fastest. Decodes run in batches as large as the load makes them
    (Little's law), and share the energy of their steps; static power falls on a model by its SM share.
    """
    clocks, shares = lut.clocks_mhz[:, None].astype(float), lut.shares_pct[None, :].astype(float)
    steps = max(load.output_tokens - 1.0, 0.0)
    context_tokens = load.input_tokens + load.output_tokens / 2.0
    prefill_ms = lut.ttft_ms(clocks, shares, load.input_tokens)
    batch, step_ms = _batches(lut, clocks, shares, load.rate_per_s * steps / 1000.0, context_tokens)
    decode_ms = step_ms * steps / batch  # of the engine's time, what falls on one request

    static_w = lut.device.static_w
    own_static_w = static_w * shares / 100.0
    prefill_w = lut.prefill_power_w(clocks, shares, load.input_tokens) - static_w
    decode_w = lut.decode_power_w(clocks, shares, batch, context_tokens) - static_w
    prefill_j = (prefill_w + own_static_w) * prefill_ms / 1000.0
    decode_j = (decode_w + own_static_w) * decode_ms / 1000.0
    prompt_in_time, token_in_time = prefill_ms <= objectives.ttft_ms, step_ms <= objectives.tbt_ms
    p = _cheapest(prefill_j, prefill_ms, prompt_in_time)
    d = _cheapest(decode_j, step_ms, token_in_time)

    times_ms = (prefill_ms[p], step_ms[d] * steps)
    decoding = load.rate_per_s * steps * objectives.tbt_ms / 1000.0  # requests, if decoded at that pace
    slow_batch = min(max(1.0, decoding), MOST_BATCH)
    slow_step_ms = lut.tbt_ms(int(lut.clocks_mhz[d[0]]), 100, slow_batch, context_tokens)
    prefilling = load.rate_per_s * prefill_ms[p[0], -1] / 1000.0
    watts = (prefill_w * prefill_ms)[:, p[1]] + (decode_w * decode_ms)[:, d[1]]
    return Preference(
        sm_share_pct=float(np.average(lut.shares_pct[[p[1], d[1]]], weights=times_ms)),
        sm_clock_mhz=float(np.average(lut.clocks_mhz[[p[0], d[0]]], weights=(prefill_j[p], decode_j[d]))),
        busy=min(1.0, float(load.rate_per_s * (prefill_ms[p] + decode_ms[d]) / 1000.0)),
        whole_pct=float(100.0 * (prefilling + min(1.0, decoding) * slow_step_ms / objectives.tbt_ms)),
        latency_ms=float(sum(times_ms)),
        least_pct=_least_pct(lut, prefill_ms[-1], step_ms[-1], objectives),
        watts=tuple((load.rate_per_s * watts / 1000.0).tolist()),
        meets=bool(prompt_in_time.any() and token_in_time.any()),
    )


def _least_pct(lut: Lut, prefill_ms: Grid, step_ms: Grid, objectives: Objectives) -> float:
    """Return the part of a device without which a model is late, from its times at each share.

    That is the least share in time, but not less than the part of its deadline that the work takes on all
    SMs: a tenth of the SMs draws a third of the memory bandwidth, which no second engine then has.
    """
    in_time = (prefill_ms <= objectives.ttft_ms) & (step_ms <= objectives.tbt_ms)
    if not in_time.any():
        return 100.0
    taken = max(prefill_ms[-1] / objectives.ttft_ms, step_ms[-1] / objectives.tbt_ms)
    return float(max(lut.shares_pct[in_time.argmax()], 100.0 * taken))


def _batches(lut: Lut, clocks: Grid, shares: Grid, steps_per_ms: float, context: float) -> tuple[Grid, Grid]:
    """Return (requests decoding at one time, ms of their step) at each configuration."""
    batch = np.ones((len(clocks), shares.shape[1]))
    step_ms: Grid = lut.tbt_ms(clocks, shares, batch, context)
    for _ in range(BATCH_ROUNDS):
        batch = np.clip(steps_per_ms * step_ms, 1.0, MOST_BATCH)
        step_ms = lut.tbt_ms(clocks, shares, batch, context)
    return batch, step_ms


def _cheapest(joules: Grid, ms: Grid, in_time: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the (clock, share) of least energy among those in time, or the fastest if none is."""
    cost = np.where(in_time, joules, np.inf) if in_time.any() else ms
    clock, share = np.unravel_index(int(cost.argmin()), cost.shape)
    return int(clock), int(share)
