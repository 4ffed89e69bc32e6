"""KV of an emulated engine on its way to and from stages: what it takes, in time and energy (3.5, F).

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

    `end_ms` is None until it has begun, at `start_ms`. `tokens` is what the stage covers then.
    """

    order: ExportKv | RunRequest
    sequence: Sequence | None
    start_ms: float = 0.0
    end_ms: float | None = None
    blocks: int = 0
    total_blocks: int = 0
    tokens: int = 0
    n_bytes: int = 0


@dataclass(slots=True)
class Copies:
    """The copies of one engine, in the order in which they were asked for; the first is under way."""

    model: ModelSpec
    waiting: deque[Copy] = field(default_factory=deque)

    @property
    def due_ms(self) -> float | None:
        """When the copy under way ends."""
        return self.waiting[0].end_ms if self.waiting else None

    def export(self, order: ExportKv, sequence: Sequence | None) -> None:
        """Take an order to copy out."""
        self.waiting.append(Copy(order, sequence))

    def take_in(self, order: RunRequest, sequence: Sequence, block_tokens: int, free_blocks: int) -> int:
        """Take a request in with its KV; returns the blocks of memory taken for that, 0 if there are none."""
        tokens = min(order.kv_tokens, sequence.prefill_tokens - 1)
        blocks = -(-tokens // block_tokens)
        self.waiting.append(copy := Copy(order, sequence, blocks=blocks, tokens=tokens))
        sequence.importing = True
        if blocks > free_blocks:
            copy.blocks = copy.tokens = 0
            return 0
        sequence.computed_tokens, sequence.blocks = tokens, blocks
        copy.n_bytes = tokens * self.model.kv_bytes_per_token
        return blocks

    def begin(self, now_ms: float, device: Device, plan: Plan, step: Step | None) -> None:
        """Begin the next copy, if it can: one of a request that is held waits until that is so in fact."""
        if not self.waiting or self.waiting[0].end_ms is not None:
            return
        copy = self.waiting[0]
        if isinstance(copy.order, ExportKv) and copy.sequence is not None:
            sequence = copy.sequence
            held = sequence.request.request_id in plan.held
            in_step = step is not None and any(part is sequence for part, _ in step.parts)
            if held and not sequence.stopped and (in_step or sequence.made_tokens):
                return
            self._measure(copy, copy.order, sequence, device.block_tokens, held)
        took_ms = float(transfer_ms(device, copy.n_bytes, LINK)) if copy.n_bytes else 0.0
        copy.start_ms, copy.end_ms = now_ms, now_ms + took_ms

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

    def finish(self, device: Device) -> tuple[KvExported | KvImported | None, float]:
        """End the copy under way; returns its report, and the joules of the memory traffic."""
        copy = self.waiting.popleft()
        assert copy.end_ms is not None, "a copy begins before it ends"
        order, gone = copy.order, copy.sequence is None or copy.sequence.stopped
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
                reason="" if copy.tokens else "no memory for it",
                energy_j=told_j,
            )
            return None if gone else imported, energy_j
        exported = KvExported(
            model=order.model,
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
        return exported, energy_j
