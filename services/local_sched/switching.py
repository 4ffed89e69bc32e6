"""Models that take turns on a GPU: more are assigned to it than its memory holds at a time.

Their weights lie in host memory, and a rule of the system (`policies/turns.py`) says whose turn it is. This
carries it out. Who has lost the turn is held, the KV of its requests is copied to host memory, one after the
other, and they wait in the queue for the next turn, to go on from there. Who has it is brought in, once those
that have no turn have made room; weights that nobody needs the room of stay. To everybody else the models of
such a GPU are all ready to serve: when, is for its local scheduler alone.

Only emulated engines change places so: what it takes of a vLLM engine that sleeps could not be seen without a
GPU.
"""

from collections.abc import Iterable

from services.local_sched import plans
from services.local_sched.engines import bring_in
from services.local_sched.evict import back_to_queue
from services.local_sched.policies import aegaeon, serverlessllm
from services.local_sched.policies.turns import Contender, Rule, Terms
from services.local_sched.state import Engine, State
from services.local_sched.work import Arrival, Stage, Work
from shared.engine import ExportKv, KvExported, StopRequest, UnloadEngine
from shared.events import Action, Count

RULES: dict[str, Rule] = {
    "request": serverlessllm.until_done,
    "shared": serverlessllm.while_they_fit,
    "token": aegaeon.turns,
}
"""By the name that the setting `switching` gives them."""

PARTED = "parted:"
"""Start of the name of a copy of KV to host memory, before that of its run."""

LEAST_KV_BYTES = 1 << 30
"""Memory for KV without which a model is not taken to fit beside others."""


def look(state: State, now_ms: float) -> list[Action]:
    """See whose turn it is, and have those with and without it change places."""
    contenders = _contenders(state)
    terms = Terms(
        total_bytes=state.ledger.capacity_bytes,
        role=state.role,
        group_requests=state.settings.group_requests,
        quota_min_ms=state.settings.quota_min_ms,
        quota_max_ms=state.settings.quota_max_ms,
    )
    state.rota = RULES[state.settings.switching](now_ms, state.rota, contenders, terms)
    assert state.rota.ends_ms > now_ms, "a rule that is asked again has to have an answer for later"
    actions: list[Action] = []
    for name, engine in state.engines.items():
        engine.on_turn = name in state.rota.on
        engine.parting = engine.parting and bool(engine.running)
        if engine.running and not engine.on_turn and not engine.parting:
            actions += _part(state, engine)
    return [*actions, *_bring_in(state, now_ms)]


# ---- what there is to do


def _contenders(state: State) -> list[Contender]:
    by_model: dict[str, list[Work]] = {}
    for work in state.works.values():
        if work.stage is not Stage.HELD:
            by_model.setdefault(work.request.model, []).append(work)
    return [
        _contender(state, engine, by_model[name])
        for name, engine in state.engines.items()
        if name in by_model and engine.takes_work
    ]


def _contender(state: State, engine: Engine, works: list[Work]) -> Contender:
    prompts = [(work.arrived_ms, work.request.request_id) for work in works if not work.started]
    tokens = sum([work.context_tokens for work in works])
    moved_bytes = 2 * state.ledger.pools[engine.spec.name].bytes_for(tokens)
    if engine.state == "asleep":
        moved_bytes += engine.spec.weight_bytes
    step_ms = float(engine.lut.tbt_ms(state.clock_mhz, 100, len(works), tokens / len(works)))
    return Contender(
        model=engine.spec.name,
        prompts=tuple(sorted(prompts)),
        running=len(engine.running),
        decodes=len(works) - len(prompts),
        since_ms=min([work.arrived_ms for work in works]),
        ready=engine.state == "ready" and not engine.parting,
        need_bytes=engine.spec.weight_bytes + max(state.kv_pool_bytes, LEAST_KV_BYTES),
        step_ms=step_ms,
        tbt_ms=min([work.request.objectives.tbt_ms for work in works]),
        switch_ms=moved_bytes / state.device.host_bytes_per_ms + 2 * len(works) * state.device.link_setup_ms,
    )


# ---- out


def _part(state: State, engine: Engine) -> list[Action]:
    """Hold the requests of a model whose turn is over, and have their KV copied to host memory."""
    engine.parting = True
    actions = plans.freeze(state, engine, engine.running)
    for run_id, work in engine.running.items():
        copy = ExportKv(
            model=engine.spec.name,
            request_id=run_id,
            move_id=PARTED + run_id,
            first_block=0,
            blocks=-(-work.context_tokens // state.device.block_tokens),
            stage=PARTED + run_id,
        )
        actions.append(copy)
    return actions


def parted(state: State, now_ms: float, event: KvExported) -> list[Action]:
    """Put a request back into the queue whose KV is in host memory now; it goes on from there."""
    engine = state.engines.get(event.model)
    work = engine.running.get(event.request_id) if engine else None
    if work is None:
        return []
    back_to_queue(state, now_ms, work, min(event.tokens, work.context_tokens - 1))
    if work.prefilled_tokens:
        work.arrival = Arrival(event.move_id, work.prefilled_tokens, move_id=event.move_id)
    if work.started:
        work.due_ms = now_ms + work.request.objectives.ttft_ms
    labels = {"model": event.model}
    return [StopRequest(model=event.model, request_id=event.request_id), Count(name="parted", labels=labels)]


def _put_to_sleep(state: State, missing_bytes: int, spared: Iterable[str]) -> list[Action]:
    """Let models that nobody is to run now make room, the longest unused first."""
    leaving = [pool for name, pool in state.ledger.pools.items() if state.engines[name].to_sleep]
    missing_bytes -= sum(pool.fixed_bytes for pool in leaving)
    idle = [
        engine
        for name, engine in state.engines.items()
        if engine.state == "ready" and not engine.running and name not in spared
    ]
    actions: list[Action] = []
    for engine in sorted(idle, key=lambda engine: engine.used_ms):
        if missing_bytes <= 0:
            break
        missing_bytes -= state.ledger.pools[engine.spec.name].fixed_bytes
        engine.state, engine.to_sleep = "unloading", True
        actions.append(UnloadEngine(model=engine.spec.name))
    return actions


# ---- in


def _bring_in(state: State, now_ms: float) -> list[Action]:
    """Load the models that have the turn, and those that come next; those without make room for the former.

    The next are loaded only if they leave as much for KV as they take.
    """
    if state.clearing:
        return []
    rota, ledger = state.rota, state.ledger
    actions: list[Action] = []
    for name in rota.on:
        engine = state.engines.get(name)
        if engine is None or engine.state != "asleep":
            continue
        missing_bytes = ledger.missing_bytes(name)
        if missing_bytes > 0:
            return [*actions, *_put_to_sleep(state, missing_bytes, rota.on)]
        actions += _load(state, now_ms, engine)
    if state.memory_awaited:
        wanted = max(work.wanted_tokens for work in state.queue.values() if work.passed_over_ms is not None)
        pools = [ledger.pools[name] for name in rota.on if name in ledger.pools]
        most_bytes = max((pool.bytes_for(wanted) for pool in pools), default=0)
        return [*actions, *_put_to_sleep(state, most_bytes - ledger.free_bytes, rota.on)]
    for name in rota.ahead:
        engine = state.engines.get(name)
        if engine is not None and engine.state == "asleep":
            need_bytes = ledger.missing_bytes(name) + engine.spec.weight_bytes
            if need_bytes > 0:
                return [*actions, *_put_to_sleep(state, need_bytes, (*rota.on, *rota.ahead))]
            actions += _load(state, now_ms, engine)
    return actions


def _load(state: State, now_ms: float, engine: Engine) -> list[Action]:
    """Bring a model's weights into the device."""
    state.ledger.wake(engine.spec.name)
    source = state.caches.source(now_ms, state.host, engine.spec)
    if source == "host" and state.settings.switching == "token":
        source = "asleep"
    state.summary_due = True
    return bring_in(state, now_ms, engine, source)
