"""The weights that this host keeps in memory, and the news of them: `weight_cache.py` says which."""

import math

from services.migrator.actions import DropWeights, KeepWeights
from services.migrator.weight_cache import WeightCache
from shared import events as ev
from shared.model import ModelSpec, digest
from shared.weights import WEIGHTS_BEAT_MS


class Weights:
    """The one owner of a host's cache of weights. A new one is empty, and says so at once.

    Args:
        host: id of the host.
        capacity_bytes: see `MigratorSettings.weight_cache_bytes`.
    """

    def __init__(self, host: str, capacity_bytes: int) -> None:
        self._host = host
        self._folders: dict[str, str] = {}  # of what is kept, by key; emulated weights have none
        self._told_ms = -math.inf
        self.cache = WeightCache(capacity_bytes)

    @property
    def wake_ms(self) -> float | None:
        """When the news is to be told again; None if nothing is ever kept."""
        return max(0.0, self._told_ms + WEIGHTS_BEAT_MS) if self.cache.capacity_bytes else None

    def used(self, now_ms: float, model: ModelSpec) -> list[ev.Action]:
        """A model's weights have come through this host's memory: keep them as the latest used."""
        key, before = digest(model), set(self.cache.kept)
        dropped = self.cache.use(key, model.weight_bytes)
        actions: list[ev.Action] = []
        for folder in filter(None, (self._folders.pop(old, "") for old in dropped)):
            actions.append(DropWeights(folder=folder))
        if model.weights and key in self.cache.kept:
            self._folders[key] = model.weights
            actions.append(KeepWeights(folder=model.weights))
        return actions if before == set(self.cache.kept) else [*actions, self._news(now_ms)]

    def beat(self, now_ms: float) -> list[ev.Action]:
        """Tell again what is kept, if that is due: news may have been lost, and readers forget old ones."""
        due_ms = self.wake_ms
        return [] if due_ms is None or now_ms < due_ms else [self._news(now_ms)]

    def _news(self, now_ms: float) -> ev.Send:
        self._told_ms = now_ms
        return ev.Send(to=self._host, message=ev.HostWeights(host=self._host, specs=self.cache.kept))
