"""Both sides of a request's move to another GPU, message by message (3.5, F); any message may be repeated."""

import msgspec

from services.local_sched.admission import enqueue, new_work
from services.local_sched.ends import delta_of, drop_move, forget, with_output
from services.local_sched.moves import DESTINATION, SOURCE, Transfer, holder
from services.local_sched.state import Stage, State, Work
from shared.events import (
    AbortMove,
    Action,
    Adopt,
    Adopted,
    CommitMove,
    Count,
    Granted,
    Moved,
    Release,
    Released,
    Reserve,
    Send,
)
from shared.model import Request

ANY = "*"  # as request id of a release: any waiting request of the model

# ---- destination


def reserve(state: State, now_ms: float, event: Reserve) -> list[Action]:
    """Promise memory for a request that may come, or say why not."""
    transfer = state.moves.transfers.get(event.move_id)
    if transfer is None:
        reason = _reserve(state, now_ms, event.move_id, event.request_id, event.model, event.context_tokens)
        if reason:
            return [_granted(event.migrator, event.move_id, 0, reason)]
        transfer = state.moves.transfers[event.move_id]
    transfer.heard_ms, transfer.migrator = now_ms, event.migrator
    return [_granted(event.migrator, event.move_id, transfer.credit_bytes, "")]


def _granted(migrator: str, move_id: str, credit_bytes: int, reason: str) -> Send:
    return Send(to=migrator, message=Granted(move_id=move_id, credit_bytes=credit_bytes, reason=reason))


def _reserve(
    state: State, now_ms: float, move_id: str, request_id: str, model: str, context_tokens: int
) -> str:
    """Take memory for a move to here; returns why that cannot be, empty if it could."""
    engine = state.engines.get(model)
    if state.draining:
        return f"{state.gpu} is draining"
    if engine is None or engine.state not in ("loading", "ready"):
        return f"model {model} is {engine.state if engine else 'not loaded'} on {state.gpu}"
    tokens = context_tokens + 1
    if not state.ledger.reserve(model, holder(move_id), tokens):
        return f"{state.gpu} has no memory for {tokens} tokens of {model}"
    state.moves.transfers[move_id] = Transfer(
        side=DESTINATION,
        request_id=request_id,
        model=model,
        heard_ms=now_ms,
        credit_bytes=state.ledger.pools[model].bytes_for(tokens),
    )
    state.summary_due = True
    return ""


def adopt(state: State, now_ms: float, event: Adopt) -> list[Action]:
    """Hold a request's state until the move is committed; no answer if there is no memory for it."""
    request = event.request
    if event.move_id not in state.moves.transfers and _reserve(
        state, now_ms, event.move_id, request.request_id, request.model, request.context_tokens
    ):
        return []
    transfer = state.moves.transfers[event.move_id]
    transfer.heard_ms, transfer.migrator = now_ms, event.migrator
    if transfer.request is None:
        transfer.request, transfer.adopted_ms = request, now_ms
        transfer.predicted_output_tokens = event.predicted_output_tokens
        transfer.source, transfer.energy_j = event.source, event.energy_j
        work = new_work(state, now_ms, request, event.predicted_output_tokens)
        # More than the context if there is room; it can start without.
        state.ledger.reserve(request.model, holder(event.move_id), work.wanted_tokens)
    return [Send(to=event.migrator, message=Adopted(move_id=event.move_id))]


# ---- source


def release(state: State, now_ms: float, event: Release) -> list[Action]:
    """Hold a waiting request still and hand out its state; one that has started stays."""
    known = state.moves.transfers.get(event.move_id)
    if known is not None:
        work = state.works.get(known.request_id) if known.side == SOURCE else None
    else:
        work = _waiting(state, event)
    if work is None:
        return [Send(to=event.migrator, message=Released(move_id=event.move_id, request=None))]
    if known is None:
        request_id, model = work.request.request_id, work.request.model
        known = Transfer(side=SOURCE, request_id=request_id, model=model, heard_ms=now_ms)
        state.moves.transfers[event.move_id] = known
        del state.queue[request_id]
        state.ledger.release(model, request_id)
        work.stage, work.passed_over_ms = Stage.HELD, None
        state.changed()
    known.heard_ms = now_ms
    released = Released(
        move_id=event.move_id,
        request=_as_of(now_ms, work),
        predicted_output_tokens=work.predicted_output_tokens,
        energy_j=work.energy_j,
    )
    return [Send(to=event.migrator, message=released)]


def _waiting(state: State, event: Release) -> Work | None:
    """Return the waiting request that is asked for, or with ``*`` the one of the model that came first."""
    if event.request_id != ANY:
        return state.queue.get(event.request_id)
    return next((w for w in state.queue.values() if w.request.model == event.model), None)


def _as_of(now_ms: float, work: Work) -> Request:
    waited_ms = work.request.waited_ms + now_ms - work.arrived_ms
    return msgspec.structs.replace(with_output(work), waited_ms=waited_ms)


# ---- both


def commit(state: State, now_ms: float, event: CommitMove) -> list[Action]:
    """The request belongs to the destination from here on: it starts it, the source forgets it."""
    transfer = state.moves.transfers.get(event.move_id)
    if transfer is None:
        return []
    if transfer.side == SOURCE:
        del state.moves.transfers[event.move_id]
        work = state.works[transfer.request_id]
        forget(state, now_ms, work)
        state.outbox.drop(transfer.request_id, work.request.attempt)  # the destination sends it all again
        return [Count(name="moves", labels={"side": SOURCE})]
    request = transfer.request
    if request is None:
        return []
    moved = Moved(
        request_id=request.request_id,
        attempt=request.attempt,
        source=transfer.source,
        destination=state.gpu,
        next_seq=len(request.output_tokens),
    )
    actions: list[Action] = [
        Send(to=transfer.migrator, message=Adopted(move_id=event.move_id, started=True)),
        Send(to=request.gateway, message=moved),
    ]
    if transfer.committed:
        return actions
    transfer.committed, transfer.heard_ms = True, now_ms
    if request.request_id in state.works:  # it has come by another way
        state.ledger.release(transfer.model, holder(event.move_id))
        return actions
    waited_ms = request.waited_ms + now_ms - transfer.adopted_ms
    here = msgspec.structs.replace(request, waited_ms=waited_ms)
    state.ledger.rename(transfer.model, holder(event.move_id), request.request_id)
    state.gateways.setdefault(request.gateway, now_ms)
    state.gone.pop(request.request_id, None)
    work = new_work(state, now_ms, here, transfer.predicted_output_tokens)
    if transfer.energy_j is None or work.energy_j is None:
        work.energy_j = None  # a part of it is not known
    else:
        work.energy_j += transfer.energy_j
    enqueue(state, work)
    if request.output_tokens:  # the source forgets them, and the last may not have reached the gateway
        so_far = msgspec.structs.replace(
            delta_of(work, 0, request.output_tokens, None), moved_from=transfer.source
        )
        actions += state.outbox.send(now_ms, [(request.gateway, so_far)])
    return [*actions, Count(name="moves", labels={"side": DESTINATION})]


def abort_move(state: State, now_ms: float, event: AbortMove) -> list[Action]:
    """Go back to what was before the move: the source goes on, the destination forgets."""
    undo(state, event.move_id)
    return []


def expire(state: State, now_ms: float) -> None:
    """Undo the moves that nobody has spoken of for too long."""
    for move_id in state.moves.expired(now_ms, state.settings.move_ttl_ms):
        undo(state, move_id)


def undo(state: State, move_id: str) -> None:
    """Take this side out of a move."""
    transfer = state.moves.transfers.get(move_id)
    if transfer is None:
        return
    if transfer.committed:
        del state.moves.transfers[move_id]
    elif transfer.side == SOURCE:
        del state.moves.transfers[move_id]
        enqueue(state, state.works[transfer.request_id])
    else:
        drop_move(state, move_id)
