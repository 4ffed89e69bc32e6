"""Phase one (3.5.2) for all models on GPUs of one kind, a few models at a time.

To make and to search a model's table takes about 10 ms. For thousands of models that is long, and the core is
to answer meanwhile; so what is known is kept, and what has changed since is found anew.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.consolidator.capacity import Capacity
from services.consolidator.cluster import Cluster
from services.consolidator.demand import Demand, Wanted
from services.consolidator.settings import ConsolidatorSettings
from services.consolidator.window import Windows
from shared.model import ModelSpec
from shared.shelf import Shelf
from shared.slo import objectives_for


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs.

    Args:
        spec, copies, of: what was looked into: so many copies on these GPUs, of its instances anywhere.
        now: the demand of each of these copies.
        demands: of the copies to plan for: as few as are in time; or as many as now, if no number is.
        is_idle: whether nobody asks for it.
    """

    spec: ModelSpec
    copies: int
    of: int
    now: Demand
    demands: tuple[Demand, ...]
    is_idle: bool


def demands_of(held: Mapping[str, Sequence[str]], needs: Mapping[str, Need]) -> dict[str, list[Demand]]:
    """Return what a placement on the way to another demands of each GPU, at most.

    Where a model has fewer copies than now, each takes no more than where it has as few as are planned.
    """
    copies = Counter(model for models in held.values() for model in models)

    def demand(model: str) -> Demand:
        need = needs[model]
        return need.now if copies[model] >= need.copies else need.demands[0]

    return {gpu: [demand(model) for model in models] for gpu, models in held.items()}


class Survey:
    """What the models on some GPUs need.

    Args:
        gpus: all of one kind.
        capacity: what a plan may fill of each.
    """

    def __init__(
        self,
        settings: ConsolidatorSettings,
        cluster: Cluster,
        shelf: Shelf,
        windows: Windows,
        gpus: Sequence[str],
        capacity: Capacity,
    ) -> None:
        self.capacity = capacity
        self._set = settings
        self._cluster = cluster
        self._shelf = shelf
        self._windows = windows
        self._gpu_type = cluster.summaries[gpus[0]].gpu_type
        self._most_copies = len(gpus)
        self._gpus = gpus
        self._needs: dict[str, Need] = {}

    def needs(self, now_ms: float, holds: Mapping[str, Sequence[str]]) -> dict[str, Need] | None:
        """Return what each model needs; None: not all of it is known yet, so ask again.

        Args:
            holds: by GPU, the models that it has now.
        """
        copies = Counter(model for held in holds.values() for model in held)
        unknown = [model for model in sorted(copies) if not self._is_known(model, copies[model])]
        for model in unknown[: self._set.survey_models]:
            self._needs[model] = self._look_into(now_ms, model, copies[model])
        if len(unknown) > self._set.survey_models:
            return None
        return {model: self._needs[model] for model in sorted(copies)}

    def _is_known(self, model: str, copies: int) -> bool:
        need = self._needs.get(model)
        instances = len(self._cluster.of_model(model))
        return need is not None and (need.spec, need.copies, need.of) == (
            self._cluster.models[model],
            copies,
            instances,
        )

    def _look_into(self, now_ms: float, model: str, copies: int) -> Need:
        spec, load = self._cluster.models[model], self._windows.load(now_ms, model)
        instances = len(self._cluster.of_model(model))
        objectives = spec.objectives or objectives_for(round(load.input_tokens) if load else 0)
        if load is not None:  # the instances share it evenly
            load = replace(load, rate_per_s=load.rate_per_s * copies / instances)
        lut = self._shelf.get(self._gpu_type, spec)
        floor_bytes = max(self._cluster.kv(gpu).of(spec) for gpu in self._gpus)
        wanted = Wanted(lut, load, objectives, floor_bytes, self._set.burst_sigmas)
        as_now = wanted.copies(copies)
        fewest = wanted.fewest_copies(self.capacity)
        if fewest is None or len(fewest) > self._most_copies:
            fewest = [self._cut(demand) for demand in as_now]
        return Need(spec, copies, instances, as_now[0], tuple(fewest), load is None)

    def _cut(self, demand: Demand) -> Demand:
        """Cut a demand to an empty GPU: with more than that it is late wherever it is."""
        sm_pct = min(demand.sm_pct, self.capacity.sm_pct)
        return replace(demand, sm_pct=sm_pct, need_bytes=min(demand.need_bytes, self.capacity.usable_bytes))
