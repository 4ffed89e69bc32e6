"""The stub NVML behaves as the driver does, for `pynvml` in this process and in others."""

import subprocess
import sys
import time

import pynvml
import pytest
from nvml import HOST, StubNvml


@pytest.fixture
def gpu(nvml: StubNvml) -> object:
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(1)
    pynvml.nvmlShutdown()


def test_a_lock_takes_effect_after_a_while_and_the_cap_holds_it_lower(nvml: StubNvml, gpu: object) -> None:
    def clock() -> int:
        return pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)

    assert pynvml.nvmlDeviceGetSupportedGraphicsClocks(gpu, 2619) == list(range(1980, 344, -15))
    nvml.set(1, settle_ms=50)
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 1755, 1755)
    assert clock() == 1980
    time.sleep(0.06)
    assert clock() == 1755 and nvml.locked_mhz(1) == (1755, 1755) and nvml.locked_mhz(0) is None
    # under a cap of 500 W: 110 + 580 * (f / 1980)^2 <= 500, so f <= 1623
    nvml.set(1, load=1, cap_w=500)
    assert clock() == 1620
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) == pynvml.nvmlClocksEventReasonSwPowerCap
    nvml.set(1, thermal_mhz=1005)
    assert clock() == 1005
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) == pynvml.nvmlClocksEventReasonSwThermalSlowdown
    assert [(call.gpu, call.what, call.result) for call in nvml.calls] == [(1, "lock 1755-1755", 0)]


def test_energy_follows_power(nvml: StubNvml, gpu: object) -> None:
    nvml.set(1, load=0.5, counter_ms=0)  # 110 + 0.5 * 580 W at the highest clock
    assert pynvml.nvmlDeviceGetPowerUsage(gpu) == 400_000
    started, before_mj = time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    time.sleep(0.1)
    passed_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before_mj
    assert passed_mj == pytest.approx(400_000 * (time.monotonic() - started), rel=0.02)


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("not_permitted", lambda gpu: pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 1005, 1005)),
        ("lost", pynvml.nvmlDeviceGetPowerUsage),
        ("no_counter", pynvml.nvmlDeviceGetTotalEnergyConsumption),
    ],
)
def test_faults_are_nvml_errors(nvml: StubNvml, gpu: object, fault: str, call: object) -> None:
    nvml.set(1, **{fault: 1})
    with pytest.raises(pynvml.NVMLError, match=r"Insufficient Permissions|GPU is lost|Not Supported"):
        call(gpu)


def test_other_processes_see_the_same_gpus(nvml: StubNvml, gpu: object) -> None:
    code = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(3);"
        "n.nvmlDeviceSetGpuLockedClocks(h, 795, 795); print(n.nvmlDeviceGetUUID(h))"
    )
    argv, options = [sys.executable, "-c", code], {"env": nvml.env, "capture_output": True, "text": True}
    done = subprocess.run(argv, **options, check=True)
    assert done.stdout.split() == ["GPU-00000000-0000-0000-0000-000000000003"]
    assert nvml.locked_mhz(3) == (795, 795)
    nvml.set(HOST, no_driver=1)
    done = subprocess.run(argv, **options, check=False)
    assert "Driver Not Loaded" in done.stderr
