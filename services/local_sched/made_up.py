"""Made-up tokens: what an emulated model answers.

An answer is a pure function of the prompt and the client's seed, so an attempt that is stopped and resumed
on another GPU goes on with the very same tokens, and a repeated experiment says the same again.
"""

from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError
from shared.model import Request

MIN_OUTPUT_TOKENS = 16  # no answer of the workload is shorter
# Quantiles of the reply lengths of ShareGPT as Aegaeon samples it (323 requests; mean 296).
LENGTH_QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
LENGTH_TOKENS = (16, 16, 28, 50, 107, 156, 205, 259, 307, 356, 452, 582, 773, 1057, 1309)

PIECE_TOKENS = 512
"""So many tokens of an answer are made up at a time."""

_MASK = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_FACTORS_64 = tuple(np.uint64(factor) for factor in _FACTORS)
_SHIFTS_64 = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class VocabSlice:
    """The part of a tokenizer's vocabulary that made-up answers are written in.

    Args:
        token_ids: ordinary tokens to draw from; more than one makes better reading.
        eos_id: the token that ends an answer; not among `token_ids`.
        table: the ordinary tokens as an array.

    Raises:
        ConfigError: no tokens, or `eos_id` is among them.
    """

    token_ids: tuple[int, ...]
    eos_id: int
    table: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.token_ids or self.eos_id in self.token_ids:
            raise ConfigError(
                f"made-up answers need ordinary tokens other than the end token {self.eos_id}; "
                f"got {len(self.token_ids)} tokens: name some, and leave the end token out"
            )
        object.__setattr__(self, "table", np.array(self.token_ids))


@dataclass(slots=True)
class Answer:
    """The whole answer to one request, made up piece by piece as it is asked for.

    `length` counts all tokens up to and with the end token; None: the answer never ends by itself.
    """

    vocab: VocabSlice
    key: int
    length: int | None
    max_tokens: int
    min_tokens: int
    stop_token_ids: Set[int]
    _piece: tuple[int, ...] = field(default=(), repr=False, compare=False)
    _piece_start: int = field(default=0, repr=False, compare=False)

    def token(self, index: int) -> tuple[int, str]:
        """Return output token `index` (from 0), and ``stop`` or ``length`` if the answer ends with it.

        As in vLLM, the end token is part of the output, and an end beats the token limit.
        """
        (token_id,) = self.tokens(index, index + 1)
        if self.length is not None and index + 1 >= self.length:
            return token_id, "stop"
        if token_id in self.stop_token_ids and index >= self.min_tokens:
            return token_id, "stop"
        return token_id, "length" if index + 1 >= self.max_tokens else ""

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return output tokens `start` up to, not including, `stop`."""
        first = start - self._piece_start
        if not 0 <= first <= first + stop - start <= len(self._piece):
            self._make(start, stop)
            first = 0
        return self._piece[first : first + stop - start]

    def end(self) -> tuple[int, str]:
        """Return how many tokens the whole answer has, and ``stop`` or ``length``, whichever ends it."""
        most, reason = max(1, self.max_tokens), "length"
        if self.length is not None and self.length <= most:
            most, reason = max(1, self.length), "stop"
        if self.stop_token_ids and not self.stop_token_ids.isdisjoint(self.vocab.token_ids):
            for start in range(self.min_tokens, most, PIECE_TOKENS):
                for i, token_id in enumerate(self.tokens(start, min(most, start + PIECE_TOKENS))):
                    if token_id in self.stop_token_ids:
                        return start + i + 1, "stop"
        return most, reason

    def _make(self, start: int, stop: int) -> None:
        """Make a piece of the answer from `start` on: what follows is asked for next."""
        most = self.max_tokens if self.length is None else min(self.length, self.max_tokens)
        stop = max(stop, min(start + PIECE_TOKENS, most))
        drawn = _mix_all(self.key, start, stop) % np.uint64(len(self.vocab.token_ids))
        piece: list[int] = self.vocab.table[drawn].tolist()
        if self.length is not None and stop >= self.length:
            first = max(0, self.length - 1 - start)
            piece[first:] = [self.vocab.eos_id] * (stop - start - first)
        self._piece, self._piece_start = tuple(piece), start


def answer(request: Request, vocab: VocabSlice, context_tokens: int, length: int | None = None) -> Answer:
    """Return the answer to `request`; what earlier attempts gave the client already does not change it.

    Args:
        request: of its ``sampling``, seed, min_tokens, ignore_eos and stop_token_ids matter.
        vocab: tokens to answer in.
        context_tokens: most tokens of prompt and output together (the model's).
        length: all tokens of the answer, where the workload says; None draws it.
    """
    sampling: dict[str, Any] = request.sampling
    text = msgspec.msgpack.encode((request.prompt_tokens, sampling.get("seed")))
    key = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    min_tokens = int(sampling.get("min_tokens") or 0)
    if length is None:
        length = max(output_length((_mix(~key) >> 11) / 2**53), min_tokens + 1)
    return Answer(
        vocab=vocab,
        key=key,
        length=None if sampling.get("ignore_eos") else length,
        max_tokens=min(request.max_tokens, context_tokens - len(request.prompt_tokens)),
        min_tokens=min_tokens,
        stop_token_ids=frozenset(sampling.get("stop_token_ids") or ()),
    )


def output_length(quantile: float) -> int:
    """Return the output length at a quantile in [0, 1): the measured distribution, linear in between."""
    i = bisect_right(LENGTH_QUANTILES, quantile) - 1
    low, high = LENGTH_QUANTILES[i], LENGTH_QUANTILES[i + 1]
    length = LENGTH_TOKENS[i] + (LENGTH_TOKENS[i + 1] - LENGTH_TOKENS[i]) * (quantile - low) / (high - low)
    return max(MIN_OUTPUT_TOKENS, int(length))


def _mix(x: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64), so that neighbouring indices look unrelated."""
    x = (x * _FACTORS[0]) & _MASK
    x = ((x ^ (x >> 30)) * _FACTORS[1]) & _MASK
    x = ((x ^ (x >> 27)) * _FACTORS[2]) & _MASK
    return x ^ (x >> 31)


def _mix_all(key: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return `_mix(key + i)` for i from `start` up to `stop`."""
    x = np.arange(start, stop, dtype=np.uint64)
    x += np.uint64(key & _MASK)
    for factor, shift in zip(_FACTORS_64, _SHIFTS_64, strict=True):  # in place: memory anew takes longest
        x *= factor
        x ^= x >> shift
    return x
