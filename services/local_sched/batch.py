"""Which work goes first, and which fits: the slack consumption ratio and the bypassing batcher (3.4).

A task is the unit that Eq. 4 scores: one decode step of an engine, or the prefill of one request.
"""

from collections.abc import Iterable
from typing import NamedTuple

URGENT = 1e6  # above any ratio that still means anything


class Task(NamedTuple):
    """A unit of work that wants memory and SMs now."""

    key: str
    score: float
    kv_bytes: int = 0
    sm_share_pct: int = 0


def score(
    latency_ms: float,
    slack_ms: float,
    age_ms: float = 0.0,
    *,
    decode: bool,
    beta: float = 1.0,
    starvation_ms: float = 10_000.0,
) -> float:
    """Return how urgent a task is: the share of its remaining slack that it would consume (Eq. 4).

    The ratio has a pole where age has eaten the slack, and no meaning past the deadline. The order is, from
    most to least urgent: late decodes, the latest first; prefills on time whose age has eaten their slack;
    everything else on time, by the ratio; late prefills, which are best-effort: they start at 0 and gain 1
    every `starvation_ms`, so in time they pass all others.

    Args:
        latency_ms: profiled time of the task.
        slack_ms: deadline minus now.
        age_ms: time since the task became runnable; only prefills age.
        decode: whether this is a decode step.
        beta: weight of the age.
        starvation_ms: see above.
    """
    if slack_ms <= 0:
        return 2 * URGENT - slack_ms if decode else -slack_ms / starvation_ms
    remaining_ms = slack_ms if decode else slack_ms - beta * age_ms
    if remaining_ms <= 0:
        return URGENT + min(latency_ms / slack_ms, URGENT - 1)
    return min(latency_ms / remaining_ms, URGENT - 1)


def order(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks from most to least urgent; equal scores by key, so the order is total."""
    return sorted(tasks, key=lambda task: (-task.score, task.key))


def fill(tasks: Iterable[Task], free_bytes: int, free_sm_share_pct: int) -> tuple[list[Task], list[Task]]:
    """Return (batch, bypassed): tasks in score order, passing over each that no longer fits (Fig. 8).

    A bypassed task does not block those behind it. The first task is always taken, its SM share clipped to
    what there is, so that something runs however tight the budget.
    """
    chosen: list[Task] = []
    bypassed: list[Task] = []
    for task in order(tasks):
        fits = task.kv_bytes <= free_bytes and task.sm_share_pct <= free_sm_share_pct
        if fits or (not chosen and task.kv_bytes <= free_bytes):
            chosen.append(task)
            free_bytes -= task.kv_bytes
            free_sm_share_pct -= min(task.sm_share_pct, free_sm_share_pct)
        else:
            bypassed.append(task)
    return chosen, bypassed
