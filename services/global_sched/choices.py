"""How other systems choose a GPU for a request: functions of the shape of `dispatch.decide`.

They look at the same estimates as Festina does. What none of them can serve in time goes, as there, to the
GPU that is soonest, and counts as a lack of instances.
"""

from collections.abc import Callable, Sequence

from services.global_sched import dispatch
from services.global_sched.dispatch import Decision
from services.global_sched.estimate import CurvesOf, Work, estimate
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


CHOICES: dict[str, Choice] = {"least_energy": dispatch.decide, "in_time": in_time}
"""By the name that the setting `choice` gives them."""
