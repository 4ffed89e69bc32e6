"""Engines of this GPU: loaded and unloaded by order of the consolidator, and what becomes of a dead one.

Load orders are fenced by the placement version they were given under. A dead engine stays in the summary as
failed; the consolidator, which places models, orders it loaded again, with a back-off, or elsewhere.
"""

from services.local_sched.ends import drop_move, fail
from services.local_sched.energy import IDLE, OVERHEAD
from services.local_sched.moves import DESTINATION
from services.local_sched.state import Engine, State
from shared.engine import EngineEnded, EngineReady, LoadEngine, UnloadEngine
from shared.events import Action, Count, Load, Unload
from shared.model import ModelSpec

EMULATED = "emulated"


def load(state: State, now_ms: float, event: Load) -> list[Action]:
    """Start loading a model, unless it is here already; what cannot be loaded is shown as failed."""
    if event.placement_version < state.order_version:
        return []
    state.order_version = event.placement_version
    state.summary_due = True
    engine = state.engines.get(event.model.name)
    if engine is not None and engine.state in ("loading", "ready"):
        return []
    if engine is not None and engine.state == "unloading":
        engine.spec, engine.load_again = event.model, not engine.reason
        return []
    return _load(state, now_ms, event.model)


def _load(state: State, now_ms: float, spec: ModelSpec) -> list[Action]:
    lut, settings = state.lut(spec), state.settings
    limit_ms = max(settings.load_timeout_ms, settings.load_timeout_factor * lut.load_ms())
    engine = Engine(spec=spec, lut=lut, used_ms=now_ms, load_due_ms=now_ms + limit_ms)
    state.engines[spec.name] = engine
    pool_bytes = state.kv_pool_bytes
    if spec.engine != state.engine_kind:
        reason = f"{spec.name} needs a {spec.engine} engine; {state.gpu} runs {state.engine_kind}"
    elif not state.ledger.open(spec, pool_bytes, state.device.block_tokens):
        needed, free = spec.weight_bytes + pool_bytes, state.ledger.free_bytes
        reason = f"weights and KV pool of {spec.name} take {needed} bytes; {state.gpu} has {free} free"
    else:
        _note_rest(state, now_ms)
        return [LoadEngine(model=spec, kv_pool_bytes=pool_bytes)]
    engine.state, engine.reason = "failed", reason
    return [Count(name="loads_failed", labels={"model": spec.name})]


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
    if engine.state == "unloading" or busy(state, event.model) or now_ms - engine.used_ms < event.if_idle_ms:
        return []
    engine.state = "unloading"
    return [UnloadEngine(model=event.model)]


def give_up_loading(state: State, now_ms: float) -> list[Action]:
    """End engines that hang while they load, and what waits for them; they have failed once they are gone."""
    actions: list[Action] = []
    for model, engine in state.engines.items():
        if engine.state != "loading" or now_ms < engine.load_due_ms:
            continue
        loading_s = (now_ms - engine.used_ms) / 1000.0
        engine.state, engine.reason = "unloading", f"{model} was still not loaded after {loading_s:.0f} s"
        works = [work for work in state.works.values() if work.request.model == model]
        actions += [*fail(state, now_ms, works, engine.reason), UnloadEngine(model=model)]
        state.changed()
    return actions


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
    engine.state, engine.used_ms = "ready", now_ms
    _note_rest(state, now_ms)
    state.changed()
    return [Count(name="loads", labels={"model": event.model})]


def ended(state: State, now_ms: float, event: EngineEnded) -> list[Action]:
    """An engine is gone: as ordered, and then perhaps loaded anew, or dead, and its requests end with it."""
    engine = state.engines.get(event.model)
    if engine is None or engine.state == "failed":
        return []
    asked = engine.state == "unloading" and not engine.reason
    works = [work for work in state.works.values() if work.request.model == event.model]
    reason = engine.reason or f"engine died: {event.reason or 'no reason given'}"
    engine.running.clear()  # nothing can be stopped in it any more
    engine.tally = None
    actions = fail(state, now_ms, works, reason)
    for move_id, transfer in list(state.moves.transfers.items()):
        if transfer.model == event.model and transfer.side == DESTINATION and not transfer.committed:
            drop_move(state, move_id)
    state.ledger.close(event.model)
    state.changed()
    if not asked:
        engine.state, engine.reason, engine.plan = "failed", reason, None
        _note_rest(state, now_ms)
        return [*actions, Count(name="engines_lost", labels={"model": event.model})]
    del state.engines[event.model]
    _note_rest(state, now_ms)
    return [*actions, *(_load(state, now_ms, engine.spec) if engine.load_again else [])]


def _note_rest(state: State, now_ms: float) -> None:
    """Tell the energy book what the device draws while no step runs: it depends on what is loaded."""
    here = [engine.state for engine in state.engines.values() if engine.state != "failed"]
    power_w = state.device.context_idle_w if here else state.device.static_w
    state.energy.rests(now_ms, power_w, OVERHEAD if "loading" in here else IDLE)
