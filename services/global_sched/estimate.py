"""What a request would meet on one GPU (3.3, phase one): T_avail, TTFT, TBT, energy, and the others' fate.

What does not depend on the request is a `Stance`: the GPU at one clock and share as it stands for its next
request of a model. It holds until the GPU's state changes and is kept with it, so a request costs a few
multiplications per GPU. Infeasible is a result, and no exception.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from services.global_sched.curves import Curve, Curves
from services.global_sched.view import GpuView
from shared.model import Objectives
from shared.silicon import contention

CurvesOf = Callable[[str, str], Curves | None]
"""From GPU type and model name to the table's curves; None if the model is not known."""

IN_CHUNKS = 1.1
"""Prompts that wait are computed in chunks, with decodes between: so much longer than in one step."""


@dataclass(init=False)  # one that is made for it stays interpreted where the rest is compiled
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

    def __init__(
        self, model: str, input_tokens: int, output_tokens: int, waited_ms: float, objectives: Objectives
    ) -> None:
        self.model, self.input_tokens, self.output_tokens = model, input_tokens, output_tokens
        self.waited_ms, self.objectives = waited_ms, objectives

    @property
    def mean_tokens(self) -> float:
        """Context in the middle of its decode."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def left_ms(self) -> float:
        """Time until its first token is due."""
        return self.objectives.ttft_ms - self.waited_ms


@dataclass(init=False)
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
        sm_clock_mhz: the clock that all this holds at.
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
    sm_clock_mhz: int

    def __init__(
        self,
        gpu: str,
        available_ms: float,
        ttft_ms: float,
        tbt_ms: float,
        keeps_others: bool,
        energy_j: float | None,
        latency_ms: float,
        free_bytes: int,
        sm_share_pct: int,
        sm_clock_mhz: int = 0,
    ) -> None:
        self.gpu, self.available_ms, self.ttft_ms, self.tbt_ms = gpu, available_ms, ttft_ms, tbt_ms
        self.keeps_others, self.energy_j, self.latency_ms = keeps_others, energy_j, latency_ms
        self.free_bytes, self.sm_share_pct, self.sm_clock_mhz = free_bytes, sm_share_pct, sm_clock_mhz


def feasible(candidate: Candidate, objectives: Objectives) -> bool:
    """Say whether the request meets its objectives there and breaks nobody else's (phase one)."""
    return (
        candidate.ttft_ms <= objectives.ttft_ms
        and candidate.tbt_ms <= objectives.tbt_ms
        and candidate.keeps_others
    )


class Stance:
    """A GPU at one clock and share, for the next request of a model; none of it depends on the request.

    Args:
        batch: requests of the engine when the next one runs, those before it included.
        joining: how many of these do not run yet; they are taken to be of the next one's length.
        bandwidth, compute: what the engines beside it leave of both, as factors.
        keeps_beside: the engines beside it keep their TBT.
        due_ms: when each prompt that waits is due (absolute), ascending, those late when told of left out.
        computed_ms: time at which all up to it are computed, from `heard_ms` on; one more element, first 0.
        late_ms: time that those left out take.
    """

    def __init__(
        self,
        curves: Curves,
        clock_mhz: int,
        share_pct: int,
        prefill: Curve,
        decode: Curve,
        running_tokens: int,
        batch: int,
        joining: int,
        bandwidth: float,
        compute: float,
        tightest_tbt_ms: float,
        keeps_beside: bool,
        due_ms: list[float],
        computed_ms: list[float],
        late_ms: float,
        heard_ms: float,
    ) -> None:
        self.curves, self.clock_mhz, self.share_pct, self.prefill = curves, clock_mhz, share_pct, prefill
        self.decode, self.running_tokens, self.batch, self.joining = decode, running_tokens, batch, joining
        self.bandwidth, self.compute, self.tightest_tbt_ms = bandwidth, compute, tightest_tbt_ms
        self.keeps_beside, self.due_ms, self.computed_ms = keeps_beside, due_ms, computed_ms
        self.late_ms, self.heard_ms = late_ms, heard_ms

    @property
    def room_tokens(self) -> float:
        """The largest mean context of a next request with which its engine keeps its TBT."""
        bound_ms = self.tightest_tbt_ms * self.bandwidth
        curve, points = self.decode, self.curves.contexts.points
        if not bound_ms:
            return math.inf
        if curve.ms[0] > bound_ms:
            return -math.inf
        cell = bisect_right(curve.ms, bound_ms) - 1
        slope = curve.ms_slope[cell]
        if slope <= 0.0:
            return math.inf
        width = points[min(cell + 1, len(points) - 1)] - points[cell] or points[-1] - points[-2]
        mean_tokens = points[cell] + (bound_ms - curve.ms[cell]) / slope * width
        return (mean_tokens * self.batch - self.running_tokens) / self.joining

    def busy_until_ms(self, left_ms: float) -> float:
        """Return the time (absolute) from which a request may start that has at least so much time left."""
        return self.heard_ms + self.computed_ms[bisect_right(self.due_ms, self.heard_ms + left_ms)]

    def closed(self, left_ms: float) -> tuple[float, float]:
        """Return (time, prefill in ms): a longer one makes a later prompt late, up to that time (absolute).

        It holds for requests that have at most so much time left, and come before that prompt, while it would
        be in time without them.
        """
        until_ms, least_ms = -math.inf, math.inf
        for after in range(bisect_right(self.due_ms, self.heard_ms + left_ms), len(self.due_ms)):
            computed_ms = self.computed_ms[after + 1]
            spare_ms = self.due_ms[after] - self.heard_ms - computed_ms
            if 0.0 <= spare_ms < least_ms:
                until_ms, least_ms = self.due_ms[after] - max(left_ms, computed_ms), spare_ms
        return until_ms, least_ms


def stance(view: GpuView, model: str, share_pct: int, curves_of: CurvesOf, boost: bool) -> Stance:
    """Return how a GPU stands for a model's next request, at its clock or its highest; kept with the view."""
    known = view.stances.setdefault(model, {})
    found = known.get((share_pct, boost))
    if found is None:
        found = known[share_pct, boost] = _stance(view, model, share_pct, curves_of, boost)
    return found


def _stance(view: GpuView, model: str, share_pct: int, curves_of: CurvesOf, boost: bool) -> Stance:
    summary, engine = view.summary, view.engines[model]
    curves = curves_of(summary.gpu_type, model)
    assert curves is not None, f"no look-up table for {model}, which is being dispatched"
    clock_mhz = summary.sm_clock_mhz
    if boost:
        clock_mhz = max(clock_mhz, curves.lut.device.f_max_mhz)
    beside = (model, share_pct, clock_mhz)
    if beside not in view.beside:
        view.beside[beside] = _beside(view, model, share_pct, clock_mhz, curves_of)
    bandwidth, compute, keeps = view.beside[beside]
    prefill = curves.prefill(clock_mhz, share_pct)
    due_ms, computed_ms, late_ms, per_ms = [], [0.0], 0.0, IN_CHUNKS / compute
    for due, heard, count, tokens in view.prefills(model):
        took_ms = per_ms * count * prefill.ms_at(*curves.inputs.locate(tokens / count))
        if due <= heard:
            late_ms += took_ms
        else:
            due_ms.append(due)
            computed_ms.append(computed_ms[-1] + took_ms)
    joining = view.queued(model) + 1
    batch = engine.running + joining
    return Stance(
        curves=curves,
        clock_mhz=clock_mhz,
        share_pct=share_pct,
        prefill=prefill,
        decode=curves.decode(clock_mhz, share_pct, batch),
        running_tokens=engine.context_tokens,
        batch=batch,
        joining=joining,
        bandwidth=bandwidth,
        compute=compute,
        tightest_tbt_ms=engine.tightest_tbt_ms,
        keeps_beside=keeps,
        due_ms=due_ms,
        computed_ms=computed_ms,
        late_ms=late_ms,
        heard_ms=view.heard_ms,
    )


def _beside(
    view: GpuView, model: str, share_pct: int, clock_mhz: int, curves_of: CurvesOf
) -> tuple[float, float, bool]:
    """Return (bandwidth scale, compute scale, whether the other models' engines keep their TBT).

    Dividing a whole step by a scale is an upper bound of how much the engines slow each other down.
    """
    others = [e for e in view.engines.values() if e.running and e.model != model]
    if not others:
        return 1.0, 1.0, True
    curves = curves_of(view.summary.gpu_type, model)
    assert curves is not None
    shares = [share_pct / 100, *(engine.sm_share_pct / 100 for engine in others)]
    bandwidth, compute = contention(curves.lut.device, shares)
    for engine in others:
        other = curves_of(view.summary.gpu_type, engine.model)
        if other is None or not engine.tightest_tbt_ms or not engine.sm_share_pct:
            continue
        step = other.decode(clock_mhz, engine.sm_share_pct, engine.running)
        at = other.contexts.locate(engine.context_tokens / engine.running)
        if step.ms_at(*at) / bandwidth > engine.tightest_tbt_ms:
            return bandwidth, compute, False
    return bandwidth, compute, True


def estimate(view: GpuView, work: Work, curves_of: CurvesOf, now_ms: float, boost: bool = False) -> Candidate:
    """Return what a request would meet on a GPU at its current clock, or at its highest with `boost`."""
    curves = curves_of(view.summary.gpu_type, work.model)
    assert curves is not None, f"no look-up table for {work.model}, which is being dispatched"
    kv_bytes = curves.lut.request_bytes(work.input_tokens + work.output_tokens)
    available_ms, share_pct = view.available(work.model, kv_bytes, now_ms)
    if share_pct == 0:
        never, clock_mhz = math.inf, view.summary.sm_clock_mhz
        energy_j = never if curves.lut.device.has_meter else None
        return Candidate(view.gpu, never, never, never, True, energy_j, never, view.free_bytes, 0, clock_mhz)
    return meet(view, stance(view, work.model, share_pct, curves_of, boost), work, now_ms, available_ms)


def meet(view: GpuView, at: Stance, work: Work, now_ms: float, available_ms: float) -> Candidate:
    """Return what a request would meet on a GPU that stands so, if its memory is there in `available_ms`."""
    cell = at.curves.inputs.locate(work.input_tokens)
    contexts = at.curves.contexts
    prefill_ms = at.prefill.ms_at(*cell) / at.compute
    queue_ms, in_time = queue(at, work.left_ms, prefill_ms, now_ms)
    start_ms = max(available_ms, queue_ms)
    mean_tokens = work.mean_tokens
    batch_tokens = (at.running_tokens + at.joining * mean_tokens) / at.batch
    tbt_ms = at.decode.ms_at(*contexts.locate(batch_tokens)) / at.bandwidth
    energy_j = None
    if at.curves.lut.device.has_meter:
        token_j = at.decode.energy_j(*contexts.locate(mean_tokens))
        energy_j = at.prefill.energy_j(*cell) + (work.output_tokens - 1) * token_j
    return Candidate(
        view.gpu,
        available_ms,
        work.waited_ms + start_ms + prefill_ms,
        tbt_ms,
        at.keeps_beside and in_time and (not at.tightest_tbt_ms or tbt_ms <= at.tightest_tbt_ms),
        energy_j,
        start_ms + prefill_ms + work.output_tokens * tbt_ms,
        view.free_bytes,
        at.share_pct,
        at.clock_mhz,
    )


def queue(at: Stance, left_ms: float, prefill_ms: float, now_ms: float) -> tuple[float, bool]:
    """Return (time until a request's prefill starts, whether those after it are as much in time as without).

    An engine computes prompts one after the other: what is due earlier goes before, and so does, before what
    is late, all that is not. Since the summary it has gone on.
    """
    gone_ms = now_ms - at.heard_ms
    if left_ms <= 0:
        return max(0.0, at.computed_ms[-1] + at.late_ms - gone_ms), True
    due_ms, computed_ms = at.due_ms, at.computed_ms
    first = bisect_right(due_ms, now_ms + left_ms)
    before_ms = max(0.0, computed_ms[first] - gone_ms)
    for after in range(first, len(due_ms)):
        end_ms = now_ms + before_ms + computed_ms[after + 1] - computed_ms[first]
        if end_ms <= due_ms[after] < end_ms + prefill_ms:
            return before_ms, False
    return before_ms, True
