"""One emulated engine: its requests, their KV memory, what its next step does, and how fast steps run.

The engine batches as vLLM does: a step decodes one token of every request whose prompt is computed, and
computes a chunk of the prompts that are not, in the order of the plan. Time and power of the steps that run
side by side come from the device model (`shared/silicon.py`); `emulated.py` says when they start and end.
"""

from dataclasses import dataclass, field, replace

from services.local_sched.made_up import Answer, VocabSlice, answer
from shared.devices import Device
from shared.engine import OutOfMemory, StepDone, StepOutput
from shared.model import ModelSpec, Plan, Request
from shared.silicon import (
    CAP_ROUNDS,
    StepWork,
    capped_clock_mhz,
    contention,
    dynamic_parts_w,
    idle_power_w,
    rates,
    step_ms,
    step_work,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in its engine. KV of `computed_tokens` is in memory, in `blocks` blocks.

    `prefill_tokens` is what must be computed before the first token of this attempt: the prompt, and what
    earlier attempts gave. `starved`: its next token did not fit. `stopped`: out of the engine.
    """

    request: Request
    answer: Answer
    prefill_tokens: int
    output_tokens: int
    computed_tokens: int = 0
    blocks: int = 0
    starved: bool = False
    stopped: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """A step that runs: `parts` are sequences with the tokens computed for each.

    `full_ms` is what the whole step would take under the conditions of this moment, `end_ms` when it ends
    if they stay; `power_w` is its part of the device's power, `energy_j` what it took up to the last change
    of conditions.
    """

    plan_id: int
    sm_share: float
    parts: list[tuple[Sequence, int]]
    work: StepWork
    start_ms: float
    end_ms: float = 0.0
    full_ms: float = 0.0
    power_w: float = 0.0
    energy_j: float = 0.0


@dataclass(slots=True, eq=False)
class Engine:
    """One model on the device. `ready_ms` is set while it loads; `pool_bytes` 0: its KV pool is elastic."""

    model: ModelSpec
    pool_bytes: int
    load_ms: float
    ready_ms: float | None
    plan: Plan = field(default_factory=lambda: Plan(plan_id=0))
    sequences: dict[str, Sequence] = field(default_factory=dict)
    step: Step | None = None
    blocks: int = 0

    def add(self, request: Request, vocab: VocabSlice, length: int | None) -> None:
        """Take a request in, behind those that are here; `length` is its answer's where that is given."""
        assert request.request_id not in self.sequences, f"{request.request_id} is in the engine already"
        self.sequences[request.request_id] = Sequence(
            request=request,
            answer=answer(request, vocab, self.model.context_tokens, length),
            prefill_tokens=request.context_tokens,
            output_tokens=len(request.output_tokens),
        )

    def start_step(self, device: Device, free_blocks: int, now_ms: float) -> list[OutOfMemory]:
        """Start the next step, if there is anything to do that fits in `free_blocks` more blocks.

        Returns:
            what did not fit; each request is named once until it runs again.
        """
        parts, starved = self._batch(device.block_tokens, free_blocks)
        if parts:
            self.step = Step(
                plan_id=self.plan.plan_id,
                sm_share=self.plan.sm_share_pct / 100,
                parts=parts,
                work=self._work(device, parts),
                start_ms=now_ms,
            )
        reports = [
            OutOfMemory(model=self.model.name, request_id=s.request.request_id)
            for s in starved
            if not s.starved
        ]
        for sequence in starved:
            sequence.starved = True
        return reports

    def _batch(
        self, block_tokens: int, free_blocks: int
    ) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Choose what runs, decodes first, and take the memory for it; also return what found none."""
        parts: list[tuple[Sequence, int]] = []
        starved: list[Sequence] = []
        prefills: list[Sequence] = []
        chunk_tokens = self.plan.chunk_tokens

        def take(sequence: Sequence, wanted_tokens: int) -> int:
            nonlocal free_blocks
            computed = sequence.computed_tokens
            tokens = min(wanted_tokens, (sequence.blocks + free_blocks) * block_tokens - computed)
            if tokens <= 0:
                starved.append(sequence)
                return 0
            grown = -(-(computed + tokens) // block_tokens) - sequence.blocks
            sequence.blocks += grown
            self.blocks += grown
            free_blocks -= grown
            sequence.starved = False
            parts.append((sequence, tokens))
            return tokens

        if self.plan.sm_share_pct <= 0:
            return parts, starved
        held = self.plan.held
        for request_id, sequence in self.sequences.items():
            if request_id in held:
                continue
            if sequence.computed_tokens < sequence.prefill_tokens:
                prefills.append(sequence)
            else:
                take(sequence, 1)
        turns = {request_id: turn for turn, request_id in enumerate(self.plan.order)}
        prefills.sort(key=lambda sequence: turns.get(sequence.request.request_id, len(turns)))
        for sequence in prefills:
            if chunk_tokens <= 0:
                break
            chunk_tokens -= take(
                sequence, min(chunk_tokens, sequence.prefill_tokens - sequence.computed_tokens)
            )
        return parts, starved

    def _work(self, device: Device, parts: list[tuple[Sequence, int]]) -> StepWork:
        """Add up what the step must do; each prompt attends to itself only, so attention adds up."""
        prefills = [(s, n) for s, n in parts if s.computed_tokens < s.prefill_tokens]
        decodes = [s for s, _ in parts if s.computed_tokens >= s.prefill_tokens]
        work = step_work(
            device,
            self.model,
            decode_batch=len(decodes),
            decode_context_tokens=sum(s.computed_tokens + 1 for s in decodes),
            prefill_tokens=sum(n for _, n in prefills),
        )
        if not prefills:
            return work
        chunks = (
            step_work(
                device,
                self.model,
                decode_batch=0,
                decode_context_tokens=0,
                prefill_tokens=n,
                prefill_past_tokens=s.computed_tokens,
            )
            for s, n in prefills
        )
        return replace(work, attn_flops=sum(chunk.attn_flops for chunk in chunks))

    def finish_step(self, metered: bool) -> tuple[StepDone, float]:
        """End the running step: move its requests on by what was computed.

        Returns:
            the report, and the joules of the step that went to requests stopped meanwhile.
        """
        step = self.step
        assert step is not None
        self.step = None
        outputs: list[StepOutput] = []
        lost_j = 0.0
        for (sequence, tokens), part in zip(step.parts, self._energy_parts(step), strict=True):
            energy_j = part * step.energy_j
            if sequence.stopped:
                lost_j += energy_j
            else:
                outputs.append(self._advance(sequence, tokens, energy_j if metered else None))
        duration_ms = step.end_ms - step.start_ms
        done = StepDone(
            model=self.model.name, plan_id=step.plan_id, duration_ms=duration_ms, outputs=tuple(outputs)
        )
        return done, lost_j

    def _advance(self, sequence: Sequence, tokens: int, energy_j: float | None) -> StepOutput:
        """Count `tokens` as computed, and sample the next token if the whole context is."""
        request_id = sequence.request.request_id
        prefilled = tokens if sequence.computed_tokens < sequence.prefill_tokens else 0
        sequence.computed_tokens += tokens
        if sequence.computed_tokens < sequence.prefill_tokens:
            return StepOutput(request_id=request_id, prefilled_tokens=prefilled, energy_j=energy_j)
        token_id, finish_reason = sequence.answer.token(sequence.output_tokens)
        sequence.output_tokens += 1
        if finish_reason:
            self.drop(request_id)
        return StepOutput(
            request_id=request_id,
            token_ids=(token_id,),
            prefilled_tokens=prefilled,
            finish_reason=finish_reason,
            energy_j=energy_j,
        )

    def _energy_parts(self, step: Step) -> list[float]:
        """Split a step's energy: half by tokens computed, half by bytes moved (KV each its own)."""
        kv_bytes_per_token = self.model.kv_bytes_per_token
        weight_bytes = self.model.weight_bytes / len(step.parts)
        moved = [weight_bytes + kv_bytes_per_token * (s.computed_tokens + n) for s, n in step.parts]
        per_token = 0.5 / sum(n for _, n in step.parts)
        per_byte = 0.5 / sum(moved)
        return [per_token * n + per_byte * b for (_, n), b in zip(step.parts, moved, strict=True)]

    def drop(self, request_id: str) -> None:
        """Take a request out and free its memory; nothing if it is not here."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            sequence.stopped = True
            self.blocks -= sequence.blocks


def run_together(
    device: Device, clock_mhz: int, steps: list[Step], now_ms: float
) -> tuple[float, float, float, float, float]:
    """Give steps that run side by side from `now_ms` on their end and their power.

    Returns the device's power in W, by what it is for: floor, context, SM clock, HBM, compute.

    What is left of a step is stretched by as much as the whole of it is. Shares that add up to more than the
    device are scaled to it; memory and compute are rationed by `contention`, the clock by the power cap.
    """
    over = max(1.0, sum(step.sm_share for step in steps))
    shares = [step.sm_share / over for step in steps]
    scales = contention(device, shares)

    def at(clock_mhz: int) -> tuple[list[float], list[float], float]:
        spans_ms = [
            float(step_ms(device, step.work, clock_mhz, share, *scales))
            for step, share in zip(steps, shares, strict=True)
        ]
        speeds = [rates(step.work, span_ms) for step, span_ms in zip(steps, spans_ms, strict=True)]
        return spans_ms, [tb_per_s for tb_per_s, _ in speeds], sum(tflop_per_s for _, tflop_per_s in speeds)

    capped_mhz = clock_mhz
    spans_ms, tb_per_s, tflop_per_s = at(clock_mhz)
    for _ in range(CAP_ROUNDS):
        asked_mhz = capped_mhz
        capped_mhz = capped_clock_mhz(device, asked_mhz, sum(shares), sum(tb_per_s), tflop_per_s)
        if capped_mhz == asked_mhz:
            break
        spans_ms, tb_per_s, tflop_per_s = at(capped_mhz)
    parts_w = (0.0, 0.0, 0.0, 0.0, 0.0)
    if device.has_meter:
        dynamic_w = dynamic_parts_w(device, capped_mhz, sum(shares), sum(tb_per_s), tflop_per_s)
        clock_w, hbm_w, compute_w = map(float, dynamic_w)
        context_w = max(0.0, device.context_idle_w - device.static_w - clock_w - hbm_w - compute_w)
        parts_w = (device.static_w, context_w, clock_w, hbm_w, compute_w)
        device_w = sum(parts_w)
        idle_w = idle_power_w(device, "warm")
        for step, share, read in zip(steps, shares, tb_per_s, strict=True):
            part = share / sum(shares)
            step.power_w = idle_w * part + (device_w - idle_w) * (part + read / sum(tb_per_s)) / 2
    for step, span_ms in zip(steps, spans_ms, strict=True):
        if step.full_ms == 0.0:
            step.end_ms = now_ms + span_ms
        elif step.full_ms != span_ms:
            step.end_ms = now_ms + (step.end_ms - now_ms) * span_ms / step.full_ms
        step.full_ms = span_ms
    return parts_w
