"""Where profiles come from besides an engine: NVML (a stand-in for it), kernel tables, plain kernels."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.local_sched import profile_aic, profile_kernels
from services.local_sched.profile_grid import DECODE, PREFILL, Point, grid_for
from services.local_sched.profile_nvml import NvmlDevice
from services.local_sched.profile_stats import beyond_memory, samples_of
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.errors import ActuatorRefused, ConfigError
from shared.lut import build, from_samples
from shared.lut_table import Provenance
from shared.silicon import step_work

H100 = device_for("h100-80gb")
QWEN = emulated_models(1)[0]


class FakeNvml:
    """The part of pynvml that is used, with a device that draws 400 W."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, counter: bool = True, may_lock: bool = True) -> None:
        self.counter, self.may_lock = counter, may_lock
        self.locked: tuple[int, int] | None = (1005, 1005)  # an orphan of an earlier run
        self.closed = False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise self.NVMLError("Invalid Argument")
        return "gpu"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: str) -> list[int]:
        return [2619, 1593]

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: str, memory: int) -> list[int]:
        return [1980, 1635, 1005, 795] if memory == 2619 else [345]

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, low: int, high: int) -> None:
        if low == 13:
            raise self.NVMLError("Invalid Argument")
        self.locked = (low, high)

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:
        if not self.may_lock:
            raise self.NVMLError("Insufficient Permissions")
        self.locked = None

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self.locked[0] if self.locked else 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.counter:
            raise self.NVMLError("Not Supported")
        return 123_456

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 400_000


def test_nvml_speaks_watts_and_joules_and_lets_the_clock_go() -> None:
    nvml = FakeNvml()
    device = NvmlDevice(0, nvml)
    assert nvml.locked is None  # what an earlier run left
    assert (device.name, device.driver, device.fixed_clock) == ("NVIDIA H100 80GB HBM3", "570.1", "")
    assert device.clocks_mhz == (795, 1005, 1635, 1980)
    assert (device.energy_source, device.energy_j()) == ("counter", 123.456)
    assert device.lock_clock(1005) == 1005
    with pytest.raises(ActuatorRefused, match="13 MHz"):
        device.lock_clock(13)
    device.close()
    assert nvml.locked is None and nvml.closed


def test_a_clock_that_may_not_be_set_stays_and_the_reason_is_told() -> None:
    nvml = FakeNvml(may_lock=False)
    device = NvmlDevice(0, nvml)
    assert "Insufficient Permissions" in device.fixed_clock
    assert device.lock_clock(1635) == 1005
    device.close()
    assert nvml.closed


def test_without_a_counter_power_is_integrated_and_labelled() -> None:
    device = NvmlDevice(0, FakeNvml(counter=False))
    assert device.energy_source == "integrated"
    before, started = device.energy_j(), time.perf_counter()
    time.sleep(0.2)
    after = device.energy_j()
    assert before is not None and after is not None
    assert after - before == pytest.approx(400 * (time.perf_counter() - started), rel=0.1)
    device.close()


def test_no_such_gpu_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no GPU cuda:3"):
        NvmlDevice(3, FakeNvml())


# ---- kernel tables


def test_composed_tables_scale_the_kernels_as_the_model_does() -> None:
    grid = grid_for(H100, QWEN, pool_bytes=40 * 10**9, max_batch=8)
    modelled = build(H100, QWEN)
    overhead_ms = float(step_work(H100, QWEN, decode_batch=1, decode_context_tokens=0).overhead_ms)

    def kernel_ms(point: Point) -> float:  # kernels twice as slow as the model's
        at = (1980, 100)
        if point.phase == PREFILL:
            return 2 * (modelled.ttft_ms(*at, point.tokens) - overhead_ms)
        if point.tokens == 8192:
            return math.nan  # past the table
        return 2 * (modelled.tbt_ms(*at, point.batch, point.tokens) - overhead_ms)

    found = {p: (ms, watts) for p, ms, watts in profile_aic.composed(H100, QWEN, grid, modelled, kernel_ms)}
    point = Point(PREFILL, 1024, 1, 795, 50)
    expected = 2 * (modelled.ttft_ms(795, 50, 1024) - overhead_ms) + overhead_ms
    assert found[point] == pytest.approx((expected, modelled.prefill_power_w(795, 50, 1024)))
    assert not [p for p in found if p.phase == DECODE and p.tokens == 8192]
    table = from_samples(
        H100, QWEN, samples_of(found | beyond_memory(grid, found)), Provenance(kind="modelled", device="d")
    )
    assert table.tbt_ms(1635, 100, 4, 1024) == pytest.approx(
        2 * (modelled.tbt_ms(1635, 100, 4, 1024) - overhead_ms) + overhead_ms, rel=0.03
    )


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(ConfigError, match=r"pip install 'festina\[aiconfigurator\]'"):
        profile_aic.kernel_times(H100, QWEN)


def test_real_kernel_tables_agree_with_the_device_model() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the optional extra aiconfigurator is not installed")
    kernel_ms, source = profile_aic.kernel_times(H100, QWEN)
    assert "h100_sxm" in source
    modelled = build(H100, QWEN)
    overhead_ms = float(step_work(H100, QWEN, decode_batch=1, decode_context_tokens=0).overhead_ms)
    # The package counts small kernels that the model counts as overhead, so short steps are longer in it.
    for tokens in (256, 1024, 8192):
        expected = modelled.ttft_ms(1980, 100, tokens) - overhead_ms
        assert 0.8 < kernel_ms(Point(PREFILL, tokens, 1, 1980, 100)) / expected < 1.5
    for batch in (1, 32, 128):
        expected = modelled.tbt_ms(1980, 100, batch, 1024) - overhead_ms
        assert 0.8 < kernel_ms(Point(DECODE, 1024, batch, 1980, 100)) / expected < 1.5


# ---- plain kernels


def test_the_kernel_profile_says_what_it_lacks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        profile_kernels.__file__,
        "--shape",
        "Qwen2.5-7B",
        "--out",
        str(tmp_path / "k"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("no ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "k").exists()
