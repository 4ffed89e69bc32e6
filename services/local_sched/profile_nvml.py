"""Meter and clocks of an NVIDIA GPU while it is being profiled; needs the package nvidia-ml-py.

The profiler has the GPU to itself. A clock lock outlives the process that set it, so it is let go of at the
end, and whatever an earlier run left is let go of at the start. NVML speaks mW and mJ; here are W and J.
"""

import threading
import time
from typing import Any

from shared.errors import ActuatorRefused, ConfigError

POLL_S = 0.05
"""Between two readings of the power where there is no energy counter."""


class NvmlDevice:
    """One GPU by its number in NVML.

    Args:
        index: its number.
        nvml: the module `pynvml`; imported when None.

    Attributes:
        energy_source: ``counter``, or ``integrated`` where the power is summed up for want of one.
        fixed_clock: why the clock cannot be moved; empty if it can.

    Raises:
        ConfigError: there is no NVML here, or no such GPU.
    """

    def __init__(self, index: int, nvml: Any = None) -> None:
        self._nvml = _pynvml() if nvml is None else nvml
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            raise ConfigError(f"no GPU cuda:{index} on this machine: {error}") from None
        self.name: str = _text(self._nvml.nvmlDeviceGetName(self._handle))
        self.driver: str = _text(self._nvml.nvmlSystemGetDriverVersion())
        self.fixed_clock = self._try_clock()
        self._integrator: _Integrator | None = None
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self.energy_source = "counter"
        except self._nvml.NVMLError:
            self.energy_source = "integrated"
            self._integrator = _Integrator(self._power_w)

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks offered at the highest memory clock, ascending."""
        memory = max(self._nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle))
        return tuple(sorted(self._nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory)))

    def clock_mhz(self) -> int:
        """The SM clock at this moment."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def lock_clock(self, asked_mhz: int) -> int:
        """Hold the SM clock at one of `clocks_mhz`; returns what the device runs at afterwards.

        A device whose clock cannot be moved keeps its own. Raises ActuatorRefused.
        """
        if self.fixed_clock:
            return self.clock_mhz()
        try:
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, asked_mhz, asked_mhz)
        except self._nvml.NVMLError as error:
            raise ActuatorRefused(f"{self.name} does not take a clock of {asked_mhz} MHz: {error}") from None
        return self.clock_mhz()

    def energy_j(self) -> float | None:
        """Joules since some fixed moment."""
        if self._integrator is not None:
            return self._integrator.energy_j()
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000.0

    def close(self) -> None:
        """Let go of the clock, and of NVML."""
        if self._integrator is not None:
            self._integrator.close()
        if not self.fixed_clock:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        self._nvml.nvmlShutdown()

    def _try_clock(self) -> str:
        """Return why clocks cannot be set; trying is the only way to know."""
        try:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        except self._nvml.NVMLError as error:
            return f"the driver does not let this user set clocks ({error})"
        return ""

    def _power_w(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000.0


class _Integrator:
    """Sums up power over time in a thread of its own."""

    def __init__(self, power_w: Any) -> None:
        self._power_w = power_w
        self._lock = threading.Lock()
        self._energy_j = 0.0
        self._last = (time.perf_counter(), power_w())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def energy_j(self) -> float:
        """Joules up to now."""
        with self._lock:
            now, watts = time.perf_counter(), self._power_w()
            then, before_w = self._last
            self._energy_j += (now - then) * (watts + before_w) / 2
            self._last = (now, watts)
            return self._energy_j

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stopping.wait(POLL_S):
            self.energy_j()


def _pynvml() -> Any:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(
            "profiling a CUDA device needs the package nvidia-ml-py: pip install nvidia-ml-py"
        ) from None
    return pynvml


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
