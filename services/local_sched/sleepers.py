"""Engines asleep on a GPU: the processes stay, the weights are in host memory, and a load wakes them (3.5).

A process that stays spares the next load what takes longest: its start. So an engine that is unloaded goes to
sleep where host memory has room for it, and the longest asleep leave for it. One whose model is not asked for
again may go on with the weights of another of the same architecture.
"""

from typing import Generic, TypeVar

from shared.engine import LoadEngine
from shared.model import ModelSpec

T = TypeVar("T")

PROCESS_BYTES = 2 << 30
"""Host memory of an engine's process beside its weights, as seen of vLLM on CPU: 2 to 3 GB in all."""

SHAPE = (
    *("engine", "params", "layers", "hidden", "heads", "kv_heads", "head_dim"),
    *("weight_bytes", "kv_bytes_per_token", "context_tokens"),
)
"""What models have in common that may take each other's place; the engine itself looks at all the rest."""


class Sleepers(Generic[T]):
    """The engines asleep, each as it was loaded, the longest asleep first.

    Args:
        most_bytes: host memory that they may take in all; 0: none sleeps.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._asleep: dict[str, tuple[LoadEngine, T]] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Whose engines are asleep."""
        return tuple(self._asleep)

    def may_sleep(self, model: ModelSpec) -> bool:
        """Say whether an engine of a model could sleep, if the others left."""
        return need_bytes(model) <= self._most_bytes

    def add(self, load: LoadEngine, engine: T) -> list[T]:
        """Take an engine that has gone to sleep; returns those that have to leave for it."""
        gone = [self.remove(load.model.name)]
        self._asleep[load.model.name] = (load, engine)
        while sum(need_bytes(each.model) for each, _ in self._asleep.values()) > self._most_bytes:
            gone.append(self.remove(next(iter(self._asleep))))
        return [engine for engine in gone if engine is not None]

    def remove(self, model: str) -> T | None:
        """Take out the engine of a model; None: there is none."""
        _, engine = self._asleep.pop(model, (None, None))
        return engine

    def discard(self, engine: T) -> None:
        """Take out an engine that has died in its sleep."""
        for name in [name for name, (_, each) in self._asleep.items() if each is engine]:
            del self._asleep[name]

    def clear(self) -> list[T]:
        """Take out all of them."""
        gone = [engine for _, engine in self._asleep.values()]
        self._asleep.clear()
        return gone

    def wakes(self, load: LoadEngine) -> tuple[str, T] | None:
        """Take out the engine that a load had best wake, with the model that it has; None: there is none.

        That is the model's own, or the one longest asleep of those that may go on with its weights. A KV pool
        has the size that it was made with.
        """
        able = [
            name
            for name, (slept, _) in self._asleep.items()
            if slept.kv_pool_bytes == load.kv_pool_bytes and _alike(slept.model, load.model)
        ]
        name = load.model.name if load.model.name in able else next(iter(able), None)
        engine = self.remove(name) if name is not None else None
        return None if name is None or engine is None else (name, engine)


def need_bytes(model: ModelSpec) -> int:
    """Return the host memory that a model's engine takes while it sleeps."""
    return model.weight_bytes + PROCESS_BYTES


def _alike(one: ModelSpec, other: ModelSpec) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in SHAPE)
