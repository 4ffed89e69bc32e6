"""Which models' weights a host keeps in memory (3.3, phase three; 3.5): the latest used that fit."""


class WeightCache:
    """A bounded cache that drops what was used least recently; it keeps sizes, others the bytes.

    Args:
        capacity_bytes: all that is kept may take; what is larger than that alone is never kept.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._bytes_of: dict[str, int] = {}  # the least recently used first

    @property
    def kept(self) -> tuple[str, ...]:
        """What is kept, the least recently used first."""
        return tuple(self._bytes_of)

    @property
    def taken_bytes(self) -> int:
        """What all that is kept takes."""
        return sum(self._bytes_of.values())

    def use(self, key: str, n_bytes: int) -> list[str]:
        """Keep something as the latest used; returns what has to be dropped for it, in that order."""
        if n_bytes > self.capacity_bytes:
            return []
        self._bytes_of.pop(key, None)
        self._bytes_of[key] = n_bytes
        dropped = []
        while self.taken_bytes > self.capacity_bytes:
            oldest = next(iter(self._bytes_of))
            del self._bytes_of[oldest]
            dropped.append(oldest)
        return dropped
