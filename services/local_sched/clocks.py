"""The SM clock of one GPU: what was asked, what its driver was told, and what it runs at, kept apart.

The driver's yes is no proof: power cap and heat hold a clock lower (1785 MHz asked under a cap of 500 W ran
at 1308). So the clock is read back, and whoever decides hears of the one that is real.
"""

from collections.abc import Sequence

from shared.engine import ClockApplied

WRITE_INTERVAL_MS = 100.0
"""Least time between two writes: every 50 ms they delay collectives (NCCL 1551)."""
SETTLE_MS = 300.0
"""A clock that is not there this long after it was written will not come."""
RETRY_MS = 1_000.0
"""After a refusal the same is tried again."""
SAME_MHZ = 15
"""Clocks are read to a step of the device."""
NOTABLE = 0.02
"""A limited clock wavers; a change by more than this part is told."""


def snapped(offered_mhz: Sequence[int], asked_mhz: int) -> int:
    """Return the highest clock offered that is not above the one asked for, else the lowest."""
    return max((clock for clock in offered_mhz if clock <= asked_mhz), default=min(offered_mhz))


def granted(asked_mhz: int, applied_mhz: int) -> ClockApplied:
    """Return what is told of a clock that runs, the one asked for or the one that it was snapped to."""
    reason = "" if applied_mhz == asked_mhz else "the device does not offer the clock asked for"
    return ClockApplied(asked_mhz=asked_mhz, applied_mhz=applied_mhz, reason=reason)


class ClockKeeper:
    """Decides when a clock is written, and says what came of it.

    Args:
        offered_mhz: the clocks that the device offers.

    Attributes:
        asked_mhz: the clock asked for last; None before.
        written_mhz: the one that the driver has taken; None: none, or refused.
        real_mhz: the one last read.
    """

    def __init__(self, offered_mhz: Sequence[int]) -> None:
        self.asked_mhz: int | None = None
        self.written_mhz: int | None = None
        self.real_mhz = 0
        self._offered_mhz = offered_mhz
        self._due_ms: float | None = None
        self._written_ms = -WRITE_INTERVAL_MS
        self._refused = ""
        self._told: ClockApplied | None = None

    @property
    def due_ms(self) -> float | None:
        """When the next write is due; None if there is none to make."""
        return self._due_ms

    def settling(self, now_ms: float) -> bool:
        """Say whether it is still open what comes of the last write."""
        return now_ms - self._written_ms <= 2.0 * SETTLE_MS

    def ask(self, now_ms: float, clock_mhz: int) -> None:
        """Take a wish; of several before the next write the last counts."""
        self.asked_mhz, self._told = clock_mhz, None
        self._due_ms = max(now_ms, self._written_ms + WRITE_INTERVAL_MS)

    def wanted(self, now_ms: float) -> int | None:
        """Return the clock to write now, one that is offered; None if it is not time."""
        return None if self._due_ms is None or now_ms < self._due_ms else self._target_mhz

    def answered(self, now_ms: float, clock_mhz: int, refused: str) -> None:
        """Note what came of a write; `refused` says why the device keeps its clock, empty if it does not."""
        self._written_ms, self._refused = now_ms, refused
        self.written_mhz = None if refused else clock_mhz
        again = bool(refused) or self._target_mhz != clock_mhz
        wait_ms = RETRY_MS if refused else WRITE_INTERVAL_MS
        self._due_ms = now_ms + wait_ms if again else None

    def read(self, now_ms: float, real_mhz: int, limits: Sequence[str], idle: bool) -> ClockApplied | None:
        """Take a reading; returns what there is to tell, if that is news."""
        self.real_mhz = real_mhz
        news, told = self._outcome(now_ms, real_mhz, limits, idle), self._told
        if news is None:
            return None
        if told is not None and (news.limited, news.reason) == (told.limited, told.reason):
            wavered_mhz = abs(news.applied_mhz - told.applied_mhz)
            if wavered_mhz <= NOTABLE * told.applied_mhz:
                return None
        self._told = news
        return news

    @property
    def _target_mhz(self) -> int | None:
        """The offered clock that stands for the one asked for; None before one is."""
        return None if self.asked_mhz is None else snapped(self._offered_mhz, self.asked_mhz)

    def _outcome(
        self, now_ms: float, real_mhz: int, limits: Sequence[str], idle: bool
    ) -> ClockApplied | None:
        """Say what became of what was asked; None while that is open, or nothing was."""
        asked_mhz, written_mhz = self.asked_mhz, self.written_mhz
        if asked_mhz is None:
            return None
        if self._refused:
            return ClockApplied(
                asked_mhz=asked_mhz, applied_mhz=real_mhz, reason=self._refused, limited="refused"
            )
        if written_mhz is None or written_mhz != self._target_mhz:
            return None
        resting = idle and real_mhz < written_mhz  # it clocks up again when there is work
        if resting or abs(real_mhz - written_mhz) <= SAME_MHZ:
            return granted(asked_mhz, written_mhz)
        if now_ms - self._written_ms < SETTLE_MS:
            return None
        why = ", ".join(limits) or "the device does not say why"
        limited = "capped" if real_mhz < written_mhz else "refused"
        reason = f"{written_mhz} MHz was taken and does not run: {why}"
        return ClockApplied(asked_mhz=asked_mhz, applied_mhz=real_mhz, reason=reason, limited=limited)
