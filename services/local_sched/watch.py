"""Engines that do not get on: noticed, and ended, so that their requests go on elsewhere.

An engine whose process exits says so itself (`EngineEnded`). One that hangs does not: it is given up when it
is still loading after many times what its table says, when it makes no step for many times what one takes, or
when nothing is heard of it. A scheduler that stood still itself has yet to hear what came meanwhile, so one
that looks stuck has to do so twice.
"""

from services.local_sched.ends import end_engine
from services.local_sched.state import Engine, State
from services.local_sched.work import Work
from shared.events import Action, Count

MOST_TOKENS = 8192
"""Most tokens of prompt in one step, whatever the plan that it began under said."""


def give_up_loading(state: State, now_ms: float) -> list[Action]:
    """End engines that hang while they load, and what waits for them; they have failed once they are gone."""
    actions: list[Action] = []
    for model, engine in state.engines.items():
        if engine.state == "loading" and now_ms >= engine.load_due_ms:
            loading_s = (now_ms - engine.used_ms) / 1000.0
            actions += _give_up(
                state, now_ms, engine, f"{model} was still not loaded after {loading_s:.0f} s"
            )
    return actions


def look(state: State, now_ms: float) -> list[Action]:
    """End engines that have made no step for `stall_ms`, and for `stall_factor` times what one may take."""
    state.looked_ms = now_ms
    actions: list[Action] = []
    for model, engine in state.engines.items():
        if engine.state != "ready":
            continue
        works = runnable(state, engine)
        if not works:
            engine.progress_ms = now_ms
        still_ms = now_ms - engine.progress_ms
        if still_ms <= state.settings.stall_ms or still_ms <= _limit_ms(state, engine, works):
            engine.looks_stuck = False
        elif not engine.looks_stuck:
            engine.looks_stuck = True
        else:
            reason = f"{model} made no step for {still_ms / 1000.0:.1f} s"
            actions += _give_up(state, now_ms, engine, reason)
    return actions


def listen(state: State, now_ms: float, unheard_ms: dict[str, float]) -> list[Action]:
    """End engines of whose processes nothing was heard for `silence_ms`, by this reading and the last."""
    actions: list[Action] = []
    for model, engine in state.engines.items():
        silent_ms = unheard_ms.get(model, 0.0)
        silent = engine.state == "ready" and silent_ms >= state.settings.silence_ms
        if silent and engine.seems_silent:
            reason = f"nothing was heard of the engine of {model} for {silent_ms / 1000.0:.1f} s"
            actions += _give_up(state, now_ms, engine, reason)
        engine.seems_silent = silent
    return actions


def runnable(state: State, engine: Engine) -> list[Work]:
    """Return the requests that the engine could get on with: not held, and not short of memory."""
    if engine.parting:
        return list(engine.running.values())
    held = engine.plan.held if engine.plan else frozenset()
    return [
        work
        for run_id, work in engine.running.items()
        if run_id not in held and run_id not in engine.frozen and run_id not in state.starved
    ]


def _limit_ms(state: State, engine: Engine, works: list[Work]) -> float:
    """Return how long an engine may take until it reports, by its table, and by what its steps have taken.

    The step under way may have begun under an earlier plan, so it is taken to compute as much as it can, and
    to share the device's time with all others. Only asked when an engine has been still for long.
    """
    plan, decodes = engine.plan, [work for work in works if work.decoding]
    share_pct = plan.sm_share_pct if plan else state.device.sm_sizes_pct[-1]
    at = (state.clock_mhz, share_pct)
    tokens = sum(work.prefill_tokens for work in works if not work.decoding)
    step_ms = 0.0
    if decodes:
        mean_tokens = sum(work.context_tokens for work in decodes) / len(decodes)
        step_ms += engine.lut.tbt_ms(*at, len(decodes), mean_tokens)
    if tokens:
        step_ms += engine.lut.ttft_ms(*at, min(tokens, MOST_TOKENS))
    step_ms *= sum(1 for other in state.engines.values() if other.running)
    step_ms = max(step_ms, engine.step_ms, plan.step_interval_ms if plan else 0.0)
    return state.settings.stall_factor * step_ms * state.settings.report_steps


def _give_up(state: State, now_ms: float, engine: Engine, reason: str) -> list[Action]:
    """End an engine that hangs; it has failed once its process is gone."""
    engine.reason = reason
    state.changed()
    given_up = Count(name="engines_given_up", labels={"model": engine.spec.name})
    return [*end_engine(state, now_ms, engine, reason), given_up]
