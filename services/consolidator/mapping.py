"""Which GPU takes which group of models (Appendix F, transmission plan), so that least has to be sent."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

WAKE_MS = 1.0  # what an empty GPU costs beside a used one, where all else is equal


def costs_ms(
    holds: Sequence[Collection[str]],
    groups: Sequence[Collection[str]],
    bytes_of: Mapping[str, int],
    bytes_per_ms: Sequence[float],
) -> NDArray[np.float64]:
    """Return the time to bring each group (column) to each GPU (row): bytes it lacks over its bandwidth.

    Args:
        holds: the models that each GPU has.
        groups: the models that are to be together.
        bytes_of: weights and moved state of each model.
        bytes_per_ms: bandwidth into each GPU.
    """
    whole = np.array([sum(bytes_of[model] for model in group) for group in groups], float)
    column_of: dict[str, list[int]] = {}
    for column, group in enumerate(groups):
        for model in group:
            column_of.setdefault(model, []).append(column)
    missing = np.tile(whole, (len(holds), 1))
    for row, held in enumerate(holds):
        for model in held:
            for column in column_of.get(model, ()):
                missing[row, column] -= bytes_of[model]
    empty = np.array([not held for held in holds])
    costs: NDArray[np.float64] = missing / np.array(bytes_per_ms, float)[:, None] + WAKE_MS * empty[:, None]
    return costs


def assign(costs: NDArray[np.float64]) -> list[int]:
    """Return the GPU (row) of each group (column), the sum of costs being least (Kuhn-Munkres).

    There may be more GPUs than groups; some then get none.
    """
    rows, columns = linear_sum_assignment(costs)
    gpu_of = dict(zip(columns.tolist(), rows.tolist(), strict=True))
    return [gpu_of[column] for column in range(costs.shape[1])]
