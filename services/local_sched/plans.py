"""From the work on the GPU to a clock and a standing plan per engine (3.4).

A decision is made when the set of work changes, and now and then while work runs; what it orders stands until
the next. The batch of Fig. 8 is whatever the engines hold: all of it is allowed to run, except where no clock
meets every deadline; then prefills that do not fit beside the more urgent ones are held back.
"""

from collections.abc import Iterable, Sequence

from services.local_sched import batch, tune
from services.local_sched.admission import score_of, since_ms
from services.local_sched.governed import governed
from services.local_sched.grid import Load, Profile, grid_of
from services.local_sched.loads import load_of, slack_ms
from services.local_sched.pacing import pace_parts
from services.local_sched.points import Point, clocks_of, points_of
from services.local_sched.state import Decision, Engine, State
from shared.engine import SetClock, SetPlan
from shared.events import Action, Count
from shared.model import Plan
from shared.slo import objectives_for

STRICTEST = objectives_for(0)
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
    choose = _decision if state.settings.clock == "sweep" else governed
    decision = state.decision = choose(state, now_ms, engines, clocks_of(state, now_ms, engines[0].lut))
    loads, points = decision.loads, points_of(state.device, decision)
    turns = [_turns(state, now_ms, engine, loads[i], points[i]) for i, engine in enumerate(engines)]
    held: frozenset[str] = frozenset()
    if decision.chosen is None and not decision.memory_awaited:
        held = _held(state, now_ms, engines, loads, turns, points[0].sm_clock_mhz)
    actions = _set_clock(state, now_ms, points[0].sm_clock_mhz)
    for i, engine in enumerate(engines):
        load, point, tasks = loads[i], points[i], turns[i]
        if point.least_share_pct != engine.least_share_pct:
            engine.least_share_pct, state.summary_due = point.least_share_pct, True
        actions += _set_plan(
            state,
            engine,
            held.intersection(engine.running) | engine.frozen if held else engine.frozen,
            _order(engine, tasks),
            _chunk_tokens(state, engine, load, point, tasks),
            point.sm_share_pct,
            load.step_interval_ms if decision.chosen is not None else 0.0,
        )
    return actions


# ---- clock and shares


def _decision(
    state: State, now_ms: float, engines: Sequence[Engine], clocks_mhz: tuple[int, ...]
) -> Decision:
    """Sweep the clocks for the least energy, unless a request waits for memory: then the highest is right.

    Where there is the same to do as at the last decision, in rounded numbers, so is what was found then.
    """
    settings, last = state.settings, state.decision
    models = tuple([engine.spec.name for engine in engines])
    budget_pct, memory_short = _budget_pct(state, engines), _memory_is_short(state)
    awaited = settings.memory_pressure and state.memory_awaited
    hurries = memory_short or state.room_short
    paced = settings.pacing == "slack" and state.device.has_meter and not hurries
    parts = pace_parts(state, engines) if paced else [0.0] * len(engines)
    loads = [load_of(state, now_ms, engine, part) for engine, part in zip(engines, parts, strict=True)]
    asked = (models, clocks_mhz, loads, budget_pct, memory_short, awaited)
    if last is not None and last[: len(asked)] == asked:
        profiles, found = last.profiles, last.found
    else:
        profiles = _profiles(last, models, clocks_mhz, loads)
        found = []
        if not awaited:
            found = tune.sweep(
                state.device,
                profiles,
                len(clocks_mhz),
                budget_pct,
                wide=memory_short,
                widening=settings.widening,
            )
    current_mhz = _in_force_mhz(state)
    current = clocks_mhz.index(current_mhz) if current_mhz in clocks_mhz else None
    chosen = tune.choose(
        tune.finalists(found, clocks_mhz, current),
        budget_pct=budget_pct,
        current_mhz=current_mhz,
        may_switch=now_ms - state.switched_ms >= settings.clock_dwell_ms,
        min_gain=settings.clock_min_gain,
    )
    return Decision(*asked, profiles, found, chosen)


def _profiles(
    last: Decision | None, models: tuple[str, ...], clocks_mhz: tuple[int, ...], loads: Sequence[Load]
) -> list[Profile]:
    """Return what the loads take: with the same to do as at the last decision, what was found then."""
    if last is None or last.models != models or last.clocks_mhz != clocks_mhz:
        return [grid_of(load.lut, clocks_mhz).profile(load) for load in loads]
    profiles = []
    for i, load in enumerate(loads):
        then, profile = last.loads[i], last.profiles[i]
        if load != then:
            grid = profile.grid if load.lut is then.lut else grid_of(load.lut, clocks_mhz)
            profile = grid.profile(load)
        profiles.append(profile)
    return profiles


def _budget_pct(state: State, engines: Sequence[Engine]) -> int:
    """Return the SM shares that may be given in all; a device that is not partitioned is shared by time."""
    sizes = state.device.sm_sizes_pct
    return 100 if len(sizes) > 1 else sizes[0] * len(engines)


def _memory_is_short(state: State) -> bool:
    """Say whether KV memory is so short that requests had better leave it soon (docs/decisions.md, 21)."""
    if not state.settings.memory_pressure:
        return False
    free_bytes, most_bytes = state.ledger.kv_bytes
    return free_bytes < state.settings.short_memory * most_bytes


# ---- turns and chunks


def _turns(state: State, now_ms: float, engine: Engine, load: Load, point: Point) -> list[batch.Task]:
    """Return the prefills of an engine in the order of their turns."""
    works = engine.tally.prefills if engine.tally else []
    if not works:
        return []
    # Decode steps take their part of the time.
    rate = point.compute * max(LEAST_RATE, 1.0 - point.step_ms / load.decode_budget_ms)
    tasks = []
    for work in works:
        # Eq. 4 weighs whole prompts, or one that is half done would lose its turn to one like it.
        whole_ms = point.prefill_ms(work.request.context_tokens) / rate
        tasks.append(
            batch.Task(
                work.run_id,
                score_of(state, now_ms, work, whole_ms),
                tenant=work.request.tenant,
                late=work.due_ms <= now_ms and not work.urgent,
                latency_ms=point.prefill_ms(work.prefill_tokens) / rate,
                slack_ms=work.due_ms - now_ms,
                since_ms=since_ms(work),
            )
        )
    if len(tasks) == 1:
        return tasks
    if state.settings.turns == "score":
        return batch.fair_order(tasks, state.served)
    return batch.prefill_order(tasks, state.served, 2.0 * _chunk_ms(state, engine))


def _order(engine: Engine, turns: Sequence[batch.Task]) -> tuple[str, ...]:
    """Return the order for the plan: the one in force, if by it the prefills come in these turns already."""
    in_force = engine.plan.order if engine.plan else ()
    if len(turns) < 2:
        return in_force
    wanted = [task.key for task in turns]
    place = {run_id: i for i, run_id in enumerate(in_force)}
    by_arrival = (work.run_id for work in engine.tally.prefills) if engine.tally else ()
    if sorted(by_arrival, key=lambda run_id: place.get(run_id, len(place))) == wanted:
        return in_force
    return tuple(wanted)


def _chunk_tokens(state: State, engine: Engine, load: Load, point: Point, turns: Sequence[batch.Task]) -> int:
    """Return the largest chunk of prefill with which decodes keep their TBT and prefills their TTFT.

    The first prefill ends with the chunk that it is in, whatever else that computes; one that comes during
    a chunk waits for its end.
    """
    if state.settings.fixed_chunk_tokens:
        return state.settings.fixed_chunk_tokens
    room_ms = _chunk_ms(state, engine)
    if load.decodes:
        room_ms = min(room_ms, load.decode_budget_ms - point.step_ms)
    if turns and turns[0].latency_ms <= turns[0].slack_ms:
        room_ms = min(room_ms, turns[0].slack_ms)
    return point.chunk_tokens(room_ms)


def _chunk_ms(state: State, engine: Engine) -> float:
    """Return how long a chunk may take; so much later than its time may a turn come, and again, end."""
    objectives = engine.spec.objectives or STRICTEST
    return state.settings.chunk_part * objectives.ttft_ms


def _held(
    state: State,
    now_ms: float,
    engines: Sequence[Engine],
    loads: Sequence[Load],
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
            left_ms = (1.0 - state.settings.slack_headroom) * slack_ms(now_ms, work)
            share_pct = load.lut.least_prefill_share_pct(clock_mhz, work.prefill_tokens, left_ms) or 100
            task.sm_share_pct = share_pct
            found.append((turn, -task.score, task.key, task))
    tasks_in_turn = [task for *_, task in sorted(found)]
    _, bypassed = batch.fill(tasks_in_turn, 0, max(0, left_pct))
    return frozenset(task.key for task in bypassed)


# ---- orders


def freeze(state: State, engine: Engine, run_ids: Iterable[str]) -> list[Action]:
    """Hold runs that are to move, or have lost their turn, at once, and in every plan from now on."""
    engine.frozen |= frozenset(run_ids)
    now = engine.plan or Plan(plan_id=0)
    return _set_plan(
        state,
        engine,
        now.held | engine.frozen,
        now.order,
        now.chunk_tokens,
        now.sm_share_pct,
        now.step_interval_ms,
    )


def _in_force_mhz(state: State) -> int:
    return state.clock_mhz if state.asked_mhz is None else state.asked_mhz


def _set_clock(state: State, now_ms: float, clock_mhz: int) -> list[Action]:
    if clock_mhz == _in_force_mhz(state) or state.clock_refused:
        return []  # what is refused is asked again by whoever drives the device
    state.asked_mhz, state.switched_ms = clock_mhz, now_ms
    return [SetClock(sm_clock_mhz=clock_mhz), Count(name="clock_switches")]


def _set_plan(
    state: State,
    engine: Engine,
    held: frozenset[str],
    order: tuple[str, ...],
    chunk_tokens: int,
    sm_share_pct: int,
    step_interval_ms: float,
) -> list[Action]:
    """Order a plan, under an id of its own, unless the one in force says the same, as most do."""
    plan = engine.plan
    if (
        plan is not None
        and chunk_tokens == plan.chunk_tokens
        and sm_share_pct == plan.sm_share_pct
        and step_interval_ms == plan.step_interval_ms
        and order == plan.order
        and held == plan.held
    ):
        return []
    engine.plan = Plan(state.next_plan_id, held, order, chunk_tokens, sm_share_pct, step_interval_ms)
    state.next_plan_id += 1
    return [SetPlan(model=engine.spec.name, plan=engine.plan)]
