"""What a migrator knows of itself: its id, its settings, and how fast KV goes from here."""

from services.migrator.run import FREEZE, PREPARE, RELEASE, STAGE, Run
from services.migrator.settings import MigratorSettings
from shared import events as ev

TO_SOURCE = (RELEASE, PREPARE, STAGE, FREEZE)  # the steps whose orders go there
MEASURED_BYTES = 1 << 20  # less says more of latency than of bandwidth
LATEST = 0.3  # weight of the latest measurement


class Host:
    """One migrator's own numbers.

    Args:
        ident: id of the host.
        settings: see `MigratorSettings`.
    """

    def __init__(self, ident: str, settings: MigratorSettings) -> None:
        self.ident = ident
        self.settings = settings
        self._bandwidths: dict[str, float] = {}  # in bytes/s, by host; "" is this one

    def advance(self, now_ms: float, run: Run, stage: str, order: ev.Message) -> list[ev.Action]:
        """Send the order of a step to the GPU it is for, and wait for the answer."""
        self.wait(now_ms, run, stage)
        return [ev.Send(to=run.move.source if stage in TO_SOURCE else run.move.destination, message=order)]

    def wait(self, now_ms: float, run: Run, stage: str) -> None:
        """Go on to a step, and wait for its answer."""
        run.enter(now_ms, stage)
        run.due_ms = now_ms + self.settings.step_timeout_ms

    def bandwidth_bytes_s(self, host: str) -> float:
        """Return how fast KV gets to GPUs of a host, as measured lately; 0 if it cannot get there."""
        here = self._bandwidths.get("", self.settings.host_bytes_s)
        if not host:
            return here
        return min(here, self._bandwidths.get(host, self.settings.network_bytes_s))

    def measure(self, host: str, n_bytes: int, took_ms: float) -> None:
        """Take a copy of KV, here or to another host, into the mean of its kind."""
        if n_bytes >= MEASURED_BYTES and took_ms > 0.0:
            latest = 1000.0 * n_bytes / took_ms
            before = self._bandwidths.get(host, latest)
            self._bandwidths[host] = before + LATEST * (latest - before)
