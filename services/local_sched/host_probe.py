"""Looks at a GPU host for the preflight, and changes nothing: no CUDA context, no lease, no setting."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import msgspec

from services.local_sched.clock_lease import Answer, Ask
from services.local_sched.clock_setters import GUARD_S, ask
from services.local_sched.host_facts import (
    DEFAULT_PIPES,
    EngineFacts,
    GpuFacts,
    GuardFacts,
    HostFacts,
    MpsFacts,
)
from services.local_sched.meter import STALL_MS
from services.local_sched.nvml import NvmlGpu, driver_here
from services.local_sched.vllm_ext.version import PACKAGES, TESTED_VERSIONS
from shared.errors import ConfigError, FestinaError, Unavailable

WATCH_S = STALL_MS / 1000.0
"""An energy counter that has not moved for this long stands still."""
ENGINE_S = 20.0
CAP_SYS_ADMIN = 21
DEFAULT_GUARD = "/run/festina/clocks.sock"
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""PCI's vendor, and its classes of GPUs: with a display and without."""

VERSIONS = f"""
import importlib.util, json, runpy
from importlib.metadata import PackageNotFoundError, version
def of(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""
found = {{"torch": of("torch"), "cuda_bindings": of("cuda-bindings")}}
found["vllm"] = of(*{PACKAGES!r}).split("+")[0]
torch = importlib.util.find_spec("torch")
if torch:
    told = runpy.run_path(torch.submodule_search_locations[0] + "/version.py")
    found["torch_cuda"] = told.get("cuda") or ""
print(json.dumps(found))
"""
"""Asked of the engine's interpreter: versions, without importing torch, which takes seconds."""


def probe(
    *,
    vllm_python: str,
    clock_guard: str = "",
    wanted: bool = False,
    gpu_type: str = "",
    watch_s: float = WATCH_S,
) -> HostFacts:
    """Return the facts about this host.

    Args:
        vllm_python: interpreter of the engine's environment.
        clock_guard: the guard's socket, if the configuration names one; else one at its usual place counts.
        wanted: the configuration has the local scheduler drive a GPU.
        gpu_type: what it takes its GPU for.
        watch_s: for how long energy counters are watched, at most.
    """
    trouble, fails, driver = "", False, None
    gpus: tuple[GpuFacts, ...] = ()
    try:
        driver = driver_here()
        gpus = _gpus(driver.gpus, watch_s)
    except ConfigError as error:
        trouble = str(error)
    except Unavailable as error:
        trouble, fails = str(error), True
    return HostFacts(
        driver_trouble=trouble,
        driver_fails=fails,
        driver=driver.version if driver else "",
        nvml=driver.nvml if driver else "",
        cuda=driver.cuda if driver else 0,
        gpus=gpus,
        pci_gpus=_pci_gpus(Path("/sys/bus/pci/devices")),
        wanted=wanted,
        gpu_type=gpu_type,
        uid=os.geteuid(),
        may_set_clocks=_has_capability(CAP_SYS_ADMIN),
        guard=ask_guard(clock_guard),
        mps=look_for_mps(Path("/proc")),
        engine=ask_engine(vllm_python),
    )


def ask_guard(named: str) -> GuardFacts:
    """Ask the clock guard what it leases, without taking a lease."""
    path = named or (DEFAULT_GUARD if Path(DEFAULT_GUARD).exists() else "")
    if not path:
        return GuardFacts()
    trouble, answer = "", Answer()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guard:
        guard.settimeout(GUARD_S)
        try:
            guard.connect(path)
            answer = ask(guard, Ask())
            trouble = answer.refused
        except (OSError, msgspec.DecodeError) as error:
            trouble = f"it does not answer: {error}"
    return GuardFacts(socket=path, named=bool(named), trouble=trouble, gpus=answer.gpus)


def look_for_mps(proc: Path) -> MpsFacts:
    """Look for the MPS control daemon: whose pipe there is, and whether its process can be seen."""
    named = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    directory = Path(named or DEFAULT_PIPES)
    try:
        owner_uid = (directory / "control").stat().st_uid
    except OSError:
        owner_uid = None
    daemon = any(_starts_with(path, "nvidia-cuda-mps") for path in proc.glob("[0-9]*/comm"))
    return MpsFacts(directory=str(directory), named=bool(named), owner_uid=owner_uid, daemon=daemon)


def ask_engine(python: str) -> EngineFacts:
    """Ask an interpreter which versions its environment has."""
    found, trouble = {}, ""
    try:
        argv = [python, "-I", "-c", VERSIONS]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ENGINE_S, check=True)
        found = json.loads(done.stdout)
    except FileNotFoundError:
        trouble = f"there is no {python}"
    except subprocess.CalledProcessError as error:
        trouble = f"{python} fails: {(error.stderr.strip().splitlines() or ['no message'])[-1]}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        trouble = f"{python} cannot be asked: {error}"
    return EngineFacts(python=python, trouble=trouble, tested=TESTED_VERSIONS, **found)


def _gpus(count: int, watch_s: float) -> tuple[GpuFacts, ...]:
    """Read every GPU, and watch their counters side by side."""
    opened: dict[int, NvmlGpu | str] = {index: _opened(index) for index in range(count)}
    first_j = {index: _counter_j(gpu) for index, gpu in opened.items()}
    still = {index for index, counter_j in first_j.items() if counter_j is not None}
    until_s = time.monotonic() + watch_s
    while still and time.monotonic() < until_s:
        time.sleep(watch_s / 20)
        still -= {index for index in still if _counter_j(opened[index]) != first_j[index]}
    told = {
        index: "absent" if first_j[index] is None else "stands still" if index in still else "moves"
        for index in opened
    }
    return tuple(_facts(index, gpu, told[index]) for index, gpu in opened.items())


def _opened(index: int) -> NvmlGpu | str:
    try:
        return NvmlGpu(str(index))
    except FestinaError as error:
        return str(error)


def _counter_j(gpu: NvmlGpu | str) -> float | None:
    try:
        return None if isinstance(gpu, str) else gpu.read().counter_j
    except Unavailable:
        return None


def _facts(index: int, gpu: NvmlGpu | str, counter: str) -> GpuFacts:
    if isinstance(gpu, str):
        return GpuFacts(index=index, trouble=gpu)
    try:
        reading, card = gpu.read(), gpu.card
        return GpuFacts(
            index=index,
            name=gpu.name,
            uuid=gpu.uuid,
            clocks_mhz=gpu.clocks_mhz,
            memory_clocks_mhz=gpu.memory_clocks_mhz,
            limits=reading.limits,
            power_w=reading.power_w,
            counter=counter,
            **card._asdict(),
        )
    except Unavailable as error:
        return GpuFacts(index=index, trouble=str(error))
    finally:
        gpu.close()


def _pci_gpus(devices: Path) -> int:
    return sum(
        _starts_with(device / "vendor", NVIDIA) and _starts_with(device / "class", *DISPLAYS)
        for device in (devices.iterdir() if devices.is_dir() else ())
    )


def _starts_with(path: Path, *starts: str) -> bool:
    try:
        return path.read_text().startswith(starts)
    except OSError:
        return False  # a process may end meanwhile


def _has_capability(number: int) -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return os.geteuid() == 0
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)
