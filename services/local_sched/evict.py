"""What becomes of a request that has to make room for another (3.4): it waits, its KV in host memory (3.5).

Its engine copies the full blocks of its KV into a stage of its own before it stops it, if that and the way
back are sooner done than the context is computed again, and if there is room in the books (`State.offload`).
The stage is the request's `arrival`, as if it had come by a move: its next run takes the KV from there, and
whatever else becomes of the request gives the slabs back (`ends.arrived`). Where there is no stage, or it
cannot be read, the context is computed again. A stage is memory of the engine's process, so it ends with it,
however that ends.
"""

import math

from services.local_sched.admission import enqueue, prefill_alone_ms
from services.local_sched.ends import leave_engine, with_output
from services.local_sched.move_mode import KV, move_mode
from services.local_sched.state import State
from services.local_sched.work import Arrival, Work
from shared.engine import ExportKv, KvExported, StopRequest
from shared.events import Action, Count

MEASURED_BYTES = 1 << 20  # a smaller copy says more of latency than of bandwidth
LATEST = 0.3  # weight of the latest measurement


def evict(state: State, now_ms: float, work: Work) -> list[Action]:
    """Put a running request back into the queue; it goes on from the tokens that it has."""
    request, run_id = work.request, work.run_id
    blocks, outcome = _blocks_to_keep(state, work)
    kept_tokens = blocks * state.ledger.pools[request.model].block_tokens
    back_to_queue(state, now_ms, work, kept_tokens)
    work.due_ms = now_ms + request.objectives.ttft_ms
    actions: list[Action] = []
    left_ms = now_ms
    if blocks:
        work.arrival = Arrival(run_id, kept_tokens)
        actions.append(_export(state, request.model, run_id, blocks))
        state.engines[request.model].leaving.add(run_id)
        left_ms = max(now_ms, state.evicted_ms) + _copy_ms(state, request.model, kept_tokens)
    state.evicted_ms = max(state.evicted_ms, left_ms)
    labels = {"model": request.model}
    return [
        *actions,
        StopRequest(model=request.model, request_id=run_id),
        Count(name="evictions", labels=labels),
        Count(name="offloads", labels=labels | {"outcome": outcome}),
    ]


def back_to_queue(state: State, now_ms: float, work: Work, kept_tokens: int) -> None:
    """Take a request out of its engine and let it wait; it goes on from the tokens that it has.

    `kept_tokens` of its context need not be computed again.
    """
    leave_engine(state, work)
    work.run_tokens, work.run_first_ms = 0, None
    work.prefilled_tokens, work.runnable_ms = kept_tokens, now_ms
    carry_output(state, work)
    enqueue(state, work)


def carry_output(state: State, work: Work) -> None:
    """Make the output so far part of what the next run of a request begins with."""
    work.request, work.tokens = with_output(work), []
    work.prefill_ms = prefill_alone_ms(state, work.request.model, work.prefill_tokens)


def _blocks_to_keep(state: State, work: Work) -> tuple[int, str]:
    """Return how many blocks of KV are worth a stage, which they have then; and ``kept``, or why none are."""
    model, pool = work.request.model, state.ledger.pools[work.request.model]
    computed = work.context_tokens - 1 if work.decoding else work.prefilled_tokens
    blocks = computed // pool.block_tokens
    if work.arrival is not None or not blocks:
        return 0, "not_there"  # what was computed is not in the engine, or still on its way into it
    mode = move_mode(
        state.engines[model].lut,
        blocks * pool.block_tokens,
        blocks * pool.block_bytes,
        math.inf,
        state.host_bytes_s / 2,  # out of the device and back: others wait for the one, it waits for the other
        state.clock_mhz,
    ).mode
    if mode != KV:
        return 0, "slower"
    reason = state.offload.hold(work.run_id, pool.block_bytes, blocks)
    return (0, "full") if reason else (blocks, "kept")


def _export(state: State, model: str, run_id: str, blocks: int) -> ExportKv:
    return ExportKv(
        model=model,
        request_id=run_id,
        move_id="",
        first_block=0,
        blocks=blocks,
        stage=run_id,
        room_blocks=state.offload.blocks_of(run_id),
    )


def _copy_ms(state: State, model: str, tokens: int) -> float:
    kv_bytes = state.ledger.pools[model].bytes_for(tokens)
    return state.device.link_setup_ms + 1000.0 * kv_bytes / state.host_bytes_s


def exported(state: State, event: KvExported) -> list[Action]:
    """Account for a copy of an evicted request's KV, and take its speed into the mean; it may run again.

    If it failed, so will the order to take it from there, and that is when its slabs come back.
    """
    engine = state.engines.get(event.model)
    if engine is not None and event.request_id in engine.leaving:
        engine.leaving.remove(event.request_id)
        state.admit_due = True
    if event.n_bytes >= MEASURED_BYTES and event.took_ms > 0.0:
        latest = 1000.0 * event.n_bytes / event.took_ms
        state.host_bytes_s += LATEST * (latest - state.host_bytes_s)
    return copied(state, event.energy_j)


def copied(state: State, energy_j: float | None) -> list[Action]:
    """Account for the energy of a copy to host memory, or back."""
    state.energy.copied(energy_j)
    return [Count(name="offload_energy_j", value=energy_j)] if energy_j else []
