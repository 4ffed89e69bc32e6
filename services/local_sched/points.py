"""The clocks to choose from, and where a decision has each engine run: clock, share, and how slowed (3.4)."""

from functools import lru_cache

from services.local_sched import tune
from services.local_sched.divide import divider_of
from services.local_sched.grid import Grid, coarse
from services.local_sched.state import Decision, State
from shared.devices import Device
from shared.lut import Lut


def clocks_of(state: State, now_ms: float, lut: Lut) -> tuple[int, ...]:
    """Return the clocks to choose from, F_max first: those that the device gives and can hold.

    There is one alone where the device keeps its own, and where nobody governs it.
    """
    if state.clock_refused:
        return (state.clock_mhz,)
    if state.settings.clock == "default":
        return (state.device.default_clock_mhz,)
    limited = now_ms - state.limited_ms < state.settings.clock_limit_ms
    return _grid_clocks(lut, state.settings.fixed_clock_mhz, state.limit_mhz if limited else None)


@lru_cache(maxsize=256)
def _grid_clocks(lut: Lut, fixed_mhz: int | None, limit_mhz: int | None) -> tuple[int, ...]:
    """Return the table's clocks up to a limit, at least the lowest; or the one that is pinned."""
    if fixed_mhz is not None:
        return (fixed_mhz,)
    clocks_mhz = tuple(map(int, lut.clocks_mhz[::-1]))
    if limit_mhz is None:
        return clocks_mhz
    return tuple([clock for clock in clocks_mhz if clock <= limit_mhz]) or clocks_mhz[-1:]


class Point:
    """Where an engine runs, and by how much contention slows it.

    Args:
        grid, clock, share: its table, and the places of its clock and share there.
        least_share_pct: the least share that meets its deadlines: others may not count on it.
        step_ms: its decode step there, beside the others; 0 if nothing decodes.
        compute: what contention leaves of its compute.
    """

    def __init__(
        self,
        grid: Grid,
        clock: int,
        share: int,
        sm_clock_mhz: int,
        sm_share_pct: int,
        least_share_pct: int,
        step_ms: float,
        compute: float,
    ) -> None:
        self.grid, self.clock, self.share = grid, clock, share
        self.sm_clock_mhz, self.sm_share_pct = sm_clock_mhz, sm_share_pct
        self.least_share_pct, self.step_ms, self.compute = least_share_pct, step_ms, compute

    def prefill_ms(self, tokens: int) -> float:
        """Return the time of a prefill on its own."""
        return self.grid.prefill_ms(self.clock, self.share, coarse(tokens, 6))

    def chunk_tokens(self, room_ms: float) -> int:
        """Return the largest chunk of prefill that adds at most so much to a decode step."""
        return tune.largest_chunk(self.grid, self.clock, self.share, room_ms, self.compute)


def points_of(device: Device, decision: Decision) -> list[Point]:
    """Return where each engine runs by a decision."""
    clocks_mhz, profiles = decision.clocks_mhz, decision.profiles
    sizes_pct, chosen, clock = device.sm_sizes_pct, decision.chosen, 0
    least_pct: tuple[int | None, ...] = ()
    if chosen is None:
        chosen = tune.fallback(device, profiles, clocks_mhz)
        least_pct = tune.least_shares(device, profiles, 0)
    else:
        clock = clocks_mhz.index(chosen.sm_clock_mhz)
        for stretch in decision.found:
            if stretch.first <= clock < stretch.end:
                least_pct = stretch.least_pct
                break
    places = tuple([sizes_pct.index(share or sizes_pct[-1]) for share in chosen.shares_pct])
    division = divider_of(device)(places)
    return [
        Point(
            profile.grid,
            clock,
            places[i],
            chosen.sm_clock_mhz,
            sizes_pct[places[i]],
            least_pct[i] or sizes_pct[places[i]],
            profile.step_ms[places[i]][clock] / division.bandwidth,
            division.compute,
        )
        for i, profile in enumerate(profiles)
    ]
