"""GreenLLM (arXiv:2508.16449): a clock for prefills from an energy model, and two loops for that of decodes.

Prefills: of the clocks at which the whole queue ends in time, the one of least energy. Decodes: the coarse
loop takes the lowest clock of the profile at which a step of this batch is in time; the fine loop moves from
the clock in force, a step at a time and at most `BAND` steps from the coarse one, so that measured steps stay
between `CALM` and 1 of their TBT, less `MARGIN`. Where several engines, or both phases, share a GPU, the
highest clock is taken.

Simplified: no separate GPUs for the phases; prompts of a length class have a TTFT of their own, so taking the
earliest deadline first stands for a queue per class.
"""

from services.local_sched import tune
from services.local_sched.policies.sight import Sight, divided

BAND, CALM, MARGIN = 2, 0.75, 0.1


def greenllm(sight: Sight, shares_pct: tuple[int, ...]) -> int:
    """Return the place of the highest clock that any engine's rules ask for."""
    places, division = divided(sight, shares_pct)
    reach = tune.reach_of(sight.profiles, places, division)
    wanted = []
    for engine, end in enumerate(reach):
        last = max(0, end - 1)  # the lowest clock in time
        if sight.loads[engine].prefills:
            wanted.append(_cheapest(sight, engine, places[engine], last))
        if sight.loads[engine].decodes:
            wanted.append(_decodes(sight, engine, last))
    return min(wanted)


def _cheapest(sight: Sight, engine: int, place: int, last: int) -> int:
    """Return the clock of least energy for an engine's prefills, of those down to `last`."""
    profile = sight.profiles[engine]
    static_w = sight.device.static_w
    ms, dynamic_j = profile.work_ms[-1][place], profile.dynamic_j[-1][place]
    return min(range(last + 1), key=lambda at: dynamic_j[at] + static_w * ms[at] / 1e3)


def _decodes(sight: Sight, engine: int, coarse: int) -> int:
    """Return the clock for an engine's decodes: near the coarse one, moved by what was measured."""
    measured_ms = sight.steps_ms[engine]
    if sight.clock_mhz not in sight.clocks_mhz or not measured_ms:
        return coarse
    tail = measured_ms / ((1.0 - MARGIN) * sight.loads[engine].decode_budget_ms)
    at = sight.clocks_mhz.index(sight.clock_mhz) + (-1 if tail > 1.0 else 1 if tail < CALM else 0)
    return max(0, coarse - BAND, min(at, coarse + BAND, len(sight.clocks_mhz) - 1))
