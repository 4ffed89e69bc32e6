"""What `festina profile` is asked to profile: the device, the model, the grid, and the lab to measure in."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from services.local_sched.clock_setters import Clocks, FixedClocks, OwnClocks
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.gpu_nvml import Engines, NvmlEngines
from services.local_sched.meter import COUNTER, INTEGRATED
from services.local_sched.nvml import NvmlGpu
from services.local_sched.profile_grid import WRITTEN_TOKENS, Grid, grid_for
from services.local_sched.profile_lab import EngineLab, Lab, VirtualLab
from services.local_sched.profile_stats import Effort
from services.local_sched.vllm_env import MODEL_NAME, VLLM, smollm2_spec, vllm_python
from shared.catalog import entries
from shared.clock import now_ms
from shared.devices import DEVICES, Device, device_for, type_of
from shared.errors import ActuatorRefused, ConfigError, FestinaError
from shared.events import Event
from shared.model import ModelSpec, slug

VLLM_MAX_BATCH = 16
"""The vLLM engine runs at most so many requests at once."""

MEMORY_MARGIN = 0.05
METER_WINDOW_MS = 1_200.0
"""An energy counter moves in steps of up to 100 ms: watts need a window of over a second."""

NO_SHARES = "vLLM has no SM partitioning"
NO_CLOCKS = "a CPU engine has no clock to set"


@dataclass
class Target:
    """What is profiled, and how.

    Args:
        source: what the numbers come from, in words.
        lab: the device with its engines; measuring starts and ends it.
        kv_pool_bytes: KV pool of the engine; 0: elastic.
    """

    device: Device
    model: ModelSpec
    grid: Grid
    effort: Effort
    source: str
    lab: Lab
    kv_pool_bytes: int = 0
    driver: str = ""
    engine_version: str = ""


@contextmanager
def target_for(
    model: str, gpu: str, gpu_type: str, source: str, state: Path, vllm_env: Path, precision: float
) -> Iterator[Target]:
    """Give what the options name: device, model, grid and lab. The device is let go of at the end."""
    effort = Effort(precision=precision)
    if gpu == "cpu" and source == "measure":
        device, spec = device_for("cpu"), _real_model(model, state)
        grid = grid_for(
            device,
            spec,
            pool_bytes=device.total_bytes - spec.weight_bytes,
            max_batch=8,
            small=True,
            fixed_clock=NO_CLOCKS,
            fixed_share=NO_SHARES,
        )
        lab = EngineLab(_vllm_engines(vllm_env, state))
        yield Target(
            device, spec, grid, effort, "vLLM on CPU", lab, _pool_bytes(grid, spec), engine_version=VLLM
        )
    elif gpu.startswith("cuda:") and source == "measure":
        index = cuda_index(gpu)
        spec = _real_model(model, state)
        gpu_here = NvmlGpu(str(index))
        device = device_for(gpu_type or type_of(gpu_here.name))
        clocks, fixed_clock = _clocks_of(gpu_here)
        pool_bytes = int(device.total_bytes * (1 - MEMORY_MARGIN)) - spec.weight_bytes
        grid = grid_for(
            device,
            spec,
            pool_bytes=pool_bytes,
            max_batch=VLLM_MAX_BATCH,
            offered_mhz=gpu_here.clocks_mhz,
            fixed_clock=fixed_clock,
            fixed_share=NO_SHARES,
        )
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)  # the engine's process inherits it
        # no bound on the repeats but their time: short steps need many to fill the meter's window
        effort = replace(effort, most=10_000, most_ms=2 * METER_WINDOW_MS, least_ms=METER_WINDOW_MS)
        meter = INTEGRATED if gpu_here.read().counter_j is None else COUNTER
        what = f"vLLM on {gpu_here.name}, energy: {meter}"
        engines = _vllm_engines(vllm_env, state)
        lab = EngineLab(
            lambda report: NvmlEngines(
                engines, gpu=gpu_here, clocks=clocks, cap_w=device.power_cap_w, now_ms=now_ms, report=report
            )
        )
        pool_bytes, version = _pool_bytes(grid, spec), VLLM.replace("-cpu", "")
        yield Target(device, spec, grid, effort, what, lab, pool_bytes, gpu_here.driver, version)
    elif gpu in DEVICES and gpu != "cpu":
        device, spec = device_for(gpu), _any_model(model, state)
        pool_bytes = int(device.total_bytes * (1 - MEMORY_MARGIN)) - spec.weight_bytes
        if pool_bytes <= 0:
            raise ConfigError(
                f"{spec.name} does not fit on {gpu}: {spec.weight_bytes / 1e9:.0f} GB of weights"
            )
        grid = grid_for(device, spec, pool_bytes=pool_bytes, max_batch=256)
        yield Target(device, spec, grid, effort, "emulated device", VirtualLab(device))
    else:
        known = ", ".join(name for name in sorted(DEVICES) if name != "cpu")
        raise ConfigError(f"--gpu {gpu} is not known here; it is cpu, cuda:N, or one of: {known}")


def _clocks_of(gpu: NvmlGpu) -> tuple[Clocks, str]:
    """Return who sets the clocks of a GPU that the profiler has to itself, and why nobody can."""
    try:
        return OwnClocks(gpu), ""
    except ActuatorRefused as error:
        return FixedClocks(str(error)), str(error)


def _vllm_engines(vllm_env: Path, state: Path) -> Callable[[Callable[[Event], None]], Engines]:
    """Return what makes the vLLM engines of an environment. Raises FestinaError: there is none."""
    python = vllm_python(vllm_env)
    if python is None:
        raise FestinaError(f"no vLLM environment in {vllm_env}: run `make setup-vllm`")
    return lambda report: VllmEngines(python=str(python), run_dir=state / "profile", report=report)


def _pool_bytes(grid: Grid, model: ModelSpec) -> int:
    """Return a KV pool for the largest point of the grid, and for the whole context that vLLM insists on."""
    largest = (grid.context_tokens[-1] + WRITTEN_TOKENS) * grid.batches[-1]
    needed = max(min(grid.pool_tokens, largest), model.context_tokens)
    return int(needed / 0.9) * model.kv_bytes_per_token


def cuda_index(gpu: str) -> int:
    """Return N of ``cuda:N``. Raises ConfigError."""
    number = gpu.removeprefix("cuda:")
    if not number.isdigit():
        raise ConfigError(f"--gpu {gpu} names no device; write cuda:0 for the first")
    return int(number)


def _any_model(name: str, state: Path) -> ModelSpec:
    """Return the small real model, one of the catalog, or one of a JSON file; part of a name will do."""
    if name.endswith(".json"):
        try:
            return msgspec.json.decode(Path(name).read_bytes(), type=ModelSpec)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{name} describes no model: {error}") from None
    if slug(MODEL_NAME).startswith(slug(name)):
        return smollm2_spec(state / "models")
    specs = {slug(entry.name): entry.spec() for entry in entries()}
    found = [spec for key, spec in specs.items() if key.startswith(slug(name))]
    exact = specs.get(slug(name))
    if exact is not None or len(found) == 1:
        return exact or found[0]
    why = (
        "several models begin so: " + ", ".join(s.name for s in found)
        if found
        else "it is not in the catalog"
    )
    raise ConfigError(f"--model {name}: {why}; give a whole name, or a JSON file")


def _real_model(name: str, state: Path) -> ModelSpec:
    spec = _any_model(name, state)
    if not spec.weights:
        raise ConfigError(
            f"{spec.name} has no weights on this machine: describe it in a JSON file with the folder of its "
            "weights, or profile an emulated device"
        )
    return spec
