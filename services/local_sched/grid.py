"""What the work of one engine takes at the clocks and shares of the sweep, by its look-up table (3.2, 3.4).

Decisions come in their hundreds per second and ask for much the same loads, as long as they name them in
round numbers (`coarse`), so answers are remembered. An answer depends on the question alone: remembering it
changes nothing. A table that is replaced has a grid of its own.

Tables are over [share][clock], the smallest share and the highest clock first: times ascend along a row.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from shared.lut import Lut

CHUNK_TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Sizes that a chunk of prefill may have."""
KEPT = 1024
"""Answers of a kind that a grid remembers; then it starts anew."""


class Load(NamedTuple):
    """What one engine has to do, and by when.

    Args:
        decodes: requests that decode.
        mean_context_tokens: mean context of those.
        decode_budget_ms: longest a step may take so that each keeps its TBT.
        decode_steps: steps expected until they end; weighs decode against prefill in the energy.
        prefills: (tokens left, slack in ms) of each prefill, earliest deadline first.
        step_interval_ms: least time from one decode step to the next.
    """

    lut: Lut
    decodes: int = 0
    mean_context_tokens: float = 0.0
    decode_budget_ms: float = math.inf
    decode_steps: float = 1.0
    prefills: tuple[tuple[float, float], ...] = ()
    step_interval_ms: float = 0.0


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


class _Zeros(Table):
    def __init__(self, shares: int, clocks: int) -> None:
        super().__init__(shares)
        self._clocks = clocks

    def _row(self, share: int) -> list[float]:
        return [0.0] * self._clocks


class _Times(Table):
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
        return list(accumulate(row, max))


class _Energies(Table):
    """Energy above the device's static power of what takes these times; none without a meter."""

    def __init__(self, times: _Times) -> None:
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
        return [(power_w - static_w) * ms / 1e3 for power_w, ms in zip(row_w, times[share], strict=True)]


class _Repeated(Table):
    """Each number, or `least` if that is more, so many times."""

    def __init__(self, shares: int, of: Table, times: float, least: float = -math.inf) -> None:
        super().__init__(shares)
        self._of, self._times, self._least = of, times, least

    def _row(self, share: int) -> list[float]:
        times, least = self._times, self._least
        return [max(number, least) * times for number in self._of[share]]


class _Sums(Table):
    """The sum of several tables."""

    def __init__(self, shares: int, of: Sequence[Table]) -> None:
        super().__init__(shares)
        self._of = of

    def _row(self, share: int) -> list[float]:
        total = self._of[0][share]
        for table in self._of[1:]:
            total = [before + more for before, more in zip(total, table[share], strict=True)]
        return total


class _Parts(Table):
    """The largest part of any one's slack that the prefills up to it take, one after the other."""

    def __init__(self, shares: int, prefills_ms: Sequence[Table], slacks_ms: Sequence[float]) -> None:
        super().__init__(shares)
        self._prefills_ms, self._slacks_ms = prefills_ms, slacks_ms

    def _row(self, share: int) -> list[float]:
        end_ms = self._prefills_ms[0][share]
        slack_ms = self._slacks_ms[0]
        parts = [ms / slack_ms for ms in end_ms]
        for table, slack_ms in zip(self._prefills_ms[1:], self._slacks_ms[1:], strict=True):
            end_ms = [before + ms for before, ms in zip(end_ms, table[share], strict=True)]
            parts = [max(part, ms / slack_ms) for part, ms in zip(parts, end_ms, strict=True)]
        return parts


class Profile(NamedTuple):
    """What a load takes, for its engine running alone.

    Args:
        step_ms, budget_ms: time of one decode step, 0 if nothing decodes, and what it may take.
        prefill_ms, slack_ms: time of the prefills, 0 if there are none, and what they may take. Of several,
            the largest part of any one's slack that the prefills up to it take, and 1.
        work_ms: time of all the work: the sum of these tables.
        dynamic_j: likewise its energy above the device's static power; 0 without a meter.
    """

    step_ms: Table
    budget_ms: float
    prefill_ms: Table
    slack_ms: float
    work_ms: Sequence[Table]
    dynamic_j: Sequence[Table]


class _Phase(NamedTuple):
    """Time, and energy above static power, of one decode step or one prompt."""

    ms: Table
    dynamic_j: Table


class _Decodes(NamedTuple):
    """Time of one decode step; time, and energy above static power, of all of them."""

    step_ms: Table
    ms: Table
    dynamic_j: Table


def coarse(number: float, digits: int) -> int:
    """Return a number rounded up to a whole one of so many binary digits: with 6 by 3 % at most."""
    whole = math.ceil(number)
    spare = whole.bit_length() - digits
    return whole if spare <= 0 else -(-whole >> spare) << spare


class Grid:
    """The answers of one table at these clocks, descending, and its device's shares, ascending."""

    def __init__(self, lut: Lut, clocks_mhz: tuple[int, ...]) -> None:
        self._lut = lut
        self._clocks_mhz = clocks_mhz
        self._shares_pct = lut.device.sm_sizes_pct
        self._shares = len(self._shares_pct)
        self._zeros: Table = _Zeros(self._shares, len(clocks_mhz))
        self._phases: dict[tuple[int, float], _Phase] = {}
        self._decodes: dict[tuple[float, ...], _Decodes] = {}
        self._chunks_ms: dict[tuple[int, int], list[float]] = {}

    def profile(self, load: Load) -> Profile:
        """Return what a load takes."""
        step_ms = prefill_ms = self._zeros
        slack_ms = 1.0
        work_ms: list[Table] = []
        dynamic_j: list[Table] = []
        if load.decodes:
            step_ms, work, energy = self._all_steps(load)
            work_ms.append(work)
            dynamic_j.append(energy)
        if load.prefills:
            prefill_ms, slack_ms, work, energy = self._prefills(load.prefills)
            work_ms.append(work)
            dynamic_j.append(energy)
        if not work_ms:
            work_ms = dynamic_j = [self._zeros]
        return Profile(step_ms, load.decode_budget_ms, prefill_ms, slack_ms, work_ms, dynamic_j)

    def prefill_ms(self, clock: int, share: int, tokens: float) -> float:
        """Return the time of a prefill at one point, given by its place among clocks and shares."""
        return self._phase(0, tokens).ms[share][clock]

    def chunks_ms(self, clock: int, share: int) -> list[float]:
        """Return the times of prefills of `CHUNK_TOKENS` at one point."""
        key = (clock, share)
        known = self._chunks_ms.get(key)
        if known is None:
            at = (self._clocks_mhz[clock], self._shares_pct[share], np.asarray(CHUNK_TOKENS))
            known = _keep(self._chunks_ms, key, self._lut.ttft_ms(*at).tolist())
        return known

    def _prefills(self, prefills: Sequence[tuple[float, float]]) -> tuple[Table, float, Table, Table]:
        """Return what prefills take, which an engine computes one after the other: as in `Profile`."""
        if len(prefills) == 1:
            tokens, slack_ms = prefills[0]
            prompt = self._phase(0, tokens)
            return prompt.ms, slack_ms, prompt.ms, prompt.dynamic_j
        prompts = [self._phase(0, tokens) for tokens, _ in prefills]
        each_ms: list[Table] = [prompt.ms for prompt in prompts]
        part = _Parts(self._shares, each_ms, [slack_ms for _, slack_ms in prefills])
        energy = _Sums(self._shares, [prompt.dynamic_j for prompt in prompts])
        return part, 1.0, _Sums(self._shares, each_ms), energy

    def _all_steps(self, load: Load) -> _Decodes:
        """Return one decode step of a load, and all of them."""
        _, batch, context_tokens, _, steps, _, interval_ms = load
        key = (batch, context_tokens, steps, interval_ms)
        known = self._decodes.get(key)
        if known is None:
            step = self._phase(batch, context_tokens)
            ms = _Repeated(self._shares, step.ms, steps, interval_ms)
            made = _Decodes(step.ms, ms, _Repeated(self._shares, step.dynamic_j, steps))
            known = _keep(self._decodes, key, made)
        return known

    def _phase(self, batch: int, tokens: float) -> _Phase:
        """Return a decode step of this batch and mean context, or the prefill of a prompt (`batch` 0)."""
        key = (batch, tokens)
        known = self._phases.get(key)
        if known is None:
            ms = _Times(self._lut, self._clocks_mhz, tokens, batch)
            known = _keep(self._phases, key, _Phase(ms, _Energies(ms)))
        return known


def _keep(known: dict[Any, Any], key: Any, answer: Any) -> Any:
    if len(known) >= KEPT:
        known.clear()
    known[key] = answer
    return answer


@lru_cache(maxsize=256)
def grid_of(lut: Lut, clocks_mhz: tuple[int, ...]) -> Grid:
    """Return the grid of a table at these clocks."""
    return Grid(lut, clocks_mhz)
