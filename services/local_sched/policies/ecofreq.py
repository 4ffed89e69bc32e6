"""EcoFreq, VoltanaLLM's clock of each iteration (arXiv:2509.04827), here of each decision, per GPU.

Per engine: the highest clock while a request waits, or the load is over a threshold; else the lowest at which
its prefills and its next decode step are predicted in time. Of several engines on a GPU the highest clock is
taken, as the paper does for its AegVoltana (4.1).

Simplified: the look-up table takes the place of EcoPred, a linear fit of the same quantities; what a prefill
has waited is in its slack; both phases are in one engine, so each decides; and a GPU without work, which
draws the same at every clock of the device model, keeps its last one instead of the lowest after 5 s. The
clocks are the table's from `ecofreq_floor_mhz` on: VoltanaLLM offers none below the knee of the voltage.
"""

from services.local_sched import tune
from services.local_sched.policies.sight import Sight, at_least, divided


def ecofreq(sight: Sight, shares_pct: tuple[int, ...]) -> int:
    """Return the place of the highest clock that any engine's rule asks for."""
    settings = sight.settings
    if sight.waits or sight.free_part < settings.ecofreq_free_part:
        return 0
    lowest = at_least(sight, settings.ecofreq_floor_mhz)
    places, division = divided(sight, shares_pct)
    reach = tune.reach_of(sight.profiles, places, division)
    return max(0, min(lowest, min(reach) - 1))
