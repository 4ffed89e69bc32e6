"""The device model: time and power of one engine step, load, transfer and wake-up, on a `Device`.

It is the emulated GPU, and the source of the look-up table (3.2.1) where no device was profiled::

    t      = (t_w^p + t_c^p)^(1/p) + t_kv + t_attn + overhead
    t_w    = weight bytes / (rate * b(s) * m(f))        t_kv   = KV bytes / (rate * b(s) * m(f))
    t_c    = matmul FLOPs / (rate * c(s) * f/f_ref)     t_attn = attention FLOPs / (likewise)
    P      = static + context SM term * phi(f) * A + per TB/s + per TFLOP/s * psi(f), at least the idle power

`s` is the SM share in (0, 1], `f` the SM clock, `b`, `c`, `m` the bandwidth and compute left by a share and a
clock, `A` the sum of the SM shares active. Units: ms, MHz, W, bytes, FLOP. Functions of numbers also take
numpy arrays, which broadcast, and are then typed Any. The numbers and their sources: `shared/devices.py`.

What the model does not show, to be said beside every figure: the published shift of the best clock with model
size and input length (here it sits at the voltage knee, 1005 MHz); the knee of `m` is assumed, and moves the
best decode clock between 705 and 1005 MHz; below a share of 0.3 everything is extrapolated; nobody has
published power against SM share.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.devices import Device
from shared.errors import ConfigError
from shared.model import ModelSpec

# ---- time


@dataclass(init=False)  # one that is made for it stays interpreted where the rest is compiled
class StepWork:
    """What one engine step must do, whatever the clock and share; numbers or arrays that broadcast."""

    weight_bytes: float
    matmul_flops: Any
    kv_bytes: Any
    attn_flops: Any
    overhead_ms: float

    def __init__(
        self, weight_bytes: float, matmul_flops: Any, kv_bytes: Any, attn_flops: Any, overhead_ms: float
    ) -> None:
        self.weight_bytes, self.overhead_ms = weight_bytes, overhead_ms
        self.matmul_flops, self.kv_bytes, self.attn_flops = matmul_flops, kv_bytes, attn_flops


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
    # The input embedding is looked up, not multiplied, and of a prompt only the last token gets logits.
    head_params = model.vocab_tokens * model.hidden
    body_params = model.params - head_params * (1 if model.tied_embeddings else 2)
    return StepWork(
        weight_bytes=model.weight_bytes * ((body_params + head_params) / model.params),
        matmul_flops=2.0
        * (
            body_params * (decode_batch + prefill_tokens)
            + head_params * (decode_batch + (prefill_tokens > 0))
        ),
        kv_bytes=1.0 * model.kv_bytes_per_token * decode_context_tokens,
        attn_flops=attn_flops(model, prefill_tokens, prefill_past_tokens),
        overhead_ms=device.layer_overhead_ms * model.layers + device.step_overhead_ms,
    )


def attn_flops(model: ModelSpec, prefill_tokens: Any, past_tokens: Any) -> Any:
    """Return the attention FLOPs of a chunk of a prompt, of which `past_tokens` were computed before."""
    # Causal: token i of the chunk attends to all that came before it, two products of 2 FLOPs per element.
    attended_tokens = prefill_tokens * (past_tokens + prefill_tokens / 2)
    return 4.0 * model.layers * model.heads * model.head_dim * attended_tokens


def bandwidth_of_share(device: Device, sm_share: Any) -> Any:
    """b(s): part of the memory bandwidth that a share of the SMs can draw."""
    rate = device.bandwidth_share_rate
    if isinstance(sm_share, float):  # numbers take a fifth of the time this way
        return math.expm1(-rate * sm_share) / math.expm1(-rate)
    return (1.0 - np.exp(-rate * sm_share)) / (1.0 - np.exp(-rate))


def compute_of_share(device: Device, sm_share: Any) -> Any:
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
    bandwidth = bandwidth_of_share(device, sm_share) * bandwidth_scale
    compute = compute_of_share(device, sm_share) * compute_scale
    if device.clock_max_mhz:  # else the device runs at the one speed it has
        slowed = sm_clock_mhz / device.bandwidth_knee_mhz
        slowed = min(1.0, slowed) if isinstance(slowed, float) else np.minimum(1.0, slowed)
        bandwidth = bandwidth * slowed**device.bandwidth_knee_exponent
        compute = compute * (sm_clock_mhz / device.compute_reference_mhz)
    p = device.overlap_exponent
    weights_ms = work.weight_bytes / (device.weight_bytes_per_ms * bandwidth)
    matmul_ms = work.matmul_flops / (device.matmul_flop_per_ms * compute)
    kv_ms = work.kv_bytes / (device.kv_bytes_per_ms * bandwidth)
    attn_ms = work.attn_flops / (device.attn_flop_per_ms * compute)
    return (weights_ms**p + matmul_ms**p) ** (1.0 / p) + kv_ms + attn_ms + work.overhead_ms


CONTENTIONS_KEPT = 4096  # sets of shares per device whose scales are remembered: schedulers ask for few


def contention(device: Device, sm_shares: Sequence[float]) -> tuple[float, float]:
    """Return (bandwidth_scale, compute_scale) of engines that run at one moment on these shares (0-1).

    Together they cannot draw more than the card has, although a small share alone draws more than its part:
    four engines at 0.25 would read memory 2.6 times as fast as the card.
    """
    known = device.contentions
    scales = known.get(key := tuple(sm_shares))
    if scales is not None:
        return scales
    if len(known) >= CONTENTIONS_KEPT:
        known.clear()
    bandwidth = float(sum(bandwidth_of_share(device, share) for share in sm_shares))
    compute = float(sum(compute_of_share(device, share) for share in sm_shares))
    scales = known[key] = (1.0 / max(1.0, bandwidth), 1.0 / max(1.0, compute))
    return scales


# ---- power


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
    dynamic_w = dynamic_parts_w(device, sm_clock_mhz, active_sm_share, tb_per_s, tflop_per_s)
    return np.maximum(device.context_idle_w, device.static_w + sum(dynamic_w))


def dynamic_parts_w(
    device: Device, sm_clock_mhz: Any, active_sm_share: Any, tb_per_s: Any, tflop_per_s: Any
) -> tuple[Any, Any, Any]:
    """Return the power above the static part, in W: of SMs being clocked, memory read, arithmetic."""
    psi = device.psi(sm_clock_mhz)
    return (
        device.sm_w * (sm_clock_mhz / device.power_reference_mhz) * psi * active_sm_share,
        device.w_per_tb_per_s * tb_per_s,
        device.w_per_tflop_per_s * psi * tflop_per_s,
    )


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
    factor = room_w / w_per_factor
    if isinstance(sm_clock_mhz, int) and isinstance(factor, float):
        fits = bisect_right(device.psi_times_mhz, factor) - 1
        return min(sm_clock_mhz, device.clocks_mhz[max(fits, 0)])
    highest = np.searchsorted(device.psi_times_mhz, factor, side="right") - 1
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


WEIGHT_CHUNK_BYTES = 64 << 20  # of the pinned stage that weights from disk go through: assumed


def load_ms(device: Device, weight_bytes: int, source: str = "host") -> float:
    """Return the time to bring weights into the device and put them to work, in ms.

    From disk they go through pinned host memory in chunks: one is copied to the device while the next is
    read, so that what the slower of the two ways takes is followed by one chunk on the other.

    Args:
        source: ``asleep`` (an engine of the model waits there, with its weights in host memory), ``host``
            (memory), ``disk`` or ``peer`` (another device). Raises ConfigError for another.
    """
    disk, host = device.disk_bytes_per_ms, device.host_bytes_per_ms
    last_bytes = min(weight_bytes, WEIGHT_CHUNK_BYTES)
    by_source = {
        "disk": weight_bytes / min(disk, host) + last_bytes / max(disk, host),
        "asleep": weight_bytes / host,
        "host": weight_bytes / host,
        "peer": weight_bytes / device.peer_bytes_per_ms,
    }
    if source not in by_source:
        raise ConfigError(f"unknown source of weights {source!r}; use one of: {', '.join(by_source)}")
    return by_source[source] + (0.0 if source == "asleep" else device.activation_ms)


def transfer_ms(device: Device, sent_bytes: Any, link: str) -> Any:
    """Return the time to send KV blocks or weights from one device to another (F), in ms.

    Args:
        link: ``nvlink``, ``pcie`` (through host memory, pipelined) or ``tcp``. Raises ConfigError for
            another, and for NVLink on a device without.
    """
    bytes_per_ms = {"pcie": device.host_bytes_per_ms, "tcp": device.tcp_bytes_per_ms}
    if device.has_nvlink:
        bytes_per_ms["nvlink"] = device.peer_bytes_per_ms
    if link not in bytes_per_ms:
        known = ", ".join(sorted(bytes_per_ms))
        raise ConfigError(f"{device.name} has no link {link!r}; use one of: {known}")
    return device.link_setup_ms + sent_bytes / bytes_per_ms[link]


def wake_ms(device: Device, state: str) -> float:
    """Return the time from a device's state until it can begin to load a model, in ms.

    Args:
        state: ``active``, ``warm``, ``draining`` or ``sleeping`` (a process holds a context: 0), ``cold``
            (one has to be started) or ``off`` (no power, either). Raises ConfigError for another.
    """
    by_state = dict.fromkeys(("active", "warm", "draining", "sleeping"), 0.0)
    by_state["cold"] = device.context_start_ms
    by_state["off"] = device.power_on_ms + device.context_start_ms
    if state not in by_state:
        raise ConfigError(f"unknown device state {state!r}; use one of: {', '.join(by_state)}")
    return by_state[state]
