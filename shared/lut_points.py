"""Which clock and SM share to choose for a request, by a look-up table (3.2): least energy, or the lowest."""

import numpy as np
from numpy.typing import NDArray

from shared.lut_query import Lut
from shared.model import Objectives


def best_point(
    lut: Lut, input_tokens: float, output_tokens: float, objectives: Objectives, batch: float = 1
) -> tuple[int, int] | None:
    """Return the (clock, share) of least energy per request that meets both objectives; None: there is none.

    Of equal points the lowest clock, then the smallest share. Without a meter, the one of least latency.
    """
    clocks, shares = lut.clocks_mhz[:, None], lut.shares_pct[None, :]
    meets = _meets(lut, input_tokens, output_tokens, objectives, batch)
    if not meets.any():
        return None
    cost_of = lut.request_energy_j if lut.device.has_meter else lut.request_latency_ms
    costs = np.where(meets, cost_of(clocks, shares, input_tokens, output_tokens, batch), np.inf)
    clock, share = np.unravel_index(int(np.argmin(costs)), costs.shape)
    return int(lut.clocks_mhz[clock]), int(lut.shares_pct[share])


def least_point(
    lut: Lut, input_tokens: float, output_tokens: float, objectives: Objectives, batch: float = 1
) -> tuple[int, int] | None:
    """Return the lowest clock at which some share meets both objectives, and the smallest such share."""
    meets = _meets(lut, input_tokens, output_tokens, objectives, batch)
    if not meets.any():
        return None
    clock = int(np.argmax(meets.any(axis=1)))
    return int(lut.clocks_mhz[clock]), int(lut.shares_pct[np.argmax(meets[clock])])


def _meets(
    lut: Lut, input_tokens: float, output_tokens: float, objectives: Objectives, batch: float
) -> NDArray[np.bool_]:
    """Whether each (clock, share) that can be chosen meets both objectives."""
    clocks, shares = lut.clocks_mhz[:, None], lut.shares_pct[None, :]
    tbt_ms = lut.tbt_ms(clocks, shares, batch, input_tokens + output_tokens / 2)
    on_time = lut.ttft_ms(clocks, shares, input_tokens) <= objectives.ttft_ms
    return np.asarray(on_time & (tbt_ms <= objectives.tbt_ms))
