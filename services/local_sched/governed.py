"""Clock and shares as systems choose them that do so one after the other, and not by Festina's joint sweep.

What comes of it has the form of the sweep's outcome, so that everything after it is the same for all systems.
"""

from collections.abc import Sequence
from functools import lru_cache

from services.local_sched import tune
from services.local_sched.grid import grid_of
from services.local_sched.loads import load_of
from services.local_sched.policies.clocks import CLOCKS
from services.local_sched.policies.shares import SHARES
from services.local_sched.state import Decision, Engine, State
from services.local_sched.tune import Candidate, Stretch
from shared.lut import Lut


def governed(state: State, now_ms: float, engines: Sequence[Engine]) -> Decision:
    """Choose the clock, then the shares, by the rules that the settings name."""
    settings, device = state.settings, state.device
    clocks_mhz = _clocks(engines[0].lut, device.default_clock_mhz)
    loads = [load_of(state, now_ms, engine) for engine in engines]
    profiles = [grid_of(load.lut, clocks_mhz).profile(load) for load in loads]
    clock = CLOCKS[settings.clock](device, profiles, clocks_mhz)
    shares_pct = SHARES[settings.shares](device, profiles, clock)
    least_pct = tune.least_shares(device, profiles, clock)
    return Decision(
        models=tuple([engine.spec.name for engine in engines]),
        clocks_mhz=clocks_mhz,
        loads=loads,
        budget_pct=max(100, sum(shares_pct)),
        memory_short=False,
        memory_awaited=False,
        profiles=profiles,
        found=[Stretch(shares_pct, least_pct, clock, [0.0])],
        chosen=Candidate(clocks_mhz[clock], shares_pct, 0.0),
    )


@lru_cache(maxsize=256)
def _clocks(lut: Lut, default_mhz: int) -> tuple[int, ...]:
    """Return the clocks to choose from, descending: the table's grid, and that of a device left alone."""
    return tuple(sorted({*map(int, lut.clocks_mhz), default_mhz}, reverse=True))
