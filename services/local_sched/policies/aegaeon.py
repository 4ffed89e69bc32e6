"""Aegaeon (SOSP '25): how long each model may keep a GPU, between the tokens of its requests.

Its decode instances go round the batches of their models. A batch that makes a token in t, while one is due
every d, is ahead of its clients by d - t a step: time in which others may run. Each turn lasts as long as the
round can afford, so that what a batch has earned pays for the turns of the others and for changing models.
"""

from collections.abc import Sequence

LEAST_ALPHA = 0.5
Q_MAX_MS = 4_000.0


def quotas_ms(
    step_ms: Sequence[float], tbt_ms: Sequence[float], switching_ms: float, most_ms: float = Q_MAX_MS
) -> tuple[list[float], float]:
    """Return the time that each batch of a round may run, and alpha; 1 / alpha of the tokens are in time.

    Args:
        step_ms, tbt_ms: of each batch, how long a decode step takes and how often one is due.
        switching_ms: what changing models takes in the whole round; if nothing, all turns are the longest.
        most_ms: longest time (Q_MAX): whoever comes waits for a round at most.
    """
    steps = [due_ms / ms for due_ms, ms in zip(tbt_ms, step_ms, strict=True)]  # that one deadline affords
    busy = sum(1.0 / n for n in steps)
    alpha = max(switching_ms / (min(steps) * most_ms) + busy, LEAST_ALPHA)
    if not switching_ms:
        return [most_ms] * len(steps), alpha
    return [switching_ms / (n * (alpha - busy)) for n in steps], alpha
