"""What a GPU tells the others about itself (3.3): its summary, made from the state."""

import math
from collections import Counter
from collections.abc import Collection

from services.local_sched.ledger import staircase
from services.local_sched.state import Engine, Stage, State, Work
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
        free_bytes=max(0, state.ledger.free_bytes),
        engines=_engines(state, now_ms),
        staircase=_staircase(state, elastic, max(0, state.ledger.free_bytes)),
        admitted_through=dict(state.admitted_through),
        power_w=state.power_w,
        energy_j=state.energy_j,
        kv_pool_bytes=state.kv_pool_bytes,
    )


def _engines(state: State, now_ms: float) -> tuple[EngineSummary, ...]:
    """Summarize each engine; requests held for a move count as queued."""
    works: dict[str, list[Work]] = {name: [] for name in state.engines}
    for work in state.works.values():
        works[work.request.model].append(work)
    return tuple(_engine(state, now_ms, engine, works[name]) for name, engine in state.engines.items())


def _engine(state: State, now_ms: float, engine: Engine, works: list[Work]) -> EngineSummary:
    model = engine.spec.name
    free_kv_bytes = state.ledger.free_kv_bytes(model)
    pool = state.ledger.pools.get(model)
    context_tokens, tightest_tbt_ms = 0, math.inf
    waiting: Counter[str] = Counter()
    prefills: list[tuple[float, int]] = []
    for work in works:  # as often as there are requests here, in every summary
        request = work.request
        tightest_tbt_ms = min(tightest_tbt_ms, request.objectives.tbt_ms)
        if work.stage is Stage.RUNNING:
            context_tokens += work.context_tokens
        else:
            waiting[request.tenant] += 1
        if work.run_first_ms is None and work.stage is not Stage.HELD:
            prefills.append((work.due_ms - now_ms, work.prefill_tokens))
    return EngineSummary(
        model=model,
        state=engine.state,
        running=len(engine.running),
        queued=waiting.total(),
        context_tokens=context_tokens,
        free_kv_bytes=free_kv_bytes,
        sm_share_pct=engine.least_share_pct,
        idle_ms=0.0 if works or state.moves.expected(model) else now_ms - engine.used_ms,
        tightest_tbt_ms=tightest_tbt_ms if works else 0.0,
        reason=engine.reason,
        queued_of=dict(waiting),
        prefills=_prefills(prefills),
        staircase=_staircase(state, [model], free_kv_bytes) if pool and pool.pool_bytes else (),
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


def _staircase(state: State, models: Collection[str], free_bytes: int) -> tuple[StairStep, ...]:
    """Tell when the memory that these models share comes free, of which `free_bytes` are so now.

    Each running request is expected to end after its remaining tokens, at its engine's present pace. An
    engine's SM share, the least that it needs, is free when its last request ends. Waiting requests take the
    memory that they want before anyone who comes later.
    """
    ends: list[tuple[float, int, int]] = []
    used_pct = 0
    for model, engine in state.engines.items():
        if not engine.running:
            continue
        share_pct = engine.least_share_pct
        used_pct += share_pct
        pool = state.ledger.pools[model]
        holders, block_bytes = pool.holders, pool.block_bytes
        mine = [
            (left_ms(engine, work), holders[work.request.request_id] * block_bytes, 0)
            for work in engine.running.values()
        ]
        mine.sort()
        last_ms, last_bytes, _ = mine[-1]
        if model in models:
            ends += [*mine[:-1], (last_ms, last_bytes, share_pct)]
        else:
            ends.append((last_ms, 0, share_pct))
    claimed = sum(
        claimed_bytes(state, work) for work in state.queue.values() if work.request.model in models
    )
    return staircase(free_bytes, max(0, 100 - used_pct), ends, claimed)


def claimed_bytes(state: State, work: Work) -> int:
    """Return the memory that a waiting request will take; one that was moved here holds some already."""
    model = work.request.model
    pool = state.ledger.pools[model]
    held = pool.holders.get(work.request.request_id, 0) * pool.block_bytes
    return max(0, pool.bytes_for(min(work.wanted_tokens, state.ledger.most_tokens(model))) - held)


def left_ms(engine: Engine, work: Work) -> float:
    """Return how long a request is expected to run on; before the first measured step, by its objectives."""
    step_ms = engine.step_ms or work.request.objectives.tbt_ms
    decode_ms = work.remaining_tokens * step_ms
    return decode_ms if work.decoding else work.prefill_ms + decode_ms
