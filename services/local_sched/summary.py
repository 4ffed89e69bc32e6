"""What a GPU tells the others about itself (3.3): its summary, made from the state."""

import math
from collections.abc import Collection

from services.local_sched.ledger import staircase
from services.local_sched.state import Engine, State
from services.local_sched.work import Inside, Stage, Work
from shared.events import Action, Put, Send, SummaryChanged
from shared.model import EngineSummary, GpuSummary, Prefills, StairStep, digest
from shared.subjects import gpu_key

MOST_PREFILLS = 8
"""Neighbouring prompts are told of together, so that a summary has no more entries per engine."""


def publish(state: State, now_ms: float) -> list[Action]:
    """Send the summary and put it into the store, where it expires after three heartbeats."""
    state.seq += 1
    state.summary_due, state.summarized_ms = False, now_ms
    summary = summarize(state, now_ms)
    return [
        Send(to=state.gpu, message=SummaryChanged(summary=summary)),
        Put(key=gpu_key(state.gpu), value=summary, ttl_ms=3 * state.settings.heartbeat_ms),
    ]


def summarize(state: State, now_ms: float) -> GpuSummary:
    """Return the GPU's state as others may know it."""
    free_bytes = max(0, state.ledger.free_bytes)
    outside = _outside(state)
    inside = {name: _inside(state, engine) for name, engine in state.engines.items()}
    sizes_pct = state.device.sm_sizes_pct
    elastic = [name for name, pool in state.ledger.pools.items() if not pool.pool_bytes]
    return GpuSummary(
        gpu=state.gpu,
        host=state.host,
        gpu_type=state.device.name,
        engine=state.engine_kind,
        started_ms=state.started_ms,
        seq=state.seq,
        state="draining" if state.draining else state.device_state,
        sm_clock_mhz=state.clock_mhz,
        total_bytes=state.device.total_bytes,
        free_bytes=free_bytes,
        engines=tuple(
            [
                _engine(state, now_ms, engine, inside, outside.get(name, ()))
                for name, engine in state.engines.items()
            ]
        ),
        staircase=_staircase(state, inside, elastic, free_bytes),
        admitted_through=dict(state.admitted_through),
        power_w=state.power_w,
        energy_j=state.energy_j,
        kv_pool_bytes=state.kv_pool_bytes,
        asleep=(*state.asleep, *_waiting_for_room(state)),
        fixed_share_pct=sizes_pct[0] if len(sizes_pct) == 1 else 0,
        switches=state.switches,
    )


def _waiting_for_room(state: State) -> list[str]:
    """Return the models that take turns here and are not in the device now."""
    if not state.switches:
        return []
    return [name for name, e in state.engines.items() if e.takes_work and e.state not in ("ready", "loading")]


def _inside(state: State, engine: Engine) -> Inside:
    """Return what runs in an engine, as last looked at if that, and its pace, have not changed since."""
    tally, pace_ms, known = engine.tally, engine.pace_ms, engine.inside
    if known is not None and tally is not None and known[0] is tally and known[1] == pace_ms:
        return known[2]
    inside = _look_inside(state, engine, pace_ms)
    engine.inside = (tally, pace_ms, inside)
    return inside


def _look_inside(state: State, engine: Engine, pace_ms: float) -> Inside:
    """Look at what runs in an engine: one pass, with little said per request, as in `loads.tally_of`.

    Each request is expected to end after its remaining tokens, at its engine's present pace; before the first
    measured step, by its objectives.
    """
    context_tokens, least_tbt_ms = 0, math.inf
    prefills: list[tuple[float, int]] = []
    ends: list[tuple[float, int, int]] = []
    if engine.running:
        pool = state.ledger.pools[engine.spec.name]
        holders, block_bytes = pool.holders, pool.block_bytes
        for work in engine.running.values():
            expected = work.predicted_output_tokens
            prompt, made, most, tbt_ms = work.terms
            made += len(work.tokens)
            context_tokens += prompt + made
            if tbt_ms < least_tbt_ms:
                least_tbt_ms = tbt_ms
            left = (expected if expected < most else most) - made
            left_ms = (left if left > 1 else 1) * (pace_ms or tbt_ms)
            if work.run_first_ms is None:
                prefills.append((work.due_ms, work.prefill_tokens))
                left_ms += work.prefill_ms
            ends.append((left_ms, holders[work.request.request_id] * block_bytes, 0))
        ends.sort()
    return Inside(context_tokens, least_tbt_ms, prefills, ends)


def _outside(state: State) -> dict[str, list[Work]]:
    """Return by model the requests that are in no engine: waiting, or held for a move."""
    outside: dict[str, list[Work]] = {}
    works: Collection[Work] = state.queue.values()
    inside = sum([len(engine.running) for engine in state.engines.values()])
    if len(works) + inside < len(state.works):
        works = [work for work in state.works.values() if work.stage is not Stage.RUNNING]
    for work in works:
        outside.setdefault(work.request.model, []).append(work)
    return outside


def _engine(
    state: State, now_ms: float, engine: Engine, inside: dict[str, Inside], outside: Collection[Work]
) -> EngineSummary:
    """Summarize an engine; requests held for a move count as queued."""
    model = engine.spec.name
    free_kv_bytes = state.ledger.free_kv_bytes(model)
    pool = state.ledger.pools.get(model)
    context_tokens, tightest_tbt_ms, running, _ = inside[model]
    prefills = [(due_ms - now_ms, tokens) for due_ms, tokens in running]
    waiting: dict[str, int] = {}
    for work in outside:
        request = work.request
        tightest_tbt_ms = min(tightest_tbt_ms, request.objectives.tbt_ms)
        waiting[request.tenant] = waiting.get(request.tenant, 0) + 1
        if work.run_first_ms is None and work.stage is not Stage.HELD:
            prefills.append((work.due_ms - now_ms, work.prefill_tokens))
    idle = not engine.running and not outside and not state.moves.expected(model)
    return EngineSummary(
        model=model,
        state="ready" if state.switches and engine.takes_work else engine.state,
        running=len(engine.running),
        queued=len(outside),
        context_tokens=context_tokens,
        free_kv_bytes=free_kv_bytes,
        sm_share_pct=engine.least_share_pct,
        idle_ms=now_ms - engine.used_ms if idle else 0.0,
        tightest_tbt_ms=tightest_tbt_ms if tightest_tbt_ms < math.inf else 0.0,
        reason=engine.reason,
        queued_of=waiting,
        prefills=_prefills(prefills) if prefills else (),
        staircase=_staircase(state, inside, [model], free_kv_bytes) if pool and pool.pool_bytes else (),
        spec=digest(engine.spec),
    )


def _prefills(left: list[tuple[float, int]]) -> tuple[Prefills, ...]:
    """Return what is to be prefilled here, of (ms until it is due, tokens) each.

    Neighbours are told of together, by the later of their times.
    """
    left.sort()
    size = math.ceil(len(left) / MOST_PREFILLS)
    groups = (left[i : i + size] for i in range(0, len(left), size or 1))
    return tuple(Prefills(group[-1][0], len(group), sum(tokens for _, tokens in group)) for group in groups)


def _staircase(
    state: State, inside: dict[str, Inside], models: Collection[str], free_bytes: int
) -> tuple[StairStep, ...]:
    """Tell when the memory that these models share comes free, of which `free_bytes` are so now.

    An engine's SM share, the least that it needs, is free when its last request ends. Waiting requests take
    the memory that they want before anyone who comes later.
    """
    ends: list[tuple[float, int, int]] = []
    used_pct = 0
    for model, engine in state.engines.items():
        mine = inside[model].ends
        if not mine:
            continue
        share_pct = engine.least_share_pct
        used_pct += share_pct
        last_ms, last_bytes, _ = mine[-1]
        if model in models:
            ends += mine
            ends[-1] = (last_ms, last_bytes, share_pct)
        else:
            ends.append((last_ms, 0, share_pct))
    claimed = sum(
        [claimed_bytes(state, work) for work in state.queue.values() if work.request.model in models]
    )
    return staircase(free_bytes, max(0, 100 - used_pct), ends, claimed)


def claimed_bytes(state: State, work: Work) -> int:
    """Return the memory that a waiting request will take; one that was moved here holds some already.

    One that waits for its turn takes none from those who have it.
    """
    model = work.request.model
    if not state.engines[model].on_turn:
        return 0
    pool = state.ledger.pools[model]
    held = pool.holders.get(work.request.request_id, 0) * pool.block_bytes
    return max(0, pool.bytes_for(min(work.wanted_tokens, state.ledger.most_tokens(model))) - held)


def left_ms(engine: Engine, work: Work) -> float:
    """Return how long a request is expected to run on; before the first measured step, by its objectives."""
    step_ms = engine.pace_ms or work.request.objectives.tbt_ms
    decode_ms = work.remaining_tokens * step_ms
    return decode_ms if work.decoding else work.prefill_ms + decode_ms
