"""One step of an emulated engine, or several alike: what it must do, how long that takes, and what it draws.

Steps that only decode differ in nothing but a context that grows. Time and bytes of a step are linear in its
context, so several of them are a step whose work is the sum of theirs: times and joules are exact as long as
conditions stay. Where they change in between, the steps before and after are taken for equally long, which is
wrong by at most half of what a step grows by meanwhile: 0.4 % for 32 steps of 32 requests of an 8B model.
"""

import math

from services.local_sched.emulated_meter import Parts
from services.local_sched.made_up import Answer
from shared.devices import Device
from shared.model import Request
from shared.silicon import (
    CAP_ROUNDS,
    StepWork,
    capped_clock_mhz,
    contention,
    dynamic_parts_w,
    idle_power_w,
    rates,
    step_ms,
)

ROUNDING = 1e-9  # of a step, by which an order that comes just as one ends may seem to come after


class Sequence:
    """A request in its engine. KV of `computed_tokens` is in memory, in `blocks` blocks.

    `prefill_tokens` is what must be computed before the first token of this attempt: the prompt, and what
    earlier attempts gave. `output_tokens` counts those; at `end_tokens` it ends by `finish_reason`. What was
    not reported yet: `made_tokens`, `prefilled_tokens` of the prompt, and `energy_j`. `starved`: its next
    token did not fit. `stopped`: out of the engine. `importing`: its KV is still on its way here. `leaving`:
    when it is stopped its memory is not free before its KV is copied.
    """

    computed_tokens: int = 0
    blocks: int = 0
    made_tokens: int = 0
    prefilled_tokens: int = 0
    energy_j: float = 0.0
    starved: bool = False
    stopped: bool = False
    importing: bool = False
    leaving: bool = False

    def __init__(
        self,
        request: Request,
        answer: Answer,
        prefill_tokens: int,
        output_tokens: int,
        end_tokens: int,
        finish_reason: str,
    ) -> None:
        self.request, self.answer = request, answer
        self.prefill_tokens, self.output_tokens = prefill_tokens, output_tokens
        self.end_tokens, self.finish_reason = end_tokens, finish_reason


class Step:
    """A step that runs, or several alike: `parts` are sequences with the tokens that each step computes.

    `full_ms` is what the whole would take under the conditions of this moment, `end_ms` when it ends if they
    stay; `power_w` is its part of the device's power, `energy_j` what it took up to the last change of
    conditions.
    """

    def __init__(
        self,
        plan_id: int,
        sm_share: float,
        parts: list[tuple[Sequence, int]],
        work: StepWork,
        start_ms: float,
        steps: int = 1,
    ) -> None:
        self.plan_id, self.sm_share, self.parts, self.work = plan_id, sm_share, parts, work
        self.start_ms, self.steps, self.was_cut = start_ms, steps, False
        self.end_ms = self.full_ms = self.power_w = self.energy_j = 0.0
        self._asked: tuple[float, ...] = ()
        self._span_ms = 0.0

    def span_ms(self, device: Device, clock_mhz: int, share: float, scales: tuple[float, float]) -> float:
        """Return what the whole takes under such conditions; the last answer is remembered."""
        asked = (clock_mhz, share, *scales)
        if asked != self._asked:
            self._asked, self._span_ms = asked, step_ms(device, self.work, clock_mhz, share, *scales)
        return self._span_ms

    def cut(self, now_ms: float) -> None:
        """Let it end with the step under way, where it stands for several."""
        done = self.steps * (1.0 - (self.end_ms - now_ms) / self.full_ms)
        steps = max(1, math.ceil(done - ROUNDING))
        if steps >= self.steps:
            return
        part = steps / self.steps
        self.end_ms = max(now_ms, self.end_ms - (1.0 - part) * self.full_ms)
        self.full_ms *= part
        self.steps, self.work, self.was_cut, self._asked = steps, scaled(self.work, part), True, ()


def scaled(work: StepWork, times: float) -> StepWork:
    """Return the work of so many like steps."""
    return StepWork(
        weight_bytes=work.weight_bytes * times,
        matmul_flops=work.matmul_flops * times,
        kv_bytes=work.kv_bytes * times,
        attn_flops=work.attn_flops * times,
        overhead_ms=work.overhead_ms * times,
    )


def idle_parts_w(device: Device, state: str) -> Parts:
    """Return the power of a device on which no step runs, by what it is for."""
    if not device.has_meter:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    all_w = idle_power_w(device, state)
    floor_w = min(all_w, device.static_w)
    return floor_w, all_w - floor_w, 0.0, 0.0, 0.0


def run_together(device: Device, clock_mhz: int, steps: list[Step], now_ms: float) -> Parts:
    """Give steps that run side by side from `now_ms` on their end and their power.

    Returns the device's power in W, by what it is for.

    What is left of a step is stretched by as much as the whole of it is. Shares that add up to more than the
    device are scaled to it; memory and compute are rationed by `contention`, the clock by the power cap.
    """
    shares = [step.sm_share for step in steps]
    over = sum(shares)
    if over > 1.0:
        shares = [share / over for share in shares]
    all_shares = sum(shares)
    scales = contention(device, shares)
    capped_mhz = clock_mhz
    spans_ms, reads, tb_per_s, tflop_per_s = _speeds(device, clock_mhz, steps, shares, scales)
    for _ in range(CAP_ROUNDS):
        asked_mhz = capped_mhz
        capped_mhz = capped_clock_mhz(device, asked_mhz, all_shares, tb_per_s, tflop_per_s)
        if capped_mhz == asked_mhz:
            break
        spans_ms, reads, tb_per_s, tflop_per_s = _speeds(device, capped_mhz, steps, shares, scales)
    parts_w = (0.0, 0.0, 0.0, 0.0, 0.0)
    if device.has_meter:
        clock_w, hbm_w, compute_w = dynamic_parts_w(device, capped_mhz, all_shares, tb_per_s, tflop_per_s)
        idle_w = device.context_idle_w
        context_w = max(0.0, idle_w - device.static_w - clock_w - hbm_w - compute_w)
        parts_w = (device.static_w, context_w, clock_w, hbm_w, compute_w)
        above_w = sum(parts_w) - idle_w
        for i, step in enumerate(steps):
            part = shares[i] / all_shares
            step.power_w = idle_w * part + above_w * (part + reads[i] / tb_per_s) / 2
    for i, step in enumerate(steps):
        span_ms = spans_ms[i]
        if step.full_ms == 0.0:
            step.end_ms = now_ms + span_ms
        elif step.full_ms != span_ms:
            step.end_ms = now_ms + (step.end_ms - now_ms) * span_ms / step.full_ms
        step.full_ms = span_ms
    return parts_w


def _speeds(
    device: Device, clock_mhz: int, steps: list[Step], shares: list[float], scales: tuple[float, float]
) -> tuple[list[float], list[float], float, float]:
    """Return of steps at a clock what each takes, TB/s that each reads, and TB/s and TFLOP/s of all."""
    spans_ms: list[float] = []
    reads: list[float] = []
    tb_per_s = tflop_per_s = 0.0
    for i, step in enumerate(steps):
        span_ms = step.span_ms(device, clock_mhz, shares[i], scales)
        read, done = rates(step.work, span_ms)
        spans_ms.append(span_ms)
        reads.append(read)
        tb_per_s += read
        tflop_per_s += done
    return spans_ms, reads, tb_per_s, tflop_per_s
