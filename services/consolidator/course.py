"""A plan under way in several placements (`moves.py`): each is waited for before the next is put in force."""

from collections.abc import Callable, Mapping, Sequence

from services.consolidator.cluster import Cluster
from services.consolidator.moves import Held, stages
from services.consolidator.plan import Plan
from services.consolidator.survey import Need


def stages_of(
    cluster: Cluster, holds: Held, needs: Mapping[str, Need], plan: Plan
) -> list[dict[str, list[str]]]:
    """Return the placements that lead to a plan, or to a part of it; see `moves.stages`."""
    return stages(
        holds,
        plan.on_gpu,
        {gpu: cluster.free_bytes(gpu, held) for gpu, held in holds.items()},
        cluster.need_bytes,
        {model for model, need in needs.items() if need.is_idle or need.copies < need.of},
    )


class Course:
    """The placements that are still to come; none, most of the time.

    Args:
        cluster: whose instances it changes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._in_force: Held = {}
        self._to_come: list[Held] = []

    def begin(self, placements: Sequence[Held]) -> None:
        """Put the first in force; the others follow."""
        self._to_come = list(placements)
        self._put_next()

    def give_up(self) -> None:
        """Leave it at the placement in force, in which all models have their place."""
        self._to_come = []

    def go_on(self, is_settled: Callable[[str], bool]) -> None:
        """Put the next in force once the GPUs have what they are to have.

        What else has changed there since then is left as it is, and the rest of the plan is given up.
        """
        cluster = self._cluster
        if not self._to_come:
            return
        for gpu, models in self._in_force.items():
            if gpu not in cluster.summaries or sorted(cluster.placed_on(gpu)) != sorted(models):
                self.give_up()
                return
        if all(map(is_settled, self._in_force)):
            self._put_next()

    def _put_next(self) -> None:
        self._in_force = self._to_come.pop(0)
        self._cluster.rearrange(self._in_force)
