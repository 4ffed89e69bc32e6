"""Prism (arXiv:2505.04021): which GPU a model goes to, by the pressure on its memory for KV.

The pressure is what the models on a GPU ask for, each request the more the sooner its tokens are due, over
the memory that is left for the KV of all. A model goes where that is least once it is there. KV memory is one
for all models of a GPU already (the ledger's elastic pools): the balloons of Prism's kvcached.

Of its two levels this is the upper one. The lower one, on the GPU, takes prompts so that as many as possible
are in time (Moore and Hodgson's rule), which is `turns` ``in_time`` there; idle models leave for others as
with any system here, and come back from host memory.

Simplified: models are placed when they are asked for, and not moved again as the pressure changes; a model's
demand is its rate times the tokens of a request, over its TBT.
"""

from collections.abc import Callable, Mapping

from services.consolidator.cluster import Cluster
from services.consolidator.window import Load
from shared.model import ModelSpec
from shared.slo import objectives_for


def demand_bytes(spec: ModelSpec, load: Load | None) -> float:
    """Return the KV bytes a second that requests for a model take, by the seconds in which a token is due."""
    if load is None:
        return 0.0
    objectives = spec.objectives or objectives_for(int(load.input_tokens))
    tokens_per_s = load.rate_per_s * (load.input_tokens + load.output_tokens)
    return tokens_per_s * spec.kv_bytes_per_token / (objectives.tbt_ms / 1e3)


def pressure(
    cluster: Cluster, load_of: Callable[[str], Load | None], model: ModelSpec
) -> Mapping[str, float]:
    """Return by GPU the pressure there with `model`; infinite where that leaves no memory for KV."""
    found: dict[str, float] = {}
    for gpu in cluster.working_gpus():
        there = {name for name in cluster.placed_on(gpu) if name in cluster.models and name != model.name}
        specs = [model, *(cluster.models[name] for name in sorted(there))]
        left_bytes = cluster.summaries[gpu].total_bytes - sum(spec.weight_bytes for spec in specs)
        asked = sum(demand_bytes(spec, load_of(spec.name)) for spec in specs)
        found[gpu] = asked / left_bytes if left_bytes > 0 else float("inf")
    return found
