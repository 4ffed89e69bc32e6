"""One NVIDIA GPU through its driver's NVML, in W, J and MHz (module `pynvml` of nvidia-ml-py).

NVML's mW and mJ, and its errors, end here. Reading makes no CUDA context. Setting clocks takes root
(`CAP_SYS_ADMIN` in a container), and what is set outlives the process that set it: so the clock guard sets
them for everybody else (`clock_guard.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from shared.errors import ActuatorRefused, ConfigError, Unavailable

T = TypeVar("T")

IDLE_REASON = 0x1
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
"""By NVML's number."""
LIMITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}
"""What holds a clock below the one asked for, by its bit (``nvmlClocksEventReason…`` in nvml.h)."""


class Reading(NamedTuple):
    """A GPU at one moment.

    Args:
        clock_mhz: the SM clock that it really runs at.
        limits: what holds it below the one asked for, in words; empty if nothing does.
        idle: it has nothing to do, and may clock down by itself.
        power_w: None where it does not tell; on Hopper the mean of the last second.
        counter_j: its energy counter, since the driver was loaded; None where it has none.
    """

    clock_mhz: int
    limits: tuple[str, ...]
    idle: bool
    power_w: float | None
    counter_j: float | None


class Driver(NamedTuple):
    """The driver of this machine: its version, NVML's, the newest CUDA it runs (12.4 is 1204), its GPUs."""

    version: str
    nvml: str
    cuda: int
    gpus: int


class Card(NamedTuple):
    """How a GPU is set up; None for what it does not tell.

    Args:
        capability: CUDA compute capability, 9.0 as 90.
        compute_mode: ``default``, ``exclusive thread``, ``prohibited`` or ``exclusive process``.
        power_cap_w, power_cap_default_w: the cap that holds, and the one it was made with.
        processes, mps_processes: ids of processes with a context on it, plain ones and clients of MPS.
    """

    memory_bytes: int
    capability: int
    compute_mode: str
    persistence: bool | None
    mig: bool | None
    power_cap_w: float | None
    power_cap_default_w: float | None
    processes: tuple[int, ...]
    mps_processes: tuple[int, ...]


def driver_here() -> Driver:
    """Return what drives this machine's GPUs.

    Raises:
        ConfigError: nothing does.
        Unavailable: the driver does not answer.
    """
    nvml = _pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(f"no NVIDIA driver on this machine: {error}") from None
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
        return Driver(
            nvml.nvmlSystemGetDriverVersion(),
            nvml.nvmlSystemGetNVMLVersion(),
            cuda // 1000 * 100 + cuda % 1000 // 10,
            nvml.nvmlDeviceGetCount(),
        )
    except nvml.NVMLError as error:
        raise Unavailable(f"the NVIDIA driver does not list its GPUs: {error}") from None
    finally:
        nvml.nvmlShutdown()


class NvmlGpu:
    """One GPU, by its number or its UUID (``GPU-…``). Use it in one thread at a time.

    Raises:
        ConfigError: there is no NVML here, or no such GPU.
    """

    def __init__(self, which: str) -> None:
        self._nvml = _pynvml()
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise ConfigError(f"no NVIDIA driver on this machine: {error}") from None
        try:
            if which.isdigit():
                self._gpu = nvml.nvmlDeviceGetHandleByIndex(int(which))
            else:
                self._gpu = nvml.nvmlDeviceGetHandleByUUID(which)
            self.name: str = nvml.nvmlDeviceGetName(self._gpu)
            self.uuid: str = nvml.nvmlDeviceGetUUID(self._gpu)
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            raise ConfigError(f"no GPU {which} on this machine: {error}") from None
        self.driver: str = nvml.nvmlSystemGetDriverVersion()

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks offered at the highest memory clock, ascending; empty where none can be chosen."""
        memory_mhz = self.memory_clocks_mhz
        read = self._nvml.nvmlDeviceGetSupportedGraphicsClocks
        return tuple(sorted(self._read("clocks", read, memory_mhz[-1]) or ())) if memory_mhz else ()

    @property
    def memory_clocks_mhz(self) -> tuple[int, ...]:
        """The memory clocks offered, ascending; empty where none can be chosen."""
        return tuple(sorted(self._read("clocks", self._nvml.nvmlDeviceGetSupportedMemoryClocks) or ()))

    @property
    def card(self) -> Card:
        """How the GPU is set up. Raises Unavailable: it has left the bus, or the driver fails."""
        nvml = self._nvml
        memory = self._read("memory", nvml.nvmlDeviceGetMemoryInfo)
        capability = self._read("capability", nvml.nvmlDeviceGetCudaComputeCapability) or (0, 0)
        mode = self._read("compute mode", nvml.nvmlDeviceGetComputeMode)
        persistence = self._read("persistence mode", nvml.nvmlDeviceGetPersistenceMode)
        mig = self._read("MIG mode", nvml.nvmlDeviceGetMigMode)
        cap_mw = self._read("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit)
        default_mw = self._read("power limit", nvml.nvmlDeviceGetPowerManagementDefaultLimit)
        plain = self._read("processes", nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        of_mps = self._read("processes", nvml.nvmlDeviceGetMPSComputeRunningProcesses) or ()
        return Card(
            memory_bytes=0 if memory is None else int(memory.total),
            capability=10 * capability[0] + capability[1],
            compute_mode=COMPUTE_MODES[mode or 0],
            persistence=None if persistence is None else bool(persistence),
            mig=None if mig is None else bool(mig[0]),
            power_cap_w=None if cap_mw is None else cap_mw / 1000.0,
            power_cap_default_w=None if default_mw is None else default_mw / 1000.0,
            processes=tuple(each.pid for each in plain),
            mps_processes=tuple(each.pid for each in of_mps),
        )

    def read(self) -> Reading:
        """Read clock, power and energy. Raises Unavailable: the GPU has left the bus, or the driver fails."""
        nvml = self._nvml
        clock_mhz = self._read("clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        reasons = self._read("limits", nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        power_mw = self._read("power", nvml.nvmlDeviceGetPowerUsage)
        counter_mj = self._read("energy", nvml.nvmlDeviceGetTotalEnergyConsumption)
        return Reading(
            clock_mhz=clock_mhz or 0,
            limits=tuple(dict.fromkeys(name for bit, name in LIMITS.items() if reasons & bit)),
            idle=bool(reasons & IDLE_REASON),
            power_w=None if power_mw is None else power_mw / 1000.0,
            counter_j=None if counter_mj is None else counter_mj / 1000.0,
        )

    def lock(self, sm_clock_mhz: int = 0, memory_clock_mhz: int = 0) -> None:
        """Hold clocks at what is offered; 0 gives one back to the driver. Whoever locks has to unlock.

        Raises:
            ActuatorRefused: the device does not take it, the user may not, or the GPU is gone.
        """
        nvml = self._nvml
        if sm_clock_mhz:
            self._set(f"a clock of {sm_clock_mhz} MHz", nvml.nvmlDeviceSetGpuLockedClocks, sm_clock_mhz)
        else:
            self._set("its default clock", nvml.nvmlDeviceResetGpuLockedClocks)
        if memory_clock_mhz:
            what = f"a memory clock of {memory_clock_mhz} MHz"
            self._set(what, nvml.nvmlDeviceSetMemoryLockedClocks, memory_clock_mhz)
        elif self.memory_clocks_mhz:
            try:
                nvml.nvmlDeviceResetMemoryLockedClocks(self._gpu)
            except nvml.NVMLError_NotSupported:
                return  # one that cannot be set needs no reset
            except nvml.NVMLError as error:
                raise self._refused("its default memory clock", error) from None

    def close(self) -> None:
        """Let NVML go; a lock stays."""
        self._nvml.nvmlShutdown()

    def _read(self, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Ask NVML; None where the device does not know, or the driver does not tell us."""
        nvml = self._nvml
        try:
            return call(self._gpu, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            return None
        except nvml.NVMLError as error:
            raise Unavailable(f"{self.name} ({self.uuid}) does not tell its {what}: {error}") from None

    def _set(self, what: str, call: Callable[..., None], *clocks_mhz: int) -> None:
        try:
            call(self._gpu, *clocks_mhz, *clocks_mhz)  # the lowest and the highest allowed
        except self._nvml.NVMLError as error:
            raise self._refused(what, error) from None

    def _refused(self, what: str, error: Exception) -> ActuatorRefused:
        cure = ""
        if isinstance(error, self._nvml.NVMLError_NoPermission):
            cure = "; setting clocks takes root, in a container CAP_SYS_ADMIN"
        return ActuatorRefused(f"{self.name} ({self.uuid}) does not take {what}: {error}{cure}")


def _pynvml() -> Any:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(
            "an NVIDIA GPU is driven with the package nvidia-ml-py: pip install nvidia-ml-py"
        ) from None
    return pynvml
