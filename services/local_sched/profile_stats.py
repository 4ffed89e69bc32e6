"""From repeats to points, and from points to the samples that a look-up table is made of (3.2.1)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.local_sched.profile_grid import DECODE, PREFILL, Grid, Point, Reading, Sweep
from shared.lut import Lut
from shared.lut_samples import Sample

# Two-sided 95 % quantiles of Student's t for 1 to 15 degrees of freedom; beyond that the normal's 2 serves.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


FEW = 5
"""Of fewer repeats none is called an outlier: two that agree by chance would disown a third."""


@dataclass(frozen=True)
class Estimate:
    """What repeats of one point say.

    Args:
        ms: mean of the repeats that are not outliers.
        half_width: half the 95 % confidence interval, as a fraction of `ms`; infinite for a single repeat.
        outliers: repeats that were left out.
    """

    ms: float
    half_width: float
    outliers: int


def estimate(repeats_ms: Sequence[float]) -> Estimate:
    """Return mean and confidence interval. Over 5 robust deviations from the median is an outlier."""
    ordered = sorted(repeats_ms)
    median = _median(ordered)
    deviation = 1.4826 * _median(sorted(abs(ms - median) for ms in ordered))
    bound = max(5.0 * deviation, 0.02 * median)  # a clock's own grain is no outlier
    if len(ordered) < FEW:
        bound = math.inf
    kept = [ms for ms in ordered if abs(ms - median) <= bound]
    mean, count = sum(kept) / len(kept), len(kept)
    if count < 2:
        return Estimate(mean, math.inf, len(ordered) - count)
    spread = math.sqrt(sum((ms - mean) ** 2 for ms in kept) / (count - 1))
    t = _T95[count - 2] if count - 2 < len(_T95) else 2.0
    return Estimate(mean, t * spread / math.sqrt(count) / mean, len(ordered) - count)


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True)
class Effort:
    """How long one point is measured: at least `least` repeats, then until the confidence interval is narrow.

    `precision` is the half width aimed for, as a fraction; `most` repeats or `most_ms` of measuring end it.
    A meter whose counter moves in steps needs `least_ms` of measuring in any case.
    """

    precision: float = 0.03
    least: int = 3
    most: int = 20
    most_ms: float = 5_000.0
    least_ms: float = 0.0

    def enough(self, repeats_ms: Sequence[float]) -> bool:
        """Return whether no further repeat is wanted."""
        spent_ms = sum(repeats_ms)
        if len(repeats_ms) < self.least or spent_ms < self.least_ms:
            return False
        spent = len(repeats_ms) >= self.most or spent_ms >= self.most_ms
        return spent or estimate(repeats_ms).half_width <= self.precision


def oddities(readings: "dict[Point, float]", tolerance: float = 0.05) -> list[tuple[Point, Point]]:
    """Return pairs (a, b) next to each other on an axis where b should take longer than a and does not.

    Time grows with tokens and batch and falls with clock and share; what breaks that by more than the
    tolerance was disturbed while it was measured.
    """
    found = []
    for axis in ("tokens", "batch", "sm_clock_mhz", "sm_share_pct"):
        sign = 1 if axis in ("tokens", "batch") else -1
        rows: dict[tuple[object, ...], list[Point]] = {}
        for point in readings:
            others = tuple(getattr(point, name) for name in Point.__annotations__ if name != axis)
            rows.setdefault(others, []).append(point)
        for row in rows.values():
            row.sort(key=lambda point, axis=axis, sign=sign: sign * getattr(point, axis))  # type: ignore[misc]
            found += [(a, b) for a, b in pairwise(row) if readings[b] < readings[a] * (1 - tolerance)]
    return sorted(found)


# ---- samples


def at_nominal(decodes: Iterable[tuple[Point, float, float]]) -> dict[Point, float]:
    """Return decode times at the very context of each point.

    A batch that runs on grows past the context it began with. A step's time is linear in the context, so the
    slope between two contexts measured at the same clock, share and batch takes the difference away.

    Args:
        decodes: point, mean context tokens while it was measured, ms.
    """
    series: dict[tuple[int, int, int], list[tuple[Point, float, float]]] = defaultdict(list)
    for point, context, ms in decodes:
        series[point.batch, point.sm_clock_mhz, point.sm_share_pct].append((point, context, ms))
    found = {}
    for row in series.values():
        row.sort(key=lambda entry: entry[1])
        for i, (point, context, ms) in enumerate(row):
            near = row[i - 1] if i else row[min(1, len(row) - 1)]
            apart = context - near[1]
            slope = max(0.0, (ms - near[2]) / apart) if apart else 0.0
            found[point] = ms + slope * (point.tokens - context)
    return found


def beyond_memory(grid: Grid, readings: dict[Point, Reading]) -> dict[Point, Reading]:
    """Return decode points that no engine could hold, so that the table has no holes.

    They cannot be asked for in earnest. The time for KV grows with batch times context, so what a larger
    context costs is taken from the largest batch that could be measured there.
    """
    made: dict[Point, Reading] = {}
    for share in grid.shares_pct:
        for clock in grid.clocks_mhz:
            for context in grid.context_tokens[1:]:
                known: tuple[int, float, float | None] | None = None
                for batch in grid.batches:
                    point = Point(DECODE, context, batch, clock, share)
                    short = readings[Point(DECODE, grid.context_tokens[0], batch, clock, share)]
                    if point in readings:
                        known = (batch, readings[point][0] - short[0], readings[point][1])
                    elif known is not None:
                        made[point] = (short[0] + known[1] * batch / known[0], known[2])
    return made


def samples_of(readings: dict[Point, Reading]) -> list[Sample]:
    """Return points as the samples that a table is made of."""
    return [
        Sample(
            phase=point.phase,
            sm_clock_mhz=point.sm_clock_mhz,
            sm_share_pct=point.sm_share_pct,
            latency_ms=ms,
            power_w=power_w,
            input_tokens=0 if point.phase == DECODE else point.tokens,
            batch=point.batch if point.phase == DECODE else 0,
            context_tokens=point.tokens if point.phase == DECODE else 0,
        )
        for point, (ms, power_w) in sorted(readings.items())
    ]


# ---- what a profile will cost


@dataclass(frozen=True)
class Plan:
    """What a sweep is expected to do, played through on the device model.

    Args:
        cost_ms: by point to be measured, what it is expected to take, in the order of measuring.
        skipped: points expected to be foretold by their neighbours.
    """

    cost_ms: dict[Point, float]
    skipped: int


def foresee(grid: Grid, tolerance: float, effort: Effort, modelled: Lut) -> Plan:
    """Return the plan of a profile if the device behaves as its model does.

    A decode point that needs a batch of its own costs the prefill of that batch as well.
    """
    cost_ms: dict[Point, float] = {}
    skipped = 0
    for phase in (PREFILL, DECODE):
        sweep = Sweep(grid, phase, tolerance)
        running = (0, 0)  # context and size of the batch that decodes
        while (point := sweep.next()) is not None:
            at = (point.sm_clock_mhz, point.sm_share_pct)
            if phase == PREFILL:
                ms, watts = modelled.ttft_ms(*at, point.tokens), modelled.prefill_power_w(*at, point.tokens)
            else:
                batch = (point.batch, point.tokens)
                ms, watts = modelled.tbt_ms(*at, *batch), modelled.decode_power_w(*at, *batch)
            cost_ms[point] = max(effort.least * ms, effort.least_ms)
            if phase == DECODE and (point.tokens != running[0] or point.batch > running[1]):
                running = (point.tokens, point.batch)
                cost_ms[point] += point.batch * modelled.ttft_ms(*at, point.tokens)
            sweep.record(point, ms, None if math.isnan(watts) else watts)
        skipped += len(sweep.skipped)
    return Plan(cost_ms, skipped)
