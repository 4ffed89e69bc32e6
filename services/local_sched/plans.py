"""From the work on the GPU to a clock and a standing plan per engine (3.4).

A decision is made when the set of work changes, and now and then while work runs; what it orders stands until
the next. The batch of Fig. 8 is whatever the engines hold: all of it is allowed to run, except where no clock
meets every deadline; then prefills that do not fit beside the more urgent ones are held back.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from services.local_sched import batch, tune
from services.local_sched.admission import task_of
from services.local_sched.state import Engine, State, Work
from shared.engine import SetClock, SetPlan
from shared.events import Action, Count
from shared.model import Plan
from shared.slo import objectives_for

CHUNK_TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LEAST_RATE = 0.1
"""Part of its time that an engine is taken to have for prefills at least, however many decodes it has."""


def decision_due_ms(state: State) -> float | None:
    """Return when the next decision is due; None while nothing runs and nothing has changed."""
    if state.work_changed:
        return state.decided_ms + state.settings.decision_interval_ms
    if any(engine.running for engine in state.engines.values()):
        return state.decided_ms + state.settings.replan_ms
    return None


def decide(state: State, now_ms: float) -> list[Action]:
    """Choose clock, shares, chunks, turns and what is held, and order what differs from before."""
    state.work_changed, state.decided_ms = False, now_ms
    engines = [engine for engine in state.engines.values() if engine.running]
    if not engines:
        return []
    device, clocks_mhz = state.device, _clocks(state, engines[0])
    loads = [load_of(state, now_ms, engine) for engine in engines]
    profiles = [tune.profile(device, load, clocks_mhz) for load in loads]
    starved = any(work.passed_over_ms is not None for work in state.queue.values())
    found = None if starved else _choose(state, now_ms, engines, profiles, clocks_mhz)
    chosen = found or tune.fallback(device, profiles, clocks_mhz)
    shares_pct = tuple(share or device.sm_sizes_pct[-1] for share in chosen.shares_pct)
    least_pct = tune.least_shares(device, profiles, clocks_mhz.index(chosen.sm_clock_mhz))
    scales = tune.scales(device, shares_pct)
    at = zip(loads, shares_pct, strict=True)
    points = [_point(load, chosen.sm_clock_mhz, share_pct, *scales) for load, share_pct in at]
    turns = [_turns(state, now_ms, *each) for each in zip(engines, loads, points, strict=True)]
    held: frozenset[str] = frozenset()
    if found is None and not starved:
        held = _held(state, now_ms, engines, loads, turns, chosen.sm_clock_mhz)
    actions = _set_clock(state, now_ms, chosen.sm_clock_mhz)
    for engine, load, point, tasks, least in zip(engines, loads, points, turns, least_pct, strict=True):
        _need(state, engine, least or point.sm_share_pct)
        plan = Plan(
            plan_id=state.next_plan_id,
            held=held & engine.running.keys(),
            order=_order(engine, tasks),
            chunk_tokens=_chunk_tokens(state, engine, load, point, tasks),
            sm_share_pct=point.sm_share_pct,
        )
        actions += _set_plan(state, engine, plan)
    return actions


class Point(NamedTuple):
    """Where an engine runs: `decode_ms` is its decode step there, `compute` what contention leaves of it."""

    sm_clock_mhz: int
    sm_share_pct: int
    decode_ms: float
    compute: float


def _point(load: tune.Load, sm_clock_mhz: int, sm_share_pct: int, bandwidth: float, compute: float) -> Point:
    decode_ms = 0.0
    if load.decodes:
        at = (sm_clock_mhz, sm_share_pct, load.decodes, load.mean_context_tokens)
        decode_ms = float(load.lut.tbt_ms(*at)) / bandwidth
    return Point(sm_clock_mhz, sm_share_pct, decode_ms, compute)


def _turns(state: State, now_ms: float, engine: Engine, load: tune.Load, point: Point) -> list[batch.Task]:
    """Return the prefills of an engine in the order of their turns."""
    works = [work for work in engine.running.values() if not work.decoding]
    if not works:
        return []
    # Decode steps take their part of the time.
    rate = point.compute * max(LEAST_RATE, 1.0 - point.decode_ms / load.decode_budget_ms)
    # Eq. 4 weighs whole prompts, or one that is half done would lose its turn to one like it.
    tokens = [(work.request.context_tokens, work.prefill_tokens) for work in works]
    alone_ms = load.lut.ttft_ms(point.sm_clock_mhz, point.sm_share_pct, np.asarray(tokens)) / rate
    tasks = [
        task_of(state, now_ms, work, whole_ms)._replace(
            key=work.run_id,
            cost=0.0,  # it counts already: the request was started
            latency_ms=left_ms,
            slack_ms=work.due_ms - now_ms,
        )
        for work, (whole_ms, left_ms) in zip(works, alone_ms.tolist(), strict=True)
    ]
    return batch.prefill_order(tasks, state.served, 2.0 * _chunk_ms(state, engine))


def _order(engine: Engine, turns: Sequence[batch.Task]) -> tuple[str, ...]:
    """Return the order for the plan: the one in force, if by it the prefills come in these turns already."""
    wanted = [task.key for task in turns]
    in_force = engine.plan.order if engine.plan else ()
    place = {run_id: i for i, run_id in enumerate(in_force)}
    by_arrival = (run_id for run_id, work in engine.running.items() if not work.decoding)
    if sorted(by_arrival, key=lambda run_id: place.get(run_id, len(place))) == wanted:
        return in_force
    return tuple(wanted)


def _chunk_tokens(
    state: State, engine: Engine, load: tune.Load, point: Point, turns: Sequence[batch.Task]
) -> int:
    """Return the largest chunk of prefill with which decodes keep their TBT and prefills their TTFT.

    The first prefill ends with the chunk that it is in, whatever else that computes; one that comes during
    a chunk waits for its end.
    """
    room_ms = _chunk_ms(state, engine)
    if load.decodes:
        room_ms = min(room_ms, load.decode_budget_ms - point.decode_ms)
    if turns and turns[0].latency_ms <= turns[0].slack_ms:
        room_ms = min(room_ms, turns[0].slack_ms)
    at = (point.sm_clock_mhz, point.sm_share_pct)
    return tune.largest_chunk(load.lut, *at, room_ms, point.compute, CHUNK_TOKENS)


def _chunk_ms(state: State, engine: Engine) -> float:
    """Return how long a chunk may take; so much later than its time may a turn come, and again, end."""
    objectives = engine.spec.objectives or objectives_for(0)
    return state.settings.chunk_part * objectives.ttft_ms


def _need(state: State, engine: Engine, least_share_pct: int) -> None:
    """Note the least share that meets an engine's deadlines: what others may not count on."""
    state.summary_due = state.summary_due or least_share_pct != engine.least_share_pct
    engine.least_share_pct = least_share_pct


def load_of(state: State, now_ms: float, engine: Engine) -> tune.Load:
    """Sum up what an engine has to do, and by when.

    A late prefill is best-effort: it gets one more TTFT, from now, so that a request which lost its deadline
    while its model loaded does not drive the clock up alone, and an overload still does.
    """
    settings = state.settings
    decodes = [work for work in engine.running.values() if work.decoding]
    waiting = [work for work in engine.running.values() if not work.decoding]
    prefills = [(work.prefill_tokens, _slack_ms(state, now_ms, work)) for work in waiting]
    prefills.sort(key=lambda prefill: prefill[1])
    return tune.Load(
        lut=engine.lut,
        decodes=len(decodes),
        mean_context_tokens=sum(w.context_tokens for w in decodes) / max(1, len(decodes)),
        decode_budget_ms=min((w.step_budget_ms(settings.slack_headroom) for w in decodes), default=math.inf),
        decode_steps=sum(w.remaining_tokens for w in decodes) / max(1, len(decodes)),
        prefills=tuple(prefills[: settings.considered_prefills]),
    )


def _slack_ms(state: State, now_ms: float, work: Work) -> float:
    left_ms = work.due_ms - now_ms
    if left_ms <= 0:
        left_ms = work.request.objectives.ttft_ms
    return left_ms * (1.0 - state.settings.slack_headroom)


def _clocks(state: State, engine: Engine) -> list[int]:
    """Return the clocks of the sweep, ascending up to F_max: the table's grid, or the one that is pinned."""
    if state.settings.fixed_clock_mhz is not None:
        return [state.settings.fixed_clock_mhz]
    return [int(clock) for clock in engine.lut.clocks_mhz]


def _choose(
    state: State,
    now_ms: float,
    engines: Sequence[Engine],
    profiles: Sequence[tune.Profile],
    clocks_mhz: Sequence[int],
) -> tune.Candidate | None:
    """Return the clock and shares of least energy that meet every deadline; None if none do."""
    found = tune.candidates(state.device, profiles, clocks_mhz)
    if _memory_is_short(state):
        found = tune.widest(found)
    return tune.choose(
        found,
        budget_pct=_budget_pct(state, engines),
        current_mhz=_in_force_mhz(state),
        may_switch=now_ms - state.switched_ms >= state.settings.clock_dwell_ms,
        min_gain=state.settings.clock_min_gain,
    )


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
    state: State,
    now_ms: float,
    engines: Sequence[Engine],
    loads: Sequence[tune.Load],
    turns: Sequence[Sequence[batch.Task]],
    clock_mhz: int,
) -> frozenset[str]:
    """Return the prefills that the batcher passes over: their SMs do not fit beside the more urgent (Fig. 8).

    Each prefill wants the least share that meets its own deadline; decodes keep theirs and are never held.
    """
    if len(state.device.sm_sizes_pct) == 1:
        return frozenset()
    left_pct = 100
    found = []
    for engine, load, tasks in zip(engines, loads, turns, strict=True):
        if load.decodes:
            at = (clock_mhz, load.decodes, load.mean_context_tokens, load.decode_budget_ms)
            left_pct -= load.lut.least_decode_share_pct(*at) or 100
        for turn, task in enumerate(tasks):
            work = engine.running[task.key]
            slack_ms = _slack_ms(state, now_ms, work)
            share_pct = load.lut.least_prefill_share_pct(clock_mhz, work.prefill_tokens, slack_ms) or 100
            found.append((turn, -task.score, task._replace(sm_share_pct=share_pct)))
    tasks_in_turn = [task for *_, task in sorted(found)]
    _, bypassed = batch.fill(tasks_in_turn, 0, max(0, left_pct))
    return frozenset(task.key for task in bypassed)


def _in_force_mhz(state: State) -> int:
    return state.clock_mhz if state.asked_mhz is None else state.asked_mhz


def _set_clock(state: State, now_ms: float, clock_mhz: int) -> list[Action]:
    if clock_mhz == _in_force_mhz(state):
        return []
    state.asked_mhz, state.switched_ms = clock_mhz, now_ms
    return [SetClock(sm_clock_mhz=clock_mhz), Count(name="clock_switches")]


def _set_plan(state: State, engine: Engine, plan: Plan) -> list[Action]:
    old = engine.plan
    if old is not None and old == msgspec.structs.replace(plan, plan_id=old.plan_id):
        return []
    engine.plan = plan
    state.next_plan_id += 1
    return [SetPlan(model=engine.spec.name, plan=plan)]
