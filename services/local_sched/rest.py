"""The device at rest: what it draws while no step runs, and how deeply it rests without engines (3.5).

A process with a context stands ready for some time after the last engine is gone, since the next may come
soon; then it is ended, and where the platform can, the device is switched off. Each state draws less than the
one before and wakes later (`silicon.idle_power_w`, `silicon.wake_ms`).
"""

import math

from services.local_sched.energy import IDLE, OVERHEAD
from services.local_sched.settings import LocalSettings
from services.local_sched.state import State
from shared.engine import RestDevice
from shared.events import Action
from shared.silicon import idle_power_w

DEPTHS = ("sleeping", "cold", "off")


def note(state: State, now_ms: float) -> None:
    """Tell the energy book what the device draws while no step runs: it depends on what is loaded."""
    here = [engine.state for engine in state.engines.values() if engine.state not in ("failed", "asleep")]
    if here:
        state.rest, state.empty_ms = state.first_rest, None
    elif state.empty_ms is None:
        state.empty_ms = now_ms
    power_w = idle_power_w(state.device, "warm" if here else state.rest)
    state.energy.rests(now_ms, power_w, OVERHEAD if "loading" in here else IDLE)


def deepen(state: State, now_ms: float) -> list[Action]:
    """Let a device that has been without engines for long enough rest deeper, if it has watts to save."""
    if state.empty_ms is None or not state.device.has_meter:
        return []
    wanted = _depth(state.settings, now_ms - state.empty_ms)
    if DEPTHS.index(wanted) <= DEPTHS.index(state.rest):
        return []
    state.rest = wanted
    note(state, now_ms)
    return [RestDevice(state=wanted)]


def _depth(settings: LocalSettings, empty_ms: float) -> str:
    if empty_ms >= (settings.off_after_ms or math.inf):
        return "off"
    return "cold" if empty_ms >= settings.cold_after_ms else "sleeping"
