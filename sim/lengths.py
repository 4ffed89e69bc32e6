"""Distributions of prompt and reply lengths, as facts with their sources.

"ShareGPT" means three things in the literature: the first turn alone, each reply to the history so far, and
GPT-4 chats with all their history. Prompt and reply lengths are close to independent (Spearman 0.05-0.12), so
a pair of marginals is a fair model.
"""

from typing import Any

import numpy as np

from services.local_sched.made_up import LENGTH_QUANTILES, LENGTH_TOKENS
from shared.model import Struct


class Quantiles(Struct):
    """A distribution as its quantiles, linear in between: `tokens` at `at`, which goes from 0 to 1."""

    at: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.at) == len(self.tokens) and (self.at[0], self.at[-1]) == (0.0, 1.0)

    def lengths(self, uniforms: Any, factor: float = 1.0, least: int = 1) -> Any:
        """Return the whole lengths at these quantiles, times `factor`, whole again, at least `least`."""
        whole = np.interp(uniforms, self.at, self.tokens).astype(np.int64)
        return np.maximum(least, (whole * factor).astype(np.int64))

    @property
    def mean(self) -> float:
        """Mean of the distribution, before lengths are made whole."""
        return float(np.trapezoid(self.tokens, self.at))


class Lengths(Struct):
    """Lengths of the prompts and replies of one workload."""

    input_tokens: Quantiles
    output_tokens: Quantiles


_AT = (0.0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99)

# Aegaeon's sample (its artifact, synth-32-0.1-1.0-1.0.csv, 323 requests): the history so far is the prompt,
# the next reply the output. Means 682 and 296 tokens. The two longest prompts have 3,213 and 11,630 tokens.
SHAREGPT = Lengths(
    Quantiles(
        (*_AT, 0.9969, 1.0),
        (4, 4, 7, 14, 56, 118, 180, 357, 543, 724, 968, 1032, 1208, 1466, 1703, 2252, 3213, 11_630),
    ),
    Quantiles(LENGTH_QUANTILES, LENGTH_TOKENS),
)

# First turn alone. Means as published with vLLM (SOSP'23): 161.3 and 338.0 tokens. Shapes: 1,000 first
# prompts (mean 201 tokens) scaled to that mean, and the replies of SHAREGPT (300.6) scaled to it; the second
# is an assumption.
SHAREGPT_FIRST_TURN = Lengths(
    Quantiles(
        (*_AT, 1.0),
        tuple(
            round(tokens * 161.3 / 201.0, 1)
            for tokens in (3, 5, 7, 10, 15, 19, 23, 41, 83, 180, 309, 365, 429, 547, 652, 769, 793)
        ),
    ),
    Quantiles(LENGTH_QUANTILES, tuple(round(tokens * 338.0 / 300.6, 1) for tokens in LENGTH_TOKENS)),
)

# GPT-4 chats with full history, cut at 8k (sarathi-serve's sharegpt4_8k, Llama-2 tokens, 30,731 requests).
# Means 2,340 and 439 tokens.
SHAREGPT_GPT4 = Lengths(
    Quantiles(
        (*_AT, 1.0),
        (1, 12, 29, 74, 382, 580, 777, 1203, 1730, 2401, 3235, 3734, 4278, 5696, 6563, 7434, 8141),
    ),
    Quantiles(
        (*_AT, 1.0),
        (2, 6, 44, 84, 181, 228, 271, 346, 415, 493, 581, 628, 683, 834, 920, 998, 1024),
    ),
)
