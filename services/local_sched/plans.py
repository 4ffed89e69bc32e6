"""From the work on the GPU to a clock and a standing plan per engine (3.4).

A decision is made when the set of work changes, and now and then while work runs; what it orders stands until
the next. The batch of Fig. 8 is whatever the engines hold: all of it is allowed to run, except where no clock
meets every deadline; then prefills that do not fit beside the more urgent ones are held back.
"""

import math
from collections.abc import Sequence

import msgspec

from services.local_sched import batch, tune
from services.local_sched.admission import score_of
from services.local_sched.state import Engine, State, Work
from shared.engine import SetClock, SetPlan
from shared.events import Action, Count
from shared.model import Plan

CHUNK_TOKENS = (256, 512, 1024, 2048, 4096, 8192)


def decision_due_ms(state: State) -> float | None:
    """Return when the next decision is due; None while nothing runs and nothing has changed."""
    if state.work_changed:
        return state.decided_ms + state.settings.decision_interval_ms
    if any(engine.running for engine in state.engines.values()):
        return state.decided_ms + state.settings.replan_ms
    return None


def decide(state: State, now_ms: float) -> list[Action]:
    """Choose clock, shares, chunks and what is held, and order what differs from before."""
    state.work_changed, state.decided_ms = False, now_ms
    engines = [engine for engine in state.engines.values() if engine.running]
    if not engines:
        return []
    device, settings = state.device, state.settings
    clocks_mhz = _clocks(state, engines[0])
    loads = [load_of(state, now_ms, engine) for engine in engines]
    profiles = [tune.profile(device, load, clocks_mhz) for load in loads]
    starved = any(work.passed_over_ms is not None for work in state.queue.values())
    chosen = None
    if not starved:
        found = tune.candidates(device, profiles, clocks_mhz)
        if _memory_is_short(state):
            found = tune.widest(found)
        chosen = tune.choose(
            found,
            budget_pct=_budget_pct(state, engines),
            current_mhz=_in_force_mhz(state),
            may_switch=now_ms - state.switched_ms >= settings.clock_dwell_ms,
            min_gain=settings.clock_min_gain,
        )
    held: frozenset[str] = frozenset()
    if chosen is None:
        chosen = tune.fallback(device, profiles, clocks_mhz)
        if not starved:
            held = _held(state, now_ms, engines, loads, chosen.sm_clock_mhz)
    shares_pct = [share or device.sm_sizes_pct[-1] for share in chosen.shares_pct]
    bandwidth, compute = tune.scales(device, shares_pct)
    actions = _set_clock(state, now_ms, chosen.sm_clock_mhz)
    for engine, load, share_pct in zip(engines, loads, shares_pct, strict=True):
        chunk_tokens = CHUNK_TOKENS[-1]
        if load.decodes:
            step_ms = load.lut.tbt_ms(chosen.sm_clock_mhz, share_pct, load.decodes, load.mean_context_tokens)
            room_ms = load.decode_budget_ms - float(step_ms) / bandwidth
            chunk_tokens = tune.largest_chunk(
                load.lut, chosen.sm_clock_mhz, share_pct, room_ms, compute, CHUNK_TOKENS
            )
        actions += _set_plan(state, engine, held & engine.running.keys(), chunk_tokens, share_pct)
    return actions


def load_of(state: State, now_ms: float, engine: Engine) -> tune.Load:
    """Sum up what an engine has to do, and by when.

    A late prefill is best-effort: it gets one more TTFT, from now, so that a request which lost its deadline
    while its model loaded does not drive the clock up alone, and an overload still does.
    """
    settings = state.settings
    decodes = [work for work in engine.running.values() if work.decoding]
    waiting = [work for work in engine.running.values() if not work.decoding]
    prefills = [(_tokens_left(work), _slack_ms(state, now_ms, work)) for work in waiting]
    prefills.sort(key=lambda prefill: prefill[1])
    return tune.Load(
        lut=engine.lut,
        decodes=len(decodes),
        mean_context_tokens=sum(w.context_tokens for w in decodes) / max(1, len(decodes)),
        decode_budget_ms=min((w.step_budget_ms(settings.slack_headroom) for w in decodes), default=math.inf),
        decode_steps=sum(w.remaining_tokens for w in decodes) / max(1, len(decodes)),
        prefills=tuple(prefills[: settings.considered_prefills]),
    )


def _tokens_left(work: Work) -> int:
    return max(1, work.request.context_tokens - work.prefilled_tokens)


def _slack_ms(state: State, now_ms: float, work: Work) -> float:
    left_ms = work.due_ms - now_ms
    if left_ms <= 0:
        left_ms = work.request.objectives.ttft_ms
    return left_ms * (1.0 - state.settings.slack_headroom)


def _clocks(state: State, engine: Engine) -> Sequence[int]:
    """Return the clocks of the sweep, ascending up to F_max: the table's grid, or the one that is pinned."""
    if state.settings.fixed_clock_mhz is not None:
        return (state.settings.fixed_clock_mhz,)
    return [int(clock) for clock in engine.lut.clocks_mhz]


def _budget_pct(state: State, engines: Sequence[Engine]) -> int:
    """Return the SM shares that may be given in all; a device that is not partitioned is shared by time."""
    sizes = state.device.sm_sizes_pct
    return 100 if len(sizes) > 1 else sizes[0] * len(engines)


def _memory_is_short(state: State) -> bool:
    """Say whether KV memory is so short that requests had better leave it soon (docs/decisions.md, 21)."""
    ledger = state.ledger
    most = sum(ledger.most_kv_bytes(domain[0]) for domain in ledger.domains())
    free = sum(ledger.free_kv_bytes(domain[0]) for domain in ledger.domains())
    return free < state.settings.ample_memory * most


def _held(
    state: State, now_ms: float, engines: Sequence[Engine], loads: Sequence[tune.Load], clock_mhz: int
) -> frozenset[str]:
    """Return the prefills that the batcher passes over: their SMs do not fit beside the more urgent (Fig. 8).

    Each prefill wants the least share that meets its own deadline; decodes keep theirs and are never held.
    """
    if len(state.device.sm_sizes_pct) == 1:
        return frozenset()
    left_pct = 100
    tasks = []
    for engine, load in zip(engines, loads, strict=True):
        if load.decodes:
            at = (clock_mhz, load.decodes, load.mean_context_tokens, load.decode_budget_ms)
            left_pct -= load.lut.least_decode_share_pct(*at) or 100
        prefills = [work for work in engine.running.values() if not work.decoding]
        for work in prefills:
            slack_ms = _slack_ms(state, now_ms, work)
            share_pct = load.lut.least_prefill_share_pct(clock_mhz, _tokens_left(work), slack_ms) or 100
            score = score_of(state, now_ms, work)
            tasks.append(batch.Task(work.run_id, score, 0, share_pct))
    _, bypassed = batch.fill(tasks, 0, max(0, left_pct))
    return frozenset(task.key for task in bypassed)


def _in_force_mhz(state: State) -> int:
    return state.clock_mhz if state.asked_mhz is None else state.asked_mhz


def _set_clock(state: State, now_ms: float, clock_mhz: int) -> list[Action]:
    if clock_mhz == _in_force_mhz(state):
        return []
    state.asked_mhz, state.switched_ms = clock_mhz, now_ms
    return [SetClock(sm_clock_mhz=clock_mhz), Count(name="clock_switches")]


def _set_plan(
    state: State, engine: Engine, held: frozenset[str], chunk_tokens: int, share_pct: int
) -> list[Action]:
    old = engine.plan
    plan = Plan(plan_id=state.next_plan_id, held=held, chunk_tokens=chunk_tokens, sm_share_pct=share_pct)
    if old is not None and old == msgspec.structs.replace(plan, plan_id=old.plan_id):
        return []
    state.summary_due = state.summary_due or old is None or old.sm_share_pct != share_pct
    engine.plan = plan
    state.next_plan_id += 1
    return [SetPlan(model=engine.spec.name, plan=plan)]
