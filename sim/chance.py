"""Chance with a seed: the same numbers on every machine, in every process."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1


class Chance:
    """A stream of random numbers (SplitMix64); equal seeds give equal streams."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK

    def uniform(self) -> float:
        """Return a number in [0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        x = self._state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((x ^ (x >> 31)) >> 11) / 2**53

    def between(self, low: float, high: float) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self.uniform()

    def below(self, bound: int) -> int:
        """Return a whole number in [0, bound)."""
        return int(self.uniform() * bound)

    def happens(self, probability: float) -> bool:
        """Say yes with this probability."""
        return probability > 0.0 and self.uniform() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""
        return choices[self.below(len(choices))]
