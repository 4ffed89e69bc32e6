"""How other systems choose a GPU for a request: functions of the shape of `dispatch.decide`.

They look at the same estimates as Festina does. A request that will be late where it goes counts, as there,
as one for a lack of instances.
"""

from collections.abc import Callable, Container, Mapping, Sequence

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


FULL = 32
"""Requests of a model on a GPU from which on it is loaded on another one as well."""


def where_loaded(
    views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float
) -> Decision:
    """ServerlessLLM: a GPU that has the model and is not full, then that with fewest requests of others."""

    def rank(view: GpuView) -> tuple[bool, int, int, str]:
        mine = _requests(view, work.model)
        others = sum(_requests(view, name) for name in view.engines) - mine
        return work.model in view.summary.asleep or mine >= FULL, others, mine, view.gpu

    return _chosen(min(views, key=rank), work, curves_of, now_ms, "where_loaded")


GROUP = 8
"""Prompts of one model that are served together."""


def joins_group(
    views: Sequence[GpuView], work: Work, curves_of: CurvesOf, now_ms: float, tie: float
) -> Decision:
    """Aegaeon's prompts: where a group of the model waits that is not full, else where the queue is shortest.

    What changing models takes counts as well.
    """

    def rank(view: GpuView) -> tuple[bool, float, str]:
        group = sum(prompts[2] for prompts in view.prefills(work.model))
        return not 0 < group < GROUP, backlog_ms(view, curves_of), view.gpu

    return _chosen(min(views, key=rank), work, curves_of, now_ms, "joins_group")


def backlog_ms(view: GpuView, curves_of: CurvesOf) -> float:
    """Return the time until all prompts on a GPU are computed, models brought in for them."""
    total_ms = 0.0
    for model in view.engines:
        curves = curves_of(view.summary.gpu_type, model)
        prompts = view.prefills(model)
        if curves is None or not prompts:
            continue
        prefill = curves.prefill(view.summary.sm_clock_mhz, 100)
        for _, _, count, tokens in prompts:
            total_ms += count * prefill.ms_at(*curves.inputs.locate(tokens / count))
        total_ms += curves.lut.load_ms("asleep") if model in view.summary.asleep else 0.0
    return total_ms


def shortest_rounds(views: Sequence[GpuView], model: str, promised: Mapping[str, Container[str]]) -> GpuView:
    """Aegaeon's decodes: where the model has its largest batch; else where batches are fewest, then requests.

    Args:
        promised: by GPU, models of which requests are on their way there.
    """

    def rank(view: GpuView) -> tuple[bool, int, int, int, str]:
        coming = promised.get(view.gpu, ())
        here = {name: _requests(view, name) for name in view.engines}
        batches = sum(1 for name, requests in here.items() if requests or name in coming)
        mine = here[model] or int(model in coming)
        return not mine, -mine, batches, sum(here.values()), view.gpu

    return min(views, key=rank)


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
    "where_loaded": where_loaded,
    "joins_group": joins_group,
}
"""By the name that the setting `choice` gives them."""
