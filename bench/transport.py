"""What carries KV between engines, in GB/s: a stage in shared memory, TCP between two migrators, and memcpy.

All move the same blocks, of 1 MiB each (a model of 64 KiB a token), and the best of several rounds counts:

- ``transport.memcpy_gb_s``: one copy from memory to memory;
- ``transport.shm_gb_s``: one host: blocks are written into a stage, summed, compared, and read out of it;
- ``transport.tcp_gb_s``: two hosts over loopback: from one stage into another, sums compared on arrival;
- ``transport.crc_gb_s``: the checksum alone, which the two above pay twice and once.
"""

import asyncio
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.migrator.link import Links
from services.migrator.receiver import Receiver
from services.migrator.settings import LinkSettings
from services.migrator.stages import Stages
from shared.stage import StageHeader, StageSettings, mapped, shared_memory

BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, ROUNDS = 1 << 20, 16, 128, 7
HEADER = StageHeader(
    model="m", digest="d", dtype="float16", shape=(32, 8, 16, 128), block_tokens=BLOCK_TOKENS
)


def run() -> dict[str, float]:
    """Return the figures by name."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        return asyncio.run(_measure(StageSettings(dir=folder, max_bytes=1 << 30)))


async def _measure(where: StageSettings) -> dict[str, float]:
    source, destination = Stages("source", where), Stages("destination", where)
    settings = LinkSettings(secret="of the benchmark")
    receiver = Receiver(destination, settings)
    await receiver.start()
    links = Links("source", source.folder, settings)
    kv = np.random.default_rng(0).integers(0, 256, BLOCKS * BLOCK_BYTES, dtype=np.uint8)
    out = np.empty_like(kv)
    out[:] = 1  # its pages are there
    try:
        assert await source.hold("stage", BLOCK_BYTES, BLOCKS) == ""
        with mapped(source.path("stage")) as stage:
            stage.describe(HEADER)
        figures = {
            "transport.memcpy_gb_s": _best_gb_s(lambda: np.copyto(out, kv)),
            "transport.crc_gb_s": _best_gb_s(lambda: zlib.crc32(kv)),
            "transport.shm_gb_s": _best_gb_s(lambda: _through(source.path("stage"), kv, out)),
        }
        assert np.array_equal(kv, out)
        took_s = []
        for _ in range(ROUNDS):
            sent = await links.send(receiver.address, "stage", 0, BLOCKS)
            assert not sent.reason, sent.reason
            took_s.append(sent.took_ms / 1000)
        with mapped(destination.path("stage")) as stage:
            assert stage.tokens(BLOCK_TOKENS) == BLOCKS * BLOCK_TOKENS
        return {**figures, "transport.tcp_gb_s": kv.nbytes / min(took_s) / 1e9}
    finally:
        await links.close_all()
        await receiver.close()
        source.close()
        destination.close()


def _through(path: Path, kv: np.ndarray, out: np.ndarray) -> None:
    """Do what the two engines of a move on one host do with its blocks."""
    spans = [slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES) for block in range(BLOCKS)]
    with mapped(path, writes=(0, BLOCKS)) as stage:
        for block, span in enumerate(spans):
            stage.empty(block)
            stage.block(block)[:] = kv[span].data
            stage.fill(block, BLOCK_TOKENS)
    with mapped(path) as stage:
        stage.check_first(BLOCKS)
        for block, span in enumerate(spans):
            out[span] = np.frombuffer(stage.block(block), np.uint8)


def _best_gb_s(move: Callable[[], object]) -> float:
    """Return the rate of the fastest of several rounds; the machine is shared."""
    took_s = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        move()
        took_s.append(time.perf_counter() - started)
    return BLOCKS * BLOCK_BYTES / min(took_s) / 1e9
