"""What the work of one engine takes at the clocks and shares of the sweep, by its look-up table (3.2, 3.4).

Decisions come in their hundreds per second and ask for much the same loads, as long as they name them in
round numbers (`coarse`), so answers are remembered. An answer depends on the question alone: remembering it
changes nothing. A table that is replaced has a grid of its own.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from services.local_sched.tables import Energies, Parts, Repeated, Sums, Table, Times, Zeros
from shared.lut import Lut

CHUNK_TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Sizes that a chunk of prefill may have."""
KEPT = 1024
"""Answers of a kind that a grid remembers; then it starts anew."""


class Load:
    """What one engine has to do, and by when.

    Args:
        decodes: requests that decode.
        mean_context_tokens: mean context of those.
        decode_budget_ms: longest a step may take so that each keeps its TBT.
        decode_steps: steps expected until they end; weighs decode against prefill in the energy.
        prefills: (tokens left, slack in ms) of each prefill, earliest deadline first.
        step_interval_ms: least time from one decode step to the next.
    """

    def __init__(
        self,
        lut: Lut,
        decodes: int = 0,
        mean_context_tokens: float = 0.0,
        decode_budget_ms: float = math.inf,
        decode_steps: float = 1.0,
        prefills: tuple[tuple[float, float], ...] = (),
        step_interval_ms: float = 0.0,
    ) -> None:
        self.lut, self.decodes, self.mean_context_tokens = lut, decodes, mean_context_tokens
        self.decode_budget_ms, self.decode_steps = decode_budget_ms, decode_steps
        self.prefills, self.step_interval_ms = prefills, step_interval_ms

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Load)
            and self.lut is other.lut
            and self.decodes == other.decodes
            and self.mean_context_tokens == other.mean_context_tokens
            and self.decode_budget_ms == other.decode_budget_ms
            and self.decode_steps == other.decode_steps
            and self.prefills == other.prefills
            and self.step_interval_ms == other.step_interval_ms
        )

    def __hash__(self) -> int:
        return hash((self.decodes, self.mean_context_tokens, self.decode_steps, self.prefills))


class Profile:
    """What a load takes, for its engine running alone.

    Args:
        grid: what tells so.
        step_ms, budget_ms: time of one decode step, 0 if nothing decodes, and what it may take.
        prefill_ms, slack_ms: time of the prefills, 0 if there are none, and what they may take. Of several,
            the largest part of any one's slack that the prefills up to it take, and 1.
        work_ms: time of all the work: the sum of these tables.
        dynamic_j: likewise its energy above the device's static power; 0 without a meter.
    """

    def __init__(
        self,
        grid: "Grid",
        step_ms: Table,
        budget_ms: float,
        prefill_ms: Table,
        slack_ms: float,
        work_ms: list[Table],
        dynamic_j: list[Table],
    ) -> None:
        self.grid = grid
        self.step_ms, self.budget_ms = step_ms, budget_ms
        self.prefill_ms, self.slack_ms = prefill_ms, slack_ms
        self.work_ms, self.dynamic_j = work_ms, dynamic_j


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
        self._zeros: Table = Zeros(self._shares, len(clocks_mhz))
        self._phases: dict[tuple[int, float], _Phase] = {}
        self._decodes: dict[tuple[float, ...], _Decodes] = {}
        self._queues: dict[tuple[float, ...], _Phase] = {}
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
        return Profile(self, step_ms, load.decode_budget_ms, prefill_ms, slack_ms, work_ms, dynamic_j)

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
        each_ms = [self._phase(0, tokens).ms for tokens, _ in prefills]
        part = Parts(self._shares, each_ms, [slack_ms for _, slack_ms in prefills])
        queue = self._queue(tuple([tokens for tokens, _ in prefills]))
        return part, 1.0, queue.ms, queue.dynamic_j

    def _queue(self, prompts: tuple[float, ...]) -> _Phase:
        """Return the prefills of these prompts, one after the other."""
        known = self._queues.get(prompts)
        if known is None:
            each = [self._phase(0, tokens) for tokens in prompts]
            ms = Sums(self._shares, [prompt.ms for prompt in each])
            energy = Sums(self._shares, [prompt.dynamic_j for prompt in each])
            known = _keep(self._queues, prompts, _Phase(ms, energy))
        return known

    def _all_steps(self, load: Load) -> _Decodes:
        """Return one decode step of a load, and all of them."""
        batch, context_tokens = load.decodes, load.mean_context_tokens
        steps, interval_ms = load.decode_steps, load.step_interval_ms
        key = (batch, context_tokens, steps, interval_ms)
        known = self._decodes.get(key)
        if known is None:
            step = self._phase(batch, context_tokens)
            ms = Repeated(self._shares, step.ms, steps, interval_ms)
            made = _Decodes(step.ms, ms, Repeated(self._shares, step.dynamic_j, steps))
            known = _keep(self._decodes, key, made)
        return known

    def _phase(self, batch: int, tokens: float) -> _Phase:
        """Return a decode step of this batch and mean context, or the prefill of a prompt (`batch` 0)."""
        key = (batch, tokens)
        known = self._phases.get(key)
        if known is None:
            ms = Times(self._lut, self._clocks_mhz, tokens, batch)
            known = _keep(self._phases, key, _Phase(ms, Energies(ms)))
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
