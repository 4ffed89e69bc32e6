"""Where a GPU's energy went, and what its meter has counted beyond that (3.4).

Engines tell what their steps took: all that the device draws while a step runs, shared out over its
requests. At any other time it draws what it draws at rest: for overhead while a model loads, else as idle.
Steps are told of when they have ended, so time counts as a gap between steps until one turns out to have run
in it.
"""

from collections import deque
from collections.abc import Sequence

REQUESTS, OVERHEAD, IDLE = "requests", "overhead", "idle"
MOST_GAPS = 1024
"""Gaps in which a step that is told of late may still have run; what is older is summed up."""


class Gap:
    """A time in which no step is known to have run, and what the device drew then, for which use."""

    def __init__(self, from_ms: float, until_ms: float, power_w: float, use: str) -> None:
        self.from_ms, self.until_ms = from_ms, until_ms
        self.power_w, self.use = power_w, use

    @property
    def energy_j(self) -> float:
        """What the device took in it."""
        return self.power_w * (self.until_ms - self.from_ms) / 1000.0


class EnergyBook:
    """Joules by use from the first reading of the meter on; unknown, not 0, before it and without a meter.

    Overhead is what loads took while no step ran, and what requests took that were stopped before it was
    told. What was told of a request is that request's, however it ended.

    Args:
        cap_w: the most that the device can draw.
        rest_w: what it draws without an engine.
    """

    def __init__(self, cap_w: float, rest_w: float) -> None:
        self.residual_j: float | None = None
        self._cap_w = cap_w
        self._rest = (rest_w, IDLE)
        self._begun_j: float | None = None  # what the meter showed, and what was written off since
        self._read_ms = self._known_ms = 0.0
        self._summed_j: dict[str, float] = {}
        self._all_told = True
        self._gaps: deque[Gap] = deque()

    @property
    def uses_j(self) -> dict[str, float] | None:
        """Joules by use; None while that is unknown. Together with `residual_j` they are the meter's."""
        if self._begun_j is None or not self._all_told:
            return None
        uses_j = dict(self._summed_j)
        for gap in self._gaps:
            uses_j[gap.use] += gap.energy_j
        return uses_j

    def rests(self, now_ms: float, power_w: float, use: str) -> None:
        """Note what the device draws from now on while no step runs, and for which use."""
        self._pass(now_ms)
        self._rest = (power_w, use)

    def ran(
        self, ended_ms: Sequence[float], spent_ms: float, requests_j: float | None, aborted_j: float
    ) -> None:
        """Book steps that took `spent_ms` in all, with what requests took, and those that were stopped.

        Where an engine does not tell its joules (None), nothing is known from then on.
        """
        if self._begun_j is None:
            return
        if requests_j is None:
            self._all_told, self.residual_j = False, None
            return
        self._summed_j[REQUESTS] += requests_j
        self._summed_j[OVERHEAD] += aborted_j
        last_ms = ended_ms[-1]
        self._pass(last_ms)
        if spent_ms > last_ms - ended_ms[0]:  # one after the other, without a pause
            self._cut_gaps(last_ms - spent_ms, last_ms)
        else:
            each_ms = spent_ms / len(ended_ms)
            for at_ms in ended_ms:
                self._cut_gaps(at_ms - each_ms, at_ms)

    def copied(self, energy_j: float | None) -> None:
        """Book the joules of a copy of KV, beside those of steps; None where there is no meter."""
        if self._begun_j is not None and energy_j is not None:
            self._summed_j[OVERHEAD] += energy_j

    def read(self, now_ms: float, meter_j: float | None, under_way_ms: float) -> float:
        """Compare with the meter; returns the joules, positive or negative, that nothing explains.

        What a step under way has drawn is not told yet. So the residual is at most what the device can have
        drawn since the last reading, and for as long before as such a step may have run (`under_way_ms`). One
        beyond that is returned and written off: what comes after is not judged by it.
        """
        self._pass(now_ms)
        bound_j = self._cap_w * (under_way_ms + now_ms - self._read_ms) / 1000.0
        self._read_ms = now_ms
        if meter_j is None or not self._all_told:
            return 0.0
        uses_j = self.uses_j
        if self._begun_j is None or uses_j is None:
            self._begun_j, self.residual_j = meter_j, 0.0
            self._summed_j = {REQUESTS: 0.0, OVERHEAD: 0.0, IDLE: 0.0}
            return 0.0
        self.residual_j = meter_j - self._begun_j - sum(uses_j.values())
        if abs(self.residual_j) <= bound_j:
            return 0.0
        unexplained_j, self.residual_j = self.residual_j, 0.0
        self._begun_j += unexplained_j
        return unexplained_j

    def _pass(self, now_ms: float) -> None:
        """Take the time up to now as a gap, for as long as no step is told of that ran in it."""
        if self._begun_j is not None and now_ms > self._known_ms:
            self._gaps.append(Gap(self._known_ms, now_ms, *self._rest))
            if len(self._gaps) > MOST_GAPS:
                settled = self._gaps.popleft()
                self._summed_j[settled.use] += settled.energy_j
        self._known_ms = max(self._known_ms, now_ms)

    def _cut_gaps(self, from_ms: float, until_ms: float) -> None:
        """Take a time in which a step ran out of the gaps."""
        gaps, after = self._gaps, []
        while gaps and gaps[-1].until_ms > from_ms:
            gap = gaps.pop()
            if gap.until_ms > until_ms:
                after.append(Gap(max(gap.from_ms, until_ms), gap.until_ms, gap.power_w, gap.use))
            if gap.from_ms < from_ms:
                gaps.append(Gap(gap.from_ms, from_ms, gap.power_w, gap.use))
        gaps.extend(reversed(after))
