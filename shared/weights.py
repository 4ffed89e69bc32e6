"""Which hosts have which weights in memory, as far as is heard: loading from there spares the disk (3.3)."""

from shared.events import HostWeights
from shared.model import ModelSpec, digest

WEIGHTS_BEAT_MS = 5_000.0  # a migrator tells of its host's weights at least this often
FORGOTTEN_AFTER_MS = 3.0 * WEIGHTS_BEAT_MS  # one that is silent for longer is gone, and its cache with it


class HostCaches:
    """The news of all hosts."""

    def __init__(self) -> None:
        # by host, the longest silent first: when heard, and of which weights
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    def hear(self, now_ms: float, news: HostWeights) -> None:
        """Take what a host's migrator tells, and forget the hosts that are gone."""
        self._known.pop(news.host, None)
        self._known[news.host] = (now_ms, frozenset(news.specs))
        while now_ms - next(iter(self._known.values()))[0] >= FORGOTTEN_AFTER_MS:
            del self._known[next(iter(self._known))]

    def __len__(self) -> int:
        """Return how many hosts are remembered."""
        return len(self._known)

    def hosts(self, now_ms: float, model: ModelSpec) -> set[str]:
        """Return the hosts that have a model's weights in memory. Cost: linear in the hosts."""
        spec = digest(model)
        return {
            host
            for host, (heard_ms, specs) in self._known.items()
            if spec in specs and now_ms - heard_ms < FORGOTTEN_AFTER_MS
        }

    def source(self, now_ms: float, host: str, model: ModelSpec) -> str:
        """Return where a load on that host takes its weights from: its memory (``host``), or ``disk``."""
        return "host" if host in self.hosts(now_ms, model) else "disk"
