"""The stage of a moving request: a file in its host's shared memory that holds its KV (3.5, F).

Engines write and read stages, migrators copy them between hosts; all of one host find a stage by its name in
one folder. A file is a header of `HEADER_BYTES`, then one record per block: how many tokens the block holds
and its checksum, in `RECORD_BYTES`, and its KV. A stage grows at its end while the request goes on decoding,
so nothing in it depends on how many blocks there are. Numbers are little-endian.

A block's record is emptied before its KV is written and filled in after: whoever dies in between leaves a
block that is not there, or one whose checksum is wrong, never wrong KV.
"""

import mmap
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shared.errors import FestinaError
from shared.model import Struct
from shared.settings import require_positive

HEADER_BYTES = 4096
RECORD_BYTES = 64
"""Two numbers, and padding that keeps the KV on the boundaries of cache lines."""

MOST_THREADS = 4
"""That compare checksums of a stage; the request is frozen meanwhile."""

_FIXED = struct.Struct("<8sQI")  # magic, bytes of a block's KV, length of the description
_RECORD = struct.Struct("<II")  # tokens in the block, checksum
_MAGIC = b"FSTKV\x00\x00\x01"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python does not name yet
_DAMAGED = "the stage's description is damaged"


class StageDamaged(FestinaError):
    """A stage does not hold what it should; its KV has to be computed instead."""


def shared_memory() -> Path | None:
    """Return this machine's shared memory; None where there is none to write to."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


class StageSettings(Struct):
    """Where a host's stages are, the same for its migrator and its engines (section ``stages``).

    Args:
        dir: folder; each host has one of its own in it. Empty: ``festina`` in the machine's shared memory,
            or, where there is none, in its folder for temporary files.
        max_bytes: most bytes of all stages of a host.
        slab_bytes: about how many bytes a stage grows by.
    """

    dir: str = ""
    max_bytes: int = 1 << 30
    slab_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        require_positive(self, ("max_bytes", "slab_bytes"))

    def folder(self, host: str) -> Path:
        """Return the folder of a host's stages."""
        if self.dir:
            return Path(self.dir) / host
        return (shared_memory() or Path(tempfile.gettempdir())) / "festina" / host


class StageHeader(Struct):
    """Whose KV a stage holds: it fits an engine that says the same of its own.

    Args:
        model: its name.
        digest: of its weights; the KV of other weights means nothing.
        dtype: type of the numbers.
        shape: of one block's KV, such as (layers, KV heads, tokens, K and V).
        block_tokens: tokens of a full block.
    """

    model: str
    digest: str
    dtype: str
    shape: tuple[int, ...]
    block_tokens: int


def stage_path(folder: Path, name: str) -> Path:
    """Return where a stage is; raises FestinaError for a name that could lead out of the folder."""
    if not _NAME.fullmatch(name):
        raise FestinaError(f"{name!r} is no name of a stage: letters, digits, '-', '_' and '.' only")
    return folder / name


def record_bytes(block_bytes: int) -> int:
    """Return the bytes that a block takes in a stage."""
    return RECORD_BYTES + block_bytes


def stage_bytes(block_bytes: int, blocks: int) -> int:
    """Return the size of a stage with room for so many blocks."""
    return HEADER_BYTES + blocks * record_bytes(block_bytes)


class Stage:
    """A stage as bytes in memory. Views of blocks have to be let go of before the memory is."""

    def __init__(self, memory: memoryview) -> None:
        if len(memory) < HEADER_BYTES:
            raise StageDamaged("the stage is shorter than its header")
        magic, block_bytes, _ = _FIXED.unpack_from(memory)
        if magic != _MAGIC or not 0 < block_bytes < 1 << 40:
            raise StageDamaged("the file is no stage")
        self._memory = memory
        self.block_bytes: int = block_bytes

    @staticmethod
    def format(memory: memoryview, block_bytes: int) -> "Stage":
        """Make an empty stage of zeroed memory."""
        _FIXED.pack_into(memory, 0, _MAGIC, block_bytes, 0)
        return Stage(memory)

    @property
    def capacity_blocks(self) -> int:
        """How many blocks there is room for."""
        return (len(self._memory) - HEADER_BYTES) // record_bytes(self.block_bytes)

    def describe(self, header: StageHeader) -> None:
        """Say whose KV this is; raises FestinaError if that takes more room than there is."""
        body = msgspec.msgpack.encode(header)
        if len(body) > HEADER_BYTES - _FIXED.size - 4:
            raise FestinaError(f"the description of {header.model}'s KV is too long")
        start = _FIXED.size
        self._memory[start : start + len(body)] = body
        struct.pack_into("<I", self._memory, start + len(body), zlib.crc32(body))
        _FIXED.pack_into(self._memory, 0, _MAGIC, self.block_bytes, len(body))

    def head(self) -> bytes:
        """Return the description as it is written, for a copy of the stage."""
        return bytes(self._memory[:HEADER_BYTES]).rstrip(b"\x00")

    def put_head(self, head: bytes) -> None:
        """Write down another stage's description; raises StageDamaged if its blocks are of another size."""
        padded = head.ljust(HEADER_BYTES, b"\x00")
        if len(padded) > HEADER_BYTES or Stage(memoryview(padded)).block_bytes != self.block_bytes:
            raise StageDamaged(_DAMAGED)
        self._memory[:HEADER_BYTES] = padded

    def header(self) -> StageHeader | None:
        """Return whose KV this is, None if nobody has said; raises StageDamaged."""
        _, _, length = _FIXED.unpack_from(self._memory)
        if length == 0:
            return None
        if length > HEADER_BYTES - _FIXED.size - 4:
            raise StageDamaged(_DAMAGED)
        body = bytes(self._memory[_FIXED.size : _FIXED.size + length])
        (checksum,) = struct.unpack_from("<I", self._memory, _FIXED.size + length)
        if zlib.crc32(body) != checksum:
            raise StageDamaged(_DAMAGED)
        try:
            return msgspec.msgpack.decode(body, type=StageHeader)
        except msgspec.DecodeError:
            raise StageDamaged(_DAMAGED) from None

    def block(self, block: int) -> memoryview:
        """Return the bytes of a block's KV, whether they have been written or not."""
        start = self._record_at(block) + RECORD_BYTES
        return self._memory[start : start + self.block_bytes]

    def empty(self, block: int) -> None:
        """Say that a block's KV is about to be written."""
        _RECORD.pack_into(self._memory, self._record_at(block), 0, 0)

    def fill(self, block: int, tokens: int) -> int:
        """Say that a block's KV is written and holds so many tokens; returns its checksum."""
        with self.block(block) as kv:
            checksum = zlib.crc32(kv)
        _RECORD.pack_into(self._memory, self._record_at(block), tokens, checksum)
        return checksum

    def record(self, block: int) -> tuple[int, int]:
        """Return a block's tokens, 0 if it is not there, and its checksum as written down."""
        tokens, checksum = _RECORD.unpack_from(self._memory, self._record_at(block))
        return tokens, checksum

    def check(self, block: int) -> int:
        """Return the tokens of a block; raises StageDamaged if its KV is not what was written."""
        tokens, checksum = self.record(block)
        with self.block(block) as kv:
            if tokens and zlib.crc32(kv) != checksum:
                raise StageDamaged(f"the checksum of block {block} is wrong")
        return tokens

    def check_first(self, blocks: int) -> int:
        """Return the tokens of the first blocks together, checked by several threads; raises StageDamaged."""
        there = range(min(blocks, self.capacity_blocks))
        with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
            return sum(threads.map(self.check, there))

    def tokens(self, block_tokens: int) -> int:
        """Return how many tokens of the context the stage covers without a gap."""
        covered = 0
        for block in range(self.capacity_blocks):
            tokens, _ = self.record(block)
            covered += tokens
            if tokens < block_tokens:
                break
        return covered

    def _record_at(self, block: int) -> int:
        if not 0 <= block < self.capacity_blocks:
            raise StageDamaged(f"the stage has room for {self.capacity_blocks} blocks, not for block {block}")
        return HEADER_BYTES + block * record_bytes(self.block_bytes)


@contextmanager
def mapped(path: Path, writes: tuple[int, int] = (0, 0)) -> Iterator[Stage]:
    """Map a stage into memory, as long as it is now; it stays readable if the file is removed meanwhile.

    Args:
        path: the file.
        writes: the first of the blocks that are about to be written, and how many there are. To say so is
            faster: the pages come all at once, not one by one as they are touched.

    Raises:
        StageDamaged: there is no such stage, or it is none.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StageDamaged(f"the stage {path.name} is not there: {error.strerror}") from None
    try:
        size = os.fstat(file).st_size
        if size < HEADER_BYTES:
            raise StageDamaged(f"the stage {path.name} is shorter than its header")
        memory = mmap.mmap(file, size)
    finally:
        os.close(file)
    view = memoryview(memory)
    try:
        stage = Stage(view)
        _touch(memory, stage.block_bytes, *writes)
        yield stage
    finally:
        with suppress(BufferError):  # an error on its way up still holds a block: it goes with the error
            view.release()
            memory.close()


def _touch(memory: mmap.mmap, block_bytes: int, first: int, blocks: int) -> None:
    """Have the pages of some blocks mapped for writing, where the kernel can (Linux 5.14)."""
    page = mmap.PAGESIZE
    start = stage_bytes(block_bytes, first) // page * page
    end = min(-(-stage_bytes(block_bytes, first + blocks) // page) * page, len(memory) // page * page)
    if blocks and start < end:
        with suppress(OSError):
            memory.madvise(_POPULATE_WRITE, start, end - start)
