"""Clock and shares as systems choose them that do so one after the other, and not by Festina's joint sweep.

What comes of it has the form of the sweep's outcome, so that everything after it is the same for all systems.
"""

from collections.abc import Sequence

from services.local_sched import tune
from services.local_sched.grid import grid_of
from services.local_sched.loads import load_of
from services.local_sched.policies.affinity import affinity
from services.local_sched.policies.dilu import demand
from services.local_sched.policies.dynamollm import dynamollm
from services.local_sched.policies.ecofreq import ecofreq
from services.local_sched.policies.greenllm import greenllm
from services.local_sched.policies.muxserve import static
from services.local_sched.policies.sight import Clock, Shares, Sight, default, everything
from services.local_sched.state import Decision, Engine, State
from services.local_sched.tune import Candidate, Stretch

SHARES: dict[str, Shares] = {"all": everything, "static": static, "demand": demand}
CLOCKS: dict[str, Clock] = {
    "default": default,
    "affinity": affinity,
    "ecofreq": ecofreq,
    "greenllm": greenllm,
    "dynamollm": dynamollm,
}
"""By the names that the settings `shares` and `clock` give them."""


def governed(state: State, now_ms: float, engines: Sequence[Engine], clocks_mhz: tuple[int, ...]) -> Decision:
    """Choose the shares, then the clock out of these, by the rules that the settings name."""
    sight = _sight(state, now_ms, engines, clocks_mhz)
    shares_pct = SHARES[state.settings.shares](sight)
    clock = CLOCKS[state.settings.clock](sight, shares_pct)
    least_pct = tune.least_shares(state.device, sight.profiles, clock)
    return Decision(
        models=tuple([engine.spec.name for engine in engines]),
        clocks_mhz=clocks_mhz,
        loads=list(sight.loads),
        budget_pct=max(100, sum(shares_pct)),
        memory_short=False,
        memory_awaited=False,
        profiles=list(sight.profiles),
        found=[Stretch(shares_pct, least_pct, clock, [0.0])],
        chosen=Candidate(clocks_mhz[clock], shares_pct, 0.0),
    )


def _sight(state: State, now_ms: float, engines: Sequence[Engine], clocks_mhz: tuple[int, ...]) -> Sight:
    loads = [load_of(state, now_ms, engine) for engine in engines]
    residents = [name for name, engine in state.engines.items() if engine.state in ("loading", "ready")]
    free_bytes, most_bytes = state.ledger.kv_bytes
    return Sight(
        device=state.device,
        settings=state.settings,
        clocks_mhz=clocks_mhz,
        loads=loads,
        profiles=[grid_of(load.lut, clocks_mhz).profile(load) for load in loads],
        lengths=[
            [(len(w.request.prompt_tokens), w.predicted_output_tokens) for w in engine.running.values()]
            for engine in engines
        ],
        steps_ms=[engine.step_ms for engine in engines],
        residents=[state.engines[name].lut for name in residents],
        places=[residents.index(engine.spec.name) for engine in engines],
        waits=state.memory_awaited,
        free_part=free_bytes / most_bytes if most_bytes else 0.0,
        clock_mhz=state.clock_mhz,
    )
