"""What the engines of a GPU have to do, and by when (3.4): in numbers small and round enough to decide by."""

import math

from services.local_sched.grid import Load, coarse
from services.local_sched.state import Engine, State
from services.local_sched.work import Tally, Work


def load_of(state: State, now_ms: float, engine: Engine, pace_part: float = 0.0) -> Load:
    """Sum up what an engine has to do, and by when; numbers of tokens and steps are rounded up.

    A late prefill is best-effort: it gets one more TTFT, from now, so that a request which lost its deadline
    while its model loaded does not drive the clock up alone, and an overload still does.

    Decodes that are not behind their pace wait for one another: `pace_part` of a TBT from step to step.
    """
    tally = engine.tally = engine.tally or tally_of(engine)
    kept = 1.0 - state.settings.slack_headroom
    count, context_tokens, steps, tbt_ms, left_ms, _, waiting = tally
    prefills = [(coarse(work.prefill_tokens, 6), kept * slack_ms(now_ms, work)) for work in waiting]
    if len(prefills) > 1:
        prefills.sort(key=lambda prefill: prefill[1])
        prefills = prefills[: state.settings.considered_prefills]
    if not count:
        return Load(engine.lut, prefills=tuple(prefills))
    # A step may take one TBT; more would use up the room that is kept for a stall. Where one is behind its
    # pace, it may take what is left, but at least half a TBT: one late token is not worth any clock.
    budget_ms = kept * min(tbt_ms, max(left_ms, tbt_ms / 2))
    means = (coarse(context_tokens / count, 5), budget_ms, coarse(steps / count, 4))
    interval_ms = pace_part * tbt_ms if left_ms >= tbt_ms else 0.0
    return Load(engine.lut, coarse(count, 4), *means, tuple(prefills), interval_ms)


def tally_of(engine: Engine) -> Tally:
    """Count up what runs in an engine: one pass, with little said per request, for there may be many."""
    prefills: list[Work] = []
    context_tokens = steps = 0
    least_tbt_ms = least_left_ms = first_last_ms = math.inf
    for work in engine.running.values():
        first_ms, last_ms = work.run_first_ms, work.last_ms
        if first_ms is None or last_ms is None:
            prefills.append(work)
            continue
        prompt, made, most, tbt_ms = work.terms
        made += len(work.tokens)
        context_tokens += prompt + made
        left = min(most, work.predicted_output_tokens) - made
        steps += left if left > 1 else 1
        if tbt_ms < least_tbt_ms:
            least_tbt_ms = tbt_ms
        left_ms = first_ms + tbt_ms * work.run_tokens - last_ms
        if left_ms < least_left_ms:
            least_left_ms = left_ms
        if last_ms < first_last_ms:
            first_last_ms = last_ms
    count = len(engine.running) - len(prefills)
    return Tally(count, context_tokens, steps, least_tbt_ms, least_left_ms, first_last_ms, prefills)


def slack_ms(now_ms: float, work: Work) -> float:
    """Return how long a prefill may take until it is due; late, as long as a fresh one."""
    left_ms = work.due_ms - now_ms
    return left_ms if left_ms > 0 else work.request.objectives.ttft_ms
