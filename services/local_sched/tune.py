"""The joint sweep over clocks and SM shares: the least energy that meets every deadline (3.4, Fig. 8 step 3).

`choose` is the decision over plain numbers, and `sweep` makes the choices out of what each engine needs
(`Grid.profile`): per clock, the least shares that meet the deadlines, and those shares widened in proportion
until they fill the device. The second kind is not in the paper: a decode on its least share finishes late
within its deadline, and while it lasts the device's static power is drawn, so more SMs are sometimes less
energy. Energy decides. Clocks are named by their places, from the highest down.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.local_sched.divide import Division, divider_of, proportional
from services.local_sched.grid import CHUNK_TOKENS, Grid, Profile
from shared.devices import Device


@dataclass(init=False)  # one that is made for it stays interpreted where the rest is compiled
class Candidate:
    """A clock with one SM share per engine; None where no share meets that engine's deadlines."""

    sm_clock_mhz: int
    shares_pct: tuple[int | None, ...]
    energy_j: float

    def __init__(self, sm_clock_mhz: int, shares_pct: tuple[int | None, ...], energy_j: float) -> None:
        self.sm_clock_mhz, self.shares_pct, self.energy_j = sm_clock_mhz, shares_pct, energy_j


def feasible(candidate: Candidate, budget_pct: int = 100) -> bool:
    """Say whether every deadline is met and the shares fit: at most 100 % (docs/decisions.md, 5)."""
    shares = [share for share in candidate.shares_pct if share is not None]
    return len(shares) == len(candidate.shares_pct) and sum(shares) <= budget_pct


def choose(
    found: Sequence[Candidate],
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
    here = _least([candidate for candidate in found if candidate.sm_clock_mhz == current_mhz], budget_pct)
    if here is not None and not may_switch:
        return here
    best = _least(found, budget_pct)
    if best is None or here is None:
        return best
    return best if best.energy_j < here.energy_j * (1.0 - min_gain) else here


def _least(found: Iterable[Candidate], budget_pct: int) -> Candidate | None:
    best = None
    for candidate in found:
        if best is not None and candidate.energy_j > best.energy_j:
            continue
        if feasible(candidate, budget_pct) and (best is None or _rank(candidate) < _rank(best)):
            best = candidate
    return best


def _rank(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    return candidate.energy_j, candidate.sm_clock_mhz, tuple(share or 0 for share in candidate.shares_pct)


class Stretch:
    """Neighbouring clocks, from the place `first` on downwards, with the same shares; and the energy at each.

    `least_pct` are the least shares there, which these are or are more than.
    """

    def __init__(
        self,
        shares_pct: tuple[int | None, ...],
        least_pct: tuple[int | None, ...],
        first: int,
        energies_j: list[float],
    ) -> None:
        self.shares_pct, self.least_pct = shares_pct, least_pct
        self.first, self.energies_j = first, energies_j

    @property
    def end(self) -> int:
        """Place of the first clock below."""
        return self.first + len(self.energies_j)


def sweep(
    device: Device,
    profiles: list[Profile],
    clocks: int,
    budget_pct: int = 100,
    *,
    wide: bool = False,
    widening: bool = True,
) -> list[Stretch]:
    """Return the least and the filled shares at each of so many clocks, with their energy.

    A lower clock needs no smaller share. So the sweep goes down from the highest clock, each time from the
    shares of the one before, and ends with the first clock at which a deadline is missed or the shares do not
    fit, for below it nothing does. More SMs for one engine leave less bandwidth for the rest, so shares are
    raised until all deadlines hold at once: needs only grow on the way, so the first fit is the least.

    Args:
        profiles: of each engine, over these clocks.
        wide: leave out the least shares where the filled ones hold as well. They end requests sooner for a
            little more energy, which is worth it when memory is short (docs/decisions.md, 21).
        widening: consider the filled shares at all.
    """
    divide = divider_of(device)
    j_per_ms = device.static_w / 1e3 if device.has_meter else 1.0
    found: list[Stretch] = []
    places = (0,) * len(profiles)
    clock = 0
    while clock < clocks:
        least = divide(places)
        reach = reach_of(profiles, places, least)
        end = min(reach)
        if end <= clock:
            raised = _raised(device, places, reach, clock)
            if raised is None:
                shares_pct = _without(device, places, reach, clock)
                return [*found, Stretch(shares_pct, shares_pct, clock, [math.inf])]
            places = raised
            continue
        if least.total_pct > budget_pct:
            return [*found, *_stretch(profiles, places, least, least, clock, clock + 1, j_per_ms)]
        filled, filled_end = divide(least.filled), clock
        if widening and filled is not least:
            filled_end = max(clock, min(end, *reach_of(profiles, least.filled, filled)))
        found += _stretch(profiles, places, least, least, filled_end if wide else clock, end, j_per_ms)
        found += _stretch(profiles, least.filled, filled, least, clock, filled_end, j_per_ms)
        clock = end
    return found


def reach_of(profiles: list[Profile], places: tuple[int, ...], division: Division) -> list[int]:
    """Return by engine at how many clocks, from the highest down, its deadlines hold on these shares.

    Where an engine does both, decode steps take their part of its time from the prefills.
    """
    _, _, bandwidth, compute, _ = division
    reach = []
    for engine, profile in enumerate(profiles):
        place = places[engine]
        steps, most_ms = profile.step_ms[place], profile.budget_ms * bandwidth
        prefills, slack_ms = profile.prefill_ms[place], profile.slack_ms * compute
        end = len(steps)  # mostly all do, and if not, those that do not are the last
        while end and (
            steps[end - 1] > most_ms or prefills[end - 1] > slack_ms * (1.0 - steps[end - 1] / most_ms)
        ):
            end -= 1
        reach.append(end)
    return reach


def _raised(
    device: Device, places: Sequence[int], reach: Sequence[int], clock: int
) -> tuple[int, ...] | None:
    """Return the places with the next larger share for each engine that is late; None if one has all."""
    last = len(device.sm_sizes_pct) - 1
    if any(end <= clock and place == last for end, place in zip(reach, places, strict=True)):
        return None
    return tuple([place + (end <= clock) for end, place in zip(reach, places, strict=True)])


def _stretch(
    profiles: list[Profile],
    places: tuple[int, ...],
    division: Division,
    least: Division,
    start: int,
    end: int,
    j_per_ms: float,
) -> list[Stretch]:
    """Return the clocks from `start` up to `end` with the energy of all the work; nothing if there are none.

    Static power counts once, for as long as the longest engine takes (docs/decisions.md, 16).
    Without a meter it is the time alone, so that the fastest wins (30).
    """
    if end <= start:
        return []
    j_per_ms /= min(division.bandwidth, division.compute)
    rows_ms: list[list[list[float]]] = []
    rows_j: list[list[float]] = []
    for engine, profile in enumerate(profiles):
        place = places[engine]
        rows_ms.append([table[place] for table in profile.work_ms])
        rows_j += [table[place] for table in profile.dynamic_j]
    energies_j: list[float] = []
    for clock in range(start, end):
        longest_ms = total_j = 0.0
        for rows in rows_ms:
            ms = 0.0
            for row in rows:
                ms += row[clock]
            longest_ms = max(longest_ms, ms)
        for row in rows_j:
            total_j += row[clock]
        energies_j.append(j_per_ms * longest_ms + total_j)
    return [Stretch(division.shares_pct, least.shares_pct, start, energies_j)]


def candidates(found: Iterable[Stretch], clocks_mhz: Sequence[int]) -> list[Candidate]:
    """Return every candidate of the stretches."""
    return [
        Candidate(clocks_mhz[stretch.first + i], stretch.shares_pct, energy_j)
        for stretch in found
        for i, energy_j in enumerate(stretch.energies_j)
    ]


def finalists(found: Iterable[Stretch], clocks_mhz: Sequence[int], current: int | None) -> list[Candidate]:
    """Return the candidates that `choose` may return: of each stretch the best, and the clock in force."""
    chosen = []
    for stretch in found:
        shares_pct, first, energies_j = stretch.shares_pct, stretch.first, stretch.energies_j
        least_j = min(energies_j)
        best = len(energies_j) - 1 - energies_j[::-1].index(least_j)  # of equals the lowest clock
        chosen.append(Candidate(clocks_mhz[first + best], shares_pct, least_j))
        if current is not None and 0 <= current - first < len(energies_j) and current != first + best:
            chosen.append(Candidate(clocks_mhz[current], shares_pct, energies_j[current - first]))
    return chosen


def least_shares(device: Device, profiles: list[Profile], clock: int) -> tuple[int | None, ...]:
    """Return the least share per engine that meets its deadlines at a clock, beside the others."""
    divide, sizes_pct, places = divider_of(device), device.sm_sizes_pct, (0,) * len(profiles)
    while True:
        reach = reach_of(profiles, places, divide(places))
        if min(reach) > clock:
            return tuple(sizes_pct[place] for place in places)
        raised = _raised(device, places, reach, clock)
        if raised is None:
            return _without(device, places, reach, clock)
        places = raised


def _without(
    device: Device, places: Sequence[int], reach: Sequence[int], clock: int
) -> tuple[int | None, ...]:
    """Return the shares, without those of engines that are late although they have all SMs."""
    sizes_pct, last = device.sm_sizes_pct, len(device.sm_sizes_pct) - 1
    return tuple(
        None if end <= clock and place == last else sizes_pct[place]
        for end, place in zip(reach, places, strict=True)
    )


def fallback(device: Device, profiles: list[Profile], clocks_mhz: Sequence[int]) -> Candidate:
    """Return the highest clock with shares in proportion to need, for when no point meets all deadlines.

    Also the answer to memory pressure, where the way out is to end requests sooner (docs/decisions.md, 21).
    """
    return Candidate(clocks_mhz[0], shares_by_need(device, profiles), math.nan)


def shares_by_need(device: Device, profiles: list[Profile]) -> tuple[int, ...]:
    """Return shares that fill the device, in proportion to what each engine alone needs to be in time.

    That is its least share at the highest clock; all SMs where none is enough.
    """
    most_pct = device.sm_sizes_pct[-1]
    needs = [least_shares(device, [engine], 0)[0] or most_pct for engine in profiles]
    return proportional(needs, device.sm_sizes_pct)


def largest_chunk(grid: Grid, clock: int, share: int, room_ms: float, compute_scale: float) -> int:
    """Return the largest prefill chunk that adds at most `room_ms` to a decode step.

    The smallest is returned even if it does not fit: a prefill must get on.
    """
    fitting = bisect_right(grid.chunks_ms(clock, share), room_ms * compute_scale)
    return CHUNK_TOKENS[max(0, fitting - 1)]
