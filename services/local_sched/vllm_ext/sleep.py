"""An engine that gives its memory back and stays, and one that goes on with the weights of another model.

A process that is there already has vLLM imported, its context on the device, and its kernels compiled: what
is left to do is to read weights. On a GPU this is vLLM's own sleep mode. A CPU has its weights in host
memory anyway, so there level 1 gives up the KV pool, and there is no level 2.
"""

import json
from pathlib import Path
from typing import Any

import torch
from vllm import LLMEngine
from vllm.platforms import current_platform

from shared.errors import FestinaError
from shared.model import ModelSpec

NAMES_ONLY = ("_name_or_path", "transformers_version")
"""Entries of a model's configuration that say nothing about how it computes."""


class Sleeper:
    """Sleeps, wakes and exchanges weights; the caller sees to it that nothing runs.

    Args:
        engine: vLLM's, in this process.
        caches: its layers' KV.
    """

    def __init__(self, engine: LLMEngine, caches: list[torch.Tensor]) -> None:
        self._engine = engine
        self._caches = caches
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # with the bytes each had
        self.level = 0

    def sleep(self, level: int) -> int:
        """Go to a sleep level; returns the device memory that this has freed, in bytes.

        Raises:
            FestinaError: this device has no such level, or the engine sleeps already.
        """
        if self.level:
            raise FestinaError(f"it is at sleep level {self.level} already")
        if level not in (1, 2):
            raise FestinaError(f"there is no sleep level {level}; it is 1 or 2")
        freed_bytes = self._empty_kv(level) if current_platform.is_cpu() else self._sleep_on_gpu(level)
        self.level = level
        return freed_bytes

    def wake(self, served: ModelSpec, serve: ModelSpec) -> None:
        """Get the memory back, and the weights of `serve` into it in place of those of `served`.

        Raises:
            FestinaError: `serve` is of another architecture; nothing has been changed then.
        """
        if serve.weights != served.weights:
            check_alike(served, serve)
        if self.level and current_platform.is_cpu():
            for storage, n_bytes in self._emptied:
                storage.resize_(n_bytes)
            for cache in self._caches:
                cache.zero_()
        elif self.level:
            self._engine.wake_up()
        if self.level == 2 or serve.weights != served.weights:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": serve.weights})
            if current_platform.is_cpu():
                self._engine.apply_model(_renew_tied_head)
            self._engine.reset_prefix_cache()
        self.level = 0

    def _empty_kv(self, level: int) -> int:
        if level == 2:
            raise FestinaError("weights on a CPU are in host memory already: its only sleep level is 1")
        storages = [cache.untyped_storage() for cache in self._caches]
        storages = list(
            {storage.data_ptr(): storage for storage in storages}.values()
        )  # layers may share one
        self._emptied = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return sum(n_bytes for _, n_bytes in self._emptied)

    def _sleep_on_gpu(self, level: int) -> int:
        free_bytes, _ = torch.cuda.mem_get_info()
        self._engine.sleep(level)
        return int(torch.cuda.mem_get_info()[0] - free_bytes)


def _renew_tied_head(model: Any) -> None:
    """Make a CPU's output head anew from the embeddings it shares: its packed copy is not reloaded."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def check_alike(served: ModelSpec, serve: ModelSpec) -> None:
    """Raise FestinaError unless one model's weights can take the place of the other's in a running engine."""
    folders = {spec.name: Path(spec.weights) for spec in (served, serve)}
    for name, folder in folders.items():
        if not folder.is_dir():
            raise FestinaError(f"{name}: its weights {str(folder)!r} are no folder on this host.")
    one, other = (_computes(folder) for folder in folders.values())
    differs = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    sizes = ("params", "weight_bytes", "kv_bytes_per_token", "context_tokens")
    differs += [name for name in sizes if getattr(served, name) != getattr(serve, name)]
    if differs:
        raise FestinaError(
            f"{serve.name} cannot take the place of {served.name}: they differ in {', '.join(differs)}"
        )


def _computes(folder: Path) -> dict[str, object]:
    """Return all of a model's configuration that the engine computes by, its end tokens included."""
    found: dict[str, object] = {}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        found |= {f"{name}: {key}": value for key, value in content.items() if key not in NAMES_ONLY}
    return found
