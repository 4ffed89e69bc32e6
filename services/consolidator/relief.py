"""More GPUs when the load comes back (3.5): the models of a crowded GPU are spread onto a resting one."""

from services.consolidator.cluster import Cluster
from services.consolidator.settings import ConsolidatorSettings
from shared.model import EngineSummary, Instance


class Relief:
    """Which GPUs are crowded, and the way out.

    Args:
        cluster: whose instances it changes, and whose `resting` GPUs it uses.
    """

    def __init__(self, settings: ConsolidatorSettings, cluster: Cluster) -> None:
        self._set = settings
        self._cluster = cluster
        self._crowded_ms: dict[str, float] = {}  # by GPU, since when

    def crowded(self, now_ms: float) -> list[str]:
        """Return the GPUs that have needed more than their SMs for some time, if there is where to go.

        Just all of them is what a low clock that saves energy often takes, and no reason.
        """
        found = []
        for gpu in self._cluster.working_gpus() if self._cluster.resting else ():
            fixed = self._cluster.summaries[gpu].fixed_share_pct  # which says nothing of what is needed
            if fixed or sum(engine.sm_share_pct for engine in self._running(gpu)) <= 100:
                self._crowded_ms.pop(gpu, None)
            elif now_ms - self._crowded_ms.setdefault(gpu, now_ms) >= self._set.crowded_ms:
                found.append(gpu)
        return found

    def spread(self, gpu: str) -> bool:
        """Move some models of a GPU to a resting one of its kind, halving what is needed; says if it did."""
        cluster = self._cluster
        mine = cluster.summaries[gpu]
        resting = (cluster.summaries[each] for each in sorted(cluster.resting & cluster.summaries.keys()))
        free = {
            summary.gpu: cluster.free_bytes(summary.gpu, cluster.loaded_on(summary.gpu))
            for summary in resting
            if (summary.engine, summary.gpu_type) == (mine.engine, mine.gpu_type)
        }
        instances = [instance for instance in cluster.on_gpu(gpu) if len(instance.gpus) == 1]
        if not free or len(instances) < 2:
            return False
        room = max(free, key=free.__getitem__)
        needs_pct = {engine.model: 1 + engine.sm_share_pct for engine in self._running(gpu)}
        stays_pct = goes_pct = 0
        for instance in sorted(instances, key=lambda i: (-needs_pct.get(i.model, 1), i.model)):
            pct, need_bytes = needs_pct.get(instance.model, 1), cluster.need_bytes(room, instance.model)
            if stays_pct <= goes_pct or need_bytes > free[room]:
                stays_pct += pct
                continue
            cluster.remove(instance)
            cluster.add(Instance(model=instance.model, gpus=(room,)))
            goes_pct += pct
            free[room] -= need_bytes
        if goes_pct == 0:  # what is on its way out there still fills it
            return False
        cluster.resting.discard(room)
        self._crowded_ms.pop(gpu, None)
        return True

    def _running(self, gpu: str) -> list[EngineSummary]:
        """Return the engines with work on a GPU, without those that are about to leave it."""
        placed = self._cluster.placed_on(gpu)
        return [e for e in self._cluster.summaries[gpu].engines if e.running and e.model in placed]
