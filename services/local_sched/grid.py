"""What the work of one engine takes at the clocks and shares of the sweep, by its look-up table (3.2, 3.4).

Decisions come in their hundreds per second and ask for much the same loads, as long as they name them in
round numbers (`coarse`), so answers are remembered. An answer depends on the question alone: remembering it
changes nothing. A table that is replaced has a grid of its own.

Tables are over [share][clock], the smallest share and the highest clock first: times ascend along a row.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.lut import Lut

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
    """Numbers over [share][clock]: an array, and lists of those rows that are read, for few are."""

    def __init__(self, numbers: NDArray[Any]) -> None:
        self.numbers = numbers
        self._rows: dict[int, list[float]] = {}

    def __getitem__(self, share: int) -> list[float]:
        """Return the row of a share."""
        row = self._rows.get(share)
        if row is None:
            row = self._rows[share] = self.numbers[share].tolist()
        return row


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
    work_ms: tuple[Table, ...]
    dynamic_j: tuple[Table, ...]


class _Phase(NamedTuple):
    """Time, and energy above static power, of one decode step or one prompt."""

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
        self._point = (np.asarray(clocks_mhz)[:, None], np.asarray(self._shares_pct)[None, :])
        self._zeros = Table(np.zeros((len(self._shares_pct), len(clocks_mhz))))
        self._prompts: dict[float, _Phase] = {}
        self._steps: dict[tuple[int, float], _Phase] = {}
        self._decodes: dict[tuple[float, ...], tuple[Table, Table]] = {}
        self._chunks_ms: dict[tuple[Any, ...], list[float]] = {}

    def profile(self, load: Load) -> Profile:
        """Return what a load takes."""
        step_ms = prefill_ms = self._zeros
        work_ms: tuple[Table, ...] = ()
        dynamic_j: tuple[Table, ...] = ()
        slack_ms = 1.0
        if load.decodes:
            step = self._step(load.decodes, load.mean_context_tokens)
            work, energy = self._all_steps(step, load)
            step_ms, work_ms, dynamic_j = step.ms, (work,), (energy,)
        if load.prefills:
            prefill_ms, slack_ms, work, energy = self._prefills(load.prefills)
            work_ms, dynamic_j = (*work_ms, work), (*dynamic_j, energy)
        none = (self._zeros,)
        return Profile(
            step_ms, load.decode_budget_ms, prefill_ms, slack_ms, work_ms or none, dynamic_j or none
        )

    def prefill_ms(self, clock: int, share: int, tokens: float) -> float:
        """Return the time of a prefill at one point, given by its place among clocks and shares."""
        return self._prompt(tokens).ms[share][clock]

    def chunks_ms(self, clock: int, share: int, sizes: tuple[int, ...]) -> list[float]:
        """Return the times of prefills of several sizes at one point."""
        key = (clock, share, sizes)
        known = self._chunks_ms.get(key)
        if known is None:
            at = (self._clocks_mhz[clock], self._shares_pct[share], np.asarray(sizes))
            known = _keep(self._chunks_ms, key, self._lut.ttft_ms(*at).tolist())
        return known

    def _prefills(self, prefills: Sequence[tuple[float, float]]) -> tuple[Table, float, Table, Table]:
        """Return what prefills take, which an engine computes one after the other: as in `Profile`."""
        tokens, slack_ms = prefills[0]
        prompt = self._prompt(tokens)
        if len(prefills) == 1:
            return prompt.ms, slack_ms, prompt.ms, prompt.dynamic_j
        ms, dynamic_j = prompt.ms.numbers, prompt.dynamic_j.numbers
        part = ms / slack_ms
        for tokens, slack_ms in prefills[1:]:
            prompt = self._prompt(tokens)
            ms = ms + prompt.ms.numbers
            part = np.maximum(part, ms / slack_ms)
            dynamic_j = dynamic_j + prompt.dynamic_j.numbers
        return Table(part), 1.0, Table(ms), Table(dynamic_j)

    def _all_steps(self, step: _Phase, load: Load) -> tuple[Table, Table]:
        """Return time and energy of all decode steps of a load."""
        key = (load.decodes, load.mean_context_tokens, load.decode_steps, load.step_interval_ms)
        known = self._decodes.get(key)
        if known is None:
            steps = load.decode_steps
            ms = np.maximum(step.ms.numbers, load.step_interval_ms) * steps
            made = (Table(ms), Table(step.dynamic_j.numbers * steps))
            known = _keep(self._decodes, key, made)
        return known

    def _prompt(self, tokens: float) -> _Phase:
        known = self._prompts.get(tokens)
        if known is None:
            at: Any = (*self._point, tokens)
            asked = (self._lut.ttft_ms(*at), self._lut.prefill_power_w(*at))
            known = _keep(self._prompts, tokens, self._phase(*asked))
        return known

    def _step(self, batch: int, mean_context_tokens: float) -> _Phase:
        key = (batch, mean_context_tokens)
        known = self._steps.get(key)
        if known is None:
            at: Any = (*self._point, *key)
            asked = (self._lut.tbt_ms(*at), self._lut.decode_power_w(*at))
            known = _keep(self._steps, key, self._phase(*asked))
        return known

    def _phase(self, ms: NDArray[Any], power_w: NDArray[Any]) -> _Phase:
        """Return what the table says, with no time below that of a higher clock.

        The power cap makes some steps slower by a percent at a higher clock; the sweep counts on the order.
        """
        ms = np.maximum.accumulate(ms)
        ms = np.ascontiguousarray(ms.T)
        device = self._lut.device
        dynamic_j: NDArray[Any] = np.zeros(ms.shape)
        if device.has_meter:
            dynamic_j = (power_w.T - device.static_w) * ms / 1e3
        return _Phase(Table(ms), Table(dynamic_j))


def _keep(known: dict[Any, Any], key: Any, answer: Any) -> Any:
    if len(known) >= KEPT:
        known.clear()
    known[key] = answer
    return answer


@lru_cache(maxsize=256)
def grid_of(lut: Lut, clocks_mhz: tuple[int, ...]) -> Grid:
    """Return the grid of a table at these clocks."""
    return Grid(lut, clocks_mhz)
