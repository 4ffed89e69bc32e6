"""Device types: the numbers that the device model (`shared/silicon.py`) reads.

`PARAMETERS` is the same table with the source and the status of each number (`shared/device_table.py`).
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from shared.device_table import PARAMETERS, Parameter
from shared.errors import ConfigError

__all__ = ["DEVICES", "PARAMETERS", "Device", "Parameter", "device_for", "type_of"]


NOT_MODELLED = ("name", "sm_count", "sm_group", "given_sizes_pct")
"""What no time and no power depends on."""


@dataclass(frozen=True)
class Device:
    """One device type; `PARAMETERS` says where each number comes from.

    Args:
        total_bytes: memory for weights and KV.
        block_tokens: tokens of one KV block.
        clock_min_mhz, clock_max_mhz, clock_step_mhz: the SM clocks offered; all 0: none to choose.
        f_max_mhz: the highest clock the schedulers use (F_max of 3.3).
        default_clock_mhz: clock of a device that nobody governs.
        sm_count, sm_group: its SMs, and how many go together in a part of them; 0: it has none.
        has_meter: whether it measures energy; without, every power is nan.
        given_sizes_pct: the SM shares that engines can be given on a host, where they are not the table's.
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
    sm_count: int
    sm_group: int
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
    tcp_bytes_per_ms: float
    has_nvlink: bool
    link_setup_ms: float
    activation_ms: float
    context_start_ms: float
    power_on_ms: float
    given_sizes_pct: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """Hash what tells devices apart in practice; hashing every number took longer than a look-up."""
        return hash((self.name, self.total_bytes, self.default_clock_mhz))

    def at_default_clock(self, clock_mhz: int) -> "Device":
        """Return this device with another clock for when nobody governs it.

        Raises:
            ConfigError: it offers no such clock.
        """
        if clock_mhz not in self.clocks_mhz:
            low, high, step = self.clock_min_mhz, self.clock_max_mhz, self.clock_step_mhz
            raise ConfigError(
                f"{self.name} has no clock of {clock_mhz} MHz; it has {low} to {high} in steps of {step}"
            )
        return replace(self, default_clock_mhz=clock_mhz)

    def with_sm_sizes(self, sizes_pct: tuple[int, ...]) -> "Device":
        """Return this device with these SM shares to give, ascending; with a single one it is not cut."""
        return replace(self, sm_size_min_pct=sizes_pct[0], given_sizes_pct=sizes_pct)

    @cached_property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks offered, ascending; ``(0,)`` where there is none to choose."""
        return tuple(range(self.clock_min_mhz, self.clock_max_mhz + 1, self.clock_step_mhz))

    @cached_property
    def sm_sizes_pct(self) -> tuple[int, ...]:
        """The SM shares that an engine can be given, ascending."""
        return self.given_sizes_pct or tuple(range(self.sm_size_min_pct, 101, self.sm_size_step_pct))

    def psi(self, sm_clock_mhz: Any) -> Any:
        """psi(f): square of the voltage at a clock, against that at the reference clock."""
        if not isinstance(sm_clock_mhz, int):
            return self._psi(sm_clock_mhz)
        known = self._psis.get(sm_clock_mhz)
        if known is None:
            known = self._psis[sm_clock_mhz] = self._psi(sm_clock_mhz)
        return known

    def _psi(self, sm_clock_mhz: Any) -> Any:
        def voltage(clock_mhz: Any) -> Any:
            above_mhz = clock_mhz - self.voltage_knee_mhz
            scalar = isinstance(above_mhz, float)
            above_ghz = (max(0.0, above_mhz) if scalar else np.maximum(0.0, above_mhz)) / 1000.0
            return 1.0 + self.voltage_slope_per_ghz * above_ghz

        return (voltage(sm_clock_mhz) / voltage(self.power_reference_mhz)) ** 2

    @cached_property
    def _psis(self) -> dict[int, float]:
        return {}

    @cached_property
    def psi_times_mhz(self) -> tuple[float, ...]:
        """The factor of dynamic power that falls with the clock, at each clock offered; ascending."""
        clocks = np.array(self.clocks_mhz)
        return tuple((clocks * self.psi(clocks)).tolist())

    @cached_property
    def contentions(self) -> dict[tuple[float, ...], tuple[float, float]]:
        """What `silicon.contention` has worked out; nothing but a memory of it."""
        return {}

    @cached_property
    def digest(self) -> str:
        """sha256 of every number of the model, in hex: tables made with other numbers have another."""
        fields = [name for name in Device.__annotations__ if name not in NOT_MODELLED]
        numbers = {name: float(getattr(self, name)) for name in fields}
        return hashlib.sha256(msgspec.msgpack.encode(numbers, order="deterministic")).hexdigest()


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


def type_of(name: str) -> str:
    """Return the row for a GPU's name as its driver gives it ("NVIDIA H100 80GB HBM3").

    Raises:
        ConfigError: no row has it; the message names them.
    """
    for gpu_type in DEVICES:
        if gpu_type != "cpu" and gpu_type.split("-")[0] in name.lower():
            return gpu_type
    raise ConfigError(f"no device type is known for {name!r}; name one of: {', '.join(DEVICES)}")
