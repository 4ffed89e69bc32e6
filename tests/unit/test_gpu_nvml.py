"""Engines on a GPU that NVML drives, on the stub NVML through the real `pynvml`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from nvml import HOST, UUIDS, StubNvml
from support import eventually

from services.local_sched import gpu_nvml
from services.local_sched.clock_setters import FixedClocks, OwnClocks, clocks_for
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.engine_emulated import EmulatedEngines
from services.local_sched.gpu_nvml import NvmlEngines
from services.local_sched.made_up import VocabSlice
from services.local_sched.nvml import NvmlGpu, Reading
from shared import engine as en
from shared.catalog import emulated_models
from shared.clock import now_ms
from shared.devices import device_for
from shared.errors import ActuatorRefused, ConfigError, Unavailable

H100 = device_for("h100-80gb")
MODEL = emulated_models(1)[0]


@pytest.fixture
def gpu(nvml: StubNvml):
    found = NvmlGpu("2")
    yield found
    found.close()


def test_a_gpu_speaks_watts_joules_and_megahertz(nvml: StubNvml, gpu: NvmlGpu) -> None:
    assert (gpu.name, gpu.uuid, gpu.driver) == ("NVIDIA H100 80GB HBM3", UUIDS[2], "580.95.05")
    assert gpu.clocks_mhz == H100.clocks_mhz and gpu.memory_clocks_mhz == (1593, 2619)
    nvml.set(2, load=1.0, cap_w=500.0, energy_mj=123_456_000.0)
    read = gpu.read()
    # 110 + 580 * (1620 / 1980)^2 W is the most below the cap
    assert read[:4] == (1620, ("power cap",), False, pytest.approx(110 + 580 * (1620 / 1980) ** 2, abs=0.01))
    assert read.counter_j == pytest.approx(123_456.0, abs=50.0)
    other = NvmlGpu(UUIDS[3])
    assert other.read()[:4] == Reading(1980, (), True, 110.0, None)[:4]
    other.close()


def test_a_lock_goes_to_one_gpu_alone(nvml: StubNvml, gpu: NvmlGpu) -> None:
    gpu.lock(1005, 1593)
    assert nvml.locked_mhz(2) == (1005, 1005) and nvml.get(2, "memory_locked_mhz") == 1593
    gpu.lock()
    assert nvml.locked_mhz(2) is None and nvml.get(2, "memory_locked_mhz") == 0
    assert {call.gpu for call in nvml.calls} == {2}


def test_what_a_device_refuses_is_named(nvml: StubNvml, gpu: NvmlGpu) -> None:
    with pytest.raises(ActuatorRefused, match=r"does not take a clock of 99999 MHz: Invalid Argument"):
        gpu.lock(99_999)
    nvml.set(2, not_permitted=1)
    with pytest.raises(ActuatorRefused, match=r"Insufficient Permissions; .*CAP_SYS_ADMIN"):
        gpu.lock(1005)
    nvml.set(2, not_permitted=0, memory_fixed=1)
    with pytest.raises(ActuatorRefused, match=r"a memory clock of 1593 MHz: Not Supported"):
        gpu.lock(1005, 1593)
    gpu.lock(1005)  # a memory clock that cannot be set needs no reset
    nvml.set(2, lost=1)
    with pytest.raises(Unavailable, match=r"does not tell its clock: GPU is lost"):
        gpu.read()


def test_no_driver_and_no_gpu_are_one_line(nvml: StubNvml) -> None:
    with pytest.raises(ConfigError, match="no GPU 7 on this machine: Invalid Argument"):
        NvmlGpu("7")
    nvml.set(HOST, no_driver=1)
    with pytest.raises(ConfigError, match="no NVIDIA driver on this machine"):
        NvmlGpu("0")


# ---- engines on it


class Driven:
    """Emulated engines on GPU 2 of the stub, and what they have reported."""

    def __init__(self, clocks: Callable[[NvmlGpu], object] = OwnClocks, memory_clock_mhz: int = 0) -> None:
        self.events: list[object] = []
        gpu = NvmlGpu("2")
        self.emulated = EmulatedGpu(H100, vocab=VocabSlice(token_ids=(1, 2), eos_id=0))
        self.engines = NvmlEngines(
            lambda report: EmulatedEngines(gpu=self.emulated, now_ms=now_ms, report=report),
            gpu=gpu,
            clocks=clocks(gpu),
            memory_clock_mhz=memory_clock_mhz,
            cap_w=H100.power_cap_w,
            now_ms=now_ms,
            report=self.events.append,
        )

    @property
    def told(self) -> list[tuple[int, str]]:
        found = [event for event in self.events if isinstance(event, en.ClockApplied)]
        return [(event.applied_mhz, event.limited) for event in found]

    def ask(self, clock_mhz: int) -> None:
        self.engines.perform(en.SetClock(sm_clock_mhz=clock_mhz))


@asynccontextmanager
async def driven(*arguments: object, **options: object) -> AsyncIterator[Driven]:
    made = Driven(*arguments, **options)
    await made.engines.start()
    yield made
    await made.engines.close()


async def test_the_clock_that_runs_is_told_and_is_the_engines(nvml: StubNvml) -> None:
    nvml.set(2, settle_ms=60, load=0.5)
    async with driven() as made:
        made.ask(1010)
        await eventually(lambda: made.told == [(1005, "")])
        await eventually(lambda: made.emulated.sm_clock_mhz == 1005)
        nvml.set(2, thermal_mhz=795)
        await eventually(lambda: made.told[-1] == (795, "capped"))
        nvml.set(2, thermal_mhz=0)
        await eventually(lambda: made.told[-1] == (1005, ""))
        assert nvml.locked_mhz(2) == (1005, 1005)
    assert nvml.locked_mhz(2) is None and {call.gpu for call in nvml.calls} == {2}


async def test_many_wishes_are_few_writes(nvml: StubNvml) -> None:
    async with driven() as made:
        for clock_mhz in range(345, 1645, 15):
            made.ask(clock_mhz)
            await asyncio.sleep(0.005)
        await eventually(lambda: nvml.locked_mhz(2) == (1635, 1635))
    locks = [call.at_s for call in nvml.calls if call.what.startswith("lock ")]
    gaps_s = [after - before for before, after in pairwise(locks)]
    assert len(locks) >= 2 and min(gaps_s) >= 0.099  # however long it all took


@pytest.mark.parametrize("clocks", [OwnClocks, lambda gpu: clocks_for(gpu, "")])
async def test_a_clock_that_is_refused_stays_and_is_told(nvml: StubNvml, clocks: object) -> None:
    async with driven(clocks) as made:
        nvml.set(2, not_permitted=1)
        made.ask(1005)
        await eventually(lambda: made.told == [(1980, "refused")])
        news = made.events[-1]
        assert "Insufficient Permissions" in news.reason or "no clock guard is configured" in news.reason


async def test_a_lost_gpu_keeps_its_clock_and_is_told(nvml: StubNvml) -> None:
    async with driven() as made:
        nvml.set(2, lost=1)
        made.ask(1005)
        await eventually(lambda: made.told == [(1980, "refused")])
        assert "GPU is lost" in made.events[-1].reason
        assert made.engines.sample().energy_source == "unknown"
        nvml.set(2, lost=0)
        await eventually(lambda: made.told[-1] == (1005, ""))


async def test_faults_of_the_meter_are_labelled(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_nvml, "IDLE_S", 0.02)
    async with driven(lambda gpu: FixedClocks("not now")) as made:

        def source() -> str:
            return made.engines.sample().energy_source

        await eventually(lambda: source() == "counter")
        assert made.engines.sample().power_w == 110.0
        nvml.set(2, no_counter=1)
        await eventually(lambda: source() == "integrated")
        nvml.set(2, no_power=1)
        await eventually(lambda: source() == "unknown")
        assert made.engines.sample().energy_j is None
        nvml.set(2, no_counter=0, no_power=0)
        await eventually(lambda: source() == "counter")
        nvml.set(2, counter_offset_mj=1e9)
        await eventually(lambda: made.engines.sample().meter_faults.get("jump") == 1)
        nvml.set(2, lost=1)
        await eventually(lambda: source() == "unknown")


async def test_an_idle_gpu_is_read_less_often(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read = NvmlGpu.read

    def counted(self: NvmlGpu) -> Reading:
        nonlocal reads
        reads += 1
        return read(self)

    monkeypatch.setattr(NvmlGpu, "read", counted)
    async with driven() as made:
        await asyncio.sleep(0.5)
        assert reads == 1
        made.engines.perform(en.LoadEngine(model=MODEL))
        await asyncio.sleep(0.05)
        assert made.engines.sample().state == "active"
        await asyncio.sleep(0.45)
        assert 4 <= reads <= 7


def test_clocks_that_cannot_be_are_refused_at_the_start(nvml: StubNvml) -> None:
    with pytest.raises(ConfigError, match=r"no memory clock of 2000 MHz, only \(1593, 2619\)"):
        Driven(memory_clock_mhz=2_000)
    nvml.set(2, no_clocks=1)
    with pytest.raises(ConfigError, match="offers no clocks"):
        Driven(lambda gpu: FixedClocks(""))
