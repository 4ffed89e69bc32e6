"""Which work goes first, and which fits: the slack consumption ratio and the bypassing batcher (3.4).

A task is the unit that Eq. 4 scores: one decode step of an engine, or the prefill of one request.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

URGENT = 1e6  # above any ratio that still means anything


@dataclass(init=False)  # one that is made for it stays interpreted where the rest is compiled
class Task:
    """A unit of work that wants memory and SMs now.

    `late`: its deadline has passed, so that it is best-effort. `cost` is what it adds to what its tenant has
    had, in tokens by the tenant's weight. It takes `latency_ms`, and should have ended in `slack_ms`; it has
    waited since `since_ms`.
    """

    key: str
    score: float
    kv_bytes: int
    sm_share_pct: int
    tenant: str
    late: bool
    cost: float
    latency_ms: float
    slack_ms: float
    since_ms: float

    def __init__(
        self,
        key: str,
        score: float,
        kv_bytes: int = 0,
        sm_share_pct: int = 0,
        *,
        tenant: str = "",
        late: bool = False,
        cost: float = 0.0,
        latency_ms: float = 0.0,
        slack_ms: float = 0.0,
        since_ms: float = 0.0,
    ) -> None:
        self.key, self.score = key, score
        self.kv_bytes, self.sm_share_pct = kv_bytes, sm_share_pct
        self.tenant, self.late, self.cost = tenant, late, cost
        self.latency_ms, self.slack_ms, self.since_ms = latency_ms, slack_ms, since_ms


def score(
    latency_ms: float,
    slack_ms: float,
    *,
    decode: bool,
    age_ms: float = 0.0,
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
        decode: whether this is a decode step.
        age_ms: time since the task became runnable; only prefills age.
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
    """Return the tasks from most to least urgent; of equals who waits longest, then by key: a total order."""
    return sorted(tasks, key=lambda task: (-task.score, task.since_ms, task.key))


def fair_order(tasks: Iterable[Task], served: Mapping[str, float]) -> list[Task]:
    """Return the tasks of several tenants in the order of `order`, late ones of the better served last.

    What is on time goes by Eq. 4 alone, whoever's it is, for every deadline met is met for free. What is late
    is best-effort, and there the tenants share: a late task whose tenant has by then had no less than another
    that waits comes after all others, the least served first. A flood is late soon and has had most, so that
    it waits for others, and not they for it; among the tasks of one tenant, or where one tenant is alone,
    nothing changes.

    Args:
        served: what each tenant has had (`Task.cost` of what was started). Cost: as of sorting.
    """
    ranked = order(tasks)
    had = {task.tenant: served.get(task.tenant, 0.0) for task in ranked}
    if len(had) < 2:
        return ranked
    (least, first), (second, _) = sorted((amount, tenant) for tenant, amount in had.items())[:2]
    keyed = []
    for position, task in enumerate(ranked):
        before = had[task.tenant]
        had[task.tenant] += task.cost
        yields = task.late and before >= (second if task.tenant == first else least)
        keyed.append((yields, before if yields else 0.0, position))
    return [ranked[position] for _, _, position in sorted(keyed)]


def prefill_order(tasks: Iterable[Task], served: Mapping[str, float], reserve_ms: float = 0.0) -> list[Task]:
    """Return the prefills of one engine, which computes one after the other, in the order of their turns.

    That is `fair_order` where all that can be in time are so in it, with `reserve_ms` to spare for all but
    the first. It need not be: by Eq. 4 a long prompt goes before a short one whose deadline is nearer. Then
    as many as possible are in time (Moore, 1968): the earliest deadline first, without those that take
    longest wherever not all fit. These, and what is late, come after, by `fair_order`; what has starved, or
    has to go on, comes before.
    """
    ranked = fair_order(tasks, served)
    if _all_in_time(ranked, reserve_ms):
        return ranked
    first = [task for task in ranked if task.score == math.inf or (task.late and task.score >= 1.0)]
    rest = [task for task in ranked if task not in first]
    in_time = _most_in_time(rest, sum(task.latency_ms for task in first))
    return [*first, *in_time, *(task for task in rest if task not in in_time)]


def _all_in_time(tasks: Sequence[Task], reserve_ms: float) -> bool:
    """Say whether each task that alone would end in time does so after those before it."""
    before_ms = 0.0
    for task in tasks:
        latest_ms = before_ms + reserve_ms + task.latency_ms
        if before_ms > 0.0 and task.latency_ms <= task.slack_ms < latest_ms:
            return False
        before_ms += task.latency_ms
    return True


def _most_in_time(tasks: Iterable[Task], start_ms: float) -> list[Task]:
    """Return as many of the tasks as can end in time, the earliest deadline first."""
    chosen: dict[str, Task] = {}
    longest: list[tuple[float, int, str]] = []
    end_ms = start_ms
    for position, task in enumerate(sorted(tasks, key=lambda task: task.slack_ms)):
        chosen[task.key] = task
        heapq.heappush(longest, (-task.latency_ms, -position, task.key))
        end_ms += task.latency_ms
        if end_ms > task.slack_ms:
            negative_ms, _, key = heapq.heappop(longest)
            end_ms += negative_ms
            del chosen[key]
    return list(chosen.values())


def fill(tasks: Iterable[Task], free_bytes: int, free_sm_share_pct: int) -> tuple[list[Task], list[Task]]:
    """Return (batch, bypassed): tasks in the order given, passing over each that no longer fits (Fig. 8).

    A bypassed task does not block those behind it. The first task is always taken, its SM share clipped to
    what there is, so that something runs however tight the budget.
    """
    chosen: list[Task] = []
    bypassed: list[Task] = []
    for task in tasks:
        fits = task.kv_bytes <= free_bytes and task.sm_share_pct <= free_sm_share_pct
        if fits or (not chosen and task.kv_bytes <= free_bytes):
            chosen.append(task)
            free_bytes -= task.kv_bytes
            free_sm_share_pct -= min(task.sm_share_pct, free_sm_share_pct)
        else:
            bypassed.append(task)
    return chosen, bypassed
