"""Tables over [share][clock], the smallest share and the highest clock first: times ascend along a row."""

import math
from collections.abc import Sequence

from shared.lut import Lut


class Table:
    """Numbers over [share][clock], in plain floats: a row is worked out when first read, for few are."""

    def __init__(self, shares: int) -> None:
        self._rows: list[list[float] | None] = [None] * shares

    def __getitem__(self, share: int) -> list[float]:
        """Return the row of a share."""
        row = self._rows[share]
        if row is None:
            row = self._rows[share] = self._row(share)
        return row

    def _row(self, share: int) -> list[float]:
        raise NotImplementedError


class Zeros(Table):
    """Nothing anywhere."""

    def __init__(self, shares: int, clocks: int) -> None:
        super().__init__(shares)
        self._clocks = clocks

    def _row(self, share: int) -> list[float]:
        return [0.0] * self._clocks


class Times(Table):
    """Times of one decode step, or of one prompt (`batch` 0), none below that of a higher clock.

    The power cap makes some steps slower by a percent at a higher clock; the sweep counts on the order.
    """

    def __init__(self, lut: Lut, clocks_mhz: tuple[int, ...], tokens: float, batch: int) -> None:
        super().__init__(len(lut.device.sm_sizes_pct))
        self.lut, self.clocks_mhz, self.tokens, self.batch = lut, clocks_mhz, tokens, batch

    def _row(self, share: int) -> list[float]:
        lut, share_pct = self.lut, self.lut.device.sm_sizes_pct[share]
        if self.batch:
            row = lut.tbt_row_ms(self.clocks_mhz, share_pct, self.batch, self.tokens)
        else:
            row = lut.ttft_row_ms(self.clocks_mhz, share_pct, self.tokens)
        longest_ms = -math.inf
        for clock, ms in enumerate(row):
            if ms < longest_ms:
                row[clock] = longest_ms
            else:
                longest_ms = ms
        return row


class Energies(Table):
    """Energy above the device's static power of what takes these times; none without a meter."""

    def __init__(self, times: Times) -> None:
        super().__init__(len(times.lut.device.sm_sizes_pct))
        self._times = times

    def _row(self, share: int) -> list[float]:
        times, device = self._times, self._times.lut.device
        if not device.has_meter:
            return [0.0] * len(times.clocks_mhz)
        share_pct, static_w = device.sm_sizes_pct[share], device.static_w
        if times.batch:
            row_w = times.lut.decode_row_w(times.clocks_mhz, share_pct, times.batch, times.tokens)
        else:
            row_w = times.lut.prefill_row_w(times.clocks_mhz, share_pct, times.tokens)
        row_ms = times[share]
        return [(power_w - static_w) * row_ms[clock] / 1e3 for clock, power_w in enumerate(row_w)]


class Repeated(Table):
    """Each number, or `least` if that is more, so many times."""

    def __init__(self, shares: int, of: Table, times: float, least: float = -math.inf) -> None:
        super().__init__(shares)
        self._of, self._times, self._least = of, times, least

    def _row(self, share: int) -> list[float]:
        times, least = self._times, self._least
        return [max(number, least) * times for number in self._of[share]]


class Sums(Table):
    """The sum of several tables."""

    def __init__(self, shares: int, of: Sequence[Table]) -> None:
        super().__init__(shares)
        self._of = of

    def _row(self, share: int) -> list[float]:
        total = self._of[0][share]
        for table in self._of[1:]:
            row = table[share]
            total = [before + row[clock] for clock, before in enumerate(total)]
        return total


class Parts(Table):
    """The largest part of any one's slack that the prefills up to it take, one after the other."""

    def __init__(self, shares: int, prefills_ms: Sequence[Table], slacks_ms: Sequence[float]) -> None:
        super().__init__(shares)
        self._prefills_ms, self._slacks_ms = prefills_ms, slacks_ms

    def _row(self, share: int) -> list[float]:
        rows = [table[share] for table in self._prefills_ms]
        slacks_ms, parts = self._slacks_ms, []
        for clock in range(len(rows[0])):
            end_ms = largest = 0.0
            for i, row in enumerate(rows):
                end_ms += row[clock]
                largest = max(largest, end_ms / slacks_ms[i])
            parts.append(largest)
        return parts
