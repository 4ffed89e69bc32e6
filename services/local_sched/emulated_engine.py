"""One emulated engine: its requests, their KV memory, and what its next step does.

The engine batches as vLLM does: a step decodes one token of every request whose prompt is computed, and
computes a chunk of the prompts that are not, in the order of the plan. Where there is nothing to do but to
decode, up to `report_steps` steps are taken as one (`emulated_step.py`), and reported together. A step that
ends a request, or computes part of a prompt, is reported at once; of others that decoded in it meanwhile the
tokens are told once there are `report_steps` of them.
"""

import math
from dataclasses import dataclass, field

from services.local_sched.emulated_kv import Copies
from services.local_sched.emulated_step import Sequence, Step, scaled
from services.local_sched.made_up import VocabSlice, answer
from shared.devices import Device
from shared.engine import OutOfMemory, StepDone, StepOutput
from shared.events import Event
from shared.model import ModelSpec, Plan, Request
from shared.silicon import StepWork, attn_flops, step_work


@dataclass(slots=True, eq=False)
class Engine:
    """One model on the device. `ready_ms` is set while it loads; `pool_bytes` 0: its KV pool is elastic.
    `started_ms` is when its latest step started.

    `copies` are those of KV, out of it and in.

    `ended_ms` is when its steps ended since all requests were told of, and `told_steps` how many of those are
    reported. Not reported yet: `spent_ms`, how long they took, and `aborted_j`, what requests took that
    were stopped. `report_due`: the next end of a step is to be reported, and with it `aside`, sequences
    which that step leaves out.
    """

    model: ModelSpec
    pool_bytes: int
    load_ms: float
    ready_ms: float | None
    plan: Plan = field(default_factory=lambda: Plan(plan_id=0))
    sequences: dict[str, Sequence] = field(default_factory=dict)
    step: Step | None = None
    started_ms: float = -math.inf
    blocks: int = 0
    ended_ms: list[float] = field(default_factory=list)
    told_steps: int = 0
    spent_ms: float = 0.0
    aborted_j: float = 0.0
    report_due: bool = False
    aside: list[Sequence] = field(default_factory=list)
    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.model)

    def add(self, request: Request, vocab: VocabSlice, length: int | None) -> Sequence:
        """Take a request in, behind those that are here; `length` is its answer's where that is given."""
        assert request.request_id not in self.sequences, f"{request.request_id} is in the engine already"
        told = answer(request, vocab, self.model.context_tokens, length)
        end_tokens, finish_reason = told.end()
        sequence = self.sequences[request.request_id] = Sequence(
            request=request,
            answer=told,
            prefill_tokens=request.context_tokens,
            output_tokens=len(request.output_tokens),
            end_tokens=end_tokens,
            finish_reason=finish_reason,
        )
        return sequence

    @property
    def due_ms(self) -> float:
        """When the next step may start: one that only decodes, once the interval of the plan has passed."""
        interval_ms, held = self.plan.step_interval_ms, self.plan.held
        if not interval_ms:
            return -math.inf
        for request_id, sequence in self.sequences.items():
            if sequence.computed_tokens < sequence.prefill_tokens and request_id not in held:
                return -math.inf
        return self.started_ms + interval_ms

    def start_step(self, device: Device, free_blocks: int, now_ms: float, report_steps: int) -> list[Event]:
        """Start the next step, if there is anything to do that fits in `free_blocks` more blocks.

        Returns:
            what did not fit, each request named once until it runs again; and what was not reported yet of an
            engine that stands still now.
        """
        starved: list[Sequence] = []
        parts, steps = self._decodes(device.block_tokens, free_blocks, report_steps)
        if not parts:
            parts, starved = self._batch(device.block_tokens, free_blocks)
        if parts:
            self.started_ms = now_ms
            self.step = Step(
                plan_id=self.plan.plan_id,
                sm_share=self.plan.sm_share_pct / 100,
                parts=parts,
                work=self._work(device, parts, steps),
                start_ms=now_ms,
                steps=steps,
            )
        reports: list[Event] = []
        for sequence in starved:
            if not sequence.starved:
                reports.append(OutOfMemory(model=self.model.name, request_id=sequence.request.request_id))
            sequence.starved = True
        if self.aside and not parts:
            reports.append(self._report(device, self.plan.plan_id, self.aside))
        return reports

    def _decodes(
        self, block_tokens: int, free_blocks: int, report_steps: int
    ) -> tuple[list[tuple[Sequence, int]], int]:
        """Return all there is to do where that is to decode, and for how many steps; take their memory.

        Nothing, and 1, where there are prompts to compute, or sequences that are held or may not fit.
        """
        if self.plan.held or self.plan.sm_share_pct <= 0:
            return [], 1
        sequences = self.sequences.values()
        steps = 1 if self.report_due or self.plan.step_interval_ms else report_steps - len(self.ended_ms)
        for sequence in sequences:
            if sequence.computed_tokens < sequence.prefill_tokens or sequence.starved:
                return [], 1
            left = sequence.end_tokens - sequence.output_tokens
            if left < steps:
                steps = left
        steps = max(1, steps)
        grown = [-(-(sequence.computed_tokens + steps) // block_tokens) for sequence in sequences]
        blocks = sum(grown) + self.copies.leaving_blocks
        if blocks - self.blocks > free_blocks:
            return [], 1
        self.blocks = blocks
        for i, sequence in enumerate(sequences):
            sequence.blocks = grown[i]
        return [(sequence, 1) for sequence in sequences], steps

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
                self._leave_out(sequence)
                return 0
            grown = -(-(computed + tokens) // block_tokens) - sequence.blocks
            sequence.blocks += grown
            self.blocks += grown
            free_blocks -= grown
            sequence.starved = False
            parts.append((sequence, tokens))
            return tokens

        held = self.plan.held if self.plan.sm_share_pct > 0 else self.sequences.keys()
        for request_id, sequence in self.sequences.items():
            if request_id in held or sequence.importing:
                self._leave_out(sequence)
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

    def _leave_out(self, sequence: Sequence) -> None:
        """See to it that what a sequence has made is reported although it pauses."""
        if sequence.made_tokens:
            self.aside.append(sequence)
            self.report_due = True

    def _work(self, device: Device, parts: list[tuple[Sequence, int]], steps: int) -> StepWork:
        """Add up what the steps must do; each prompt attends to itself only, so attention adds up."""
        prefills = [(s, n) for s, n in parts if s.computed_tokens < s.prefill_tokens]
        decodes = len(parts) - len(prefills)
        context_tokens = sum([s.computed_tokens for s, _ in parts if s.computed_tokens >= s.prefill_tokens])
        work = step_work(
            device,
            self.model,
            decode_batch=decodes,
            decode_context_tokens=context_tokens + decodes * (steps + 1) / 2,  # the mean of the steps
            prefill_tokens=sum([n for _, n in prefills]),
        )
        if prefills:
            work.attn_flops = sum([attn_flops(self.model, n, s.computed_tokens) for s, n in prefills])
        return work if steps == 1 else scaled(work, steps)

    def finish_step(self, device: Device, report_steps: int) -> tuple[StepDone | None, float]:
        """End the running step: move its requests on by what was computed.

        Returns:
            the report on what must be told now, or None if all can wait; and the joules of the step that went
            to requests stopped meanwhile.
        """
        step = self.step
        assert step is not None
        self.step = None
        self._note_ends(step)
        steps, lost_j, untold = step.steps, 0.0, 0
        news: list[Sequence] = []
        energies_j = self._energies_j(step)
        for i, (sequence, tokens) in enumerate(step.parts):
            energy_j = energies_j[i]
            if sequence.stopped:
                lost_j += energy_j
                continue
            sequence.energy_j += energy_j
            told = sequence.computed_tokens < sequence.prefill_tokens
            if told:
                sequence.prefilled_tokens = tokens
            sequence.computed_tokens += tokens * steps
            if sequence.computed_tokens >= sequence.prefill_tokens:
                sequence.made_tokens += steps
                sequence.output_tokens += steps
                told = told or sequence.output_tokens >= sequence.end_tokens
            if told:
                news.append(sequence)
            else:
                untold += 1
        self.aborted_j += lost_j
        if step.was_cut:
            self._give_back(device.block_tokens)
        if self.report_due or len(self.ended_ms) >= report_steps or not untold:
            return self._report(device, step.plan_id, [s for s, _ in step.parts] + self.aside), lost_j
        return self._report(device, step.plan_id, news, untold) if news else None, lost_j

    def _note_ends(self, step: Step) -> None:
        """Note when the steps ended; several that were taken as one are taken to have been equally long."""
        self.spent_ms += step.end_ms - step.start_ms
        each_ms = (step.end_ms - step.start_ms) / step.steps
        self.ended_ms += [step.end_ms - each_ms * left for left in range(step.steps - 1, -1, -1)]

    def _give_back(self, block_tokens: int) -> None:
        """Free the memory that was taken for steps that a cut has left out."""
        for sequence in self.sequences.values():
            blocks = -(-sequence.computed_tokens // block_tokens)
            if blocks < sequence.blocks:
                self.blocks -= sequence.blocks - blocks
                sequence.blocks = blocks

    def _report(self, device: Device, plan_id: int, told: list[Sequence], untold: int = 0) -> StepDone:
        """Return the report on these sequences, and on all steps since the last."""
        ended_ms, spent_ms, aborted_j = self.ended_ms, self.spent_ms, self.aborted_j
        steps = len(ended_ms) - self.told_steps
        back = max(steps, *[sequence.made_tokens for sequence in told])
        self.spent_ms, self.aborted_j = 0.0, 0.0
        if untold:
            self.told_steps = len(ended_ms)
        else:
            self.ended_ms, self.told_steps, self.report_due, self.aside = [], 0, False, []
        return StepDone(
            model=self.model.name,
            plan_id=plan_id,
            duration_ms=spent_ms,
            outputs=tuple([self._output(s, device.has_meter) for s in told if not s.stopped]),
            ages_ms=tuple([ended_ms[-1] - at_ms for at_ms in ended_ms[-back:]]) if back > 1 else (),
            aborted_j=aborted_j if device.has_meter else 0.0,
            steps=steps,
            untold=untold,
        )

    def _output(self, sequence: Sequence, metered: bool) -> StepOutput:
        """Return what is to be told of a sequence; one that has ended leaves."""
        request_id, made, have = sequence.request.request_id, sequence.made_tokens, sequence.output_tokens
        prefilled_tokens, energy_j = sequence.prefilled_tokens, sequence.energy_j
        sequence.made_tokens, sequence.prefilled_tokens, sequence.energy_j = 0, 0, 0.0
        finish_reason = sequence.finish_reason if made and have >= sequence.end_tokens else ""
        if finish_reason:
            self.drop(request_id)
        return StepOutput(
            request_id=request_id,
            token_ids=sequence.answer.tokens(have - made, have) if made else (),
            prefilled_tokens=prefilled_tokens,
            finish_reason=finish_reason,
            energy_j=energy_j if metered else None,
        )

    def _energies_j(self, step: Step) -> list[float]:
        """Split a step's energy: half by tokens computed, half by bytes moved (KV each its own)."""
        parts, kv_bytes_per_token = step.parts, self.model.kv_bytes_per_token
        added = (step.steps - 1) / 2  # mean growth of a context while this stands for several steps
        each_bytes = self.model.weight_bytes / len(parts) + kv_bytes_per_token * added
        tokens = context_tokens = 0
        for sequence, n in parts:
            tokens += n
            context_tokens += sequence.computed_tokens + n
        moved_bytes = each_bytes * len(parts) + kv_bytes_per_token * context_tokens
        per_token_j = 0.5 / tokens * step.energy_j
        per_byte_j = 0.5 / moved_bytes * step.energy_j
        each_j, kv_j = per_byte_j * each_bytes, per_byte_j * kv_bytes_per_token
        return [per_token_j * n + each_j + kv_j * (s.computed_tokens + n) for s, n in parts]

    def drop(self, request_id: str) -> float:
        """Take a request out and free its memory, unless its KV is still copied; nothing if it is not here.

        Returns:
            the joules that it has taken and that were not reported.
        """
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return 0.0
        sequence.stopped = True
        self.aborted_j += sequence.energy_j
        if not sequence.leaving:
            self.blocks -= sequence.blocks
        return sequence.energy_j

    @property
    def unreported_j(self) -> float:
        """Joules of all requests that no report has told of."""
        running_j = self.step.energy_j if self.step is not None else 0.0
        return running_j + sum(sequence.energy_j for sequence in self.sequences.values())
