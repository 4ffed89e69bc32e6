"""Frequency-aware dispatch, the paper's three phases (3.3), as plain functions over plain data.

`estimate` turns what is known of one GPU into a `Candidate`; the phases choose among candidates:
`least_energy` (phases one and two, at the current clocks), `first_in_time` (phase three, at the highest), and
`soonest` (nobody can be in time: serve late). Infeasible is a result, None, and no exception.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.global_sched.view import GpuView
from shared.lut import Lut
from shared.model import Objectives
from shared.silicon import contention

LutOf = Callable[
    [str, str], Lut | None
]  # (GPU type, model name) -> its table; None if the model is not known

IN_CHUNKS = 1.1
"""Prompts that wait are computed in chunks, with decodes between: so much longer than in one step."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request as the dispatcher sees it.

    Args:
        input_tokens: tokens to prefill, outputs of earlier attempts included.
        output_tokens: predicted tokens still to come, margin included.
        waited_ms: time since the request reached its gateway.
    """

    model: str
    input_tokens: int
    output_tokens: int
    waited_ms: float
    objectives: Objectives


@dataclass(frozen=True, slots=True)
class Candidate:
    """One GPU with what a request would meet there at one clock.

    Args:
        available_ms: T_avail, in ms from now; infinite if the memory is never expected to be free.
        ttft_ms: time to first token since the request reached its gateway.
        tbt_ms: time between tokens of the engine with this request in its batch.
        keeps_others: requests on the GPU already still keep their objectives.
        energy_j: what the request takes (Eq. 2); None without a meter.
        latency_ms: from now to its last token.
        free_bytes, sm_share_pct: memory free now; SM share it can use at T_avail.
    """

    gpu: str
    available_ms: float
    ttft_ms: float
    tbt_ms: float
    keeps_others: bool
    energy_j: float | None
    latency_ms: float
    free_bytes: int
    sm_share_pct: int


def feasible(candidate: Candidate, objectives: Objectives) -> bool:
    """Say whether the request meets its objectives there and breaks nobody else's (phase one)."""
    return (
        candidate.ttft_ms <= objectives.ttft_ms
        and candidate.tbt_ms <= objectives.tbt_ms
        and candidate.keeps_others
    )


def least_energy(candidates: Iterable[Candidate], objectives: Objectives, tie: float) -> Candidate | None:
    """Return the feasible candidate that takes the least energy (phases one and two, Eq. 3), or None.

    Among those within the fraction `tie` of the least, the one with the most free memory wins, then the most
    SM share, then the first by id. GPUs without a meter have no joules to compare: they are ranked by latency
    among themselves, and only when no GPU with a meter is feasible.
    """
    fitting = [c for c in candidates if feasible(c, objectives)]
    metered = [(c.energy_j, c) for c in fitting if c.energy_j is not None]
    costs = metered or [(c.latency_ms, c) for c in fitting]
    if not costs:
        return None
    bound = min(cost for cost, _ in costs) * (1.0 + tie)
    tied = (c for cost, c in costs if cost <= bound)
    return min(tied, key=lambda c: (-c.free_bytes, -c.sm_share_pct, c.gpu))


def first_in_time(boosted: Iterable[Candidate], objectives: Objectives) -> Candidate | None:
    """Return the first feasible candidate in order of T_avail (phase three), or None.

    Args:
        boosted: candidates estimated at their highest clocks.
    """
    ordered = sorted(boosted, key=lambda c: (c.available_ms, -c.free_bytes, c.gpu))
    return next((c for c in ordered if feasible(c, objectives)), None)


def soonest(boosted: Sequence[Candidate], objectives: Objectives) -> Candidate:
    """Return the candidate with the earliest first token, for a request that cannot be in time anywhere.

    One that breaks nobody else's objectives, and then one that keeps the request's own TBT, comes first.

    Args:
        boosted: candidates estimated at their highest clocks; at least one.
    """
    return min(
        boosted,
        key=lambda c: (not c.keeps_others, c.tbt_ms > objectives.tbt_ms, c.ttft_ms, -c.free_bytes, c.gpu),
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen candidate, and by which rule.

    ``reason`` is ``least_energy``, ``lowest_latency`` (no meter), ``f_max``, or ``best_effort``: not in time.
    """

    candidate: Candidate
    reason: str


def decide(views: Sequence[GpuView], work: Work, lut_of: LutOf, now_ms: float, tie: float) -> Decision:
    """Run the three phases over the GPUs that have the model ready.

    Args:
        views: at least one; all with a LUT for the work's model.

    Cost: linear in the GPUs that have the model; phase three doubles it.
    """
    chosen = least_energy((estimate(v, work, lut_of, now_ms) for v in views), work.objectives, tie)
    if chosen is not None:
        return Decision(chosen, "lowest_latency" if chosen.energy_j is None else "least_energy")
    boosted = [estimate(v, work, lut_of, now_ms, boost=True) for v in views]
    chosen = first_in_time(boosted, work.objectives)
    if chosen is not None:
        return Decision(chosen, "f_max")
    return Decision(soonest(boosted, work.objectives), "best_effort")


def lacks_capacity(decision: Decision, work: Work) -> bool:
    """Say whether the request would be late even if it had come only now.

    One that is late by its own past, such as its model's load, says nothing about a lack of instances.
    """
    if decision.reason != "best_effort":
        return False
    chosen = decision.candidate
    return not feasible(replace(chosen, ttft_ms=chosen.ttft_ms - work.waited_ms), work.objectives)


def estimate(view: GpuView, work: Work, lut_of: LutOf, now_ms: float, boost: bool = False) -> Candidate:
    """Return what a request would meet on a GPU at its current clock, or at its highest with `boost`."""
    lut = lut_of(view.summary.gpu_type, work.model)
    assert lut is not None, f"no look-up table for {work.model}, which is being dispatched"
    engine = view.engines[work.model]
    clock_mhz = view.summary.sm_clock_mhz
    if boost:
        clock_mhz = max(clock_mhz, lut.device.f_max_mhz)
    kv_bytes = lut.request_bytes(work.input_tokens + work.output_tokens)
    available_ms, share_pct = view.available(work.model, kv_bytes, now_ms)
    free_bytes = view.free_bytes
    if share_pct == 0:
        never = math.inf
        return Candidate(view.gpu, never, never, never, True, _metered(lut, never), never, free_bytes, 0)

    bandwidth, compute, keeps_others = _beside(view, work.model, share_pct, clock_mhz, lut_of)
    prefill_ms = float(lut.ttft_ms(clock_mhz, share_pct, work.input_tokens)) / compute
    queue_ms, in_time = _prefill_queue(view, work, lut, (clock_mhz, share_pct), compute, prefill_ms, now_ms)
    keeps_others = keeps_others and in_time
    start_ms = max(available_ms, queue_ms)
    joining = view.queued(work.model) + 1  # it and those before it, taken to be of its length
    batch = engine.running + joining
    batch_tokens = engine.context_tokens + joining * (work.input_tokens + work.output_tokens / 2)
    tbt_ms = float(lut.tbt_ms(clock_mhz, share_pct, batch, batch_tokens / batch)) / bandwidth
    if engine.tightest_tbt_ms:
        keeps_others = keeps_others and tbt_ms <= engine.tightest_tbt_ms
    energy_j = lut.request_energy_j(clock_mhz, share_pct, work.input_tokens, work.output_tokens, batch)
    return Candidate(
        gpu=view.gpu,
        available_ms=available_ms,
        ttft_ms=work.waited_ms + start_ms + prefill_ms,
        tbt_ms=tbt_ms,
        keeps_others=keeps_others,
        energy_j=_metered(lut, energy_j),
        latency_ms=start_ms + prefill_ms + work.output_tokens * tbt_ms,
        free_bytes=free_bytes,
        sm_share_pct=share_pct,
    )


def _prefill_queue(
    view: GpuView,
    work: Work,
    lut: Lut,
    point: tuple[int, int],
    compute: float,
    prefill_ms: float,
    now_ms: float,
) -> tuple[float, bool]:
    """Return (time until a request's prefill starts, whether those after it are as much in time as without).

    An engine computes prompts one after the other: what is due earlier goes before, and so does, before what
    is late, all that is not.

    Args:
        point: clock and SM share that the engine has.
        prefill_ms: of the request itself.
    """
    waiting = view.prefills(work.model, now_ms)
    if not waiting:
        return 0.0, True
    tokens, counts = (np.asarray([p.tokens for p in waiting]), np.asarray([p.count for p in waiting]))
    each_ms = (IN_CHUNKS * lut.ttft_ms(*point, tokens / counts) * counts / compute).tolist()
    left_ms = work.objectives.ttft_ms - work.waited_ms
    late_ms = sum(ms for p, ms in zip(waiting, each_ms, strict=True) if p.due_ms <= 0)
    on_time = [(p.due_ms, ms) for p, ms in zip(waiting, each_ms, strict=True) if p.due_ms > 0]
    computed_ms = now_ms - view.heard_ms  # it has gone on since the summary
    if left_ms <= 0:
        return max(0.0, sum(ms for _, ms in on_time) + late_ms - computed_ms), True
    before_ms = max(0.0, sum(ms for due_ms, ms in on_time if due_ms <= left_ms) - computed_ms)
    end_ms, in_time = before_ms, True
    for due_ms, ms in on_time:
        if due_ms > left_ms:
            end_ms += ms
            in_time = in_time and not end_ms <= due_ms < end_ms + prefill_ms
    return before_ms, in_time


def _metered(lut: Lut, energy_j: float) -> float | None:
    return energy_j if lut.device.has_meter else None


def _beside(
    view: GpuView, model: str, share_pct: int, clock_mhz: int, lut_of: LutOf
) -> tuple[float, float, bool]:
    """Return (bandwidth scale, compute scale, whether the other models' engines keep their TBT).

    Dividing a whole step by a scale is an upper bound of how much the engines slow each other down.
    """
    others = list(view.running_beside(model))
    if not others:
        return 1.0, 1.0, True
    lut = lut_of(view.summary.gpu_type, model)
    assert lut is not None
    shares = [share_pct / 100, *(engine.sm_share_pct / 100 for engine in others)]
    bandwidth, compute = contention(lut.device, shares)
    keeps = True
    for engine in others:
        other = lut_of(view.summary.gpu_type, engine.model)
        if other is None or not engine.tightest_tbt_ms or not engine.sm_share_pct:
            continue
        mean_tokens = engine.context_tokens / engine.running
        tbt_ms = float(other.tbt_ms(clock_mhz, engine.sm_share_pct, engine.running, mean_tokens)) / bandwidth
        keeps = keeps and tbt_ms <= engine.tightest_tbt_ms
    return bandwidth, compute, keeps
