"""KV of an emulated engine on its way to and from stages: what it takes, in time and energy (3.4, 3.5, F).

Stages lie in host memory, so each copy goes over PCIe, one after the other. Nothing is copied in fact: there
are no bytes of KV in an emulated device. Blocks, tokens, bytes, times and joules are those that a device with
KV would report; the checksum is that of nothing.
"""

from collections import deque
from dataclasses import dataclass, field

from services.local_sched.emulated_step import Sequence, Step
from shared.devices import Device
from shared.engine import ExportKv, KvExported, KvImported, RunRequest
from shared.model import ModelSpec, Plan
from shared.silicon import transfer_ms

LINK = "pcie"


@dataclass(slots=True, eq=False)
class Copy:
    """A copy, out by an `ExportKv` or in with a `RunRequest`; `sequence` None: the request is not here.

    `end_ms` is None until it has begun, at `start_ms`. `tokens` is what the stage covers then. Until it ends,
    an evicted request's `leaving_blocks` are taken.
    """

    order: ExportKv | RunRequest
    sequence: Sequence | None
    start_ms: float = 0.0
    end_ms: float | None = None
    blocks: int = 0
    total_blocks: int = 0
    tokens: int = 0
    n_bytes: int = 0
    leaving_blocks: int = 0


@dataclass(slots=True)
class Copies:
    """The copies of one engine, in the order in which they were asked for; the first is under way.

    `kept` are the stages that the engine keeps itself, with the tokens that each covers.
    """

    model: ModelSpec
    waiting: deque[Copy] = field(default_factory=deque)
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def due_ms(self) -> float | None:
        """When the copy under way ends."""
        return self.waiting[0].end_ms if self.waiting else None

    @property
    def leaving_blocks(self) -> int:
        """Blocks of requests that have left the engine, and whose KV is still copied."""
        return sum([copy.leaving_blocks for copy in self.waiting])

    @property
    def frees(self) -> bool:
        """Whether the copy under way frees memory when it ends."""
        return bool(self.waiting and self.waiting[0].leaving_blocks) and self.due_ms is not None

    def export(self, order: ExportKv, sequence: Sequence | None, block_tokens: int) -> None:
        """Take an order to copy out; one that is evicted keeps its memory until that is done."""
        self.waiting.append(copy := Copy(order, sequence))
        if order.room_blocks and sequence is not None:
            self._measure(copy, order, sequence, block_tokens, held=False)
            copy.leaving_blocks, sequence.leaving = sequence.blocks, True
            self.kept[order.stage] = copy.tokens

    def free(self, stage: str) -> None:
        """Drop a stage that the engine keeps itself."""
        self.kept.pop(stage, None)

    def take_in(self, order: RunRequest, sequence: Sequence, block_tokens: int, free_blocks: int) -> int:
        """Take a request in whose KV is to be copied; returns the blocks of memory taken for that."""
        tokens = min(order.kv_tokens, sequence.prefill_tokens - 1)
        if order.own_stage:
            tokens = min(tokens, self.kept.pop(order.stage, 0))
        self.waiting.append(copy := Copy(order, sequence, tokens=tokens))
        sequence.importing = True
        return self._take_memory(copy, sequence, block_tokens, free_blocks)

    def _take_memory(self, copy: Copy, sequence: Sequence, block_tokens: int, free_blocks: int) -> int:
        """Take the memory for KV that comes in, if there is as much; returns its blocks."""
        blocks = -(-copy.tokens // block_tokens)
        if blocks > free_blocks or sequence.stopped:
            return 0
        sequence.computed_tokens, sequence.blocks, copy.blocks = copy.tokens, blocks, blocks
        copy.n_bytes = copy.tokens * self.model.kv_bytes_per_token
        return blocks

    def begin(
        self, now_ms: float, device: Device, plan: Plan, step: Step | None, free_blocks: int, waits: bool
    ) -> int:
        """Begin the next copy, if it can: one of a request that is held waits until that is so in fact.

        One that comes in and has found no memory yet waits for what is about to be free (`waits`), or its KV
        is computed. Returns the blocks that it has taken now.
        """
        if not self.waiting or self.waiting[0].end_ms is not None:
            return 0
        copy = self.waiting[0]
        taken = 0
        if isinstance(copy.order, RunRequest):
            assert copy.sequence is not None
            if copy.tokens and not copy.blocks:
                taken = self._take_memory(copy, copy.sequence, device.block_tokens, free_blocks)
                if not taken and waits and not copy.sequence.stopped:
                    return 0
                copy.tokens = copy.tokens if taken else 0
        elif copy.sequence is not None and not copy.leaving_blocks:
            sequence = copy.sequence
            held = sequence.request.request_id in plan.held
            in_step = step is not None and any(part is sequence for part, _ in step.parts)
            if held and not sequence.stopped and (in_step or sequence.made_tokens):
                return 0
            self._measure(copy, copy.order, sequence, device.block_tokens, held)
        took_ms = float(transfer_ms(device, copy.n_bytes, LINK)) if copy.n_bytes else 0.0
        copy.start_ms, copy.end_ms = now_ms, now_ms + took_ms
        return taken

    def _measure(
        self, copy: Copy, order: ExportKv, sequence: Sequence, block_tokens: int, held: bool
    ) -> None:
        """Say what a copy out takes along: full blocks, and the last one as well if the request is held."""
        computed = sequence.computed_tokens
        copy.total_blocks = -(-computed // block_tokens)
        there = copy.total_blocks if held else computed // block_tokens
        if order.stage:
            copy.blocks = max(0, min(order.blocks, there - order.first_block))
            end_tokens = min(computed, (order.first_block + copy.blocks) * block_tokens)
            copy.tokens = end_tokens
            copied_tokens = max(0, end_tokens - order.first_block * block_tokens)
            copy.n_bytes = copied_tokens * self.model.kv_bytes_per_token

    def finish(self, device: Device) -> tuple[KvExported | KvImported | None, float, int]:
        """End the copy under way; returns its report, the joules of the memory traffic, and blocks freed."""
        copy = self.waiting.popleft()
        assert copy.end_ms is not None, "a copy begins before it ends"
        order, gone = copy.order, copy.sequence is None or (copy.sequence.stopped and not copy.leaving_blocks)
        took_ms = copy.end_ms - copy.start_ms
        energy_j = device.w_per_tb_per_s * copy.n_bytes / 1e12 if device.has_meter else 0.0
        told_j = energy_j if device.has_meter else None
        if isinstance(order, RunRequest):
            assert copy.sequence is not None
            copy.sequence.importing = False
            imported = KvImported(
                model=order.model,
                request_id=order.request.request_id,
                tokens=copy.tokens,
                took_ms=took_ms,
                reason="" if copy.tokens else "no memory for it, or no such stage",
                energy_j=told_j,
                own_stage=order.own_stage,
            )
            return None if gone else imported, energy_j, 0
        exported = KvExported(
            model=order.model,
            request_id=order.request_id,
            move_id=order.move_id,
            first_block=order.first_block,
            blocks=0 if gone else copy.blocks,
            total_blocks=copy.total_blocks,
            n_bytes=copy.n_bytes,
            checksum=0,
            took_ms=took_ms,
            tokens=0 if gone else copy.tokens,
            reason="the request is not here" if gone else "",
            energy_j=told_j,
        )
        return exported, energy_j, copy.leaving_blocks
