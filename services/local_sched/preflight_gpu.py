"""What a preflight says of one GPU: a plain function of the facts per check."""

from collections.abc import Callable

import msgspec

from services.local_sched.host_facts import GpuFacts, HostFacts, no_mps
from shared.devices import type_of
from shared.errors import ConfigError

OK, WARNING, FAILED, NOT_APPLICABLE = "ok", "warning", "failed", "not applicable"


class Row(msgspec.Struct, frozen=True):
    """One check: its outcome, what was found, what that means for Festina, and what to do; of which GPUs."""

    check: str
    outcome: str
    found: str
    means: str = ""
    cure: str = ""
    gpus: tuple[int, ...] = ()


def state(host: HostFacts, gpu: GpuFacts) -> Row:
    """What it is, and whether it answers and is well; the other checks are of a GPU that answers."""
    if gpu.trouble:
        return _row(
            gpu,
            "GPU",
            FAILED,
            gpu.trouble,
            "it cannot serve; other GPUs go on",
            "look for Xid errors in the kernel's log (`dmesg | grep Xid`), then reset it or restart the host",
        )
    found = f"{gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB, compute capability {gpu.capability / 10:.1f}"
    if gpu.limits:
        return _row(
            gpu,
            "GPU",
            WARNING,
            f"{found}; its clock is held down: {', '.join(gpu.limits)}",
            "it runs slower than the clock that is asked for; the scheduler goes by what runs",
            "see to its cooling and power supply, or its power limit",
        )
    return _row(gpu, "GPU", OK, found)


def _device_type(host: HostFacts, gpu: GpuFacts) -> Row:
    """Whether the scheduler reckons with this GPU's numbers, where there are some."""
    check = "device type"
    try:
        found = type_of(gpu.name)
    except ConfigError as none:
        means = "look-up tables, memory and power cap are another device's"
        return _row(gpu, check, WARNING, str(none), means, "measure it: `make gpu-check`, `festina profile`")
    if not host.gpu_type or found == host.gpu_type:
        return _row(gpu, check, OK, found)
    return _row(
        gpu,
        check,
        FAILED if host.wanted else WARNING,
        f"{found}, and a local scheduler here would take it for {host.gpu_type}",
        "its latencies, memory and power cap are reckoned with another device's numbers",
        f"set FESTINA_DEVICE_GPU_TYPE={found}",
    )


def _compute_mode(host: HostFacts, gpu: GpuFacts) -> Row:
    mode, check = gpu.compute_mode, "compute mode"
    if mode == "default":
        return _row(gpu, check, OK, mode, "several engines may share it")
    if mode == "exclusive process" and not no_mps(host):
        return _row(gpu, check, OK, f"{mode}, with MPS", "engines share it through the MPS server alone")
    return _row(
        gpu,
        check,
        FAILED,
        mode + (", without MPS" if mode == "exclusive process" else ""),
        "no engine can start on it" if mode == "prohibited" else "a second engine on it cannot start",
        f"`nvidia-smi -i {gpu.index} -c DEFAULT` as root"
        + (", or start MPS (`nvidia-cuda-mps-control -d`)" if mode == "exclusive process" else ""),
    )


def _persistence(host: HostFacts, gpu: GpuFacts) -> Row:
    if gpu.persistence is None:
        return _row(gpu, "persistence", NOT_APPLICABLE, "the device does not tell")
    if gpu.persistence:
        return _row(gpu, "persistence", OK, "on")
    return _row(
        gpu,
        "persistence",
        WARNING,
        "off",
        "with the last process the driver leaves the GPU: the next start takes seconds more, and the energy "
        "counter begins anew",
        "run nvidia-persistenced, or `nvidia-smi -pm 1` as root",
    )


def _mig(host: HostFacts, gpu: GpuFacts) -> Row:
    if not gpu.mig:
        return _row(gpu, "MIG", OK, "off" if gpu.mig is False else "the device has none")
    return _row(
        gpu,
        "MIG",
        WARNING,
        "on",
        "its slices share one clock, one power figure and one counter: Festina drives whole GPUs",
        f"`nvidia-smi -i {gpu.index} -mig 0` as root, while nothing runs there",
    )


def _power_cap(host: HostFacts, gpu: GpuFacts) -> Row:
    cap_w, default_w = gpu.power_cap_w, gpu.power_cap_default_w
    if cap_w is None:
        return _row(gpu, "power limit", NOT_APPLICABLE, "the device has none")
    if default_w is None or cap_w >= default_w:
        return _row(gpu, "power limit", OK, f"{cap_w:.0f} W")
    return _row(
        gpu,
        "power limit",
        WARNING,
        f"{cap_w:.0f} W, below its default of {default_w:.0f} W",
        "high clocks will not run under load; look-up tables measured at the default foretell too much",
        f"`nvidia-smi -i {gpu.index} -pl {default_w:.0f}` as root, unless that is meant",
    )


def _clocks(host: HostFacts, gpu: GpuFacts) -> Row:
    if not gpu.clocks_mhz:
        return _row(
            gpu,
            "clocks",
            FAILED if host.wanted else WARNING,
            "none to choose from",
            "its energy cannot be saved by its clock",
            "set FESTINA_DEVICE_CLOCKS=none; in a virtual machine, ask who runs the host",
        )
    low, high, memory = gpu.clocks_mhz[0], gpu.clocks_mhz[-1], gpu.memory_clocks_mhz
    found = f"{len(gpu.clocks_mhz)} from {low} to {high} MHz; memory {', '.join(map(str, memory))} MHz"
    return _row(gpu, "clocks", OK, found)


def _setting(host: HostFacts, gpu: GpuFacts) -> Row:
    """Who may set its clock: the guard for a local scheduler; root alone may profile without."""
    guard, check = host.guard, "setting clocks"
    run_guard = "run the clock guard with its UUID in FESTINA_CLOCK_GUARD_GPUS (docs/operations.md)"
    if guard.socket and guard.trouble:
        return _row(
            gpu,
            check,
            FAILED if guard.named else WARNING,
            f"clock guard at {guard.socket}: {guard.trouble}",
            "local schedulers cannot set its clock",
            "start the guard; give this user the right by FESTINA_CLOCK_GUARD_UIDS (docs/operations.md)",
        )
    leased = next((each for each in guard.gpus if each.gpu == gpu.uuid), None)
    if leased is not None and leased.trouble:
        return _row(
            gpu,
            check,
            FAILED,
            f"the clock guard leases it and cannot set it: {leased.trouble}",
            "its clock stays what it is",
            "run the guard as root, in a container with CAP_SYS_ADMIN",
        )
    if leased is not None:
        held = "somebody holds it now" if leased.held else "nobody holds it now"
        return _row(gpu, check, OK, f"leased by the clock guard at {guard.socket}; {held}")
    if guard.socket:
        found = f"the clock guard at {guard.socket} does not lease it"
        return _row(gpu, check, WARNING, found, "local schedulers cannot set its clock", run_guard)
    if host.may_set_clocks:
        means = "`festina profile` can sweep clocks; local schedulers set none without the guard"
        return _row(gpu, check, WARNING, "we may, and there is no clock guard", means, run_guard)
    means = "the GPU is measured, and keeps the clock that its driver gives it"
    return _row(gpu, check, WARNING, "we may not, and there is no clock guard", means, run_guard + " as root")


def _counter(host: HostFacts, gpu: GpuFacts) -> Row:
    check = "energy counter"
    if gpu.counter == "moves":
        return _row(gpu, check, OK, gpu.counter)
    if gpu.power_w is None:
        means = "its joules are unknown, and answers carry none"
        return _row(gpu, check, FAILED, f"{gpu.counter}, and no power", means, "update the driver")
    return _row(
        gpu,
        check,
        WARNING,
        gpu.counter,
        "joules come from integrated power, and are labelled so",
        "it takes a GPU from Volta on, not virtual" if gpu.counter == "absent" else "reload the driver",
    )


CHECKS: tuple[Callable[[HostFacts, GpuFacts], Row], ...] = (
    state,
    _device_type,
    _compute_mode,
    _persistence,
    _mig,
    _power_cap,
    _clocks,
    _setting,
    _counter,
)


def _row(gpu: GpuFacts, check: str, outcome: str, found: str, means: str = "", cure: str = "") -> Row:
    return Row(check=check, outcome=outcome, found=found, means=means, cure=cure, gpus=(gpu.index,))
