"""How other systems choose a GPU for a request: functions of the shape of `dispatch.decide`.

They look at the same estimates as Festina does. A request that will be late where it goes counts, as there,
as one for a lack of instances.
"""

from collections.abc import Callable, Sequence

from services.global_sched import dispatch
from services.global_sched.dispatch import Decision
from services.global_sched.estimate import CurvesOf, Work, estimate, feasible
from services.global_sched.view import GpuView

Choice = Callable[[Sequence[GpuView], Work, CurvesOf, float, float], Decision]


def in_time(views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float) -> Decision:
    """SLO-aware dispatching (4.3, stage 1): the first that is in time, by when its memory is free.

    No energy is weighed, and GPUs are taken as they run: nobody asks them for a higher clock.
    """
    present = tuple([estimate(view, work, curves_of, now_ms) for view in views])
    chosen = dispatch.first_in_time(present, work.objectives)
    if chosen is not None:
        return Decision(chosen, "in_time", present)
    return Decision(dispatch.soonest(present, work.objectives), "best_effort", present)


def least_loaded(
    views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float
) -> Decision:
    """Balance the load: the GPU on which the model has fewest requests, running and waiting."""

    def load(view: GpuView) -> int:
        return view.engines[work.model].running + view.queued(work.model)

    return _chosen(
        min(views, key=lambda view: (load(view), view.gpu)), work, curves_of, now_ms, "least_loaded"
    )


TILE = 64
"""Requests that a decode step takes for about the time of one: beyond them it takes longer."""


def eco_route(
    views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float
) -> Decision:
    """EcoRoute, VoltanaLLM's routing (arXiv:2509.04827): let no request be the one that raises a clock.

    While all batches are within one tile, the GPU with the lowest clock; else one whose tile is begun, the
    fullest first, before one that would have to begin another.
    """

    def batch(view: GpuView) -> int:
        return view.engines[work.model].running + view.queued(work.model)

    if all(batch(view) < TILE for view in views):
        best = min(views, key=lambda view: (view.summary.sm_clock_mhz, batch(view), view.gpu))
    else:
        best = min(views, key=lambda view: (batch(view) % TILE == 0, -(batch(view) % TILE), view.gpu))
    return _chosen(best, work, curves_of, now_ms, "eco_route")


def _chosen(view: GpuView, work: Work, curves_of: CurvesOf, now_ms: float, reason: str) -> Decision:
    """Return the decision for a GPU; that it will be late there is noted, and changes nothing."""
    candidate = estimate(view, work, curves_of, now_ms)
    late = not feasible(candidate, work.objectives)
    return Decision(candidate, "best_effort" if late else reason, (candidate,))


CHOICES: dict[str, Choice] = {
    "least_energy": dispatch.decide,
    "in_time": in_time,
    "least_loaded": least_loaded,
    "eco_route": eco_route,
}
"""By the name that the setting `choice` gives them."""
