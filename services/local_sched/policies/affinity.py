"""A clock that models prefer, without looking at what is due: stage 2 of Festina's ablation (4.3, Fig. 13).

Dispatching brings requests to GPUs whose clock suits them, and a GPU runs at the highest clock that its
models with work prefer (Eq. 5's F_g), for the mean lengths of their requests; shares are not chosen yet. The
paper does not say how a GPU gets its clock before stage 3; this is how it activates one (3.3, phase three).
"""

from functools import lru_cache

import numpy as np

from services.local_sched.grid import coarse
from services.local_sched.policies.sight import Sight, at_least, divided
from shared.lut import Lut
from shared.slo import objectives_for


def affinity(sight: Sight, shares_pct: tuple[int, ...]) -> int:
    """Return the place of the highest clock that a model with work prefers."""
    places, _ = divided(sight, shares_pct)
    preferred = []
    for load, lengths, place in zip(sight.loads, sight.lengths, places, strict=True):
        count = len(lengths)
        means = [coarse(sum(column) / count, 3) for column in zip(*lengths, strict=True)]
        share_pct = sight.device.sm_sizes_pct[place]
        preferred.append(best_clock_mhz(load.lut, share_pct, means[0], means[1], coarse(count, 2)))
    return at_least(sight, max(preferred))


@lru_cache(maxsize=4096)
def best_clock_mhz(lut: Lut, share_pct: int, input_tokens: int, output_tokens: int, batch: int) -> int:
    """Return the clock of least energy for such requests that meets their objectives; F_max if none does."""
    objectives = objectives_for(input_tokens)
    clocks_mhz = lut.clocks_mhz
    meets = lut.ttft_ms(clocks_mhz, share_pct, input_tokens) <= objectives.ttft_ms
    context_tokens = input_tokens + output_tokens / 2
    meets &= lut.tbt_ms(clocks_mhz, share_pct, batch, context_tokens) <= objectives.tbt_ms
    if not meets.any():
        return int(clocks_mhz[-1])
    energy_j = lut.request_energy_j(clocks_mhz, share_pct, input_tokens, output_tokens, batch)
    return int(clocks_mhz[np.where(meets, energy_j, np.inf).argmin()])
