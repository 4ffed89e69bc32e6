"""Which GPU takes which group of models (Appendix F, transmission plan), so that least has to be sent."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

LEAST_WAKE_MS = 1.0  # what an empty GPU costs beside a used one, where all else is equal


def costs_ms(
    holds: Sequence[Collection[str]],
    groups: Sequence[Collection[str]],
    load_ms: Sequence[Mapping[str, float]],
    wake_ms: Sequence[float],
) -> NDArray[np.float64]:
    """Return the time to bring each group (column) to each GPU (row): to wake it, and to load what it lacks.

    Args:
        holds: the models that each GPU has.
        groups: the models that are to be together.
        load_ms: of each model, by GPU. Those for which it is one and the same object are looked at once.
        wake_ms: by GPU, the time until it can begin.
    """
    whole_of: dict[int, NDArray[np.float64]] = {}
    for times in load_ms:
        if id(times) not in whole_of:
            whole_of[id(times)] = np.array([sum(times[model] for model in group) for group in groups], float)
    column_of: dict[str, list[int]] = {}
    for column, group in enumerate(groups):
        for model in group:
            column_of.setdefault(model, []).append(column)
    costs = np.array([whole_of[id(times)] for times in load_ms])
    for row, held in enumerate(holds):
        for model in held:
            for column in column_of.get(model, ()):
                costs[row, column] -= load_ms[row][model]
        costs[row] += wake_ms[row] + (0.0 if held else LEAST_WAKE_MS)
    return costs


def assign(costs: NDArray[np.float64]) -> list[int]:
    """Return the GPU (row) of each group (column), the sum of costs being least (Kuhn-Munkres).

    There may be more GPUs than groups; some then get none.
    """
    rows, columns = linear_sum_assignment(costs)
    gpu_of = dict(zip(columns.tolist(), rows.tolist(), strict=True))
    return [gpu_of[column] for column in range(costs.shape[1])]
