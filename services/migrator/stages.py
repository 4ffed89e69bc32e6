"""The stages of one host as files: made, grown, and removed on every path (3.5).

The folder belongs to one migrator. What an earlier life of it has left there is removed when it starts; an
engine that still has such a file mapped reads and writes memory that is nobody else's.
"""

import asyncio
import fcntl
import mmap
import os
from pathlib import Path

from shared.errors import ConfigError
from shared.slabs import SlabPool
from shared.stage import HEADER_BYTES, Stage, StageSettings, record_bytes, stage_bytes, stage_path

LOCK = ".lock"


class Stages:
    """The host's stages. Use it in one asyncio loop.

    Args:
        host: id of the host.
        settings: where they are, and how much of them there may be.

    Raises:
        ConfigError: the folder cannot be used, or another migrator uses it.
    """

    def __init__(self, host: str, settings: StageSettings) -> None:
        self.folder = settings.folder(host)
        self.pool = SlabPool(settings.max_bytes, settings.slab_bytes)
        self._growing = asyncio.Lock()
        self._lock = self._own()
        for path in self.folder.iterdir():
            if path.name != LOCK:
                path.unlink(missing_ok=True)

    def _own(self) -> int:
        """Make the folder and lock it for as long as this process lives."""
        lock = -1
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            cause = "another migrator uses it" if isinstance(error, BlockingIOError) else str(error)
            raise ConfigError(
                f"the folder for stages, {self.folder}, cannot be used: {cause}; "
                "FESTINA_STAGES_DIR names another"
            ) from None
        return lock

    def path(self, name: str) -> Path:
        """Return where a stage is; raises FestinaError for a name that cannot be one."""
        return stage_path(self.folder, name)

    async def hold(self, name: str, block_bytes: int, blocks: int) -> str:
        """Make a stage, or let it grow, to at least so many blocks; returns why not, empty if it has them.

        The memory is there afterwards: writing to it cannot fail for want of any.
        """
        path = self.path(name)
        async with self._growing:
            self._forget_removed()
            is_new = name not in self.pool.stages
            # the checksum and count of tokens of a block are part of what it takes
            if reason := self.pool.hold(name, record_bytes(block_bytes), blocks):
                return reason
            size = stage_bytes(block_bytes, self.pool.blocks_of(name))
            try:
                await asyncio.to_thread(_allocate, path, size, block_bytes if is_new else None)
            except OSError as error:
                self.free(name)
                return f"no memory for stage {name}: {error.strerror}"
            if name not in self.pool.stages:  # freed meanwhile: what was made then is to go as well
                self.free(name)
                return f"stage {name} is not wanted any more"
            return ""

    def free(self, name: str) -> None:
        """Remove a stage; nothing if there is none."""
        self.pool.free(name)
        self.path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all stages, and let go of the folder."""
        for name in self.pool.stages:
            self.free(name)
        os.close(self._lock)

    def _forget_removed(self) -> None:
        """Take back the slabs of stages that the engines that read them have removed."""
        for name in self.pool.stages:
            if not self.path(name).exists():
                self.pool.free(name)


def _allocate(path: Path, size: int, block_bytes: int | None) -> None:
    """Give a file its memory; with `block_bytes` it is a new stage."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if block_bytes else 0)
    file = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        if block_bytes:
            with mmap.mmap(file, HEADER_BYTES) as memory, memoryview(memory) as view:
                Stage.format(view, block_bytes)
    finally:
        os.close(file)
