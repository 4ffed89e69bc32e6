"""Dilu (arXiv:2503.05130): SM shares by present demand, and requests in the order in which they came.

Each engine with work has at least the share with which it meets what is due (its request quota), and what is
left of the GPU is given out in proportion (up to its limit quota), anew with each change of the work.

Simplified: quotas come from the look-up table and the work at hand, where Dilu adds up tokens by the kernels
that its instances launched. First come, first served, with whole prompts, is the preset's `bypass_max_ms` 0
and `fixed_chunk_tokens`.
"""

from services.local_sched import tune
from services.local_sched.policies.sight import Sight


def demand(sight: Sight) -> tuple[int, ...]:
    """Return shares in proportion to what each engine needs to be in time, filling the device."""
    return tune.shares_by_need(sight.device, sight.profiles)
