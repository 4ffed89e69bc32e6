"""The local scheduler's shell: one per GPU, beside the engines it drives."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from services.local_sched.clock_setters import clocks_for
from services.local_sched.core import LocalSchedCore
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.engine_emulated import EmulatedEngines
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.gpu_nvml import Engines, NvmlEngines
from services.local_sched.host_facts import HostFacts
from services.local_sched.host_probe import probe
from services.local_sched.made_up import VocabSlice
from services.local_sched.nvml import NvmlGpu
from services.local_sched.partition import Partition, partition_for, sm_facts
from services.local_sched.presets import patience, preset
from services.local_sched.settings import LocalSettings
from services.local_sched.state import EMULATED, State
from services.local_sched.work import Stage
from shared import engine as en
from shared import standin
from shared.clock import now_ms
from shared.config import Common, load
from shared.devices import Device, device_for
from shared.errors import ConfigError
from shared.events import Event, Leaving
from shared.metrics import Metrics
from shared.process import run_service
from shared.runtime import Shell, wait_for_stop
from shared.stage import StageSettings
from shared.subjects import LOCAL

log = logging.getLogger(__name__)

SAMPLE_PERIOD_S = 0.25
HANDED_BACK_WITHIN_S = 1.0


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The device and kind of engine that this local scheduler owns (section ``device``).

    Args:
        host: name of the GPU host, the id of its migrator.
        engine: ``emulated`` or ``vllm``.
        gpu_type: row of the device table.
        default_clock_mhz: clock of the device while nobody governs it; 0: as the device has it.
        elastic_kv: emulated engines share the free memory for KV, as in the paper; off: a fixed pool each.
        speedup: emulated device time passes this much faster; 1 but for benchmarks of the services.
        vllm_python: interpreter of the environment that vLLM is installed in.
        run_dir: where the sockets and logs of the vLLM processes are.
        clocks: ``nvml``: clock and meter are those of an NVIDIA GPU; ``none``: those that the engine has.
        gpu: that GPU, by UUID (``GPU-…``) or number.
        clock_guard: socket of the clock guard; empty: the GPU is measured, and keeps its clock.
        memory_clock_mhz: memory clock to hold, one that the GPU offers; 0 leaves it to the driver.
        sm_partition: how vLLM engines share the SMs of a GPU (`partition.py`); ``auto``: the best way here.
        mps_share_pct: the SM share of each engine for its life, where MPS gives it.
        sleep_bytes: host memory that vLLM engines may take that are unloaded and asleep; 0: they end. By
            default 64 GiB beside a GPU, and 8 GiB where engines run on the CPU.
    """

    host: str = "emulated-0"
    engine: str = "emulated"
    gpu_type: str = "h100-80gb"
    default_clock_mhz: int = 0
    elastic_kv: bool = True
    speedup: float = 1.0
    vllm_python: str = ".venv-vllm/bin/python"
    run_dir: str = ".festina/run"
    clocks: Literal["none", "nvml"] = "none"
    gpu: str = "0"
    clock_guard: str = ""
    memory_clock_mhz: int = 0
    sm_partition: Literal["auto", "green", "mps", "none"] = "auto"
    mps_share_pct: int = 100
    sleep_bytes: int | None = None

    @property
    def device(self) -> Device:
        """What the GPU is. Raises ConfigError for an unknown type, or a clock that it does not offer."""
        device = device_for(self.gpu_type)
        return device.at_default_clock(self.default_clock_mhz) if self.default_clock_mhz else device


def sleep_bytes_of(where: DeviceSettings) -> int:
    """Return the host memory that this GPU's engines may take while they sleep; emulated ones do not."""
    if where.engine != "vllm" or where.sleep_bytes is not None:
        return where.sleep_bytes or 0
    return (64 if where.device.sm_count else 8) << 30


def shares_here(
    where: DeviceSettings, settings: LocalSettings
) -> tuple[Device, Partition | None, LocalSettings]:
    """Return the GPU with the SM shares that engines can be given here, how that is done, and what follows.

    Emulated engines have them all, by themselves.

    Raises:
        ConfigError: it cannot be done as the configuration says.
    """
    device = where.device
    if where.engine != "vllm":
        return device, None, settings
    host = probe(vllm_python=where.vllm_python, watch_s=0.0) if device.sm_count else HostFacts()
    partition = partition_for(where.sm_partition, where.mps_share_pct, device, sm_facts(host))
    log.info("SM shares of engines", extra={"means": partition.means, "why": partition.why})
    shared_fate = settings.shared_fate or partition.shared_fate
    return partition.device, partition, replace(settings, shared_fate=shared_fate)


def engines_for(
    where: DeviceSettings,
    device: Device,
    report: Callable[[Event], None],
    stages: Path | None,
    partition: Partition | None = None,
) -> Engines:
    """Return the engines that the configuration names.

    Args:
        where: names them.
        device: the GPU.
        partition: how they share its SMs; None: emulated ones, which do so by themselves.
        report: is told what they report.
        stages: folder of the host's stages, for KV that is moved; None: there is none.

    Raises:
        ConfigError: there is no such kind of engine, or no such GPU.
    """
    if where.engine not in ("emulated", "vllm"):
        raise ConfigError(f"FESTINA_DEVICE_ENGINE={where.engine} is not known; it is `emulated` or `vllm`")
    make_engines = partial(_engines, where, device, stages, partition)
    if where.clocks == "none":
        return make_engines(report)
    gpu = NvmlGpu(where.gpu)
    return NvmlEngines(
        make_engines,
        gpu=gpu,
        clocks=clocks_for(gpu, where.clock_guard),
        memory_clock_mhz=where.memory_clock_mhz,
        cap_w=device.power_cap_w,
        now_ms=now_ms,
        report=report,
    )


def _engines(
    where: DeviceSettings,
    device: Device,
    stages: Path | None,
    partition: Partition | None,
    report: Callable[[Event], None],
) -> Engines:
    """Make the engines alone, with what they have for clock and meter."""
    if where.engine == "vllm":
        run_dir = Path(where.run_dir)
        return VllmEngines(
            python=where.vllm_python,
            run_dir=run_dir,
            report=report,
            stages=stages,
            partition=partition,
            sleep_bytes=sleep_bytes_of(where),
        )
    token_ids, eos_id = standin.vocab_slice()
    vocab = VocabSlice(token_ids=token_ids, eos_id=eos_id)
    gpu = EmulatedGpu(device, elastic_kv=where.elastic_kv, vocab=vocab)
    return EmulatedEngines(gpu=gpu, now_ms=now_ms, report=report, speedup=where.speedup)


async def serve(
    common: Common,
    where: DeviceSettings,
    settings: LocalSettings,
    stop: asyncio.Event,
    stages: Path | None = None,
) -> bool:
    """Run until told to stop; returns whether all went well. `stages` is the folder of the host's stages."""
    device, partition, settings = shares_here(where, settings)
    if settings.off_after_ms and where.engine != EMULATED:
        raise ConfigError(
            "FESTINA_LOCAL_SCHED_OFF_AFTER_MS must be 0: nothing here can cut the power of a real GPU"
        )
    shell = Shell(LOCAL, common.id, common)
    engines = engines_for(where, device, shell.heard, stages, partition)
    core = LocalSchedCore(
        *(shell.ident, where.host, where.engine, device, settings, now_ms()),
        elastic_kv=where.elastic_kv,
        sleeps=sleep_bytes_of(where) > 0,
    )
    await shell.open()
    sampler = None
    try:
        await engines.start()
        await shell.start(core, dict.fromkeys(en.Order.__subclasses__(), engines.perform))
        sampler = asyncio.create_task(_sample(shell, core, engines))
        well = await wait_for_stop(shell, stop)
        if well:
            await _leave(shell, core, common.drain_s)
        return well
    finally:
        if sampler is not None:
            sampler.cancel()
        await engines.close()
        await shell.close()


async def _leave(shell: Shell, core: LocalSchedCore, drain_s: float) -> None:
    """Let what runs end within `drain_s`, and hand back to the gateways what has not."""
    for event, within_s in ((Leaving(), drain_s), (Leaving(at_once=True), HANDED_BACK_WITHIN_S)):
        if event.at_once and core.idle:
            return
        shell.feed(event)
        deadline = asyncio.get_running_loop().time() + within_s
        while not core.idle and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)


async def _sample(shell: Shell, core: LocalSchedCore, engines: Engines) -> None:
    """Read the device regularly: for the summary, and for the metrics."""
    while True:
        reading = engines.sample()
        shell.heard(reading)
        _show_load(shell.metrics, core.state)
        shell.metrics.show_each("engine_requests", "model", engines.requests())
        shell.metrics.show("used_bytes", {}, reading.used_bytes)
        if reading.power_w is not None and reading.energy_j is not None:
            shell.metrics.show("power_w", {}, reading.power_w)
            shell.metrics.show("energy_j", {}, reading.energy_j)
        shell.metrics.show_each("meter", "source", {reading.energy_source: 1.0})
        shell.metrics.show_each("meter_faults", "kind", reading.meter_faults)
        book = core.state.energy
        if (uses_j := book.uses_j) is not None and book.residual_j is not None:
            shell.metrics.show_each("use_energy_j", "use", uses_j)
            shell.metrics.show("residual_energy_j", {}, book.residual_j)
        await asyncio.sleep(SAMPLE_PERIOD_S)


def _show_load(metrics: Metrics, state: State) -> None:
    """Show clock and state, and by model whether it is resident, how many requests run and wait, their KV.

    Without requests, what is promised and what is unacknowledged is 0 as well.
    """
    metrics.show("sm_clock_mhz", {}, state.clock_mhz)
    metrics.show_each("device_state", "state", {state.device_state: 1.0})
    waiting = Counter(work.request.model for work in state.works.values() if work.stage is not Stage.RUNNING)
    ready = {name: float(engine.state == "ready") for name, engine in state.engines.items()}
    metrics.show_each("resident", "model", ready)
    metrics.show_each("running_requests", "model", {n: len(e.running) for n, e in state.engines.items()})
    metrics.show_each("waiting_requests", "model", {name: waiting[name] for name in state.engines})
    promised = {name: pool.held_bytes for name, pool in state.ledger.pools.items()}
    metrics.show_each("promised_kv_bytes", "model", promised)
    metrics.show("unacknowledged_attempts", {}, state.outbox.unacknowledged)
    metrics.show("open_moves", {}, state.moves.open)
    metrics.show("offloaded_bytes", {}, state.offload.taken_bytes)
    metrics.show("offload_fragmentation", {}, state.offload.fragmentation)


def main() -> None:
    """Entry point; the id (FESTINA_ID) is the GPU's name."""
    common, where = load(Common), load(DeviceSettings, "device")
    defaults = preset(common.system) | patience(where.engine, where.gpu_type)
    settings = load(LocalSettings, LOCAL, preset=defaults)
    stages = load(StageSettings, "stages").folder(where.host)
    run_service(common, lambda stop: serve(common, where, settings, stop, stages))


if __name__ == "__main__":
    main()
