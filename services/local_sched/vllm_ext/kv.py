"""The KV of an engine's requests, out of its blocks into a stage and back (3.4, 3.5, F).

The engine's process is its own worker, and this runs between its steps: nothing else touches the blocks
meanwhile. On a GPU the copies would be the same, once the streams are drained. Stages of moves are files that
the migrator has made; those of evicted requests are memory of this process, and end with it.
"""

import hashlib
import mmap
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.v1.request import Request

from services.local_sched.vllm_ext.scheduler import PlanScheduler, external_id
from shared.engine import ExportKv, KvExported, KvImported, RunRequest
from shared.errors import FestinaError
from shared.model import ModelSpec
from shared.stage import Stage, StageDamaged, StageHeader, mapped, stage_bytes, stage_path

SAMPLES, SAMPLE_BYTES = 32, 4096
FAILURES = (FestinaError, OSError, RuntimeError)
"""Of a copy: no stage, or one that does not fit; no memory to map or make one; no thread; torch's own."""


class KvPort:
    """Copies KV between an engine's blocks and stages. What goes wrong is a reason in the report, no error.

    Args:
        model: what the engine serves.
        scheduler: the engine's.
        layers: vLLM's layers by name; those with a KV cache have it as (block, KV head, token, K and V).
        folder: where this host's stages of moves are; None: there are none.
    """

    def __init__(
        self, model: ModelSpec, scheduler: PlanScheduler, layers: Mapping[str, Any], folder: Path | None
    ) -> None:
        self._model = model.name
        self._scheduler = scheduler
        self._folder = folder
        caches = [layer.kv_cache for layer in layers.values() if getattr(layer, "kv_cache", None) is not None]
        self.caches: list[torch.Tensor] = caches
        self._own: dict[str, Stage] = {}  # of evicted requests
        self._header: StageHeader | None = None
        one_shape = {(cache.dtype, cache.shape[1:]) for cache in caches}
        if len(one_shape) == len(scheduler.kv_cache_config.kv_cache_groups) == 1:
            self._header = StageHeader(
                model=model.name,
                digest=weights_digest(Path(model.weights)),
                dtype=str(caches[0].dtype).removeprefix("torch."),
                shape=(len(caches), *caches[0].shape[1:]),
                block_tokens=scheduler.block_size,
            )

    @property
    def _block_bytes(self) -> int:
        return sum(cache[0].numel() * cache.element_size() for cache in self.caches)

    # ---- out of the engine

    def export(self, order: ExportKv) -> KvExported:
        """Copy the blocks that are asked for, as far as the request has them and they change no more.

        Without a stage nothing is copied: who asks wants to know that the steps before are all reported.
        """
        started = time.perf_counter()
        checksums: list[int] = []
        total_blocks = tokens = 0
        reason = ""
        try:
            request = self._find(order.request_id)
            total_blocks, ready_blocks = self._progress(request)
            blocks = range(order.first_block, min(order.first_block + order.blocks, ready_blocks))
            if order.room_blocks:
                self._make_own(order.stage, order.room_blocks)
            if order.stage:
                checksums, tokens = self._copy(order, request, blocks)
        except FAILURES as error:
            reason = str(error)
        return KvExported(
            model=self._model,
            request_id=order.request_id,
            move_id=order.move_id,
            first_block=order.first_block,
            blocks=len(checksums),
            total_blocks=total_blocks,
            n_bytes=len(checksums) * self._block_bytes,
            checksum=zlib.crc32(struct.pack(f"<{len(checksums)}I", *checksums)),
            took_ms=(time.perf_counter() - started) * 1000,
            tokens=tokens,
            reason=reason,
        )

    def _copy(self, order: ExportKv, request: Request, blocks: range) -> tuple[list[int], int]:
        """Copy blocks into a stage; returns their checksums, and how many tokens the stage covers now."""
        header = self._described()
        (block_ids,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        with self._stage(order.stage, order.room_blocks > 0, (blocks.start, len(blocks))) as stage:
            self._claim(stage, header)
            checksums = [
                self._write(stage, block, block_ids[block], request.num_computed_tokens) for block in blocks
            ]
            return checksums, stage.tokens(header.block_tokens)

    def _progress(self, request: Request) -> tuple[int, int]:
        """Return how many blocks hold KV of a request, and how many of them may be copied."""
        tokens, size = request.num_computed_tokens, self._scheduler.block_size
        total_blocks = -(-tokens // size)
        is_held = self._scheduler.is_held(request)
        return total_blocks, total_blocks if is_held else tokens // size

    def _claim(self, stage: Stage, header: StageHeader) -> None:
        """Say in a new stage whose KV it holds; one that has been begun has to be of the same."""
        if stage.block_bytes != self._block_bytes:
            raise StageDamaged(
                f"the stage has blocks of {stage.block_bytes} bytes, {self._model} of {self._block_bytes}"
            )
        if stage.header() is None:
            stage.describe(header)
        elif stage.header() != header:
            raise StageDamaged("the stage holds the KV of another model")

    def _write(self, stage: Stage, block: int, block_id: int, computed_tokens: int) -> int:
        stage.empty(block)
        for layer, kept in enumerate(self._views(stage, block)):
            kept.copy_(self.caches[layer][block_id])
        size = self._scheduler.block_size
        return stage.fill(block, min(size, computed_tokens - block * size))

    # ---- into the engine

    def take(self, order: RunRequest) -> KvImported:
        """Give a request that has just been added the KV of its stage, and remove the stage."""
        started = time.perf_counter()
        tokens, reason = 0, ""
        try:
            header = self._described()
            try:
                with self._stage(order.stage, order.own_stage) as stage:
                    tokens = self._read(stage, header, self._find(order.request.request_id), order.kv_tokens)
            finally:
                self._remove(order)
        except FAILURES as error:
            reason = str(error)
        return KvImported(
            model=self._model,
            request_id=order.request.request_id,
            tokens=tokens,
            took_ms=(time.perf_counter() - started) * 1000,
            reason=reason,
            own_stage=order.own_stage,
        )

    def free(self, name: str) -> None:
        """Drop the stage of an evicted request; nothing if there is none."""
        self._own.pop(name, None)

    def free_all(self) -> None:
        """Drop all of them: who sleeps gives host memory back as well."""
        self._own.clear()

    def _remove(self, order: RunRequest) -> None:
        if order.own_stage:
            self.free(order.stage)
        else:
            self._path(order.stage).unlink(missing_ok=True)

    def _read(self, stage: Stage, header: StageHeader, request: Request, kv_tokens: int) -> int:
        """Put a stage's KV into new blocks of a request; returns how many of its tokens it spares."""
        if stage.block_bytes != self._block_bytes or stage.header() != header:
            raise StageDamaged(f"the stage holds no KV that fits {self._model} here: {stage.header()}")
        # the last token is computed in any case: it is what the next one is sampled from
        tokens: int = min(kv_tokens, request.num_tokens - 1)
        blocks = range(-(-tokens // header.block_tokens))
        staged = stage.check_first(len(blocks))
        if not 0 < tokens <= staged:
            raise StageDamaged(f"the stage holds {staged} tokens, not {tokens}")
        manager = self._scheduler.kv_cache_manager
        if manager.allocate_slots(request, tokens, has_scheduled_reqs=bool(self._scheduler.running)) is None:
            raise FestinaError(f"there are no {len(blocks)} free blocks for the KV")
        (block_ids,) = manager.get_block_ids(request.request_id)
        for block in blocks:
            for layer, kept in enumerate(self._views(stage, block)):
                self.caches[layer][block_ids[block]].copy_(kept)
        request.num_computed_tokens = tokens
        return tokens

    # ---- both

    def _described(self) -> StageHeader:
        """Return what stages say of this engine's KV; raises FestinaError if it cannot be copied."""
        if self._header is None:
            raise FestinaError(f"the KV of {self._model} cannot be moved: it is not of one shape")
        return self._header

    def _path(self, name: str) -> Path:
        if self._folder is None:
            raise FestinaError(f"the KV of {self._model} cannot be moved: there is no folder for stages")
        return stage_path(self._folder, name)

    def _make_own(self, name: str, room_blocks: int) -> None:
        """Make a stage of this process: zeroed memory, of which only what is written is ever taken."""
        memory = memoryview(mmap.mmap(-1, stage_bytes(self._block_bytes, room_blocks)))
        self._own[name] = Stage.format(memory, self._block_bytes)

    @contextmanager
    def _stage(self, name: str, own: bool, writes: tuple[int, int] = (0, 0)) -> Iterator[Stage]:
        """Open a stage, one of this process (`own`) or a file; raises FestinaError if there is none."""
        if not own:
            with mapped(self._path(name), writes) as stage:
                yield stage
        elif name in self._own:
            yield self._own[name]
        else:
            raise StageDamaged(f"the stage {name} is not there")

    def _find(self, request_id: str) -> Request:
        for request in self._scheduler.requests.values():
            if external_id(request.request_id) == request_id:
                return request
        raise FestinaError(f"{request_id} is not in the engine of {self._model}")

    def _views(self, stage: Stage, block: int) -> list[torch.Tensor]:
        """Return a block of a stage as tensors, one for each layer."""
        cache = self.caches[0]
        whole = torch.frombuffer(stage.block(block), dtype=cache.dtype)
        return list(whole.view(len(self.caches), *cache.shape[1:]))


def weights_digest(folder: Path) -> str:
    """Return what tells a model's weights from others': sizes and samples of all files, not every byte."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()
