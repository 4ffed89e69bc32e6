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
    return dispatch.in_order(present, work.objectives, "in_time")


def least_loaded(
    views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float
) -> Decision:
    """Balance the load: the GPU on which the model has fewest requests, running and waiting."""
    best = min(views, key=lambda view: (_requests(view, work.model), view.gpu))
    return _chosen(best, work, curves_of, now_ms, "least_loaded")


TILE = 64
"""Requests that a decode step takes for about the time of one: beyond them it takes longer."""


def eco_route(
    views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float
) -> Decision:
    """EcoRoute, VoltanaLLM's routing (arXiv:2509.04827): let no request be the one that raises a clock.

    While all batches are within one tile, the GPU with the lowest clock; else one whose tile is begun, the
    fullest first, before one that would have to begin another.
    """
    batch = {view.gpu: _requests(view, work.model) for view in views}
    if all(requests < TILE for requests in batch.values()):
        best = min(views, key=lambda view: (view.summary.sm_clock_mhz, batch[view.gpu], view.gpu))
    else:
        best = min(views, key=lambda view: (batch[view.gpu] % TILE == 0, -(batch[view.gpu] % TILE), view.gpu))
    return _chosen(best, work, curves_of, now_ms, "eco_route")


def _requests(view: GpuView, model: str) -> int:
    """Return how many requests of a model run and wait on a GPU."""
    return view.engines[model].running + view.queued(model)


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
