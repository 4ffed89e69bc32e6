"""What a GPU has drawn, out of its energy counter and its power, with a label on every figure.

The counter is right where it is there and behaves. It may be missing, stand still, jump, or wrap at 2^32 mJ.
So power is integrated beside it: it fills in for the counter, tells a wrap from a jump, and the two are held
against each other. Where there is neither, energy is unknown, which is not zero.
"""

from collections import Counter

COUNTER, INTEGRATED, MODELLED, UNKNOWN = "counter", "integrated", "modelled", "unknown"

WRAP_J = 2**32 / 1000.0
STALL_MS = 1_000.0
"""A counter moves every 10-100 ms, even on an idle GPU; one that has not for this long stands still."""
GAP_MS = 5_000.0
"""Between readings further apart than this, power is not interpolated."""
LATE_MS = 200.0
"""The counter may tell of so much more time than has passed between two readings of it."""
OVER_CAP = 1.2
"""Power overshoots its cap by so much for moments."""
CHECK_MS = 10_000.0
DISAGREE = 0.10
"""Counter and integrated power may differ by this part over `CHECK_MS`; zeus's users saw 187 J and 327 J."""


class EnergyMeter:
    """Joules since the first reading.

    Args:
        cap_w: the most that the device draws.

    Attributes:
        source: where the last stretch of the sum comes from: ``counter``, ``integrated`` or ``unknown``.
        power_w: at the last reading; None if unknown.
        faults: how often what happened: ``wrap``, ``jump``, ``stall``, ``disagreement``.
        disputed: counter and power have disagreed when last compared.
    """

    def __init__(self, cap_w: float) -> None:
        self.source = UNKNOWN
        self.power_w: float | None = None
        self.faults: Counter[str] = Counter()
        self.disputed = False
        self._cap_w = cap_w
        self._settled_j = 0.0  # up to the counter's last move
        self._since_j: float | None = 0.0  # by power, since then; None: some of it is unknown
        self._counter_j: float | None = None
        self._moved_ms = self._read_ms = 0.0
        self._begun = self._stalled = False
        self._check = (0.0, 0.0, 0.0)  # since when, and what counter and power have summed up

    def energy_j(self, now_ms: float) -> float | None:
        """Return the joules up to now, since the last reading at its power; None while unknown."""
        if self.source == UNKNOWN or self._since_j is None:
            return None
        ahead_ms = min(now_ms - self._read_ms, GAP_MS)
        return self._settled_j + self._since_j + (self.power_w or 0.0) * ahead_ms / 1000.0

    def read(self, now_ms: float, counter_j: float | None, power_w: float | None) -> None:
        """Take a reading of the device; None for what it does not tell."""
        if not self._begun:
            self._begun, self._check = True, (now_ms, 0.0, 0.0)
            self._read_ms = self._moved_ms = now_ms
        self._integrate(now_ms, power_w)
        if counter_j is not None and self._counter_j is not None and counter_j != self._counter_j:
            self._move(now_ms, counter_j - self._counter_j)
        elif counter_j is None or now_ms - self._moved_ms >= STALL_MS:
            self._fill_in(stalled=counter_j is not None)
        elif self._counter_j is None:  # the first that it tells
            self._settle(now_ms, self._since_j or 0.0, COUNTER)
        self._counter_j = counter_j

    def _integrate(self, now_ms: float, power_w: float | None) -> None:
        """Add what power makes of the time since the last reading."""
        passed_ms, before_w = now_ms - self._read_ms, self.power_w
        self._read_ms, self.power_w = now_ms, power_w
        if passed_ms == 0.0:
            return
        if power_w is None or before_w is None or passed_ms > GAP_MS:
            self._since_j = None
        elif self._since_j is not None:
            self._since_j += (power_w + before_w) / 2.0 * passed_ms / 1000.0

    def _move(self, now_ms: float, moved_j: float) -> None:
        """The counter has moved: believe it, unless no device can have drawn that."""
        most_j = OVER_CAP * self._cap_w * (now_ms - self._moved_ms + LATE_MS) / 1000.0
        if moved_j < 0.0 and 0.0 <= moved_j + WRAP_J <= most_j:
            self.faults["wrap"] += 1
            moved_j += WRAP_J
        possible = 0.0 <= moved_j <= most_j
        since_j = self._since_j
        if possible and not (self._stalled and since_j and moved_j < since_j * (1.0 - DISAGREE)):
            self._compare(now_ms, moved_j)
            self._settle(now_ms, moved_j, COUNTER)
        else:  # it jumped, or goes on from where it stood still
            if not possible:
                self.faults["jump"] += 1
            self._settle(now_ms, since_j or 0.0, UNKNOWN if since_j is None else INTEGRATED)
        self._stalled = False

    def _settle(self, now_ms: float, energy_j: float, source: str) -> None:
        self._settled_j += energy_j
        self._since_j, self._moved_ms, self.source = 0.0, now_ms, source

    def _fill_in(self, stalled: bool) -> None:
        """Go by power alone, for want of a counter that moves."""
        if stalled and not self._stalled:
            self.faults["stall"] += 1
        self._stalled = self._stalled or stalled
        if self._since_j is not None and self.power_w is not None:
            self.source = INTEGRATED
        elif self.power_w is None:
            self.source = UNKNOWN
        else:  # power is back: what was missed stays unknown, and is not made up
            self._settle(self._moved_ms, 0.0, UNKNOWN)

    def _compare(self, now_ms: float, moved_j: float) -> None:
        """Hold the counter against power, over windows that are long beside what either lags."""
        since_ms, counted_j, integrated_j = self._check
        if self._since_j is None:
            self._check = (now_ms, 0.0, 0.0)
            return
        counted_j, integrated_j = counted_j + moved_j, integrated_j + self._since_j
        if now_ms - since_ms < CHECK_MS:
            self._check = (since_ms, counted_j, integrated_j)
            return
        self._check = (now_ms, 0.0, 0.0)
        self.disputed = abs(counted_j - integrated_j) > DISAGREE * max(counted_j, integrated_j)
        if self.disputed:
            self.faults["disagreement"] += 1
