"""How a request comes in, waits, and is given to its engine (3.4)."""

import math

import msgspec

from services.local_sched import batch
from services.local_sched.ends import abandon, count_outcome, fail
from services.local_sched.spans import span
from services.local_sched.state import Engine, Stage, State, Work
from shared.engine import RunRequest
from shared.events import Action, Admitted, Refused, Send, Submit
from shared.model import Request


def submit(state: State, now_ms: float, event: Submit) -> list[Action]:
    """Take an attempt into the queue, or refuse it; a repeat is answered, an overtaken one ignored."""
    request = event.request
    admitted = Admitted(request_id=request.request_id, attempt=request.attempt, gpu=state.gpu)
    # Counted even if refused: the scheduler's reservation for it is no longer needed.
    counted = max(event.dispatch_seq, state.admitted_through.get(event.scheduler, 0))
    state.admitted_through[event.scheduler] = counted
    state.summary_due = True
    known = state.works.get(request.request_id)
    if known is not None and request.attempt <= known.request.attempt:
        same = request.attempt == known.request.attempt
        return [Send(to=request.gateway, message=admitted)] if same else []
    if request.attempt <= state.gone.get(request.request_id, 0):
        again = state.outbox.resend(now_ms, request_id=request.request_id)
        return [Send(to=request.gateway, message=admitted), *again] if again else []
    actions: list[Action] = []
    if known is not None:
        actions += abandon(state, now_ms, known, "superseded")
    if reason := why_refused(state, request, event.predicted_output_tokens):
        refused = Refused(
            request_id=request.request_id, attempt=request.attempt, gpu=state.gpu, reason=reason
        )
        return [*actions, Send(to=event.scheduler, message=refused), count_outcome(request, "refused")]
    state.gateways.setdefault(request.gateway, now_ms)
    enqueue(state, new_work(state, now_ms, request, event.predicted_output_tokens))
    return [*actions, Send(to=request.gateway, message=admitted)]


def why_refused(state: State, request: Request, predicted_output_tokens: int) -> str:
    """Return why this GPU cannot take a request, in words; empty if it can."""
    model = request.model
    engine = state.engines.get(model)
    if engine is None:
        return f"model {model} is not loaded on {state.gpu}"
    if engine.state not in ("loading", "ready"):
        return f"model {model} is {engine.state} on {state.gpu}" + (engine.reason and f": {engine.reason}")
    if state.draining:
        return f"{state.gpu} is draining"
    if len(state.queue) >= state.settings.max_queue:
        return f"the queue of {state.gpu} is full: {len(state.queue)} requests wait"
    if request.context_tokens >= engine.spec.context_tokens:
        return f"{request.context_tokens} tokens leave no room in the context of {engine.spec.context_tokens}"
    work = new_work(state, 0.0, request, predicted_output_tokens)
    tokens = work.wanted_tokens(state.settings.margin)
    most = state.ledger.most_tokens(model)
    if tokens > most:
        return f"KV of {tokens} tokens does not fit: {state.gpu} has room for at most {most} of {model}"
    return ""


def new_work(state: State, now_ms: float, request: Request, predicted_output_tokens: int) -> Work:
    """Return a request as work that arrives now.

    The first token of a fresh request is due its TTFT after it reached its gateway. One that goes on from
    another attempt or GPU has given its first token: it has a TTFT from now to compute its context again.
    """
    ttft_ms = request.objectives.ttft_ms
    asked_ms = now_ms if request.output_tokens else now_ms - request.waited_ms
    return Work(
        request=request,
        predicted_output_tokens=predicted_output_tokens,
        arrived_ms=now_ms,
        runnable_ms=now_ms,
        due_ms=asked_ms + ttft_ms,
        prefill_ms=prefill_alone_ms(state, request),
        energy_j=0.0 if state.device.has_meter else None,
    )


def enqueue(state: State, work: Work) -> None:
    """Put work into the queue, to be given to its engine as soon as its memory fits."""
    work.stage = Stage.QUEUED
    state.works[work.request.request_id] = state.queue[work.request.request_id] = work
    state.changed()


def admit_waiting(state: State, now_ms: float) -> list[Action]:
    """Give waiting requests to their engines, most urgent first, passing over what does not fit (Fig. 8).

    One passed over for `bypass_max_ms` lets nobody who competes for the same memory past it any more.
    """
    state.admit_due = False
    closed: set[str] = set()
    actions: list[Action] = []
    for task in batch.order(batch.Task(i, score_of(state, now_ms, w)) for i, w in state.queue.items()):
        work = state.queue[task.key]
        model = work.request.model
        engine = state.engines[model]
        full = len(engine.running) >= state.settings.max_running
        if engine.state != "ready" or full or model in closed:
            continue
        most = state.ledger.most_tokens(model)
        if most < work.context_tokens:
            reason = f"out of memory: KV of {work.context_tokens} tokens does not fit on {state.gpu} any more"
            actions += fail(state, now_ms, [work], reason)
            continue
        # A moved request holds memory for its context already, and starts with that if there is no more.
        fits = state.ledger.reserve(model, task.key, min(most, work.wanted_tokens(state.settings.margin)))
        if fits or state.ledger.held_tokens(model, task.key) >= work.context_tokens:
            actions += _start(state, now_ms, engine, work)
            continue
        if work.passed_over_ms is None:
            work.passed_over_ms = now_ms
        if task.score == math.inf:
            closed.update(state.ledger.domain(model))
    return actions


def score_of(state: State, now_ms: float, work: Work) -> float:
    """Return how urgent the prefill of a request is (Eq. 4).

    First of all come those that outgrew their memory, and those passed over for `bypass_max_ms`.
    """
    passed_over_ms = 0.0 if work.passed_over_ms is None else now_ms - work.passed_over_ms
    if work.urgent or passed_over_ms >= state.settings.bypass_max_ms:
        return math.inf
    return batch.score(
        work.prefill_ms,
        work.due_ms - now_ms,
        now_ms - work.runnable_ms,
        decode=False,
        beta=state.settings.beta,
        starvation_ms=state.settings.starvation_ms,
    )


def _start(state: State, now_ms: float, engine: Engine, work: Work) -> list[Action]:
    request = work.request
    del state.queue[request.request_id]
    state.runs += 1
    work.run_id = f"{request.request_id}~{state.runs}"
    engine.running[work.run_id] = work
    work.stage, work.passed_over_ms = Stage.RUNNING, None
    actions: list[Action] = []
    if work.given_ms is None:
        work.given_ms = now_ms
        actions += span(state, now_ms, work, "local.queue", work.arrived_ms)
    state.work_changed = state.summary_due = True
    run = msgspec.structs.replace(request, request_id=work.run_id)
    return [*actions, RunRequest(model=request.model, request=run)]


def prefill_alone_ms(state: State, request: Request) -> float:
    """Return the profiled time of a request's prefill on the whole device, at the clock of now."""
    lut = state.engines[request.model].lut
    return float(lut.ttft_ms(state.clock_mhz, 100, request.context_tokens))
