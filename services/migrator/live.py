"""The steps that only the move of a running request takes (3.5, F): prepare, stage on credit, freeze.

Each function takes an answer and returns what follows. KV that cannot be staged, for whatever reason, is
left: the request is frozen all the same, and its context computed again where it goes.
"""

from services.migrator.actions import ChunkSent, OpenStage, SendChunk, StageOpened
from services.migrator.host import Host
from services.migrator.run import (
    CREDIT,
    FREEZE,
    KV,
    LAST,
    OPEN,
    PREPARE,
    RESERVE,
    SEND,
    STAGE,
    Run,
    blocks_of,
)
from shared import events as ev


def prepare(host: Host, now_ms: float, run: Run, request_id: str) -> list[ev.Action]:
    """Ask the source whether a move pays."""
    return host.advance(now_ms, run, PREPARE, _prepare(host, run, request_id))


def _prepare(host: Host, run: Run, request_id: str) -> ev.Prepare:
    return ev.Prepare(
        move_id=run.step_id,
        request_id=request_id,
        migrator=host.ident,
        model=run.move.model,
        bandwidth_bytes_s=host.bandwidth_bytes_s(run.move.destination_host),
    )


def prepared(host: Host, now_ms: float, run: Run, event: ev.Prepared) -> list[ev.Action]:
    """It pays: reserve memory, and make a stage for its KV."""
    run.prepared, run.mode = event, event.mode
    run.total_blocks = blocks_of(event)
    run.staging = event.mode == KV
    if not (run.staging and event.block_stage_bytes):
        return reserve(host, now_ms, run, _wanted_tokens(event))
    host.wait(now_ms, run, OPEN)
    run.has_stage = True
    blocks = run.total_blocks + host.settings.spare_blocks
    return [OpenStage(run.step_id, run.stage_name, event.block_stage_bytes, blocks)]


def opened(host: Host, now_ms: float, run: Run, event: StageOpened) -> list[ev.Action]:
    """There is a stage, or no room for one."""
    assert run.prepared is not None
    run.staging = not event.reason
    return reserve(host, now_ms, run, _wanted_tokens(run.prepared))


def _wanted_tokens(prepared: ev.Prepared) -> int:
    """Return the tokens to reserve for at first: a block more than there are, for it grows."""
    return prepared.context_tokens + prepared.block_tokens


def reserve(host: Host, now_ms: float, run: Run, tokens: int) -> list[ev.Action]:
    """Ask the destination for memory: all of it, or with KV that comes bit by bit, what there is."""
    order = ev.Reserve(
        move_id=run.step_id,
        request_id=run.request_id,
        model=run.move.model,
        migrator=host.ident,
        context_tokens=tokens,
        partial=run.mode == KV,
    )
    return host.advance(now_ms, run, CREDIT if run.mode == KV else RESERVE, order)


def granted(host: Host, now_ms: float, run: Run, event: ev.Granted) -> list[ev.Action]:
    """The destination has promised memory, or more of it."""
    before, run.credit_blocks = (
        run.credit_blocks,
        max(run.credit_blocks, event.credit_bytes // run.block_bytes),
    )
    if run.stage == RESERVE:
        return _freeze(host, now_ms, run)
    return _copy(host, now_ms, run) if run.stage == CREDIT and run.credit_blocks > before else []


def ask_again(host: Host, now_ms: float, run: Run) -> list[ev.Action]:
    """Keep both sides waiting while there is no memory at the destination."""
    tries = run.tries + 1
    actions = _ask_credit(host, now_ms, run)
    run.tries = tries
    return [*actions, ev.Send(to=run.move.source, message=_prepare(host, run, run.request_id))]


def _ask_credit(host: Host, now_ms: float, run: Run) -> list[ev.Action]:
    """Ask for memory for all that there is, and the block after that."""
    assert run.prepared is not None
    return reserve(host, now_ms, run, (run.total_blocks + 2) * run.prepared.block_tokens - 1)


def _copy(host: Host, now_ms: float, run: Run, last: bool = False) -> list[ev.Action]:
    """Have the next chunk copied; or, if little is left, the request frozen, once there is credit for all."""
    left = run.total_blocks - run.staged_blocks if run.staging else 0
    chunk = max(1, host.settings.chunk_bytes // run.block_bytes)
    if last or left <= chunk:
        enough = run.credit_blocks > run.total_blocks
        return _freeze(host, now_ms, run) if enough else _ask_credit(host, now_ms, run)
    blocks = min(chunk, run.credit_blocks - run.staged_blocks)
    if blocks <= 0:
        return _ask_credit(host, now_ms, run)
    order = ev.StageKv(
        move_id=run.step_id,
        request_id=run.request_id,
        first_block=run.staged_blocks,
        blocks=blocks,
        stage=run.stage_name,
    )
    return host.advance(now_ms, run, STAGE, order)


def staged(host: Host, now_ms: float, run: Run, event: ev.KvStaged) -> list[ev.Action]:
    """A chunk is in the stage; it has to get to the destination's host, and the next one follows."""
    if event.reason:
        run.staging = False  # what has been copied is of no use without the rest
        return _copy(host, now_ms, run)
    if event.first_block != run.staged_blocks:
        return []  # a repeat, of a chunk before
    run.take_copy(event)
    host.measure("", event.n_bytes, event.took_ms)
    return _send(host, now_ms, run, event, SEND) or _copy(host, now_ms, run, last=event.blocks == 0)


def _send(host: Host, now_ms: float, run: Run, copied: ev.KvStaged, stage: str) -> list[ev.Action]:
    """Have what was copied sent to the destination's host, if that is another and there is a stage."""
    if not (run.move.destination_host and run.has_stage and copied.blocks):
        return []
    host.wait(now_ms, run, stage)
    to = run.move.destination_host
    return [SendChunk(run.step_id, run.stage_name, to, copied.first_block, copied.blocks)]


def sent(host: Host, now_ms: float, run: Run, event: ChunkSent) -> list[ev.Action] | None:
    """A chunk has arrived, or not; returns None if it was the last, and the request can be adopted."""
    if event.reason:
        run.staging, run.kv_tokens = False, 0
    else:
        host.measure(run.move.destination_host, event.n_bytes, event.took_ms)
    return _copy(host, now_ms, run) if run.stage == SEND else None


def _freeze(host: Host, now_ms: float, run: Run) -> list[ev.Action]:
    run.frozen_ms = now_ms
    order = ev.Release(
        move_id=run.step_id,
        request_id=run.request_id,
        migrator=host.ident,
        model=run.move.model,
        freeze=True,
        first_block=run.staged_blocks if run.staging else 0,
        blocks=run.credit_blocks - run.staged_blocks if run.staging else 0,
        stage=run.stage_name if run.staging else "",
    )
    return host.advance(now_ms, run, FREEZE, order)


def frozen(host: Host, now_ms: float, run: Run, event: ev.Released) -> list[ev.Action]:
    """The request is still, and its state here; returns what has to be sent before it can be adopted."""
    run.take_state(event)
    if not run.staging or event.staged is None or not event.kv_tokens:
        run.kv_tokens = 0
        return []
    run.take_copy(event.staged)
    return _send(host, now_ms, run, event.staged, LAST)
