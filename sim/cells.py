"""Cells of a grid: one system on one workload, played and summed up. What is compared is made of these."""

import hashlib
from dataclasses import replace as replaced
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.catalog import entries, pool_models
from shared.devices import Device
from shared.errors import ConfigError
from shared.model import ModelSpec, Objectives, Struct
from sim.report import FINISHED, Report, report
from sim.scenario import FAST, RequestRecord, Result, Scenario, Settings
from sim.systems import under
from sim.tasks import planned_device
from sim.workload import RECIPES, Workload, generate
from sim.world import run


class Cell(Struct):
    """What is played.

    Args:
        llms: models served, by rank in the catalog; `models` names others instead.
        rps: requests per second and model.
        default_clock_mhz: of GPUs that the system does not govern; None as the device has it.
        knobs: settings that differ, by their place: ``consolidator.safety_margin``, ``device.f_max_mhz``.
        traced: whether clocks and requests over time are kept as well.
    """

    system: str
    workload: str = "sharegpt"
    llms: int = 16
    rps: float = 1.0
    gpus: int = 8
    gpu_type: str = "h100-80gb"
    minutes: float = 3.0
    seed: int = 0
    default_clock_mhz: int | None = None
    models: tuple[str, ...] = ()
    knobs: dict[str, float] = {}
    predictor: str = "live"
    traced: bool = False

    def key(self, version: str) -> str:
        """Return the name under which the result is kept, for one version of what plays it."""
        told = msgspec.json.encode({"version": version, **msgspec.structs.asdict(self)}, order="sorted")
        return hashlib.sha256(told).hexdigest()[:24]


class Trace(Struct):
    """What happened over time: samples a second apart, and requests by arrival.

    Args:
        clock_mhz: by GPU; 0 where nothing ran.
        requests: (model, arrived in s, latency over its objective: the worse of TTFT and mean TBT); None for
            one that never finished.
    """

    clock_mhz: tuple[tuple[int, ...], ...] = ()
    requests: tuple[tuple[str, float, float | None], ...] = ()


class Played(Struct):
    """What came of a cell: its numbers over the last two thirds, and perhaps its course."""

    cell: Cell
    report: Report
    trace: Trace = Trace()


def models_of(cell: Cell) -> tuple[ModelSpec, ...]:
    """Return the models that a cell serves. Raises ConfigError for a name that is not in the catalog."""
    if not cell.models:
        return pool_models(cell.llms)
    known = {entry.name: entry.spec() for entry in entries()}
    if strange := [name for name in cell.models if name not in known]:
        raise ConfigError(f"no model of the catalog is called {strange[0]!r}")
    return tuple(known[name] for name in cell.models)


def load_of(cell: Cell) -> Workload:
    """Return the requests of a cell."""
    return generate(
        cell.workload, models=models_of(cell), rps_per_llm=cell.rps, minutes=cell.minutes, seed=cell.seed
    )


def device_of(cell: Cell) -> Device:
    """Return what every GPU of a cell is."""
    device = planned_device(cell.gpu_type)
    if cell.default_clock_mhz is not None:
        device = device.at_default_clock(cell.default_clock_mhz)
    return replaced(device, **_knobs(cell, "device", Device.__annotations__))


def settings_of(cell: Cell) -> Settings:
    """Return the settings of a cell's services. Raises ConfigError for a knob that there is not."""
    settings = under(cell.system, FAST)
    parts = {name: getattr(settings, name) for name in settings.__struct_fields__}
    for place in cell.knobs:
        service, _, field = place.partition(".")
        if service != "device" and field not in getattr(parts.get(service), "__struct_fields__", ()):
            raise ConfigError(f"no setting is called {place!r}; name a service and its field")
    changed = {
        name: replace(
            part,
            **_knobs(cell, name, {field: type(getattr(part, field)) for field in part.__struct_fields__}),
        )
        for name, part in parts.items()
    }
    return Settings(**changed)


def check(cell: Cell) -> None:
    """Raise ConfigError for what a cell names and there is not, and for numbers that cannot be played."""
    if cell.gpus < 1 or cell.seed < 0:
        raise ConfigError(f"a cell needs a GPU, and a seed from 0 on; got {cell.gpus} GPUs, seed {cell.seed}")
    if cell.workload not in RECIPES:
        raise ConfigError(f"no workload is called {cell.workload!r}; there are: {', '.join(RECIPES)}")
    models_of(cell), device_of(cell), settings_of(cell)


def play(cell: Cell) -> Played:
    """Play a cell."""
    load, device, span_ms = load_of(cell), device_of(cell), cell.minutes * 6e4
    result = run(
        Scenario(
            models=models_of(cell),
            arrivals=load.arrivals,
            gpus=cell.gpus,
            gpu_type=cell.gpu_type,
            device=device,
            default_clock_mhz=cell.default_clock_mhz,
            seed=cell.seed,
            predictor=cell.predictor,
            settings=settings_of(cell),
            least_ms=span_ms,
        )
    )
    trace = traced(result, span_ms) if cell.traced else Trace()
    return Played(cell, report(result, device, span_ms / 3, span_ms), trace)


def traced(result: Result, span_ms: float) -> Trace:
    """Return the course of a run while requests arrived."""
    clocks = tuple(
        tuple(s.clock_mhz if s.running else 0 for s in device.samples if s.at_ms <= span_ms)
        for device in result.devices
    )
    return Trace(
        clocks, tuple((r.model, round(r.arrived_ms / 1000, 2), _over_objective(r)) for r in result.requests)
    )


def _over_objective(request: RequestRecord) -> float | None:
    """Return a request's latency over its objective, the worse of the two; None if it did not finish."""
    if request.outcome not in FINISHED or not request.token_ms:
        return None
    goals: Objectives = request.objectives
    first_ms, last_ms = request.token_ms[0], request.token_ms[-1]
    mean_tbt_ms = (last_ms - first_ms) / max(1, request.output_tokens - 1)
    return round(max((first_ms - request.arrived_ms) / goals.ttft_ms, mean_tbt_ms / goals.tbt_ms), 4)


def _knobs(cell: Cell, service: str, types: dict[str, Any]) -> dict[str, Any]:
    """Return the knobs of one service, each in its field's type."""
    mine = {
        place.partition(".")[2]: value
        for place, value in cell.knobs.items()
        if place.startswith(f"{service}.")
    }
    return {field: types[field](value) for field, value in mine.items()}
