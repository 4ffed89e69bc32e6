"""Memory promised to requests that may come by a move (3.5, F): at once, or bit by bit as it frees.

What waits here has its memory first; what is left over is granted, and more as soon as there is more. All of
it is held in the ledger under the name of the move, so that giving it back is giving back one holder.
"""

from services.local_sched.moves import DESTINATION, Transfer, holder
from services.local_sched.state import State
from services.local_sched.summary import claimed_bytes
from shared.events import Action, Granted, Reserve, Send


def reserve(state: State, now_ms: float, event: Reserve) -> list[Action]:
    """Promise memory for a request that may come, or say why not."""
    transfer = state.moves.transfers.get(event.move_id)
    tokens = event.context_tokens + 1
    if transfer is None:
        reason = take(state, now_ms, event.move_id, event.request_id, event.model, tokens, event.partial)
        if reason:
            return [_granted(event.migrator, event.move_id, 0, reason)]
        transfer = state.moves.transfers[event.move_id]
    elif transfer.awaits and event.partial and tokens > transfer.wanted_tokens:
        transfer.wanted_tokens = tokens
        _raise(state, event.move_id, transfer)
    transfer.heard_ms, transfer.migrator = now_ms, event.migrator
    return [_granted(event.migrator, event.move_id, transfer.credit_bytes, "")]


def take(
    state: State, now_ms: float, move_id: str, request_id: str, model: str, tokens: int, partial: bool = False
) -> str:
    """Take memory for a move to here; returns why that cannot be, empty if it could.

    Args:
        tokens: whose KV is to fit.
        partial: whether less will do, and the rest later.
    """
    engine = state.engines.get(model)
    if state.draining:
        return f"{state.gpu} is draining"
    if engine is None or not engine.takes_work:
        return f"model {model} is {engine.state if engine else 'not loaded'} on {state.gpu}"
    most = state.ledger.most_tokens(model)
    if tokens > most if partial else not state.ledger.reserve(model, holder(move_id), tokens):
        return f"{state.gpu} has no memory for {tokens} tokens of {model}"
    transfer = state.moves.transfers[move_id] = Transfer(
        side=DESTINATION, request_id=request_id, model=model, heard_ms=now_ms, wanted_tokens=tokens
    )
    if partial:
        _raise(state, move_id, transfer)
    else:
        transfer.credit_bytes = state.ledger.pools[model].bytes_for(tokens)
    state.summary_due = True
    return ""


def grant_more(state: State) -> list[Action]:
    """Grant what has come free to the moves that wait for it, the first of them first."""
    actions: list[Action] = []
    for move_id, transfer in state.moves.transfers.items():
        if transfer.awaits and _raise(state, move_id, transfer):
            actions.append(_granted(transfer.migrator, move_id, transfer.credit_bytes, ""))
    return actions


def _raise(state: State, move_id: str, transfer: Transfer) -> bool:
    """Grant as much more as there is, in whole blocks; returns whether that is anything."""
    model, ledger = transfer.model, state.ledger
    pool = ledger.pools[model]
    held = pool.holders.get(holder(move_id), 0)
    missing = -(-transfer.wanted_tokens // pool.block_tokens) - held
    if missing <= 0:
        return False
    domain = ledger.domain(model)
    claimed = sum(claimed_bytes(state, w) for w in state.queue.values() if w.request.model in domain)
    blocks = min(missing, (ledger.free_kv_bytes(model) - claimed) // pool.block_bytes)
    if blocks <= 0:
        return False
    pool.hold(holder(move_id), held + blocks)
    transfer.credit_bytes = (held + blocks) * pool.block_bytes
    state.summary_due = True
    return True


def _granted(migrator: str, move_id: str, credit_bytes: int, reason: str) -> Send:
    return Send(to=migrator, message=Granted(move_id=move_id, credit_bytes=credit_bytes, reason=reason))
