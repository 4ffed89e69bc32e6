"""What works on a GPU host, judged from facts about it: the pure half of `festina doctor`.

Each check is a plain function of the facts: what was found, what that means for Festina, and the cure. A row
has ``failed`` where something that is set up, or asked for, does not work; it is a ``warning`` where Festina
goes on with less.
"""

from collections.abc import Iterable

import msgspec

from services.local_sched.host_facts import HostFacts, cuda_of, no_green_contexts, no_mps
from services.local_sched.partition import partition_for, sm_facts
from services.local_sched.preflight_gpu import (
    CHECKS,
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Row,
    state,
)
from shared.devices import device_for
from shared.errors import ConfigError


def judge(host: HostFacts, sm_partition: str = "auto", mps_share_pct: int = 100) -> list[Row]:
    """Return a row for every check that makes sense on this host; GPUs that are alike share one.

    Args:
        host: the facts.
        sm_partition, mps_share_pct: as a local scheduler here is set (section ``device``).
    """
    if host.driver_trouble or not host.gpus:
        return [_no_gpu(host), _engine(host)]
    rows = [Row(check="driver", outcome=OK, found=f"{host.driver}, NVML {host.nvml}, CUDA {cuda_of(host)}")]
    for check in CHECKS:
        rows += _merged(check(host, gpu) for gpu in host.gpus if check is state or not gpu.trouble)
    shares = [_shares(host, sm_partition, mps_share_pct)] if host.gpu_type else []
    return [*rows, _mps(host), _green(host), *shares, _engine(host)]


def failed(rows: list[Row]) -> bool:
    """Return whether anything has failed: the status of `festina doctor`."""
    return any(row.outcome == FAILED for row in rows)


def _no_gpu(host: HostFacts) -> Row:
    why = host.driver_trouble or "the driver lists no GPU"
    if host.wanted or host.pci_gpus or host.driver_fails:
        seen = f"{host.pci_gpus} on the PCI bus" if host.pci_gpus else "FESTINA_DEVICE_CLOCKS=nvml wants one"
        why = why if host.driver_fails else f"{why}; {seen}"
        return Row(
            check="GPU",
            outcome=FAILED,
            found=why,
            means="no GPU of this host can serve, be measured or have its clock set",
            cure="install NVIDIA's driver and look at `nvidia-smi`; a container needs the NVIDIA runtime "
            "(--gpus all) with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    return Row(
        check="GPU",
        outcome=NOT_APPLICABLE,
        found=f"no NVIDIA GPU on this machine ({why})",
        means="emulated GPUs work (`make up EMULATED=1`), and so does vLLM on CPU where its environment is; "
        "clocks, meter and SM shares are modelled",
    )


def _mps(host: HostFacts) -> Row:
    mps, why = host.mps, no_mps(host)
    if not why:
        clients = sorted({pid for gpu in host.gpus for pid in gpu.mps_processes})
        seen = "" if mps.daemon else ", which is in another container or gone"
        found = f"daemon of user {mps.owner_uid} at {mps.directory}{seen}, {len(clients)} clients"
        means = "engines compute side by side, each on its SMs; a fatal fault of one ends all on its GPU"
        return Row(check="MPS", outcome=OK, found=found, means=means)
    if mps.owner_uid is not None:
        means = "stale, or another user's: CUDA programs may hang at their start"
        cure = (
            f"`echo quit | nvidia-cuda-mps-control` as its user, or remove {mps.directory}; name the folder "
            "in CUDA_MPS_PIPE_DIRECTORY if its daemon is in another container"
        )
        return Row(check="MPS", outcome=WARNING, found=why, means=means, cure=cure)
    means = "engines on one GPU take turns on all of its SMs, whatever shares they are given"
    cure = (
        f"`nvidia-cuda-mps-control -d` as user {host.uid}, with this folder, before engines start; "
        "where containers are composed, --profile mps"
    )
    return Row(check="MPS", outcome=WARNING, found=f"off: {why}", means=means, cure=cure)


def _green(host: HostFacts) -> Row:
    check, why, engine = "green contexts", no_green_contexts(host), host.engine
    if not why:
        found = f"CUDA {cuda_of(host)}, torch {engine.torch}, cuda-bindings {engine.cuda_bindings}"
        return Row(
            check=check,
            outcome=OK,
            found=found,
            means="under MPS an engine's SM share can change at every step",
        )
    means = "SM shares are fixed at an engine's start by MPS, or there are none"
    cure = "a driver of 550 or later; in the engine's environment torch for CUDA, which brings cuda-bindings"
    return Row(check=check, outcome=WARNING, found=why, means=means, cure=cure)


def _shares(host: HostFacts, sm_partition: str, mps_share_pct: int) -> Row:
    """Which way vLLM engines would share the SMs, and why no better one."""
    check = "SM shares"
    try:
        used = partition_for(sm_partition, mps_share_pct, device_for(host.gpu_type), sm_facts(host))
    except ConfigError as error:
        means = "no local scheduler of vLLM engines starts"
        cure = "what it says, or leave FESTINA_DEVICE_SM_PARTITION at auto"
        return Row(check=check, outcome=FAILED, found=str(error), means=means, cure=cure)
    found = f"{used.means}: {used.why}"
    if used.means in ("green", sm_partition):
        return Row(check=check, outcome=OK, found=found)
    means = "the scheduler reckons with the shares that there are; it sets none by load"
    return Row(check=check, outcome=WARNING, found=found, means=means, cure="see the two rows above")


def _engine(host: HostFacts) -> Row:
    check, engine, gpu = "vLLM", host.engine, bool(host.gpus)
    tested = f"{', '.join(engine.tested)}"
    make = f"install vLLM {tested} there for CUDA, or name another by FESTINA_DEVICE_VLLM_PYTHON"
    cure = make if gpu else "`make setup-vllm`"
    if engine.trouble or not engine.vllm:
        found = engine.trouble or f"{engine.python} has no vLLM"
        means = "only emulated engines can run here"
        outcome = WARNING if gpu else NOT_APPLICABLE
        return Row(check=check, outcome=outcome, found=found, means=means, cure=cure)
    build = f"CUDA {engine.torch_cuda}" if engine.torch_cuda else "CPU"
    found = f"{engine.vllm}, torch {engine.torch} ({build})"
    if engine.vllm not in engine.tested:
        means = f"the engine refuses to start: it was tested with {tested} only"
        return Row(check=check, outcome=FAILED, found=found, means=means, cure=cure)
    if gpu and not engine.torch_cuda:
        means = "engines compute on the CPU, and the GPUs stay idle"
        return Row(check=check, outcome=WARNING, found=found, means=means, cure=make)
    return Row(check=check, outcome=OK, found=found, means="a version that Festina was tested with")


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Say once what holds for several GPUs; a cure that names one GPU keeps its row apart."""
    found: dict[Row, tuple[int, ...]] = {}
    for row in rows:
        bare = msgspec.structs.replace(row, gpus=())
        found[bare] = (*found.get(bare, ()), *row.gpus)
    return [msgspec.structs.replace(bare, gpus=gpus) for bare, gpus in found.items()]
