"""How a request comes in, waits, and is given to its engine (3.4)."""

import math

import msgspec

from services.local_sched import batch
from services.local_sched.ends import abandon, count_outcome, fail
from services.local_sched.spans import span
from services.local_sched.state import Engine, State
from services.local_sched.work import Stage, Work
from shared.engine import RunRequest
from shared.events import Action, Admitted, Refused, Send, Submit
from shared.model import Request
from shared.overload import has_room


def submit(state: State, now_ms: float, event: Submit) -> list[Action]:
    """Take an attempt into the queue, or refuse it; a repeat is answered, an overtaken one ignored."""
    request = event.request
    admitted = Admitted(request_id=request.request_id, attempt=request.attempt, gpu=state.gpu)
    # Counted even if refused: the scheduler's reservation for it is no longer needed.
    counted = max(event.dispatch_seq, state.admitted_through.get(event.scheduler, 0))
    state.admitted_through[event.scheduler] = counted
    state.schedulers[event.scheduler] = now_ms
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
    reason = why_refused(state, request)
    never = "" if reason else why_never(state, request)
    full = "" if reason or never else why_full(state, request)
    if reason or never or full:
        refused = Refused(
            request_id=request.request_id,
            attempt=request.attempt,
            gpu=state.gpu,
            reason=reason or never or full,
            full=bool(full),
            never=bool(never),
        )
        return [*actions, Send(to=event.scheduler, message=refused), count_outcome(request, "refused")]
    state.gateways.setdefault(request.gateway, now_ms)
    work = new_work(state, now_ms, request, event.predicted_output_tokens)
    work.dispatch = event.reason
    if event.decode_gpu:
        work.hand_to = event.decode_gpu, event.decode_host
    enqueue(state, work)
    return [*actions, Send(to=request.gateway, message=admitted)]


def why_refused(state: State, request: Request) -> str:
    """Return why this GPU does not serve a request's model now, in words; empty if it does."""
    model = request.model
    engine = state.engines.get(model)
    if engine is None:
        return f"model {model} is not loaded on {state.gpu}"
    if not engine.takes_work:
        return f"model {model} is {engine.state} on {state.gpu}" + (engine.reason and f": {engine.reason}")
    if state.draining:
        return f"{state.gpu} is draining"
    return ""


def why_never(state: State, request: Request) -> str:
    """Return why not even the first token of a request fits here, whatever ends, in words; empty if it does.

    One that may outgrow the memory of its model later is taken: it ends there, as at the end of a context.
    """
    model, tokens = request.model, request.context_tokens
    most = state.engines[model].spec.context_tokens
    if tokens >= most:
        return f"{tokens} tokens leave no room in the context of {most}"
    most = state.ledger.most_tokens(model)
    if tokens >= most:
        return f"KV of {tokens} tokens and more does not fit: {state.gpu} has room for {most} of {model}"
    return ""


def why_full(state: State, request: Request) -> str:
    """Return why the queue has no place for a request, in words; empty if it has one.

    The tenant that holds more than its share of a queue that is nearly full is refused first.
    """
    waiting = state.queue.values()
    held: dict[str, int] = {}
    weights: dict[str, float] = {}
    for work in waiting:
        tenant = work.request.tenant
        held[tenant] = held.get(tenant, 0) + 1
        weights[tenant] = work.request.tenant_weight
    if has_room(held, weights, request.tenant, request.tenant_weight, state.settings.max_queue):
        return ""
    return (
        f"the queue of {state.gpu} is full: {len(waiting)} requests wait, "
        f"{held.get(request.tenant, 0)} of them of tenant {request.tenant}"
    )


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
        prefill_ms=prefill_alone_ms(state, request.model, request.context_tokens),
        energy_j=0.0 if state.device.has_meter else None,
    )


def enqueue(state: State, work: Work) -> None:
    """Put work into the queue, to be given to its engine as soon as its memory fits."""
    work.stage = Stage.QUEUED
    _count_tenant(state, work.request.tenant)
    state.works[work.request.request_id] = state.queue[work.request.request_id] = work
    state.changed()


def _count_tenant(state: State, tenant: str) -> None:
    """Count what a tenant gets from the least that another with work has had, when it has work again.

    It gets no credit for the time in which it had none, and keeps what it had beyond that.
    """
    works = state.works.values()
    if any(work.request.tenant == tenant for work in works):
        return
    active = {work.request.tenant for work in works}
    least = min((state.served.get(name, 0.0) for name in active), default=0.0)
    kept = {name: had for name, had in state.served.items() if active and (name in active or had > least)}
    state.served = {**kept, tenant: max(least, kept.get(tenant, 0.0))}


def admit_waiting(state: State, now_ms: float) -> list[Action]:
    """Give waiting requests to their engines, most urgent first, passing over what does not fit (Fig. 8).

    One passed over for `bypass_max_ms` lets nobody who competes for the same memory past it any more.
    """
    state.admit_due = False
    closed: set[str] = set()
    actions: list[Action] = []
    waiting = [task_of(state, now_ms, work) for work in state.queue.values()]
    for task in batch.fair_order(waiting, state.served):
        work = state.queue[task.key]
        model = work.request.model
        engine = state.engines[model]
        full = len(engine.running) >= state.settings.max_running
        if engine.state != "ready" or full or model in closed or not _has_turn(state, engine, work):
            continue
        if work.run_id in engine.leaving:
            continue  # its next run begins with what its engine still has to tell of the last one
        most = state.ledger.most_tokens(model)
        if most < work.context_tokens:
            reason = f"out of memory: KV of {work.context_tokens} tokens does not fit on {state.gpu} any more"
            actions += fail(state, now_ms, [work], reason)
            continue
        # A moved request holds memory for its context already, and starts with that if there is no more.
        fits = state.ledger.reserve(model, task.key, min(most, work.wanted_tokens))
        if fits or state.ledger.held_tokens(model, task.key) >= work.context_tokens:
            actions += _start(state, now_ms, engine, work)
            continue
        if work.passed_over_ms is None:
            work.passed_over_ms = now_ms
        if task.score == math.inf:
            closed.update(state.ledger.domain(model))
    return actions


def _has_turn(state: State, engine: Engine, work: Work) -> bool:
    """Say whether a waiting request may be given to its engine as far as turns go."""
    if not state.switches:
        return True
    if not engine.on_turn or engine.parting:
        return False
    if work.started:
        return True
    rota = state.rota
    if rota.only is not None and work.request.request_id not in rota.only:
        return False
    return sum(not other.started for other in engine.running.values()) < rota.at_once


def task_of(state: State, now_ms: float, work: Work) -> batch.Task:
    """Return the prefill of a request as the batcher weighs it."""
    return batch.Task(
        work.request.request_id,
        score_of(state, now_ms, work, work.prefill_ms),
        tenant=work.request.tenant,
        late=work.due_ms <= now_ms and not work.urgent,
        cost=_cost(work),
        since_ms=since_ms(work),
    )


def since_ms(work: Work) -> float:
    """Return since when work waits, for those of equal urgency; what outgrew its memory goes before all."""
    return -math.inf if work.urgent else work.runnable_ms


def _cost(work: Work) -> float:
    return work.wanted_tokens / work.request.tenant_weight


def score_of(state: State, now_ms: float, work: Work, prefill_ms: float) -> float:
    """Return how urgent the prefill of a request is (Eq. 4).

    First of all come those that outgrew their memory, and those passed over for `bypass_max_ms`.
    """
    passed_over_ms = 0.0 if work.passed_over_ms is None else now_ms - work.passed_over_ms
    if work.urgent or passed_over_ms >= state.settings.bypass_max_ms:
        return math.inf
    return batch.score(
        prefill_ms,
        work.due_ms - now_ms,
        decode=False,
        age_ms=now_ms - work.runnable_ms,
        beta=state.settings.beta,
        starvation_ms=state.settings.starvation_ms,
    )


def _start(state: State, now_ms: float, engine: Engine, work: Work) -> list[Action]:
    request = work.request
    del state.queue[request.request_id]
    state.runs += 1
    work.run_id = f"{request.request_id}~{state.runs}"
    if not engine.running:
        engine.stepped_ms = engine.progress_ms = now_ms
    engine.running[work.run_id] = work
    engine.tally = None
    work.stage, work.passed_over_ms = Stage.RUNNING, None
    actions: list[Action] = []
    if work.given_ms is None:
        work.given_ms = now_ms
        state.served[request.tenant] = state.served.get(request.tenant, 0.0) + _cost(work)
        actions += span(state, now_ms, work, "local.queue", work.arrived_ms)
    state.work_changed = state.summary_due = True
    run = msgspec.structs.replace(request, request_id=work.run_id)
    brought = work.arrival
    if brought is None:
        return [*actions, RunRequest(model=request.model, request=run)]
    with_kv = RunRequest(
        model=request.model,
        request=run,
        stage=brought.stage,
        kv_tokens=brought.kv_tokens,
        own_stage=brought.own_stage,
    )
    return [*actions, with_kv]


def prefill_alone_ms(state: State, model: str, tokens: int) -> float:
    """Return the profiled time of a prefill on the whole device, at the clock of now."""
    return float(state.engines[model].lut.ttft_ms(state.clock_mhz, 100, tokens))
