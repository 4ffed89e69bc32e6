"""Output-length prediction (3.2.2): a running quantile per model and input-length class.

The paper borrows a learned predictor that is right within 5 % in 98 % of cases. Nothing public reaches that
from the prompt alone, so this one promises only what it knows: the distribution of the outputs seen.

`Predict` is the one function that the dispatcher asks. `predict_standin.py` has others for experiments.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable

from shared.events import Event
from shared.model import Request, Struct
from shared.slo import class_of

Predict = Callable[[Request, int], int]
"""From a request, and its model's context in tokens, to its output tokens in all, margin included."""

# Until a model's own outputs are known: quantiles of the replies in ShareGPT, the workload that the catalog's
# models are served with (mean 296 tokens).
PRIOR_QUANTILES = (0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1.0)
PRIOR_TOKENS = (16, 28, 50, 107, 126, 156, 205, 259, 307, 356, 400, 452, 582, 773, 1057, 1309)
PRIOR_SAMPLES = 20  # how many observations the prior is worth


def prior_tokens(quantile: float) -> float:
    """Return the prior's output length at a quantile, linear between the table's."""
    index = bisect_left(PRIOR_QUANTILES, quantile)
    if index == 0:
        return PRIOR_TOKENS[0]
    if index == len(PRIOR_QUANTILES):
        return PRIOR_TOKENS[-1]
    low, high = PRIOR_QUANTILES[index - 1], PRIOR_QUANTILES[index]
    part = (quantile - low) / (high - low)
    return PRIOR_TOKENS[index - 1] + part * (PRIOR_TOKENS[index] - PRIOR_TOKENS[index - 1])


def prior() -> list[float]:
    """Return a sample of the prior, in the order in which values push it out.

    The middle goes first and the tails last, so that what remains of it stays spread out.
    """
    ascending = [prior_tokens((i + 0.5) / PRIOR_SAMPLES) for i in range(PRIOR_SAMPLES)]
    return sorted(ascending, key=lambda tokens: abs(tokens - ascending[PRIOR_SAMPLES // 2]))


class Learnt(Struct):
    """What one scheduler has learnt about one model: output tokens by class of input, oldest first."""

    scheduler: str
    model: str
    output_tokens: dict[str, tuple[float, ...]]


class LearntRead(Event):
    """The shell has read from the store what a scheduler once learnt."""

    learnt: Learnt


class RunningQuantile:
    """Quantiles of the last `window` values; starts with those of `arrived`, or a sample of the prior."""

    def __init__(self, window: int, arrived: tuple[float, ...] = ()) -> None:
        self._window = window
        self._arrived = deque(arrived[-window:] or prior())
        self._sorted = sorted(self._arrived)

    @property
    def arrived(self) -> tuple[float, ...]:
        """The values, oldest first."""
        return tuple(self._arrived)

    def add(self, value: float) -> None:
        """Take a value in, and the oldest out once the window is full."""
        self._arrived.append(value)
        insort(self._sorted, value)
        while len(self._arrived) > self._window:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]

    def at(self, quantile: float, above: float) -> float | None:
        """Return the quantile of the values greater than `above`; None if there are none."""
        first = bisect_right(self._sorted, above)
        count = len(self._sorted) - first
        if count == 0:
            return None
        # Nearest rank: the smallest value with at least this share of the values at or below it.
        return self._sorted[first + max(0, math.ceil(quantile * count) - 1)]


def bounded(tokens: float, margin: float, bound: int, given_tokens: int) -> int:
    """Return a predicted length with its margin, at most `bound` and more than what was given already."""
    # The small term keeps 100 * 1.05 at 105 in binary arithmetic.
    return max(given_tokens + 1, min(bound, math.ceil(tokens * (1.0 + margin) - 1e-9)))


class OutputPredictor:
    """Predicts how many output tokens a request will have in all."""

    def __init__(self, quantile: float, margin: float, window: int) -> None:
        self._quantile = quantile
        self._margin = margin
        self._window = window
        self._seen: dict[tuple[str, str], RunningQuantile] = {}

    def observe(self, model: str, input_tokens: int, output_tokens: int) -> None:
        """Learn from a request that ended of itself (not one cut off by ``max_tokens`` or a cancel)."""
        self._of(model, input_tokens).add(float(output_tokens))

    def forget(self, model: str) -> None:
        """Drop what was learnt about a model."""
        for key in [key for key in self._seen if key[0] == model]:
            del self._seen[key]

    def learnt(self, scheduler: str, model: str) -> Learnt:
        """Return what is known about a model, to be kept under this scheduler's name."""
        seen = {cls: running.arrived for (name, cls), running in self._seen.items() if name == model}
        return Learnt(scheduler=scheduler, model=model, output_tokens=seen)

    def restore(self, learnt: Learnt) -> None:
        """Go on from what was known about a model."""
        for cls, arrived in learnt.output_tokens.items():
            self._seen[learnt.model, cls] = RunningQuantile(self._window, arrived)

    def of_request(self, request: Request, context_tokens: int) -> int:
        """Predict as `Predict` says."""
        given = len(request.output_tokens)
        inputs = len(request.prompt_tokens)
        return self.predict(request.model, inputs, request.max_tokens, context_tokens, given)

    def predict(
        self, model: str, input_tokens: int, max_tokens: int, context_tokens: int, given_tokens: int = 0
    ) -> int:
        """Return the predicted output tokens in all, margin included, within ``max_tokens`` and the context.

        Args:
            input_tokens: length of the prompt; its SLO class selects the distribution.
            max_tokens: the client's bound on all output.
            context_tokens: most tokens of prompt and output together.
            given_tokens: output that earlier attempts gave; only longer outputs are considered then.
        """
        tokens = self._of(model, input_tokens).at(self._quantile, above=given_tokens)
        if tokens is None:  # longer than anything seen: expect as much again as it has had
            tokens = 2.0 * given_tokens
        bound = min(max_tokens, context_tokens - input_tokens)
        return bounded(tokens, self._margin, bound, given_tokens)

    def _of(self, model: str, input_tokens: int) -> RunningQuantile:
        key = (model, class_of(input_tokens))
        if key not in self._seen:
            self._seen[key] = RunningQuantile(self._window)
        return self._seen[key]
