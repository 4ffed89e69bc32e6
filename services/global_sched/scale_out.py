"""When to ask for a further instance of a model (3.3, phase three).

An instance for every late request would breed replicas that starve each other of memory, so one late request
is served late, and only a sustained deficit asks. A model without any instance asks at once.
"""

import math
from dataclasses import dataclass

from services.global_sched.settings import GlobalSettings
from shared import events as ev


@dataclass(slots=True)
class Deficit:
    """Dispatches of one model, all and late ones, counted with exponential forgetting."""

    at_ms: float
    total: float = 0.0
    late: float = 0.0

    def add(self, now_ms: float, late: bool, window_ms: float) -> None:
        """Count one dispatch."""
        kept = math.exp((self.at_ms - now_ms) / window_ms)
        self.at_ms = now_ms
        self.total = self.total * kept + 1.0
        self.late = self.late * kept + late


class ScaleOuts:
    """Deficits and scale-out requests of one scheduler, by model."""

    def __init__(self, scheduler: str, settings: GlobalSettings) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._deficits: dict[str, Deficit] = {}
        self._next_ms: dict[str, float] = {}

    def next_ms(self, model: str) -> float:
        """Return the time before which no request for the model is made."""
        return self._next_ms.get(model, -math.inf)

    def note(self, now_ms: float, model: str, late: bool) -> bool:
        """Count a dispatch; says whether the deficit is sustained."""
        settings = self._settings
        deficit = self._deficits.setdefault(model, Deficit(now_ms))
        deficit.add(now_ms, late, settings.deficit_window_ms)
        enough = deficit.late >= settings.deficit_requests
        return late and enough and deficit.late >= settings.deficit_share * deficit.total

    def ask(self, now_ms: float, model: str, reason: str, loading: bool) -> list[ev.Action]:
        """Ask for an instance, unless one is `loading`; not before `next_ms`."""
        self._next_ms[model] = now_ms + self._settings.scale_out_repeat_ms
        if loading:
            return []
        self._deficits.pop(model, None)  # the new instance gets the time to show its effect
        message = ev.ScaleOut(model=model, scheduler=self._scheduler, reason=reason)
        return [
            ev.Send(to=model, message=message),
            ev.Count(name="scale_outs", labels={"model": model, "reason": reason}),
        ]

    def restart(self, now_ms: float) -> None:
        """What was asked may be lost: all may be asked again."""
        self._next_ms = dict.fromkeys(self._next_ms, now_ms)

    def forget(self, model: str) -> None:
        """Drop what is kept for a model that is gone."""
        self._deficits.pop(model, None)
        self._next_ms.pop(model, None)
