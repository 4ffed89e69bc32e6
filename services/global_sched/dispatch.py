"""Frequency-aware dispatch, the paper's three phases (3.3), as plain functions over plain data.

The phases choose among the candidates that `estimate` makes of the GPUs: `least_energy` (phases one and two,
at the current clocks), `first_in_time` (phase three, at the highest), and `soonest` (nobody can be in time:
serve late). `decide` looks at all GPUs, one by one; `pools.py` finds the same among many without that.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.global_sched.estimate import Candidate, CurvesOf, Work, estimate, feasible
from services.global_sched.view import GpuView
from shared.model import Objectives


def least_energy(candidates: Iterable[Candidate], objectives: Objectives, tie: float) -> Candidate | None:
    """Return the feasible candidate that takes the least energy (phases one and two, Eq. 3), or None.

    Among those within the fraction `tie` of the least, the one with the most free memory wins, then the most
    SM share, then the first by id. GPUs without a meter have no joules to compare: they are ranked by latency
    among themselves, and only when no GPU with a meter is feasible.
    """
    fitting = [c for c in candidates if feasible(c, objectives)]
    metered = [(c.energy_j, c) for c in fitting if c.energy_j is not None]
    costs = metered or [(c.latency_ms, c) for c in fitting]
    if not costs:
        return None
    bound = min(cost for cost, _ in costs) * (1.0 + tie)
    tied = (c for cost, c in costs if cost <= bound)
    return min(tied, key=roomier)


def first_in_time(boosted: Iterable[Candidate], objectives: Objectives) -> Candidate | None:
    """Return the first feasible candidate in order of T_avail (phase three), or None.

    Args:
        boosted: candidates estimated at their highest clocks.
    """
    ordered = sorted(boosted, key=earlier)
    return next((c for c in ordered if feasible(c, objectives)), None)


def soonest(boosted: Sequence[Candidate], objectives: Objectives) -> Candidate:
    """Return the candidate with the earliest first token, for a request that cannot be in time anywhere.

    One whose memory ever comes free is first, then one that breaks nobody else's objectives, then one that
    keeps the request's own TBT.

    Args:
        boosted: candidates estimated at their highest clocks; at least one.
    """
    return min(boosted, key=lambda c: late_rank(c, objectives))


def roomier(c: Candidate) -> tuple[int, int, str]:
    """Return the place of a candidate among those that take about as much energy (phase two)."""
    return -c.free_bytes, -c.sm_share_pct, c.gpu


def earlier(c: Candidate) -> tuple[float, int, str]:
    """Return the place of a candidate in order of T_avail (phase three)."""
    return c.available_ms, -c.free_bytes, c.gpu


def late_rank(c: Candidate, objectives: Objectives) -> tuple[bool, bool, bool, float, int, str]:
    """Return the place of a candidate among those that cannot be in time; the least is the best."""
    never, jerky = math.isinf(c.ttft_ms), c.tbt_ms > objectives.tbt_ms
    return never, not c.keeps_others, jerky, c.ttft_ms, -c.free_bytes, c.gpu


@dataclass(init=False)  # one that is made for it stays interpreted where the rest is compiled
class Decision:
    """The chosen candidate, and by which rule.

    ``reason`` is ``least_energy``, ``lowest_latency`` (no meter), ``f_max``, or ``best_effort``: not in time;
    the name of another system's choice. `seen` is what was looked at on the way, the chosen one among them.
    """

    candidate: Candidate
    reason: str
    seen: tuple[Candidate, ...]

    def __init__(self, candidate: Candidate, reason: str, seen: tuple[Candidate, ...] = ()) -> None:
        self.candidate, self.reason, self.seen = candidate, reason, seen


def decide(views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float) -> Decision:
    """Run the three phases over the GPUs that have the model ready.

    Args:
        views: at least one; all with a table for the work's model.

    Cost: linear in the GPUs that have the model; phase three doubles it.
    """
    present = tuple([estimate(v, work, curves_of, now_ms) for v in views])
    chosen = least_energy(present, work.objectives, tie)
    if chosen is not None:
        return Decision(chosen, "lowest_latency" if chosen.energy_j is None else "least_energy", present)
    boosted = tuple([estimate(v, work, curves_of, now_ms, boost=True) for v in views])
    return in_order(boosted, work.objectives, "f_max")


def in_order(candidates: tuple[Candidate, ...], objectives: Objectives, reason: str) -> Decision:
    """Return the first in time, for that `reason`; else the soonest."""
    chosen = first_in_time(candidates, objectives)
    if chosen is not None:
        return Decision(chosen, reason, candidates)
    return Decision(soonest(candidates, objectives), "best_effort", candidates)


def lacks_capacity(decision: Decision, work: Work) -> bool:
    """Say whether the request would be late even if it had come only now.

    One that is late by its own past, such as its model's load, says nothing about a lack of instances.
    """
    if decision.reason != "best_effort":
        return False
    chosen = decision.candidate
    return not feasible(replace(chosen, ttft_ms=chosen.ttft_ms - work.waited_ms), work.objectives)
