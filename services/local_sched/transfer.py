"""Both sides of a request's move to another GPU, message by message (3.5, F); any message may be repeated.

`grants.py` has the memory that is promised for one, and `live.py` what is different at the source if it runs.
"""

import msgspec

from services.local_sched import grants, live
from services.local_sched.admission import enqueue, new_work, prefill_alone_ms
from services.local_sched.ends import delta_of, drop_move, moved_away, thaw
from services.local_sched.moves import DESTINATION, SOURCE, Transfer, holder
from services.local_sched.state import State
from services.local_sched.work import Arrival, Stage, Work
from shared.events import (
    AbortMove,
    Action,
    Adopt,
    Adopted,
    CommitMove,
    Count,
    KvLoaded,
    Moved,
    Release,
    Released,
    Send,
)
from shared.model import Request

ANY = "*"  # as request id of a release: any waiting request of the model

# ---- destination


def adopt(state: State, now_ms: float, event: Adopt) -> list[Action]:
    """Hold a request's state until the move is committed; no answer if there is no memory for it."""
    request = event.request
    tokens = request.context_tokens + 1
    if event.move_id not in state.moves.transfers and grants.take(
        state, now_ms, event.move_id, request.request_id, request.model, tokens
    ):
        return []
    transfer = state.moves.transfers[event.move_id]
    if not transfer.committed and not state.ledger.reserve(request.model, holder(event.move_id), tokens):
        return []  # it has grown beyond what was promised
    transfer.heard_ms, transfer.migrator = now_ms, event.migrator
    if transfer.request is None:
        transfer.request, transfer.adopted_ms = request, now_ms
        transfer.predicted_output_tokens = event.predicted_output_tokens
        transfer.source, transfer.energy_j = event.source, event.energy_j
        transfer.stage, transfer.kv_tokens = event.stage, event.kv_tokens
        work = new_work(state, now_ms, request, event.predicted_output_tokens)
        # More than the context if there is room; it can start without.
        state.ledger.reserve(request.model, holder(event.move_id), work.wanted_tokens)
    return [Send(to=event.migrator, message=Adopted(move_id=event.move_id))]


# ---- source


def release(state: State, now_ms: float, event: Release) -> list[Action]:
    """Hold a request still and hand out its state; one that has started only if it was prepared."""
    known = state.moves.transfers.get(event.move_id)
    if known is not None and known.committed:
        return []  # a repeat that was long on its way: it must not start another move under this id
    if known is not None and known.mode and event.freeze:
        frozen = live.freeze(state, now_ms, event)
        return [*frozen, *live.released(state, now_ms, event.move_id, known)]
    if event.freeze or (known is not None and known.mode):
        work = None
    elif known is not None:
        work = state.works.get(known.request_id) if known.side == SOURCE else None
    else:
        work = _waiting(state, event)
    if work is None:
        runs = event.request_id in state.works and not event.freeze
        none = Released(move_id=event.move_id, request=None, running=runs)
        return [Send(to=event.migrator, message=none)]
    if known is None:
        request_id, model = work.request.request_id, work.request.model
        known = Transfer(side=SOURCE, request_id=request_id, model=model, heard_ms=now_ms)
        state.moves.transfers[event.move_id] = known
        del state.queue[request_id]
        state.ledger.release(model, request_id)
        work.stage, work.passed_over_ms = Stage.HELD, None
        state.changed()
    known.heard_ms = now_ms
    return [Send(to=event.migrator, message=live.state_of(now_ms, event.move_id, known, work))]


def _waiting(state: State, event: Release) -> Work | None:
    """Return the waiting request that is asked for, or with ``*`` the one of the model that came first."""
    if event.request_id != ANY:
        return state.queue.get(event.request_id)
    return next((w for w in state.queue.values() if w.request.model == event.model), None)


# ---- both


def commit(state: State, now_ms: float, event: CommitMove) -> list[Action]:
    """The request belongs to the destination from here on: it starts it, the source forgets it."""
    transfer = state.moves.transfers.get(event.move_id)
    if transfer is None:
        return []
    if transfer.side == SOURCE:
        return _hand_over(state, now_ms, event, transfer)
    request = transfer.request
    if request is None:
        return []
    started = Send(to=transfer.migrator, message=Adopted(move_id=event.move_id, started=True))
    if transfer.committed and request.request_id not in state.works:
        return [started]  # it has ended, or moved on
    moved = Moved(
        request_id=request.request_id,
        attempt=request.attempt,
        source=transfer.source,
        destination=state.gpu,
        next_seq=len(request.output_tokens),
    )
    actions: list[Action] = [started, Send(to=request.gateway, message=moved)]
    if transfer.committed:
        return actions
    transfer.committed, transfer.heard_ms = True, now_ms
    waited_ms = request.waited_ms + now_ms - transfer.adopted_ms
    here = msgspec.structs.replace(request, waited_ms=waited_ms, moves=request.moves + 1)
    known = state.works.get(request.request_id)
    newer = known is not None and (known.request.attempt, known.request.moves) >= (here.attempt, here.moves)
    if newer or state.outbox.has_end(request.request_id, request.attempt):  # or ended here: the source lags
        state.ledger.release(transfer.model, holder(event.move_id))
        return [*actions, *_not_needed(event.move_id, transfer)]
    if known is not None:
        actions += moved_away(state, now_ms, known)
    return [*actions, *_start(state, now_ms, event.move_id, transfer, here)]


def _hand_over(state: State, now_ms: float, event: CommitMove, transfer: Transfer) -> list[Action]:
    """Forget a request that another GPU runs, unless it has moved on from there and come back."""
    if transfer.committed:
        return []
    work = state.works[transfer.request_id]
    if work.stage is not Stage.HELD and transfer.staged is None:
        return []  # nobody else has it
    if work.request.moves > event.moves:
        undo(state, event.move_id)
        return []
    transfer.committed, transfer.heard_ms = True, now_ms
    return [*moved_away(state, now_ms, work), Count(name="moves", labels={"side": SOURCE})]


def _start(state: State, now_ms: float, move_id: str, transfer: Transfer, here: Request) -> list[Action]:
    """Take a request that has moved here into the queue, with what it has brought along."""
    if state.switches:  # until its turn comes it takes no memory: its KV is with the host
        state.ledger.release(transfer.model, holder(move_id))
    else:
        state.ledger.rename(transfer.model, holder(move_id), here.request_id)
    state.gateways.setdefault(here.gateway, now_ms)
    state.gone.pop(here.request_id, None)
    work = new_work(state, now_ms, here, transfer.predicted_output_tokens)
    if transfer.energy_j is None or work.energy_j is None:
        work.energy_j = None  # a part of it is not known
    else:
        work.energy_j += transfer.energy_j
    if transfer.kv_tokens:
        work.arrival = Arrival(transfer.stage, transfer.kv_tokens, move_id, transfer.migrator)
        work.prefilled_tokens = transfer.kv_tokens
        work.prefill_ms = prefill_alone_ms(state, here.model, work.prefill_tokens)
    enqueue(state, work)
    # The source forgets its tokens, and the last may not have reached the gateway; nor may `Moved`.
    so_far = msgspec.structs.replace(delta_of(work, 0, here.output_tokens, None), moved_from=transfer.source)
    told = state.outbox.send(now_ms, [(here.gateway, so_far)])
    return [*told, Count(name="moves", labels={"side": DESTINATION})]


def _not_needed(move_id: str, transfer: Transfer) -> list[Action]:
    if not transfer.stage:
        return []
    return [Send(to=transfer.migrator, message=KvLoaded(move_id=move_id, reason="it is here already"))]


def abort_move(state: State, now_ms: float, event: AbortMove) -> list[Action]:
    """Go back to what was before the move: the source goes on, the destination forgets."""
    undo(state, event.move_id)
    return []


def expire(state: State, now_ms: float) -> list[Action]:
    """Undo the moves that nobody has spoken of for too long; return what is to be said of those over."""
    for move_id in state.moves.expired(now_ms, state.settings.move_ttl_ms):
        undo(state, move_id)
    notices, state.moves.notices = state.moves.notices, []
    return notices


def undo(state: State, move_id: str) -> None:
    """Take this side out of a move."""
    transfer = state.moves.transfers.get(move_id)
    if transfer is None:
        return
    if transfer.committed:
        del state.moves.transfers[move_id]
    elif transfer.side == SOURCE:
        del state.moves.transfers[move_id]
        work = state.works[transfer.request_id]
        if work.stage is Stage.HELD:
            enqueue(state, work)
        else:
            thaw(state, work)
    else:
        drop_move(state, move_id)
