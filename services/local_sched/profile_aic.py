"""A table for a model and GPU that nobody here has profiled, from NVIDIA's measured kernels.

The package aiconfigurator-core (an optional extra) carries kernel times of several GPUs at their default
clock on all SMs. What a kernel table cannot say comes from the device model: how time changes with clock and
SM share, launches and sampling between kernels, and power. So such a table is composed, not measured.
"""

import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from services.local_sched.profile_grid import DECODE, PREFILL, Grid, Point, axes_of, possible
from shared.devices import Device
from shared.errors import ConfigError
from shared.lut import Lut
from shared.model import ModelSpec
from shared.silicon import step_work

SYSTEMS = {"h100-80gb": "h100_sxm", "a100-80gb": "a100_sxm", "h200-141gb": "h200_sxm", "l40s-48gb": "l40s"}
"""Device types by the package's names for them."""

BACKEND = "vllm"
VOCABULARY = 32_000
"""Assumed, as the catalog does not say; the rest of the parameters goes to the MLP, so their sum is right."""

KernelMs = Callable[[Point], float]


def kernel_times(device: Device, model: ModelSpec) -> tuple[KernelMs, str]:
    """Return a function from a point to its kernels' time (default clock, all SMs), and the source.

    Raises:
        ConfigError: the package is not installed, or has no tables for this device.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise ConfigError(
            "--from aiconfigurator needs an optional package of 600 MB: pip install 'festina[aiconfigurator]'"
        ) from None
    if device.name not in SYSTEMS:
        raise ConfigError(
            f"aiconfigurator has no tables for {device.name}; it is used for: {', '.join(SYSTEMS)}"
        )
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(model)))
        handle: Any = EngineHandle.compile(folder, SYSTEMS[device.name], BACKEND)

    def kernel_ms(point: Point) -> float:
        if point.phase == PREFILL:
            return float(handle.predict_prefill_latency(1, point.tokens))
        return float(handle.predict_decode_latency(point.batch, point.tokens, 2))  # 2 tokens: one decode step

    return kernel_ms, f"aiconfigurator-core {_version()}, {SYSTEMS[device.name]}, {BACKEND}"


def composed(
    device: Device, model: ModelSpec, grid: Grid, modelled: Lut, kernel_ms: KernelMs
) -> Iterator[tuple[Point, float, float | None]]:
    """Yield (point, ms, W) of the grid's points: the kernels' times, scaled as the device model scales them.

    Points that the kernel tables do not reach are left out.
    """
    # The model's own overhead, the same at every clock and share, is what kernels do not contain.
    overhead_ms = float(step_work(device, model, decode_batch=1, decode_context_tokens=0).overhead_ms)
    base: dict[tuple[str, int, int], float] = {}
    for phase in (PREFILL, DECODE):
        tokens, batches, clocks, shares = axes_of(grid, phase)
        points = (Point(phase, t, b, f, s) for t in tokens for b in batches for f in clocks for s in shares)
        for point in points:
            if not possible(grid, point):
                continue
            key = (phase, point.tokens, point.batch)
            if key not in base:
                at_default = Point(phase, point.tokens, point.batch, device.default_clock_mhz, 100)
                model_ms = _modelled(modelled, at_default)[0] - overhead_ms
                base[key] = kernel_ms(at_default) / model_ms
            if math.isfinite(base[key]) and base[key] > 0:
                ms, watts = _modelled(modelled, point)
                yield point, base[key] * (ms - overhead_ms) + overhead_ms, watts


def _modelled(lut: Lut, point: Point) -> tuple[float, float | None]:
    clock, share = point.sm_clock_mhz, point.sm_share_pct
    if point.phase == PREFILL:
        ms, watts = lut.ttft_ms(clock, share, point.tokens), lut.prefill_power_w(clock, share, point.tokens)
    else:
        at = (clock, share, point.batch, point.tokens)
        ms, watts = lut.tbt_ms(*at), lut.decode_power_w(*at)
    return float(ms), None if math.isnan(watts) else float(watts)


def _config(model: ModelSpec) -> dict[str, Any]:
    """Return the model as a published configuration would describe it: a dense decoder of this shape."""
    embedding = 2 * VOCABULARY * model.hidden
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    mlp = (model.params - embedding) / model.layers - attention
    if mlp <= 0:
        raise ConfigError(f"{model.name}: its parameters do not fit its shape; correct its description")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden,
        "intermediate_size": 64 * round(mlp / (3 * model.hidden * 64)),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": model.context_tokens,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }


def _version() -> str:
    from importlib.metadata import version

    return version("aiconfigurator-core")
