"""Prefill and decode on different GPUs: which GPU does what, and that each model has both (4.4, PD-D).

The paper adopts Aegaeon's separation. Each model in use has an instance for its prompts and one for its
decodes, as far as both fit; one that has no second instance is served on a single GPU, both phases together.

Simplified: Aegaeon changes models on both kinds of GPUs, token by token; here they stay, in twice the memory.
"""

from collections.abc import Collection, Set

from services.consolidator.cluster import Cluster
from services.consolidator.place import place


def prefill_gpus(before: Set[str], working: Collection[str], part: float) -> set[str]:
    """Return the GPUs that compute prompts: those that did and still work, or as many more as it takes.

    There is at least one, and at least one is left for decodes; of a single GPU there is none.
    """
    wanted = min(len(working) - 1, max(1, round(part * len(working))))
    ordered = sorted(working, key=lambda gpu: (gpu not in before, gpu))
    return set(ordered[: max(0, wanted)])


def partners(cluster: Cluster) -> dict[str, str]:
    """Return by model the GPU for its second instance, of the kind that its first is not on.

    Models without work have one that is enough until they are used.
    """
    chosen: dict[str, str] = {}
    for prompts in (True, False):
        rooms = [room for room in cluster.rooms() if (room.gpu in cluster.prefill) == prompts]
        lacking = [spec for name, spec in cluster.models.items() if _lacks(cluster, name, prompts)]
        chosen |= place(lacking, rooms)
    return chosen


def _lacks(cluster: Cluster, model: str, prompts: bool) -> bool:
    """Say whether a model is in use, and has no instance on the GPUs for prompts, or on the others."""
    gpus = [gpu for instance in cluster.of_model(model) for gpu in instance.gpus]
    engines = [cluster.engine(gpu, model) for gpu in gpus]
    used = any(engine is None or engine.state == "loading" or engine.idle_ms == 0.0 for engine in engines)
    return bool(gpus) and used and not any((gpu in cluster.prefill) == prompts for gpu in gpus)
