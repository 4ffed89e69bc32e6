"""The joint sweep over clocks and SM shares: the least energy that meets every deadline (3.4, Fig. 8 step 3).

`choose` is the sweep's decision over plain numbers. `profile` asks the look-up table what each engine needs,
and `candidates` makes the choices out of it: per clock, the least shares that meet the deadlines, and those
shares widened in proportion until they fill the device. The second kind is not in the paper: a decode on its
least share finishes late within its deadline, and while it lasts the device's static power is drawn, so
more SMs are sometimes less energy. Energy decides.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shared.devices import Device
from shared.lut import Lut
from shared.silicon import contention, idle_power_w


class Candidate(NamedTuple):
    """A clock with one SM share per engine; None where no share meets that engine's deadlines."""

    sm_clock_mhz: int
    shares_pct: tuple[int | None, ...]
    energy_j: float


def feasible(candidate: Candidate, budget_pct: int = 100) -> bool:
    """Say whether every deadline is met and the shares fit: at most 100 % (docs/decisions.md, 5)."""
    shares = [share for share in candidate.shares_pct if share is not None]
    return len(shares) == len(candidate.shares_pct) and sum(shares) <= budget_pct


def choose(
    found: Iterable[Candidate],
    *,
    budget_pct: int = 100,
    current_mhz: int | None = None,
    may_switch: bool = True,
    min_gain: float = 0.0,
) -> Candidate | None:
    """Return the feasible candidate of least energy, or None if there is none.

    Equal energies go to the lower clock, then to the smaller shares. The current clock, where it is feasible,
    is kept if it may not be switched now, or if another would save less than `min_gain` of the energy.
    """

    def rank(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
        return candidate.energy_j, candidate.sm_clock_mhz, tuple(share or 0 for share in candidate.shares_pct)

    fitting = [candidate for candidate in found if feasible(candidate, budget_pct)]
    best = min(fitting, key=rank, default=None)
    here = min((c for c in fitting if c.sm_clock_mhz == current_mhz), key=rank, default=None)
    if best is None or here is None:
        return best
    return best if may_switch and best.energy_j < here.energy_j * (1.0 - min_gain) else here


@lru_cache(maxsize=4096)
def proportional(
    needs: tuple[float, ...], sizes_pct: tuple[int, ...], budget_pct: int = 100
) -> tuple[int, ...]:
    """Return shares in proportion to `needs`, each one of the device's ascending sizes.

    They add up to at most `budget_pct`, except where even the smallest size for each is more than that.
    """
    if len(sizes_pct) == 1:  # a device that is not partitioned
        return tuple(sizes_pct[0] for _ in needs)
    ideal_pct = [budget_pct * need / sum(needs) for need in needs]
    index = [0] * len(needs)
    left_pct = budget_pct - sizes_pct[0] * len(needs)

    def growth_pct(engine: int) -> int:
        larger = index[engine] + 1
        return sizes_pct[larger] - sizes_pct[index[engine]] if larger < len(sizes_pct) else budget_pct + 1

    while growing := [engine for engine in range(len(needs)) if growth_pct(engine) <= left_pct]:
        furthest = max(growing, key=lambda engine: ideal_pct[engine] - sizes_pct[index[engine]])
        left_pct -= growth_pct(furthest)
        index[furthest] += 1
    return tuple(sizes_pct[i] for i in index)


@dataclass(frozen=True)
class Load:
    """What one engine has to do, and by when.

    Args:
        decodes: requests that decode.
        mean_context_tokens: mean context of those.
        decode_budget_ms: longest a step may take so that each keeps its TBT.
        decode_steps: steps expected until they end; weighs decode against prefill in the energy.
        prefills: (tokens left, slack in ms) of each prefill, earliest deadline first.
    """

    lut: Lut
    decodes: int = 0
    mean_context_tokens: float = 0.0
    decode_budget_ms: float = math.inf
    decode_steps: float = 1.0
    prefills: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Profile:
    """One engine's load over the grid: each field is [clock][share], and for the engine running alone.

    Args:
        decode_ms: time of one decode step; 0 if nothing decodes.
        prefill_part: largest part of any prefill's slack that the prefills up to it take; above 1 is late.
        work_ms: time of all the work of the load.
        dynamic_j: its energy above the device's static power; 0 without a meter.
    """

    decode_budget_ms: float
    decode_ms: list[list[float]]
    prefill_part: list[list[float]]
    work_ms: list[list[float]]
    dynamic_j: list[list[float]]

    def meets(self, clock: int, share: int, bandwidth_scale: float, compute_scale: float) -> bool:
        """Say whether all deadlines hold at a point of the grid under contention.

        Where an engine does both, decode steps take their part of its time from the prefills.
        """
        step_ms = self.decode_ms[clock][share] / bandwidth_scale
        if step_ms > self.decode_budget_ms:
            return False
        left_for_prefill = 1.0 - step_ms / self.decode_budget_ms
        return self.prefill_part[clock][share] <= compute_scale * left_for_prefill


def profile(device: Device, load: Load, clocks_mhz: Sequence[int]) -> Profile:
    """Ask the look-up table about a load at every clock and share; four table queries."""
    clock = np.asarray(clocks_mhz)[:, None]
    share = np.asarray(device.sm_sizes_pct)[None, :]
    static_w = idle_power_w(device, "cold")
    shape = (len(clocks_mhz), len(device.sm_sizes_pct))
    decode_ms, prefill_part = np.zeros(shape), np.zeros(shape)
    work_ms, dynamic_j = np.zeros(shape), np.zeros(shape)
    if load.decodes:
        at: Any = (clock, share, load.decodes, load.mean_context_tokens)
        decode_ms = load.lut.tbt_ms(*at) + np.zeros(shape)
        work_ms = work_ms + decode_ms * load.decode_steps
        dynamic_j = dynamic_j + (load.lut.decode_power_w(*at) - static_w) * work_ms / 1e3
    if load.prefills:
        tokens, slack_ms = (np.asarray(column) for column in zip(*load.prefills, strict=True))
        at = (clock[..., None], share[..., None], tokens)
        prefill_ms = load.lut.ttft_ms(*at)
        prefill_part = np.max(np.cumsum(prefill_ms, axis=-1) / slack_ms, axis=-1)
        work_ms = work_ms + prefill_ms.sum(axis=-1)
        dynamic_j = dynamic_j + ((load.lut.prefill_power_w(*at) - static_w) * prefill_ms).sum(axis=-1) / 1e3
    return Profile(
        decode_budget_ms=load.decode_budget_ms,
        decode_ms=decode_ms.tolist(),
        prefill_part=prefill_part.tolist(),
        work_ms=work_ms.tolist(),
        dynamic_j=np.nan_to_num(dynamic_j).tolist(),
    )


@lru_cache(maxsize=4096)
def scales(device: Device, shares_pct: tuple[int, ...]) -> tuple[float, float]:
    """Return (bandwidth, compute) left to engines that run on these shares at one moment.

    Kept, as `proportional` is: the sweep asks at every clock for the same few shares.
    """
    return contention(device, [share / 100 for share in shares_pct])


def least_shares(device: Device, profiles: Sequence[Profile], clock: int) -> tuple[int | None, ...]:
    """Return the least share per engine that meets its deadlines at a clock of the grid, beside the others.

    More SMs for one engine leave less bandwidth for the rest, so shares are raised, from the smallest on,
    until all deadlines hold at once. Needs only grow on the way, so the first fixed point is the least.
    """
    sizes = device.sm_sizes_pct
    index = [0] * len(profiles)
    while True:
        bandwidth, compute = scales(device, tuple(sizes[i] for i in index))
        short = [e for e, p in enumerate(profiles) if not p.meets(clock, index[e], bandwidth, compute)]
        stuck = {e for e in short if index[e] == len(sizes) - 1}
        if stuck or not short:
            return tuple(None if e in stuck else sizes[i] for e, i in enumerate(index))
        for engine in short:
            index[engine] += 1


def energy_j(
    device: Device, profiles: Sequence[Profile], clock: int, shares_pct: tuple[int, ...], static_w: float
) -> float:
    """Return the energy of all the work at a point.

    Static power counts once, for as long as the longest engine takes (docs/decisions.md, 16).
    Without a meter it is the time alone, so that the fastest wins (30).
    """
    bandwidth, compute = scales(device, shares_pct)
    index = [device.sm_sizes_pct.index(share) for share in shares_pct]
    alone_ms = max(p.work_ms[clock][i] for p, i in zip(profiles, index, strict=True))
    longest_ms = alone_ms / min(bandwidth, compute)
    if not device.has_meter:
        return longest_ms
    dynamic_j = sum(p.dynamic_j[clock][i] for p, i in zip(profiles, index, strict=True))
    return static_w * longest_ms / 1e3 + dynamic_j


def candidates(device: Device, profiles: Sequence[Profile], clocks_mhz: Sequence[int]) -> list[Candidate]:
    """Return the least and the filled shares at each clock, with their energy; at most two per clock."""
    sizes = device.sm_sizes_pct
    static_w = idle_power_w(device, "cold")
    found = []
    for clock, sm_clock_mhz in enumerate(clocks_mhz):
        least = least_shares(device, profiles, clock)
        shares = tuple(share for share in least if share is not None)
        if len(shares) < len(least):
            found.append(Candidate(sm_clock_mhz, least, math.inf))
            continue
        found.append(Candidate(sm_clock_mhz, least, energy_j(device, profiles, clock, shares, static_w)))
        filled = proportional(shares, sizes)
        if len(sizes) > 1 and sum(shares) <= 100 and filled != least:
            scale = scales(device, filled)
            points = zip(profiles, (sizes.index(share) for share in filled), strict=True)
            if all(p.meets(clock, i, *scale) for p, i in points):
                energy = energy_j(device, profiles, clock, filled, static_w)
                found.append(Candidate(sm_clock_mhz, filled, energy))
    return found


def widest(found: Iterable[Candidate]) -> list[Candidate]:
    """Return, for each clock, the last of its candidates that is feasible: the one with the widest shares.

    Wider shares end requests sooner for a little more energy, which is worth it when memory is short.
    """
    by_clock: dict[int, Candidate] = {}
    for candidate in found:
        kept = by_clock.get(candidate.sm_clock_mhz)
        if kept is None or not feasible(kept) or feasible(candidate):
            by_clock[candidate.sm_clock_mhz] = candidate  # the filled one comes after the least one
    return list(by_clock.values())


def fallback(device: Device, profiles: Sequence[Profile], clocks_mhz: Sequence[int]) -> Candidate:
    """Return the highest clock with shares in proportion to need, for when no point meets all deadlines.

    Also the answer to memory pressure, where the way out is to end requests sooner (docs/decisions.md, 21).
    """
    clock = len(clocks_mhz) - 1
    needs = []
    for engine in profiles:
        alone = least_shares(device, [engine], clock)[0]
        needs.append(float(alone or device.sm_sizes_pct[-1]))
    return Candidate(clocks_mhz[clock], proportional(tuple(needs), device.sm_sizes_pct), math.nan)


def largest_chunk(
    lut: Lut, sm_clock_mhz: int, sm_share_pct: int, room_ms: float, compute_scale: float, sizes: Sequence[int]
) -> int:
    """Return the largest prefill chunk, of ascending `sizes`, that adds at most `room_ms` to a decode step.

    The smallest is returned even if it does not fit: a prefill must get on.
    """
    chunk_ms = lut.ttft_ms(sm_clock_mhz, sm_share_pct, np.asarray(sizes)) / compute_scale
    return sizes[max(0, int(np.searchsorted(chunk_ms, room_ms, side="right")) - 1)]
