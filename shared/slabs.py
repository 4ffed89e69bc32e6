"""What stages of KV may take of host memory: slabs, each of one KV shape while in use, within a bound (3.5).

Models differ in the bytes of a KV block by a factor of a hundred. So a slab is a whole number of blocks of
one shape, near the size asked for, and a stage is a whole number of slabs, which go back to all shapes with
it: what is lost is the end of its last one. A migrator keeps these books of the requests that move, a local
scheduler of those that it has evicted.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    """A stage's slabs, of `slab_blocks` blocks of `block_bytes` each, and how many blocks it uses."""

    block_bytes: int
    slab_blocks: int
    slabs: int = 0
    blocks: int = 0

    @property
    def bytes_taken(self) -> int:
        return self.slabs * self.slab_blocks * self.block_bytes


class SlabPool:
    """The books of all stages of one owner.

    Args:
        max_bytes: the bound.
        slab_bytes: about how large a slab is; one block at least.
    """

    def __init__(self, max_bytes: int, slab_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._slab_bytes = slab_bytes
        self._held: dict[str, _Held] = {}

    @property
    def taken_bytes(self) -> int:
        """Bytes of all slabs in use."""
        return sum(held.bytes_taken for held in self._held.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that were asked for."""
        return sum(held.blocks * held.block_bytes for held in self._held.values())

    @property
    def fragmentation(self) -> float:
        """The part of the slabs in use that no block was asked for in, 0 to 1."""
        taken_bytes = self.taken_bytes
        return 1 - self.used_bytes / taken_bytes if taken_bytes else 0.0

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that have slabs, the oldest first."""
        return tuple(self._held)

    def blocks_of(self, name: str) -> int:
        """Return how many blocks the slabs of a stage have room for; 0 if there is no such stage."""
        held = self._held.get(name)
        return held.slabs * held.slab_blocks if held else 0

    def hold(self, name: str, block_bytes: int, blocks: int) -> str:
        """Give a stage room for at least so many blocks in all; returns why not, empty if it has."""
        held = self._held.get(name) or _Held(block_bytes, max(1, self._slab_bytes // block_bytes))
        if held.block_bytes != block_bytes:
            return f"stage {name} has blocks of {held.block_bytes} bytes, not of {block_bytes}"
        slabs = max(held.slabs, -(-blocks // held.slab_blocks))
        more_bytes = (slabs - held.slabs) * held.slab_blocks * block_bytes
        free_bytes = self._max_bytes - self.taken_bytes
        if more_bytes > free_bytes:
            return f"{free_bytes} of {self._max_bytes} bytes for stages are free, not {more_bytes}"
        held.slabs, held.blocks = slabs, max(held.blocks, blocks)
        self._held[name] = held
        return ""

    def free(self, name: str) -> None:
        """Take a stage's slabs back; nothing if it has none."""
        self._held.pop(name, None)
