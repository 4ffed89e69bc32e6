"""Planning: what a trace would cost on so many GPUs, and how many of them it needs.

The answer is as good as the device model, so the run that it rests on is repeated with the numbers that
nobody has measured at the ends of their bands (`shared/devices.py`), one at a time. The schedulers' look-up
table follows each time: a pool profiles its own devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from shared.devices import PARAMETERS, Device, device_for
from shared.errors import ConfigError
from shared.model import ModelSpec, Struct
from sim.report import Report, report
from sim.scenario import Result, Scenario
from sim.workload import Arrival
from sim.world import run

UNCERTAIN = ("bandwidth_knee_mhz", "step_overhead_ms", "context_idle_w")  # what moves the answer most
PARTS = 12  # of the run, in which the GPUs in use are counted


class Case(Struct):
    """One run of a plan: so many GPUs of this device; `changed` says how it differs from the table's."""

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


class Outcome(Struct):
    """What came of one case; `active_gpus` are means over equal parts of the run."""

    gpus: int
    changed: str
    report: Report
    active_gpus: tuple[float, ...]


class Range(Struct):
    """A figure, and its ends over all cases of the device model."""

    value: float
    least: float
    most: float


class Plan(Struct):
    """The answer.

    Args:
        needed_gpus: fewest GPUs tried that met the target; None if none did, and then `chosen` is the most.
        tried: by number of GPUs.
        energy_kwh, attainment: of the chosen number of GPUs, attainment by request.
    """

    target: float
    needed_gpus: int | None
    chosen: Outcome
    tried: tuple[Outcome, ...]
    banded: tuple[Outcome, ...]
    energy_kwh: Range
    attainment: Range


Solve = Callable[[Sequence[Case]], list[Outcome]]
"""Runs cases, perhaps side by side, and returns their outcomes in the same order."""


def solve_case(case: Case, progress: Callable[[float], None] | None = None) -> Outcome:
    """Run one case from its start to its last arrival, and let what is open end.

    `progress` is called with the part of it that is done.
    """
    result = run(
        Scenario(
            models=case.models,
            arrivals=case.arrivals,
            gpus=case.gpus,
            gpu_type=case.device.name,
            device=case.device,
            seed=case.seed,
            predictor=case.predictor,
        ),
        progress=progress,
    )
    return Outcome(
        gpus=case.gpus,
        changed=case.changed,
        report=report(result, case.device, 0.0, max(1.0, case.span_ms)),
        active_gpus=active_over_time(result, case.span_ms),
    )


def plan(base: Case, counts: Sequence[int], target: float, solve: Solve) -> Plan:
    """Find the fewest GPUs of `counts` with which `target` of the requests are on time, and what they draw.

    More GPUs are taken never to be worse, so only about log2 of the counts are run.

    Args:
        base: the case; its number of GPUs is replaced.
        target: share of requests, 0 to 1.
    """
    tried: dict[int, Outcome] = {}
    ascending = sorted(set(counts))
    if not ascending or not base.arrivals:
        raise ConfigError("a plan needs at least one number of GPUs and one request")
    low, high = 0, len(ascending)
    while low < high:  # the answer's place is in [low, high]; `high` past the end: none is enough
        middle = (low + high) // 2
        gpus = ascending[middle]
        [tried[gpus]] = solve([msgspec.structs.replace(base, gpus=gpus)])
        if (tried[gpus].report.attainment.request or 0.0) >= target:
            high = middle
        else:
            low = middle + 1
    needed = ascending[low] if low < len(ascending) else None
    chosen = tried[ascending[-1] if needed is None else needed]
    banded = tuple(solve(banded_cases(msgspec.structs.replace(base, gpus=chosen.gpus))))
    return Plan(
        target=target,
        needed_gpus=needed,
        chosen=chosen,
        tried=tuple(tried[gpus] for gpus in sorted(tried)),
        banded=banded,
        energy_kwh=_range([one.report.energy_j.cold / 3.6e6 for one in (chosen, *banded)]),
        attainment=_range([one.report.attainment.request or 0.0 for one in (chosen, *banded)]),
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


def active_over_time(result: Result, until_ms: float, parts: int = PARTS) -> tuple[float, ...]:
    """Return the mean number of GPUs with a model, in each of `parts` equal parts of [0, until_ms]."""
    edges = np.linspace(0.0, max(1.0, until_ms), parts + 1)
    active = np.zeros(parts)
    for device in result.devices:
        at_ms = [0.0, *(sample.at_ms for sample in device.samples)]
        cold_ms = [0.0, *(sample.cold_ms for sample in device.samples)]
        active += 1.0 - np.diff(np.interp(edges, at_ms, cold_ms)) / np.diff(edges)
    return tuple(round(float(value), 3) for value in active)


def _range(values: Sequence[float]) -> Range:
    return Range(value=values[0], least=min(values), most=max(values))
