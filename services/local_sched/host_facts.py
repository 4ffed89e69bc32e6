"""Facts about a GPU host that the preflight judges, and what they say of the ways to share its SMs.

`host_probe.py` finds them; nothing is changed for that.
"""

import msgspec

from services.local_sched.clock_lease import Standing

GREEN_CUDA = 1204
"""Green contexts came with CUDA 12.4, whose driver is 550."""


DEFAULT_PIPES = "/tmp/nvidia-mps"
"""Where a daemon has its pipes unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""


class GpuFacts(msgspec.Struct, frozen=True):
    """A GPU. None stands for what it does not tell.

    Args:
        index: its number.
        trouble: why it cannot be read; the rest says nothing then.
        compute_mode: ``default``, ``exclusive thread``, ``prohibited`` or ``exclusive process``.
        processes, mps_processes: that have a context on it, by itself or through MPS.
        clocks_mhz: SM clocks that can be chosen.
        limits: what holds its clock down now.
        counter: its energy counter ``moves``, ``stands still`` or is ``absent``.
    """

    index: int
    trouble: str = ""
    name: str = ""
    uuid: str = ""
    memory_bytes: int = 0
    capability: int = 0
    compute_mode: str = "default"
    persistence: bool | None = None
    mig: bool | None = None
    power_cap_w: float | None = None
    power_cap_default_w: float | None = None
    processes: tuple[int, ...] = ()
    mps_processes: tuple[int, ...] = ()
    clocks_mhz: tuple[int, ...] = ()
    memory_clocks_mhz: tuple[int, ...] = ()
    limits: tuple[str, ...] = ()
    power_w: float | None = None
    counter: str = "absent"


class GuardFacts(msgspec.Struct, frozen=True):
    """The clock guard behind a socket: why it does not answer us, or what it leases.

    `named`: the configuration names the socket, so somebody counts on it.
    """

    socket: str = ""
    named: bool = False
    trouble: str = ""
    gpus: tuple[Standing, ...] = ()


class MpsFacts(msgspec.Struct, frozen=True):
    """The MPS control daemon, by its folder of pipes; `named` by CUDA_MPS_PIPE_DIRECTORY.

    `owner_uid` is whose control pipe it is, None where there is none; `daemon`: its process can be seen. That
    cannot be from another container.
    """

    directory: str = DEFAULT_PIPES
    named: bool = False
    owner_uid: int | None = None
    daemon: bool = False


class EngineFacts(msgspec.Struct, frozen=True):
    """The engine's Python environment: versions of what is installed in it, empty where it is not.

    Args:
        python: its interpreter.
        trouble: why it cannot be asked.
        torch_cuda: CUDA version that its torch was built for; empty: a CPU build.
        cuda_bindings: of NVIDIA's cuda-python.
        tested: the vLLM versions that Festina was tested with.
    """

    python: str = ""
    trouble: str = ""
    vllm: str = ""
    torch: str = ""
    torch_cuda: str = ""
    cuda_bindings: str = ""
    tested: tuple[str, ...] = ()


class HostFacts(msgspec.Struct, frozen=True):
    """A host.

    Args:
        driver_trouble: why there is no NVML; empty where there is.
        driver_fails: there is a driver, and it does not answer.
        driver, nvml: versions.
        cuda: the newest CUDA that the driver runs, 12.4 as 1204.
        pci_gpus: NVIDIA's GPUs on the PCI bus, driver or not.
        wanted: the configuration has the local scheduler drive a GPU (FESTINA_DEVICE_CLOCKS=nvml).
        gpu_type: what it takes its GPU for (FESTINA_DEVICE_GPU_TYPE); empty: nobody has said.
        uid: who we are.
        may_set_clocks: we have the right that setting clocks takes (CAP_SYS_ADMIN).
    """

    driver_trouble: str = ""
    driver_fails: bool = False
    driver: str = ""
    nvml: str = ""
    cuda: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    pci_gpus: int = 0
    wanted: bool = False
    gpu_type: str = ""
    uid: int = 0
    may_set_clocks: bool = False
    guard: GuardFacts = GuardFacts()
    mps: MpsFacts = MpsFacts()
    engine: EngineFacts = EngineFacts()


def cuda_of(host: HostFacts) -> str:
    """Return the driver's CUDA version as people write it."""
    return f"{host.cuda // 100}.{host.cuda % 100}"


def no_green_contexts(host: HostFacts) -> str:
    """Return why engines here cannot have SM shares by green contexts; empty if they can."""
    engine = host.engine
    if host.driver_trouble or not host.gpus:
        return "no NVIDIA GPU"
    if host.cuda < GREEN_CUDA:
        return f"the driver {host.driver} runs CUDA {cuda_of(host)}, and they take 12.4 (driver 550)"
    if engine.trouble or not engine.torch:
        return f"no torch in the engine's environment ({engine.trouble or engine.python})"
    if not engine.torch_cuda:
        return f"torch {engine.torch} there is a CPU build"
    if not engine.cuda_bindings:
        return f"torch {engine.torch} there came without cuda-bindings"
    return ""


def no_mps(host: HostFacts) -> str:
    """Return why engines here would not run under MPS; empty if they would.

    A pipe in the folder that the configuration names is believed in, though its daemon is not to be seen.
    """
    mps = host.mps
    if host.driver_trouble or not host.gpus:
        return "no NVIDIA GPU"
    if mps.owner_uid is None:
        return f"no control pipe in {mps.directory}"
    if not mps.daemon and not mps.named:
        return f"a control pipe in {mps.directory}, and no daemon to be seen"
    if host.uid not in (mps.owner_uid, 0) and mps.owner_uid != 0:
        return f"the daemon at {mps.directory} is user {mps.owner_uid}'s, and we are user {host.uid}"
    return ""
