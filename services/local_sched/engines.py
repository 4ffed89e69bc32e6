"""Engines of this GPU: loaded and unloaded by order of the consolidator, and what becomes of a dead one.

Load orders are fenced by the placement version they were given under. A dead engine stays in the summary as
failed; the consolidator, which places models, orders it loaded again, with a back-off, or elsewhere. Where
engines share their fate, the others are ended with it, and loaded again once all are gone.
"""

from services.local_sched import rest
from services.local_sched.ends import drop_move, end_engine, fail_all
from services.local_sched.moves import DESTINATION
from services.local_sched.state import Engine, State
from shared.engine import EngineEnded, EngineReady, LoadEngine, UnloadEngine
from shared.events import Action, Count, HostWeights, Load, Send, Unload, WeightsUsed
from shared.model import ModelSpec


def load(state: State, now_ms: float, event: Load) -> list[Action]:
    """Start loading a model, unless it is here already; what cannot be loaded is shown as failed."""
    if event.placement_version < state.order_version:
        return []
    state.order_version = event.placement_version
    state.summary_due = True
    if state.clearing:
        state.to_load[event.model.name] = event.model
        return []
    engine = state.engines.get(event.model.name)
    if engine is not None and engine.takes_work:
        return []
    if engine is not None and engine.state == "unloading":
        engine.spec, engine.load_again = event.model, not engine.reason
        return []
    return _load(state, now_ms, event.model)


def _load(state: State, now_ms: float, spec: ModelSpec) -> list[Action]:
    engine = state.engines[spec.name] = Engine(spec=spec, lut=state.lut(spec), used_ms=now_ms)
    pool_bytes = state.kv_pool_bytes
    if spec.engine != state.engine_kind:
        reason = f"{spec.name} needs a {spec.engine} engine; {state.gpu} runs {state.engine_kind}"
    elif not state.ledger.open(spec, pool_bytes, state.device.block_tokens):
        needed, free = spec.weight_bytes + pool_bytes, state.ledger.free_bytes
        reason = f"weights and KV pool of {spec.name} take {needed} bytes; {state.gpu} has {free} free"
    elif state.switches:
        # it is brought in when its turn comes; until then the host is to have its weights
        engine.state, engine.on_turn = "asleep", False
        state.changed()
        return [Send(to=state.host, message=WeightsUsed(model=spec))]
    else:
        source = state.caches.source(now_ms, state.host, spec)
        return bring_in(state, now_ms, engine, "asleep" if spec.name in state.asleep else source)
    engine.state, engine.reason = "failed", reason
    return [Count(name="loads_failed", labels={"model": spec.name})]


def bring_in(state: State, now_ms: float, engine: Engine, source: str) -> list[Action]:
    """Load the weights of a model that has its memory in the ledger, from where they are."""
    settings = state.settings
    limit_ms = max(settings.load_timeout_ms, settings.load_timeout_factor * engine.lut.load_ms("disk"))
    engine.state, engine.source = "loading", source
    engine.used_ms, engine.load_due_ms = now_ms, now_ms + limit_ms
    rest.note(state, now_ms)
    return [LoadEngine(model=engine.spec, kv_pool_bytes=state.kv_pool_bytes, source=source)]


def unload(state: State, now_ms: float, event: Unload) -> list[Action]:
    """Unload a model, unless it has work, awaits some, or was used after the order was decided."""
    if event.placement_version < state.order_version:
        return []
    state.order_version = event.placement_version
    state.summary_due = True
    engine = state.engines.get(event.model)
    if engine is None:
        return []
    if engine.state == "failed":
        del state.engines[event.model]
        return []
    engine.load_again = False
    if busy(state, event.model) or now_ms - engine.used_ms < event.if_idle_ms:
        return []
    if engine.state == "asleep":
        del state.engines[event.model]
        state.ledger.close(event.model)
        return []
    ordered, engine.state, engine.to_sleep = engine.state == "unloading", "unloading", False
    return [] if ordered else [UnloadEngine(model=event.model)]


def hear_weights(state: State, now_ms: float, event: HostWeights) -> list[Action]:
    """Note whose weights a host has in memory: a load begins from there."""
    if event.host == state.host:
        state.caches.hear(now_ms, event)
    return []


def busy(state: State, model: str) -> bool:
    """Say whether a request of a model runs, waits, or may arrive here by a move."""
    here = any(work.request.model == model for work in state.works.values())
    return here or state.moves.expected(model)


def ready(state: State, now_ms: float, event: EngineReady) -> list[Action]:
    """A model is loaded: what waits for it may start. A fixed pool has the size that the engine says."""
    engine = state.engines.get(event.model)
    if engine is None or engine.state != "loading":
        return []  # an order to unload it is on its way
    elastic = state.elastic_kv and not state.settings.kv_pool_bytes
    state.ledger.resize(event.model, 0 if elastic else event.kv_pool_bytes, event.block_tokens)
    engine.state, engine.used_ms, engine.progress_ms = "ready", now_ms, now_ms
    rest.note(state, now_ms)
    state.changed()
    return [
        Send(to=state.host, message=WeightsUsed(model=engine.spec)),
        Count(name="loads", labels={"model": event.model, "source": engine.source}),
    ]


def ended(state: State, now_ms: float, event: EngineEnded) -> list[Action]:
    """An engine is gone: as ordered, and then perhaps loaded anew, or dead, and its requests end with it."""
    engine = state.engines.get(event.model)
    if engine is None or engine.state == "failed":
        return []
    asked = engine.state == "unloading" and not engine.reason
    if asked and engine.to_sleep:
        return _asleep(state, now_ms, engine)
    engine.to_sleep = engine.parting = False
    reason = engine.reason or f"engine died: {event.reason or 'no reason given'}"
    engine.running.clear()  # nothing can be stopped in it any more
    engine.tally = None
    actions = fail_all(state, now_ms, event.model, reason)
    for move_id, transfer in list(state.moves.transfers.items()):
        if transfer.model == event.model and transfer.side == DESTINATION and not transfer.committed:
            drop_move(state, move_id)
    state.ledger.close(event.model)
    state.changed()
    if asked:
        del state.engines[event.model]
        if engine.load_again:
            state.to_load[event.model] = engine.spec
    else:
        engine.state, engine.reason, engine.plan = "failed", reason, None
        actions.append(Count(name="engines_lost", labels={"model": event.model}))
        if state.settings.shared_fate and not state.clearing:
            actions += _end_others(state, now_ms, event.model)
    rest.note(state, now_ms)
    return [*actions, *_load_again(state, now_ms)]


def _asleep(state: State, now_ms: float, engine: Engine) -> list[Action]:
    """A model has left the device for others, and waits for its next turn."""
    engine.state, engine.to_sleep, engine.plan = "asleep", False, None
    engine.leaving.clear()
    state.ledger.sleep(engine.spec.name)
    rest.note(state, now_ms)
    state.changed()
    return _load_again(state, now_ms)


def _end_others(state: State, now_ms: float, dead: str) -> list[Action]:
    """End all engines that a dead one takes with it: MPS takes no new client before all old ones are gone."""
    state.clearing = True
    reason = f"the engine of {dead} died, and takes all others of {state.gpu} with it"
    actions: list[Action] = []
    for engine in state.engines.values():
        if engine.state in ("loading", "ready"):
            engine.load_again = True
            actions += end_engine(state, now_ms, engine, reason)
    return actions


def _load_again(state: State, now_ms: float) -> list[Action]:
    """Load what waited for engines to be gone; while a GPU is being cleared, for all of them."""
    if state.clearing and any(engine.state == "unloading" for engine in state.engines.values()):
        return []
    specs, state.to_load, state.clearing = list(state.to_load.values()), {}, False
    return [order for spec in specs for order in _load(state, now_ms, spec)]
