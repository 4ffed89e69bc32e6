"""What a plan plays: a trace, or a window of it, on so many GPUs of a device."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shared.devices import PARAMETERS, Device, device_for
from shared.errors import ConfigError
from shared.model import ModelSpec, Struct
from sim.report import late_tokens, request_met, tokens_between, window_totals
from sim.scenario import FAST, Result, Scenario
from sim.windows import Excerpt
from sim.workload import Arrival
from sim.world import run

UNCERTAIN = ("bandwidth_knee_mhz", "step_overhead_ms", "context_idle_w")  # what moves the answer most


class Case(Struct):
    """What is planned for: so many GPUs of this device; `changed` says how it differs from the table's."""

    models: tuple[ModelSpec, ...]
    arrivals: tuple[Arrival, ...]
    gpus: int
    device: Device
    seed: int = 0
    predictor: str = "live"
    changed: str = ""

    @property
    def span_ms(self) -> float:
        """From the start to the last arrival; what ends after it is not counted."""
        return self.arrivals[-1].at_ms


class Task(Struct):
    """One world to play, and the stretches of it that count: (number of the window, from, until)."""

    case: Case
    played: Excerpt
    counted: tuple[tuple[int, float, float], ...]


class Counts(Struct):
    """What came of one stretch: requests that arrived in it and their tokens, joules (cold), GPU-ms used."""

    on_time: int
    tokens_on_time: int
    tokens: int
    energy_j: float
    gpu_ms: float


class Played(Struct):
    """What came of a task; `wall_s` is how long it took."""

    counts: dict[int, Counts]
    wall_s: float


Play = Callable[[str, Sequence[Task], float, int], list[Played]]
"""Plays tasks, side by side: (what for, the tasks in order, seconds to spend on them, fewest to be played).

Returns what came of the first so many; they are those that time allows."""


def play_task(task: Task, progress: Callable[[float], None] | None = None) -> dict[int, Counts]:
    """Play one task; `progress` is called with the part of it that is done."""
    case = task.case
    result = run(
        Scenario(
            models=case.models,
            arrivals=task.played.arrivals,
            gpus=case.gpus,
            gpu_type=case.device.name,
            device=case.device,
            seed=case.seed,
            predictor=case.predictor,
            learnt=task.played.learnt,
            least_ms=max(until_ms for _, _, until_ms in task.counted),
            settings=FAST,
        ),
        progress=progress,
    )
    return {index: counted(result, case.device, low_ms, high_ms) for index, low_ms, high_ms in task.counted}


def counted(result: Result, device: Device, from_ms: float, until_ms: float) -> Counts:
    """Return what came of a run in [from_ms, until_ms)."""
    arrived = [one for one in result.requests if from_ms <= one.arrived_ms < until_ms]
    parts_j, empty_ms = window_totals(result.devices, device, from_ms, until_ms)
    return Counts(
        on_time=sum(map(request_met, arrived)),
        tokens_on_time=sum(one.output_tokens - late_tokens(one) for one in arrived),
        tokens=tokens_between(result.requests, from_ms, until_ms),
        energy_j=sum(parts_j),
        gpu_ms=len(result.devices) * (until_ms - from_ms) - empty_ms,
    )


def banded_cases(base: Case) -> list[Case]:
    """Return the case with each uncertain number of its device at either end of its band."""
    parameters = PARAMETERS[base.device.name]
    types: dict[str, Any] = Device.__annotations__
    cases: list[Case] = []
    for name in UNCERTAIN:
        for end in parameters[name].band or ():
            device = replace(base.device, **{name: types[name](end)})
            cases.append(msgspec.structs.replace(base, device=device, changed=f"{name} = {end:g}"))
    return cases


def planned_device(gpu_type: str) -> Device:
    """Return the device of this name. Raises ConfigError for one without a power meter."""
    device = device_for(gpu_type)
    if not device.has_meter:
        raise ConfigError(f"{gpu_type} has no power meter, so there is no energy to plan with")
    return device
