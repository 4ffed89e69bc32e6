"""Keeps files of weights in the page cache, and gives it back (3.5).

The kernel's page cache is the host memory that a vLLM engine on this host reads its weights from. It is asked
to read ahead what is kept and to drop what is not; it may drop more where memory is short, and a load is then
as slow as from disk, whatever was told.
"""

import asyncio
import logging
import os
from pathlib import Path

from services.migrator.actions import DropWeights, KeepWeights
from services.migrator.tasks import Tasks

log = logging.getLogger(__name__)


class WeightFiles:
    """Carries out orders about weights, each in a thread: a file system may be slow. One asyncio loop."""

    def __init__(self) -> None:
        self._tasks = Tasks()

    def keep(self, order: KeepWeights) -> None:
        """Have the files of a folder read into the page cache."""
        self._tasks.begin(asyncio.to_thread(_advise, order.folder, os.POSIX_FADV_WILLNEED))

    def drop(self, order: DropWeights) -> None:
        """Give back the page cache that the files of a folder take."""
        self._tasks.begin(asyncio.to_thread(_advise, order.folder, os.POSIX_FADV_DONTNEED))

    async def close(self) -> None:
        """End what is under way."""
        await self._tasks.end()


def _advise(folder: str, advice: int) -> None:
    for path in Path(folder).glob("*.safetensors"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:  # this host may not have them
            log.warning("no weights to keep in memory", extra={"path": str(path), "error": str(error)})
            continue
        try:
            os.posix_fadvise(file, 0, 0, advice)
        finally:
            os.close(file)
