"""How often Python looks for cycles of dead objects while a world is played."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 200_000  # objects made between two looks; a world has few cycles, and looking takes a fifth of it


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Look for cycles rarely within this block."""
    before = gc.get_threshold()
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
