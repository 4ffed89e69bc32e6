"""Which hosts have which weights in memory, as far as is heard: loading from there spares the disk (3.3)."""

from shared.events import HostWeights
from shared.model import ModelSpec, digest

WEIGHTS_BEAT_MS = 5_000.0  # a migrator tells of its host's weights at least this often
FORGOTTEN_AFTER_MS = 3.0 * WEIGHTS_BEAT_MS  # one that is silent for longer is gone, and its cache with it


class HostCaches:
    """The news of all hosts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, frozenset[str]]] = {}  # by host: when heard, and of which weights

    def hear(self, now_ms: float, news: HostWeights) -> None:
        """Take what a host's migrator tells."""
        self._known[news.host] = (now_ms, frozenset(news.specs))

    def source(self, now_ms: float, host: str, model: ModelSpec) -> str:
        """Return where a load on that host takes its weights from: its memory (``host``), or ``disk``."""
        heard_ms, specs = self._known.get(host, (-FORGOTTEN_AFTER_MS, frozenset()))
        return "host" if digest(model) in specs and now_ms - heard_ms < FORGOTTEN_AFTER_MS else "disk"
