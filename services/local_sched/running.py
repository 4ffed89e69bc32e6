"""What engines report of the requests they run: tokens, ends, and too little memory (3.4)."""

from services.local_sched.attribution import with_joules
from services.local_sched.ends import count_end, delta_of, fail, finish, forget
from services.local_sched.evict import carry_output, evict
from services.local_sched.spans import end_of, last_span, span
from services.local_sched.state import Engine, State
from services.local_sched.work import Stage, Work
from shared.engine import OutOfMemory, StepDone, StepOutput
from shared.events import Action, Count, HandOff, Send, TokenDelta

STARVED_STEPS = 10
"""A request that room was made for runs within so many steps, or so many times `oom_grace_ms`."""


def step_done(state: State, now_ms: float, event: StepDone) -> list[Action]:
    """Count what an engine did and send its tokens, one message per gateway; end what has ended."""
    engine = state.engines.get(event.model)
    if engine is None:
        return []
    engine.progress_ms = now_ms
    event = with_joules(state, engine, event)
    tally, engine.tally = engine.tally, None
    actions: list[Action] = []
    deltas: list[tuple[str, TokenDelta]] = []
    grown: list[Work] = []
    decoded = 0
    _book_energy(state, now_ms, engine, event)
    for output in event.outputs:
        work = engine.running.get(output.request_id) or _evicted(state, output.request_id)
        if work is None:
            continue  # stopped meanwhile
        decoded += work.decoding
        first_seq = work.output_count
        if work.stage is Stage.RUNNING:
            actions += _count_output(state, now_ms, work, output)
        else:
            actions += _count_last_output(state, now_ms, work, output)
        end = None
        if output.finish_reason:
            end = end_of(state, now_ms, work, output.finish_reason, output.error)
            actions += last_span(state, now_ms, work, output.error)
            actions += count_end(work, output.finish_reason)
            forget(state, now_ms, work)
        elif output.token_ids:
            grown.append(work)
        if output.token_ids or end:
            deltas.append((work.request.gateway, delta_of(work, first_seq, output.token_ids, end)))
    tokens = sum([len(delta.token_ids) for _, delta in deltas])
    steps = event.steps  # 0: what a step under way when its request was held has made is told afterwards
    if steps and (decoded or event.untold):
        step_ms = event.duration_ms / steps
        smoothed_ms = engine.step_ms or step_ms
        engine.step_ms = step_ms + 0.8**steps * (smoothed_ms - step_ms)
        # Where every decode got on by the same, and nothing else happened, it need not be counted up anew.
        alike = decoded == len(grown) == len(event.outputs) and tokens == steps * decoded
        if alike and not event.untold and tally is not None and tally.decodes == decoded:
            engine.tally = tally.stepped(now_ms, steps)
    sends = state.outbox.send(now_ms, deltas, event.ages_ms)
    for work in grown:
        if work.stage is Stage.RUNNING:  # it may have made room for one before it, or before this step
            actions += _grow(state, now_ms, work)
    if tokens:
        actions.append(Count(name="tokens", labels={"model": event.model}, value=tokens))
    return [*sends, *actions]


def _evicted(state: State, run_id: str) -> Work | None:
    """Return the request of a run that was under way when it was evicted, if it has not begun another yet."""
    work = state.queue.get(run_id.rpartition("~")[0])
    return work if work is not None and work.run_id == run_id else None


def _book_energy(state: State, now_ms: float, engine: Engine, event: StepDone) -> None:
    """Book what an engine's steps took; what it tells of requests stopped meanwhile was in vain."""
    if not event.untold:
        engine.stepped_ms = now_ms
    requests_j: float | None = 0.0
    aborted_j = event.aborted_j
    for output in event.outputs:
        if output.energy_j is None or requests_j is None:
            requests_j = None
        elif output.request_id in engine.running or _evicted(state, output.request_id):
            requests_j += output.energy_j
        else:
            aborted_j += output.energy_j
    ended_ms = [now_ms - age_ms for age_ms in event.ages_ms[len(event.ages_ms) - event.steps :]] or [now_ms]
    state.energy.ran(ended_ms, event.duration_ms, requests_j, aborted_j)


def _count_output(state: State, now_ms: float, work: Work, output: StepOutput) -> list[Action]:
    """Add one step's result to a request; its first token ends its prefill."""
    state.starved.pop(output.request_id, None)
    work.prefilled_tokens += output.prefilled_tokens
    _add_energy(work, output)
    if not output.token_ids:
        return []
    work.tokens.extend(output.token_ids)
    work.run_tokens += len(output.token_ids)
    work.last_ms = now_ms
    if work.run_first_ms is not None:
        return []
    work.run_first_ms = now_ms
    state.work_changed = state.summary_due = True
    if state.switches:
        state.admit_due = True  # the next prompt has waited for this one
    actions = _hand_off(state, work) if work.hand_to and not output.finish_reason else []
    return [*actions, *_first_token(state, now_ms, work)]


def _count_last_output(state: State, now_ms: float, work: Work, output: StepOutput) -> list[Action]:
    """Add what the step made that was under way when a request was evicted: its next run goes on from there.

    An engine stops a request between two steps only, and this may even have been the last one it needed.
    """
    _add_energy(work, output)
    if not output.token_ids:
        return []
    work.tokens.extend(output.token_ids)
    work.last_ms = now_ms
    carry_output(state, work)
    return _first_token(state, now_ms, work)


def _add_energy(work: Work, output: StepOutput) -> None:
    if work.energy_j is not None:
        work.energy_j = None if output.energy_j is None else work.energy_j + output.energy_j


def _first_token(state: State, now_ms: float, work: Work) -> list[Action]:
    """Note the first token that a request gives here, if this is it."""
    if work.first_ms is not None:
        return []
    actions = span(state, now_ms, work, "local.prefill", work.given_ms)
    work.first_ms = now_ms
    return actions


def _hand_off(state: State, work: Work) -> list[Action]:
    """Have a request moved, now that its prompt is computed, to where it is to decode."""
    assert work.hand_to is not None
    (gpu, host), request = work.hand_to, work.request
    message = HandOff(
        move_id=f"{state.gpu}.{int(state.started_ms)}.{work.run_id}",
        request_id=request.request_id,
        model=request.model,
        source=state.gpu,
        destination=gpu,
        destination_host="" if host == state.host else host,
    )
    return [Send(to=state.host, message=message), Count(name="hand_offs", labels={"model": request.model})]


def _grow(state: State, now_ms: float, work: Work) -> list[Action]:
    """Extend the reservation of a request that is about to outgrow it; evict others if need be (3.4).

    One that has all the memory there is for its model has reached the end of its context here.
    """
    request = work.request
    needed = work.context_tokens  # the next step computes the latest token's KV
    ahead = needed + state.settings.report_steps - 1  # and more may be computed before the next report
    held = state.ledger.held_tokens(request.model, request.request_id)
    if held >= ahead:
        return []
    if needed > state.ledger.most_tokens(request.model):
        return finish(state, now_ms, work, "length")
    for tokens in (max(ahead, work.wanted_tokens), ahead, needed):
        if state.ledger.reserve(request.model, request.request_id, tokens):
            return []
    work.urgent = True
    actions: list[Action] = []
    while not state.ledger.reserve(request.model, request.request_id, needed):
        victim = _victim(state, work)
        if victim is None and state.switches:
            return [*actions, *evict(state, now_ms, work)]  # others will make room for it
        if victim is None:
            reason = f"out of memory: {needed} tokens of KV do not fit on {state.gpu}"
            return [*actions, *fail(state, now_ms, [work], reason)]
        actions += evict(state, now_ms, victim)
    return actions


def out_of_memory(state: State, now_ms: float, event: OutOfMemory) -> list[Action]:
    """Note that the device had no memory for a request; `relieve` makes room.

    The ledger should have kept this from happening; when it did not, the device is right.
    """
    state.starved[event.request_id] = now_ms
    return []


def relief_due_ms(state: State) -> float | None:
    """Return when a starved request is to be helped; None if there is none."""
    if not state.starved:
        return None
    return max(min(state.starved.values()), state.evicted_ms + state.settings.oom_grace_ms)


def relieve(state: State, now_ms: float) -> list[Action]:
    """Evict a request to make room for one that is starved, once what was evicted before has left (3.4).

    A starved request is looked at again later, unless it has run by then: its engine reports it but once.
    """
    actions: list[Action] = []
    running = {run_id: work for engine in state.engines.values() for run_id, work in engine.running.items()}
    while (due_ms := relief_due_ms(state)) is not None and due_ms <= now_ms:
        run_id = min(state.starved, key=state.starved.__getitem__)
        del state.starved[run_id]
        work = running.get(run_id)
        if work is None or work.stage is not Stage.RUNNING:
            continue  # it has left
        work.urgent = True
        victim = _victim(state, work)
        if victim is None:
            reason = f"out of memory: {state.gpu} has no memory for its next token and nothing to evict"
            return [*actions, *fail(state, now_ms, [work], reason)]
        actions += evict(state, now_ms, victim)
        steps_ms = STARVED_STEPS * state.engines[work.request.model].pace_ms
        state.starved[run_id] = now_ms + max(STARVED_STEPS * state.settings.oom_grace_ms, steps_ms)
    return actions


def _victim(state: State, spared: Work) -> Work | None:
    """Return the running request whose eviction costs least to compute again, in the same memory."""
    running = (
        work
        for model in state.ledger.domain(spared.request.model)
        for work in state.engines[model].running.values()
        if work is not spared
    )
    return min(running, key=lambda w: (w.urgent, w.context_tokens, w.request.request_id), default=None)
