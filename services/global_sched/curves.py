"""A look-up table's numbers in the form that dispatching asks for (3.2), remembered between requests.

A dispatch asks a table for the same few operating points and batches again and again, at lengths that always
differ. So what is kept is, per point and batch, one curve over the length: start and slope of each cell.
"""

import math
from bisect import bisect_right
from itertools import pairwise

from shared.lut import Lut

CURVES_KEPT = 16_384  # per table; there are few clocks and shares, and some hundred batches


class Axis:
    """Lengths in tokens at which a table has points."""

    def __init__(self, points: tuple[int, ...]) -> None:
        self.points = [float(point) for point in points]
        widths = [high - low for low, high in pairwise(self.points)]
        self._inverse = [1.0 / width for width in (widths or [1.0])]
        self._inverse.append(self._inverse[-1])  # beyond the last point its cell goes on

    def locate(self, tokens: float) -> tuple[int, float]:
        """Return (cell, part of the way to the next point); over 1 beyond the last, 0 before the first."""
        if tokens <= self.points[0]:
            return 0, 0.0
        cell = bisect_right(self.points, tokens) - 1
        return cell, (tokens - self.points[cell]) * self._inverse[cell]


def _slopes(starts: list[float], beyond: bool) -> list[float]:
    """Return the rise in each cell; beyond the last point the last one again, or none."""
    slopes = [high - low for low, high in pairwise(starts)]
    return [*slopes, slopes[-1] if slopes and beyond else 0.0]


class Curve:
    """Time in ms, and the power in W that a request answers for, by cell of one axis.

    Powers are zeros without a meter.
    """

    def __init__(self, ms: list[float], ms_slope: list[float], w: list[float], w_slope: list[float]) -> None:
        self.ms, self.ms_slope, self.w, self.w_slope = ms, ms_slope, w, w_slope

    def ms_at(self, cell: int, part: float) -> float:
        """Return the time there."""
        return self.ms[cell] + self.ms_slope[cell] * part

    def energy_j(self, cell: int, part: float) -> float:
        """Return power times time there."""
        ms = self.ms[cell] + self.ms_slope[cell] * part
        return (self.w[cell] + self.w_slope[cell] * part) * ms / 1000.0

    def energy_parts(self) -> list[tuple[float, float, float]]:
        """Return (a, b, c) per cell, so that the energy at part x is a + b x + c x^2, in J."""
        rows = zip(self.ms, self.ms_slope, self.w, self.w_slope, strict=True)
        return [
            (w * ms / 1e3, (w * ms_slope + w_slope * ms) / 1e3, w_slope * ms_slope / 1e3)
            for ms, ms_slope, w, w_slope in rows
        ]


class Curves:
    """The curves of one table: prefill by (clock, share), decode by (clock, share, batch).

    Args:
        whole: a request answers for the power of the whole device (Eq. 2 as published), and not for its part
            of the batch, nor without the static power of the SMs that it does not use.
    """

    def __init__(self, lut: Lut, whole: bool = False) -> None:
        self.lut = lut
        self._whole = whole
        self.inputs = Axis(lut.axes.input_tokens)
        self.contexts = Axis(lut.axes.context_tokens)
        self._prefill: dict[tuple[int, int], Curve] = {}
        self._decode: dict[tuple[int, int, int], Curve] = {}

    def prefill(self, clock_mhz: int, share_pct: int) -> Curve:
        """Return the curve of a prefill over the input tokens."""
        key = (clock_mhz, share_pct)
        curve = self._prefill.get(key)
        if curve is None:
            ms, power_w = self.lut.prefill_curves(clock_mhz, share_pct)
            curve = self._prefill[key] = self._curve(ms, power_w, share_pct, 1)
        return curve

    def decode(self, clock_mhz: int, share_pct: int, batch: int) -> Curve:
        """Return the curve of a decode step over the mean context; its power is one request's part."""
        key = (clock_mhz, share_pct, batch)
        curve = self._decode.get(key)
        if curve is None:
            if len(self._decode) >= CURVES_KEPT:
                self._decode.clear()
            ms, power_w = self.lut.decode_curves(clock_mhz, share_pct, batch)
            curve = self._decode[key] = self._curve(ms, power_w, share_pct, batch)
        return curve

    def _curve(self, ms: list[float], power_w: list[float], share_pct: int, batch: int) -> Curve:
        if not self.lut.device.has_meter:
            power_w = [0.0] * len(ms)
        elif not self._whole:
            not_ours_w = self.lut.device.static_w * (1.0 - share_pct / 100.0)
            power_w = [(each_w - not_ours_w) / batch for each_w in power_w]
        # where it cannot run, a time is infinite and does not rise further
        slopes = _slopes(ms, True) if all(map(math.isfinite, ms)) else [0.0] * len(ms)
        return Curve(ms, slopes, power_w, _slopes(power_w, False))
