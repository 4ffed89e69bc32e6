"""Predictions with a known error, for experiments: the truth, the paper's error, or a measured one (3.2.2).

Each is a `Predict` like the running quantiles, made from a function that knows how long a request's output
will be (an emulated workload does). A request's error is drawn by its id, so a repeated run errs the same.
"""

from bisect import bisect_right
from collections.abc import Callable
from hashlib import blake2b

from services.global_sched.predict import Predict, bounded
from shared.model import Request

Ratios = tuple[tuple[float, float], ...]
"""Quantiles of predicted / true length: (quantile, ratio) ascending from 0 to 1, linear in between."""

Errors = tuple[tuple[float, Ratios], ...]
"""Ratios by the true length: (longest output they hold for, ratios), ascending."""

ORACLE: Errors = ((float("inf"), ((0.0, 1.0), (1.0, 1.0))),)

# Figure 7: the error is within 5 % for 98 % of the requests, and nearly always within 10 %.
PAPER: Errors = ((float("inf"), ((0.0, 0.9), (0.01, 0.95), (0.99, 1.05), (1.0, 1.1))),)

# Published predictions of a BERT with five length classes for Vicuna-13B (SSJF; 85,482 chats with outputs
# below 512 tokens). A class predicts its median, fitted on a random half; quantiles of the other half, in
# three equal bands of true length. 6.6 % lie within 5 % of the truth, 28.5 % within 20 %.
MEASURED: Errors = (
    (
        69.0,
        (
            *((0.0, 0.28), (0.01, 0.31), (0.05, 0.42), (0.1, 0.51), (0.25, 0.83), (0.5, 1.74), (0.75, 3.31)),
            *((0.9, 9.5), (0.95, 9.5), (0.99, 24.67), (1.0, 163.0)),
        ),
    ),
    (
        243.0,
        (
            *((0.0, 0.08), (0.01, 0.11), (0.05, 0.23), (0.1, 0.46), (0.25, 0.77), (0.5, 1.11), (0.75, 1.54)),
            *((0.9, 2.18), (0.95, 2.67), (0.99, 3.79), (1.0, 5.24)),
        ),
    ),
    (
        float("inf"),
        (
            *((0.0, 0.04), (0.01, 0.06), (0.05, 0.28), (0.1, 0.39), (0.25, 0.66), (0.5, 0.8), (0.75, 0.95)),
            *((0.9, 1.13), (0.95, 1.23), (0.99, 1.33), (1.0, 1.55)),
        ),
    ),
)


def stand_in(true_tokens: Callable[[Request], int], errors: Errors, margin: float = 0.05) -> Predict:
    """Return a prediction that errs as `errors` say.

    Args:
        true_tokens: output tokens that a request will have in all; it must be the same for each attempt.
        margin: added, as a fraction (3.2.2: 5 %).
    """

    def predict(request: Request, context_tokens: int) -> int:
        tokens = true_tokens(request)
        ratios = next(ratios for longest, ratios in errors if tokens <= longest)
        bound = min(request.max_tokens, context_tokens - len(request.prompt_tokens))
        guess = max(1.0, tokens * _at(ratios, _uniform(request.request_id)))
        return bounded(guess, margin, bound, len(request.output_tokens))

    return predict


def _at(ratios: Ratios, quantile: float) -> float:
    index = min(bisect_right(ratios, (quantile, float("inf"))), len(ratios) - 1)
    (low_q, low), (high_q, high) = ratios[index - 1], ratios[index]
    return low + (high - low) * (quantile - low_q) / (high_q - low_q)


def _uniform(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
