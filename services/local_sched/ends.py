"""How a request leaves: aborted, failed, or simply forgotten because it has ended."""

import msgspec

from services.local_sched.moves import DESTINATION, SOURCE, holder
from services.local_sched.spans import end_of, last_span
from services.local_sched.state import Engine, State
from services.local_sched.work import Work
from shared.engine import FreeStage, StopRequest, UnloadEngine
from shared.events import STOPPED, Abort, Action, Count, KvLoaded, Released, Send, TokenDelta
from shared.model import Request, RequestEnd


def abort(state: State, now_ms: float, event: Abort) -> list[Action]:
    """Stop an attempt and every lower one at once, and see to it that none comes in late.

    One that a stop string has ended is not given up but complete: its end is reported.
    """
    state.remember(event.request_id, event.attempt)
    state.outbox.drop(event.request_id, event.attempt)
    for move_id in state.moves.of_request(event.request_id):
        transfer = state.moves.transfers[move_id]
        overtaken = transfer.request is not None and transfer.request.attempt > event.attempt
        if transfer.side == DESTINATION and not overtaken:
            drop_move(state, move_id)
    work = state.works.get(event.request_id)
    if work is None or work.request.attempt > event.attempt:
        return []
    if event.reason == STOPPED and work.request.attempt == event.attempt:
        return finish(state, now_ms, work, "stop")
    return abandon(state, now_ms, work, event.reason or "aborted")


def moved_away(state: State, now_ms: float, work: Work) -> list[Action]:
    """Let go of work that another GPU has started; that one sends the gateway all there is."""
    actions = last_span(state, now_ms, work) if work.given_ms is not None else []
    actions += _stop(state, work)
    state.outbox.drop(work.request.request_id, work.request.attempt)
    forget(state, now_ms, work)
    return actions


def give_up_gateway(state: State, now_ms: float, gateway: str) -> list[Action]:
    """End all work of a gateway that has been silent for longer than its lease.

    The ends wait in the outbox for a while: a gateway that was only cut off is told of them when it is back,
    and can start its next attempts at once.
    """
    works = [work for work in state.works.values() if work.request.gateway == gateway]
    lease_s = state.settings.gateway_lease_ms / 1000.0
    actions = fail(state, now_ms, works, f"{state.gpu} heard nothing of gateway {gateway} for {lease_s:g} s")
    state.outbox.silence(gateway, now_ms)
    del state.gateways[gateway]
    return [Count(name="gateways_lost"), *actions]


def abandon(state: State, now_ms: float, work: Work, reason: str) -> list[Action]:
    """Drop work that nobody waits for any more; no end is reported."""
    actions = last_span(state, now_ms, work, reason)
    request = work.request
    actions += _stop(state, work)
    state.outbox.drop(request.request_id, request.attempt)
    actions += count_end(work, "aborted")
    forget(state, now_ms, work)
    return actions


def fail(state: State, now_ms: float, works: list[Work], reason: str) -> list[Action]:
    """End work with an error, so that its gateway can start another attempt."""
    return _end(state, now_ms, works, "error", reason)


def fail_all(state: State, now_ms: float, model: str, reason: str) -> list[Action]:
    """End all work of a model with an error."""
    works = [work for work in state.works.values() if work.request.model == model]
    return fail(state, now_ms, works, reason)


def end_engine(state: State, now_ms: float, engine: Engine, reason: str) -> list[Action]:
    """End an engine at once, with all work of its model."""
    engine.state, model = "unloading", engine.spec.name
    return [*fail_all(state, now_ms, model, reason), UnloadEngine(model=model, at_once=True)]


def finish(state: State, now_ms: float, work: Work, finish_reason: str) -> list[Action]:
    """End work well, before its engine does."""
    return _end(state, now_ms, [work], finish_reason)


def _end(state: State, now_ms: float, works: list[Work], finish_reason: str, error: str = "") -> list[Action]:
    """Take work out of its engine, and report its end."""
    actions: list[Action] = []
    deltas = []
    for work in works:
        request = work.request
        actions += _stop(state, work)
        end = end_of(state, now_ms, work, finish_reason, error)
        deltas.append((request.gateway, delta_of(work, work.output_count, (), end)))
        actions += last_span(state, now_ms, work, error)
        actions += count_end(work, finish_reason)
        forget(state, now_ms, work)
    return [*state.outbox.send(now_ms, deltas), *actions]


def forget(state: State, now_ms: float, work: Work) -> None:
    """Take work off every list, free its memory, and remember that it has been here."""
    request = work.request
    leave_engine(state, work)
    if engine := state.engines.get(request.model):
        engine.used_ms = now_ms
    state.queue.pop(request.request_id, None)
    del state.works[request.request_id]
    state.remember(request.request_id, request.attempt)
    state.changed()


def leave_engine(state: State, work: Work) -> None:
    """Take work off its engine, if it is in one, end its moves, and free its memory."""
    request = work.request
    if engine := state.engines.get(request.model):
        engine.running.pop(work.run_id, None)
        engine.frozen -= {work.run_id}
        engine.tally = None
    leave_moves(state, work)
    state.ledger.release(request.model, request.request_id)


def leave_moves(state: State, work: Work) -> None:
    """End the moves of work that ends here, or goes on here otherwise than they know."""
    moves = state.moves
    for move_id in moves.of_request(work.request.request_id):
        transfer = moves.transfers[move_id]
        if transfer.side == SOURCE:
            del moves.transfers[move_id]
            if transfer.migrator:
                gone = Released(move_id=move_id, request=None)
                moves.notices.append(Send(to=transfer.migrator, message=gone))
    if work.arrival is not None and work.arrival.own_stage:
        moves.notices.append(FreeStage(model=work.request.model, stage=work.arrival.stage))
    arrived(state, work, 0, 0.0, "not needed any more")


def thaw(state: State, work: Work) -> None:
    """Let work go on that was held in its engine for a move: by the next plan it does."""
    engine = state.engines[work.request.model]
    if work.run_id in engine.frozen and not engine.parting:
        engine.frozen -= {work.run_id}
        state.changed()


def arrived(state: State, work: Work, tokens: int, took_ms: float, reason: str = "") -> None:
    """Let go of the stage of a request: tell the migrator by whom it came, or take its slabs back."""
    brought, work.arrival = work.arrival, None
    if brought is None:
        return
    if brought.own_stage:
        state.offload.free(brought.stage)
    elif brought.migrator:
        loaded = KvLoaded(move_id=brought.move_id, tokens=tokens, took_ms=took_ms, reason=reason)
        state.moves.notices.append(Send(to=brought.migrator, message=loaded))


def _stop(state: State, work: Work) -> list[Action]:
    model = work.request.model
    if work.run_id not in state.engines[model].running:
        return []
    return [StopRequest(model=model, request_id=work.run_id)]


def drop_move(state: State, move_id: str) -> None:
    """Forget a move whose request is gone, and free what it held."""
    transfer = state.moves.transfers.pop(move_id)
    state.ledger.release(transfer.model, holder(move_id))
    state.admit_due = state.summary_due = True


def with_output(work: Work) -> Request:
    """Return a request with the tokens it has made as part of it."""
    return msgspec.structs.replace(work.request, output_tokens=(*work.request.output_tokens, *work.tokens))


def delta_of(work: Work, first_seq: int, token_ids: tuple[int, ...], end: RequestEnd | None) -> TokenDelta:
    """Return what is to be told about an attempt, from index `first_seq` of its output on."""
    return TokenDelta(
        request_id=work.request.request_id,
        attempt=work.request.attempt,
        first_seq=first_seq,
        token_ids=token_ids,
        end=end,
    )


def count_end(work: Work, outcome: str) -> list[Action]:
    """Count how a request ended, and its energy."""
    counted: list[Action] = [count_outcome(work.request, outcome)]
    if work.energy_j:
        labels = {"model": work.request.model}
        counted.append(Count(name="request_energy_j", labels=labels, value=work.energy_j))
    return counted


def count_outcome(request: Request, outcome: str) -> Count:
    """Count a request of a model by how it came out."""
    return Count(name="requests", labels={"model": request.model, "outcome": outcome})
