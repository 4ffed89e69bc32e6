"""MuxServe (ICML 2024): SM shares that are found offline and stay as they are.

For each model the smallest share that carries its expected load in time; what is left of the GPU is given out
in proportion, once. A model's idle SMs are lost: nobody else may use them (the paper, 4.2.2).

Placement: its greedy takes models by computation, the largest first, each to where the throughput grows most.
With the same load for all, that is the order and the choice of `consolidator/place.py`: weights grow with
computation, and the GPU with most memory left is the one with least to compute.

Simplified: prefills and decodes of a model share its SMs in one engine, in chunks, where MuxServe runs them
beside each other in jobs; its cache of KV blocks, which moves quotas between models, is the GPU's elastic
memory; the load is expected to be the same for all models, and known (`static_*` settings). As in the
paper's comparison more than two models share a GPU, and one that is idle leaves it, and its share to others.
"""

from functools import lru_cache

from services.local_sched.divide import proportional
from services.local_sched.policies.sight import Sight
from services.local_sched.settings import LocalSettings
from shared.lut import Lut
from shared.slo import objectives_for

ROUNDS = 4  # in which a batch and the time of its step settle on each other


def static(sight: Sight) -> tuple[int, ...]:
    """Return the part that each engine has of the GPU, whoever has work now."""
    needs = [least_share_pct(lut, sight.settings) for lut in sight.residents]
    shares_pct = proportional(needs, sight.device.sm_sizes_pct)
    return tuple([shares_pct[place] for place in sight.places])


@lru_cache(maxsize=1024)
def least_share_pct(lut: Lut, settings: LocalSettings) -> int:
    """Return the smallest share with which a model carries the expected load in time; all if none does."""
    rate_per_ms = settings.static_rate_per_s / 1e3
    inputs, outputs = settings.static_input_tokens, settings.static_output_tokens
    objectives = objectives_for(inputs)
    clock_mhz = lut.device.default_clock_mhz
    for share_pct in lut.device.sm_sizes_pct:
        prefill_ms = float(lut.ttft_ms(clock_mhz, share_pct, inputs))
        left = 1.0 - rate_per_ms * prefill_ms  # of its time, for decodes
        if prefill_ms > objectives.ttft_ms or left <= 0.0:
            continue
        batch = 1.0
        for _ in range(ROUNDS):
            interval_ms = float(lut.tbt_ms(clock_mhz, share_pct, batch, inputs + outputs / 2)) / left
            batch = max(1.0, rate_per_ms * outputs * interval_ms)
        if interval_ms <= objectives.tbt_ms:
            return share_pct
    return lut.device.sm_sizes_pct[-1]
