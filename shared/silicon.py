"""The device model: time and power of one engine step, from one table of parameters per device type.

It is the emulated GPU, and the source of the look-up table (3.2.1) where no device was profiled::

    t      = (t_w^p + t_c^p)^(1/p) + t_kv + t_attn + overhead
    t_w    = weight bytes / (rate * b(s) * m(f))        t_kv   = KV bytes / (rate * b(s) * m(f))
    t_c    = matmul FLOPs / (rate * c(s) * f/f_ref)     t_attn = attention FLOPs / (likewise)
    P      = static + context SM term * phi(f) * A + per TB/s + per TFLOP/s * psi(f), at least the idle power

`s` is the SM share in (0, 1], `f` the SM clock, `b`, `c`, `m` the bandwidth and compute left by a share and a
clock, `A` the sum of the SM shares active. Units: ms, MHz, W, bytes, FLOP. Functions of numbers also take
numpy arrays, which broadcast, and are then typed Any.

What the model does not show, to be said beside every figure: the published shift of the best clock with model
size and input length (here it sits at the voltage knee, 1005 MHz); the knee of `m` is assumed, and moves the
best decode clock between 705 and 1005 MHz; below a share of 0.3 everything is extrapolated; nobody has
published power against SM share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shared.errors import ConfigError
from shared.model import ModelSpec


@dataclass(frozen=True)
class Parameter:
    """One number of a device. `status`: ``measured``, ``fitted`` (to what `source` names) or ``assumed``."""

    value: float
    source: str
    status: str


def _rows(status: str, source: str, **values: float) -> dict[str, Parameter]:
    """Make the rows of a table that share one source."""
    return {name: Parameter(value, source, status) for name, value in values.items()}


_KERNELS = "composed kernel latencies, H100 SXM, 9 models of 3B-32B, n = 511, MAPE 4.4 %"
_SERVING_W = "ML.ENERGY serving power, H100, dense models, n = 44, MAPE 6.4 %"
_SMOLLM2 = "SmolLM2-135M in vLLM on two cores: 19 token/s alone, 143 token/s for 8, context taken as 64"
_NO_CHOICE = "no clock and no partition to choose"
_NO_METER = "no power meter, so no power is modelled"
_NAN = float("nan")

PARAMETERS: dict[str, dict[str, Parameter]] = {
    "h100-80gb": {
        **_rows("assumed", "nominal memory; contexts and activations take what is above", total_bytes=80e9),
        **_rows("assumed", "the engine's default", block_tokens=16),
        **_rows(
            "measured", "clocks the driver offers", clock_min_mhz=345, clock_max_mhz=1980, clock_step_mhz=15
        ),
        **_rows(
            "assumed", "the paper's F_max, the clock sustained at the power limit (3.2.1)", f_max_mhz=1635
        ),
        **_rows("measured", "default boost clock", default_clock_mhz=1980),
        **_rows("assumed", "the paper's grid (3.2.1)", sm_size_min_pct=10, sm_size_step_pct=10),
        **_rows("measured", "the driver's energy counter", has_meter=1),
        **_rows("fitted", _KERNELS, overlap_exponent=2.2, compute_reference_mhz=1830),
        **_rows("fitted", _KERNELS, weight_bytes_per_ms=2.82e9, kv_bytes_per_ms=2.85e9),
        **_rows("fitted", f"{_KERNELS}; causal attention", matmul_flop_per_ms=824e9, attn_flop_per_ms=365e9),
        **_rows(
            "assumed", "launches and sampling, not in kernels", layer_overhead_ms=0.027, step_overhead_ms=1.0
        ),
        **_rows("fitted", "MuxServe decode, A100, batch <= 128, MAPE 5.7 %", bandwidth_share_rate=4.1),
        **_rows("fitted", "MuxServe prefill, A100, MAPE 3.5 %", compute_share_exponent=0.70),
        **_rows("assumed", "no data; a knee at 700-1400 MHz is possible", bandwidth_knee_mhz=1100),
        **_rows("assumed", "no data", bandwidth_knee_exponent=0.75),
        **_rows("fitted", _SERVING_W, static_w=70, w_per_tb_per_s=55.5, w_per_tflop_per_s=1.14),
        **_rows(
            "fitted", f"{_SERVING_W}; linear in the SM share: assumed", sm_w=268, power_reference_mhz=1980
        ),
        **_rows("assumed", "an idle H100 that holds a CUDA context", context_idle_w=110),
        **_rows("assumed", "just under the power limit of 700 W", power_cap_w=690),
        **_rows(
            "fitted", "H100 power at 15 locked clocks", voltage_knee_mhz=1005, voltage_slope_per_ghz=0.67
        ),
        **_rows("assumed", "one NVMe drive, 6 GB/s", disk_bytes_per_ms=6e6),
        **_rows("assumed", "PCIe 5.0 x16, 55 of 64 GB/s", host_bytes_per_ms=55e6),
        **_rows("assumed", "NVLink 4, 400 of 450 GB/s each way", peer_bytes_per_ms=400e6),
        **_rows("assumed", "a model put into an engine process that stands ready", activation_ms=200),
    },
    "cpu": {
        **_rows("assumed", "budget for weights and KV, not the host's memory", total_bytes=4 * 2**30),
        **_rows("assumed", "the engine's KV block", block_tokens=16),
        **_rows("assumed", _NO_CHOICE, clock_min_mhz=0, clock_max_mhz=0, clock_step_mhz=1),
        **_rows("assumed", _NO_CHOICE, f_max_mhz=0, default_clock_mhz=0, compute_reference_mhz=1),
        **_rows("assumed", _NO_CHOICE, sm_size_min_pct=100, sm_size_step_pct=100),
        **_rows("assumed", _NO_CHOICE, bandwidth_knee_mhz=1, bandwidth_knee_exponent=0),
        **_rows("measured", _NO_METER, has_meter=0),
        **_rows("assumed", "reads and products do not overlap", overlap_exponent=1),
        **_rows("assumed", "20 GB/s for two cores", weight_bytes_per_ms=20e6, kv_bytes_per_ms=20e6),
        **_rows("fitted", _SMOLLM2, matmul_flop_per_ms=0.675e9, layer_overhead_ms=1.257),
        **_rows("assumed", "half the rate of matrix products", attn_flop_per_ms=0.3375e9),
        **_rows("assumed", "as on the H100", step_overhead_ms=1.0, bandwidth_share_rate=4.1),
        **_rows("assumed", "time slices of whole cores", compute_share_exponent=1),
        **_rows("assumed", _NO_METER, static_w=_NAN, context_idle_w=_NAN, sm_w=_NAN, power_cap_w=_NAN),
        **_rows("assumed", _NO_METER, w_per_tb_per_s=_NAN, w_per_tflop_per_s=_NAN, power_reference_mhz=1),
        **_rows("assumed", _NO_METER, voltage_knee_mhz=0, voltage_slope_per_ghz=0),
        **_rows("assumed", "a shared disk, 1 GB/s", disk_bytes_per_ms=1e6),
        **_rows("assumed", "a copy in memory, 5 GB/s", host_bytes_per_ms=5e6, peer_bytes_per_ms=5e6),
        **_rows("measured", "start of a vLLM process on two cores, 17-29 s", activation_ms=23_000),
    },
}


@dataclass(frozen=True)
class Device:
    """One device type; `PARAMETERS` says where each number comes from.

    Args:
        total_bytes: memory for weights and KV.
        block_tokens: tokens of one KV block.
        clock_min_mhz, clock_max_mhz, clock_step_mhz: the SM clocks offered; all 0: none to choose.
        f_max_mhz: the highest clock the schedulers use (F_max of 3.3).
        default_clock_mhz: clock of a device that nobody governs.
        has_meter: whether it measures energy; without, every power is nan.
    """

    name: str
    total_bytes: int
    block_tokens: int
    clock_min_mhz: int
    clock_max_mhz: int
    clock_step_mhz: int
    f_max_mhz: int
    default_clock_mhz: int
    sm_size_min_pct: int
    sm_size_step_pct: int
    has_meter: bool
    overlap_exponent: float
    weight_bytes_per_ms: float
    kv_bytes_per_ms: float
    matmul_flop_per_ms: float
    attn_flop_per_ms: float
    layer_overhead_ms: float
    step_overhead_ms: float
    bandwidth_share_rate: float
    compute_share_exponent: float
    compute_reference_mhz: float
    bandwidth_knee_mhz: float
    bandwidth_knee_exponent: float
    static_w: float
    context_idle_w: float
    sm_w: float
    w_per_tb_per_s: float
    w_per_tflop_per_s: float
    power_cap_w: float
    voltage_knee_mhz: float
    voltage_slope_per_ghz: float
    power_reference_mhz: float
    disk_bytes_per_ms: float
    host_bytes_per_ms: float
    peer_bytes_per_ms: float
    activation_ms: float

    @cached_property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks offered, ascending; ``(0,)`` where there is none to choose."""
        return tuple(range(self.clock_min_mhz, self.clock_max_mhz + 1, self.clock_step_mhz))

    @cached_property
    def sm_sizes_pct(self) -> tuple[int, ...]:
        """The SM shares that an engine can be given, ascending, up to 100."""
        return tuple(range(self.sm_size_min_pct, 101, self.sm_size_step_pct))

    @cached_property
    def _psi_times_mhz(self) -> np.ndarray[Any, Any]:
        """The factor of dynamic power that falls with the clock, at each clock offered; ascending."""
        clocks = np.array(self.clocks_mhz)
        return clocks * _psi(self, clocks)  # type: ignore[no-any-return]


def _device(name: str, parameters: dict[str, Parameter]) -> Device:
    """Make a device from its row of the table, each number in its field's type."""
    types = Device.__annotations__
    return Device(name=name, **{field: types[field](p.value) for field, p in parameters.items()})


DEVICES: dict[str, Device] = {name: _device(name, parameters) for name, parameters in PARAMETERS.items()}


def device_for(gpu_type: str) -> Device:
    """Return the device type of this name. Raises ConfigError naming the known ones."""
    try:
        return DEVICES[gpu_type]
    except KeyError:
        known = ", ".join(sorted(DEVICES))
        raise ConfigError(f"unknown GPU type {gpu_type!r}; set one of: {known}") from None


# ---- time


@dataclass(frozen=True)
class StepWork:
    """What one engine step must do, whatever the clock and share; numbers or arrays that broadcast."""

    weight_bytes: float
    matmul_flops: Any
    kv_bytes: Any
    attn_flops: Any
    overhead_ms: float


def step_work(
    device: Device,
    model: ModelSpec,
    *,
    decode_batch: Any,
    decode_context_tokens: Any,
    prefill_tokens: Any = 0,
    prefill_past_tokens: Any = 0,
) -> StepWork:
    """Return the work of a step that decodes, prefills a chunk, or both at once.

    Args:
        decode_batch: requests that get one more token each.
        decode_context_tokens: sum of their context tokens.
        prefill_tokens: prompt tokens computed in this step.
        prefill_past_tokens: tokens of the same prompt computed before, which the chunk attends to. Several
            prompts in one step: add the `attn_flops` of each.
    """
    # Causal: token i of the chunk attends to all that came before it, two products of 2 FLOPs per element.
    attended_tokens = prefill_tokens * (prefill_past_tokens + prefill_tokens / 2)
    return StepWork(
        weight_bytes=model.weight_bytes,
        matmul_flops=2.0 * model.params * (decode_batch + prefill_tokens),
        kv_bytes=1.0 * model.kv_bytes_per_token * decode_context_tokens,
        attn_flops=4.0 * model.layers * model.heads * model.head_dim * attended_tokens,
        overhead_ms=device.layer_overhead_ms * model.layers + device.step_overhead_ms,
    )


def _bandwidth_of_share(device: Device, sm_share: Any) -> Any:
    """b(s): part of the memory bandwidth that a share of the SMs can draw."""
    rate = device.bandwidth_share_rate
    return (1.0 - np.exp(-rate * sm_share)) / (1.0 - np.exp(-rate))


def _compute_of_share(device: Device, sm_share: Any) -> Any:
    """c(s): part of the compute that a share of the SMs gives."""
    return sm_share**device.compute_share_exponent


def step_ms(
    device: Device,
    work: StepWork,
    sm_clock_mhz: Any,
    sm_share: Any,
    bandwidth_scale: Any = 1.0,
    compute_scale: Any = 1.0,
) -> Any:
    """Return how long a step takes, in ms, on `sm_share` (0-1) of the SMs.

    `bandwidth_scale` and `compute_scale` come from `contention` where engines run side by side.
    """
    bandwidth = _bandwidth_of_share(device, sm_share) * bandwidth_scale
    compute = _compute_of_share(device, sm_share) * compute_scale
    if device.clock_max_mhz:  # else the device runs at the one speed it has
        slowed = np.minimum(1.0, sm_clock_mhz / device.bandwidth_knee_mhz)
        bandwidth = bandwidth * slowed**device.bandwidth_knee_exponent
        compute = compute * (sm_clock_mhz / device.compute_reference_mhz)
    p = device.overlap_exponent
    weights_ms = work.weight_bytes / (device.weight_bytes_per_ms * bandwidth)
    matmul_ms = work.matmul_flops / (device.matmul_flop_per_ms * compute)
    kv_ms = work.kv_bytes / (device.kv_bytes_per_ms * bandwidth)
    attn_ms = work.attn_flops / (device.attn_flop_per_ms * compute)
    return (weights_ms**p + matmul_ms**p) ** (1.0 / p) + kv_ms + attn_ms + work.overhead_ms


def contention(device: Device, sm_shares: Sequence[float]) -> tuple[float, float]:
    """Return (bandwidth_scale, compute_scale) of engines that run at one moment on these shares (0-1).

    Together they cannot draw more than the card has, although a small share alone draws more than its part:
    four engines at 0.25 would read memory 2.6 times as fast as the card.
    """
    bandwidth = float(sum(_bandwidth_of_share(device, share) for share in sm_shares))
    compute = float(sum(_compute_of_share(device, share) for share in sm_shares))
    return 1.0 / max(1.0, bandwidth), 1.0 / max(1.0, compute)


# ---- power


def _psi(device: Device, sm_clock_mhz: Any) -> Any:
    """psi(f): square of the voltage at a clock, against that at the reference clock."""

    def voltage(clock_mhz: Any) -> Any:
        above_ghz = np.maximum(0.0, clock_mhz - device.voltage_knee_mhz) / 1000.0
        return 1.0 + device.voltage_slope_per_ghz * above_ghz

    return (voltage(sm_clock_mhz) / voltage(device.power_reference_mhz)) ** 2


def rates(work: StepWork, ms: Any) -> tuple[Any, Any]:
    """Return (TB/s read, TFLOP/s computed), the mean over a step that takes `ms`."""
    per_tera = 1e9 * ms  # bytes per ms -> TB per s
    return (work.weight_bytes + work.kv_bytes) / per_tera, (work.matmul_flops + work.attn_flops) / per_tera


def power_w(device: Device, sm_clock_mhz: Any, active_sm_share: Any, tb_per_s: Any, tflop_per_s: Any) -> Any:
    """Return what the whole device draws, in W, before its power cap; nan without a meter.

    Args:
        active_sm_share: sum of the shares (0-1) of the engines that run at this moment.
        tb_per_s, tflop_per_s: memory read and computed by all of them together.
    """
    psi = _psi(device, sm_clock_mhz)
    dynamic_w = (
        device.sm_w * (sm_clock_mhz / device.power_reference_mhz) * psi * active_sm_share
        + device.w_per_tb_per_s * tb_per_s
        + device.w_per_tflop_per_s * psi * tflop_per_s
    )
    return np.maximum(device.context_idle_w, device.static_w + dynamic_w)


def capped_clock_mhz(
    device: Device, sm_clock_mhz: Any, active_sm_share: Any, tb_per_s: Any, tflop_per_s: Any
) -> Any:
    """Return the highest clock offered, at most the one asked, that holds the power cap; int, or an array.

    The rates are those at the clock asked. As the clock falls, computing is taken to fall with it and reading
    to stay, so both SM terms of the power fall as f * psi(f) and the limit has a closed form. A step that is
    not all computing then draws up to 5 % over the cap; another call, at the new clock's rates, mends it.
    """
    if not device.has_meter:
        return sm_clock_mhz
    room_w = device.power_cap_w - device.static_w - device.w_per_tb_per_s * tb_per_s
    w_per_factor = (
        device.sm_w * active_sm_share / device.power_reference_mhz
        + device.w_per_tflop_per_s * tflop_per_s / sm_clock_mhz
    )
    highest = np.searchsorted(device._psi_times_mhz, room_w / w_per_factor, side="right") - 1
    within = np.array(device.clocks_mhz)[np.maximum(highest, 0)]
    capped = np.minimum(sm_clock_mhz, within)
    return capped if capped.ndim else int(capped)


CAP_ROUNDS = 3  # after which no step of the catalog draws more than the cap


def step_alone(device: Device, work: StepWork, sm_clock_mhz: Any, sm_share: Any) -> tuple[Any, Any, Any]:
    """Return (ms, W, clock in MHz) of a step with no other engine running, within the power cap."""
    clock_mhz, ms = sm_clock_mhz, step_ms(device, work, sm_clock_mhz, sm_share)
    for _ in range(CAP_ROUNDS):
        clock_mhz = capped_clock_mhz(device, clock_mhz, sm_share, *rates(work, ms))
        ms = step_ms(device, work, clock_mhz, sm_share)
    return ms, power_w(device, clock_mhz, sm_share, *rates(work, ms)), clock_mhz


def idle_power_w(device: Device, state: str) -> float:
    """Return the power of a device on which nothing runs; nan without a meter.

    Args:
        state: ``active``, ``warm``, ``draining`` or ``sleeping`` (a process holds a context), ``cold`` (none
            does) or ``off``. Raises ConfigError for another.
    """
    by_state = dict.fromkeys(("active", "warm", "draining", "sleeping"), device.context_idle_w)
    by_state |= {"cold": device.static_w, "off": 0.0 if device.has_meter else float("nan")}
    if state not in by_state:
        raise ConfigError(f"unknown device state {state!r}; use one of: {', '.join(by_state)}")
    return by_state[state]


def load_ms(device: Device, weight_bytes: int, source: str = "host") -> float:
    """Return the time to bring weights into the device and put them to work, in ms.

    Args:
        source: ``disk``, ``host`` (memory) or ``peer`` (another device). Raises ConfigError for another.
    """
    bytes_per_ms = {
        "disk": device.disk_bytes_per_ms,
        "host": device.host_bytes_per_ms,
        "peer": device.peer_bytes_per_ms,
    }
    if source not in bytes_per_ms:
        raise ConfigError(f"unknown source of weights {source!r}; use one of: {', '.join(bytes_per_ms)}")
    return device.activation_ms + weight_bytes / bytes_per_ms[source]
