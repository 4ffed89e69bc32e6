"""The source's side of the move of a running request (3.5, F): prepare, stage, freeze.

The request decodes on while full blocks of its KV are copied to a stage. Then it is held by the plan; the
order that copies the rest follows the plan, so once the engine has answered it, no token of the request is
still to come, and what goes to the destination is all there is. The engine keeps the KV until the destination
has started: an abort only ends the hold. Whatever else lets the request go on here ends the move first
(`ends.leave_moves`), so that a commit never makes this side forget more than the destination knows.
"""

import msgspec

from services.local_sched import evict, plans, switching
from services.local_sched.admission import prefill_alone_ms
from services.local_sched.ends import arrived, with_output
from services.local_sched.move_mode import KV, STAY, Choice, move_mode
from services.local_sched.moves import DESTINATION, SOURCE, Transfer
from services.local_sched.state import State
from services.local_sched.summary import left_ms
from services.local_sched.work import Stage, Work
from shared.engine import ExportKv, KvExported, KvImported
from shared.events import Action, Count, KvStaged, Prepare, Prepared, Release, Released, Send, StageKv
from shared.resumable import resumable

ANY = "*"  # as request id: whichever request of the model moves best


def prepare(state: State, now_ms: float, event: Prepare) -> list[Action]:
    """Say how a running request had better move, and note that it is to; one that stays is left alone."""
    transfer = state.moves.transfers.get(event.move_id)
    if transfer is not None and transfer.committed:
        return []  # a repeat that was long on its way
    if transfer is None:
        work, choice, reason = _choose(state, event)
        if work is None:
            stays = Prepared(move_id=event.move_id, request_id=event.request_id, mode=STAY, reason=reason)
            return [Send(to=event.migrator, message=stays)]
        request = work.request
        transfer = Transfer(
            side=SOURCE,
            request_id=request.request_id,
            model=request.model,
            heard_ms=now_ms,
            migrator=event.migrator,
            mode=choice.mode,
        )
        state.moves.transfers[event.move_id] = transfer
    elif transfer.side != SOURCE or transfer.migrator != event.migrator:
        return []  # a waiting request, or one that comes here
    transfer.heard_ms = now_ms
    work = state.works[transfer.request_id]
    pool = state.ledger.pools[transfer.model]
    prepared = Prepared(
        move_id=event.move_id,
        request_id=transfer.request_id,
        mode=transfer.mode,
        context_tokens=work.context_tokens,
        kv_bytes=pool.bytes_for(work.context_tokens),
        block_tokens=pool.block_tokens,
        block_stage_bytes=0 if state.engine_kind == "emulated" else pool.block_bytes,
        traceparent=work.request.traceparent,
    )
    return [Send(to=event.migrator, message=prepared)]


def _choose(state: State, event: Prepare) -> tuple[Work | None, Choice, str]:
    """Return which request is to move, and how; or why none does."""
    engine = state.engines.get(event.model)
    stay = Choice(STAY, 0.0)
    running = list(engine.running.values()) if engine and engine.state == "ready" else []
    if event.request_id != ANY:
        running = [work for work in running if work.request.request_id == event.request_id]
    free = [work for work in running if not state.moves.of_request(work.request.request_id)]
    if engine is None or not free:
        return None, stay, "nothing of it runs here that is not moving already"
    choices = [(work, mode_of(state, work, event.bandwidth_bytes_s)) for work in free]
    moving = [(work, choice) for work, choice in choices if choice.mode != STAY]
    if not moving:
        return None, stay, "it ends sooner than it would have moved, or could not go on elsewhere as here"
    work, choice = max(moving, key=lambda pair: left_ms(engine, pair[0]) - pair[1].delay_ms)
    return work, choice, ""


def mode_of(state: State, work: Work, bandwidth_bytes_s: float) -> Choice:
    """Return how a running request had better move; one with a random state of its own stays."""
    request = work.request
    engine = state.engines[request.model]
    if not resumable(request.sampling, state.engine_kind == "emulated"):
        return Choice(STAY, 0.0)
    kv_bytes = state.ledger.pools[request.model].bytes_for(work.context_tokens) if work.decoding else 0
    return move_mode(
        engine.lut,
        work.context_tokens,
        kv_bytes,
        left_ms(engine, work),
        bandwidth_bytes_s,
        state.clock_mhz,
    )


def stage(state: State, now_ms: float, event: StageKv) -> list[Action]:
    """Have KV blocks copied while the request goes on."""
    transfer = state.moves.transfers.get(event.move_id)
    if transfer is None or transfer.mode != KV or transfer.frozen:
        gone = KvStaged(move_id=event.move_id, reason=f"{event.request_id} is not prepared to move any more")
        return [Send(to=transfer.migrator if transfer else state.host, message=gone)]
    transfer.heard_ms = now_ms
    return _export(state, event.move_id, transfer, event.first_block, event.blocks, event.stage)


def _export(
    state: State, move_id: str, transfer: Transfer, first_block: int, blocks: int, stage: str
) -> list[Action]:
    transfer.exports += 1
    export = ExportKv(
        model=transfer.model,
        request_id=state.works[transfer.request_id].run_id,
        move_id=move_id,
        first_block=first_block,
        blocks=blocks if stage else 0,
        stage=stage,
    )
    return [export]


def freeze(state: State, now_ms: float, event: Release) -> list[Action]:
    """Hold a prepared request in its engine, and have the rest copied; `exported` hands out its state."""
    transfer = state.moves.transfers[event.move_id]
    transfer.heard_ms = now_ms
    if transfer.frozen:
        return []
    work = state.works[transfer.request_id]
    assert work.stage is Stage.RUNNING, "what leaves its engine leaves its moves"
    transfer.frozen = True
    held = plans.freeze(state, state.engines[transfer.model], [work.run_id])
    return [*held, *_export(state, event.move_id, transfer, event.first_block, event.blocks, event.stage)]


def exported(state: State, now_ms: float, event: KvExported) -> list[Action]:
    """Tell the migrator what was copied; after the last copy of a frozen request, all of its state."""
    if event.model in state.engines:
        state.engines[event.model].progress_ms = now_ms
    if not event.move_id:
        return evict.exported(state, event)
    counted = _copied(state, SOURCE, event.energy_j)
    if event.move_id.startswith(switching.PARTED):
        return [*counted, *switching.parted(state, now_ms, event)]
    transfer = state.moves.transfers.get(event.move_id)
    if transfer is None or not transfer.exports:
        return counted
    transfer.exports -= 1
    staged = KvStaged(
        move_id=event.move_id,
        first_block=event.first_block,
        blocks=event.blocks,
        total_blocks=event.total_blocks,
        n_bytes=event.n_bytes,
        checksum=event.checksum,
        took_ms=event.took_ms,
        energy_j=event.energy_j,
        reason=event.reason,
    )
    if not transfer.frozen:
        return [*counted, Send(to=transfer.migrator, message=staged)]
    if transfer.exports:
        return counted  # of one before the freeze
    work = state.works[transfer.request_id]
    transfer.staged = staged
    transfer.kv_tokens = min(event.tokens, work.context_tokens - 1)
    return [*counted, *released(state, now_ms, event.move_id, transfer)]


def _copied(state: State, side: str, energy_j: float | None) -> list[Action]:
    """Account for the energy of a copy."""
    state.energy.copied(energy_j)
    return [Count(name="move_energy_j", labels={"side": side}, value=energy_j)] if energy_j else []


def released(state: State, now_ms: float, move_id: str, transfer: Transfer) -> list[Action]:
    """Hand out the state of a frozen request, once there is all of it."""
    if transfer.staged is None:
        return []
    work = state.works[transfer.request_id]
    return [Send(to=transfer.migrator, message=state_of(now_ms, move_id, transfer, work))]


def state_of(now_ms: float, move_id: str, transfer: Transfer, work: Work) -> Released:
    """Return all that the destination needs to go on with a request."""
    waited_ms = work.request.waited_ms + now_ms - work.arrived_ms
    return Released(
        move_id=move_id,
        request=msgspec.structs.replace(with_output(work), waited_ms=waited_ms),
        predicted_output_tokens=work.predicted_output_tokens,
        energy_j=work.energy_j,
        kv_tokens=transfer.kv_tokens,
        staged=transfer.staged,
    )


def imported(state: State, now_ms: float, event: KvImported) -> list[Action]:
    """A request has taken its KV from its stage, or has to compute it after all."""
    own = event.own_stage
    counted = evict.copied(state, event.energy_j) if own else _copied(state, DESTINATION, event.energy_j)
    engine = state.engines.get(event.model)
    if engine is None:
        return counted
    engine.progress_ms = now_ms
    work = engine.running.get(event.request_id)
    if work is None or work.arrival is None:
        return counted
    if event.tokens < work.prefilled_tokens:
        work.prefilled_tokens = event.tokens
        work.prefill_ms = prefill_alone_ms(state, event.model, work.prefill_tokens)
        engine.tally = None
        state.changed()
    arrived(state, work, event.tokens, event.took_ms, event.reason)
    labels = {"model": event.model, "outcome": "taken" if event.tokens else "computed"}
    return [*counted, Count(name="offload_imports" if own else "kv_imports", labels=labels)]
