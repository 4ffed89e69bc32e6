"""What a GPU tells the others about itself (3.3): its summary, made from the state."""

from services.local_sched.ledger import staircase
from services.local_sched.state import Engine, Stage, State, Work
from shared.events import Action, Put, Send, SummaryChanged
from shared.model import EngineSummary, GpuSummary, StairStep
from shared.subjects import gpu_key


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
        staircase=_staircase(state),
        admitted_through=dict(state.admitted_through),
        power_w=state.power_w,
        energy_j=state.energy_j,
    )


def _engines(state: State, now_ms: float) -> tuple[EngineSummary, ...]:
    """Summarize each engine; requests held for a move count as queued."""
    works: dict[str, list[Work]] = {name: [] for name in state.engines}
    for work in state.works.values():
        works[work.request.model].append(work)
    return tuple(_engine(state, now_ms, engine, works[name]) for name, engine in state.engines.items())


def _engine(state: State, now_ms: float, engine: Engine, works: list[Work]) -> EngineSummary:
    model = engine.spec.name
    return EngineSummary(
        model=model,
        state=engine.state,
        running=len(engine.running),
        queued=sum(work.stage is not Stage.RUNNING for work in works),
        context_tokens=sum(work.context_tokens for work in engine.running.values()),
        free_kv_bytes=state.ledger.free_kv_bytes(model),
        sm_share_pct=engine.plan.sm_share_pct if engine.plan else 0,
        idle_ms=0.0 if works or state.moves.expected(model) else now_ms - engine.used_ms,
        tightest_tbt_ms=min((work.request.objectives.tbt_ms for work in works), default=0.0),
        reason=engine.reason,
    )


def _staircase(state: State) -> tuple[StairStep, ...]:
    """Expect each running request to end after its remaining tokens, at its engine's present pace.

    An engine's SM share is free when its last request ends. Waiting requests take the memory that they want
    before anyone who comes later.
    """
    ends: list[tuple[float, int, int]] = []
    used_pct = 0
    for model, engine in state.engines.items():
        if not engine.running:
            continue
        share_pct = engine.plan.sm_share_pct if engine.plan else 0
        used_pct += share_pct
        pool = state.ledger.pools[model]
        mine = [
            (_left_ms(engine, work), pool.holders[work.request.request_id] * pool.block_bytes, 0)
            for work in engine.running.values()
        ]
        mine.sort()
        last_ms, last_bytes, _ = mine[-1]
        ends += [*mine[:-1], (last_ms, last_bytes, share_pct)]
    margin = state.settings.margin
    claimed = sum(
        state.ledger.pools[w.request.model].bytes_for(w.wanted_tokens(margin)) for w in state.queue.values()
    )
    free_bytes = max(0, state.ledger.free_bytes)
    return staircase(free_bytes, max(0, 100 - used_pct), ends, claimed)


def _left_ms(engine: Engine, work: Work) -> float:
    """Return how long a request is expected to run on; before the first measured step, by its objectives."""
    step_ms = engine.step_ms or work.request.objectives.tbt_ms
    return (0.0 if work.decoding else work.prefill_ms) + work.remaining_tokens * step_ms
