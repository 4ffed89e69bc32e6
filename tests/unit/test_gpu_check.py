"""The steps of `make gpu-check` one by one, on the stub NVML, with a stand-in for kernels on CUDA."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from guard_process import Guard
from kernels_stand_in import MS, interpreter
from nvml import UUIDS, StubNvml

from services.cli.gpu_check import run as running
from services.cli.gpu_check.clocks import clocks
from services.cli.gpu_check.copies import copies
from services.cli.gpu_check.engines import engines
from services.cli.gpu_check.idle import idle
from services.cli.gpu_check.isolation import isolation, slowed
from services.cli.gpu_check.kernels import Ran, Skipped
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.meter import differs_pct, meter
from services.cli.gpu_check.run import DONE, FAILED, SKIPPED, STEPS, Step, run
from services.cli.gpu_check.shares import on_part, shares
from services.cli.gpu_check.summary import summary
from services.cli.gpu_check.watched import Watched, summed
from services.local_sched.host_probe import probe
from services.local_sched.nvml import NvmlGpu, Reading
from shared.devices import device_for
from shared.errors import FestinaError

T = TypeVar("T")
PACE = 0.03
H100 = device_for("h100-80gb")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def lab_with(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Lab]:
    monkeypatch.setenv("LD_LIBRARY_PATH", nvml.env["LD_LIBRARY_PATH"])
    gpu = NvmlGpu("0")

    def make(python: str) -> Lab:
        return Lab(gpu=gpu, device=H100, host=probe(vllm_python=python, watch_s=0.05), pace=PACE)

    yield make
    gpu.close()


@pytest.fixture
def lab(lab_with: Callable[[str], Lab], tmp_path: Path) -> Lab:
    """With a CUDA environment, as the stand-in has it."""
    return changed(lab_with(interpreter(tmp_path)), state_dir=tmp_path)


@pytest.fixture
def bare(lab_with: Callable[[str], Lab]) -> Lab:
    """With our own environment, which has no torch."""
    return lab_with(sys.executable)


# ---- arithmetic


def test_what_is_watched_is_summed_by_counter_and_by_power() -> None:
    """100 W, then 300 W, over 0.5 s each; the counter tells 10 % more than the 150 J that this comes to."""
    seen = [
        (10.0, Reading(1980, (), False, 100.0, 500.0)),
        (10.5, Reading(1980, (), False, 100.0, 555.0)),
        (10.5 + 1e-9, Reading(1980, ("heat",), False, 300.0, 555.0)),
        (11.0, Reading(1400, ("heat",), False, 300.0, 720.0)),
    ]
    found = summed(seen, cap_w=700.0)
    assert found.for_s == pytest.approx(1.0) and found.readings == 4 and found.limits == ("heat",)
    assert found.counter_j == pytest.approx(220.0) and found.integrated_j == pytest.approx(200.0)
    assert differs_pct(found) == pytest.approx(10.0) and found.real_mhz == pytest.approx(1835.0)
    assert (found.source, found.power_w) == ("counter", pytest.approx(220.0))
    no_power = summed([(at_s, reading._replace(power_w=None)) for at_s, reading in seen], 700.0)
    assert no_power.integrated_j is None and differs_pct(no_power) is None
    no_counter = summed([(at_s, reading._replace(counter_j=None)) for at_s, reading in seen], 700.0)
    assert no_counter.counter_j is None and no_counter.source == "integrated"
    assert no_counter.power_w == pytest.approx(200.0)


def test_a_kernel_on_a_part_is_held_against_the_whole_and_the_model(bare: Lab) -> None:
    whole, part = Ran(100, 0.1, 10**9, 10**12), Ran(50, 0.1, 10**9, 10**12)
    watched = Watched(1.0, 10, 300.0, 300.0, 300.0, "counter", {}, 1980.0)
    row = on_part(bare, "decode", 66, 132, part, watched, whole)
    assert (row.ms, row.gb_per_s, row.tflop_per_s, row.speed) == (2.0, 500.0, 500.0, 0.5)
    assert row.modelled == pytest.approx(0.886, abs=0.001)  # (1 - e^-2.05) / (1 - e^-4.1)
    row = on_part(bare, "prefill", 66, 132, part, watched, whole)
    assert row.modelled == pytest.approx(0.5**H100.compute_share_exponent)


# ---- without CUDA


@pytest.mark.parametrize("step", [shares, isolation, copies])
def test_a_step_that_needs_cuda_says_that_it_is_not_there(bare: Lab, step: Callable[[Lab], object]) -> None:
    with pytest.raises(Skipped, match="not a CUDA device: there is no torch"):
        step(bare)
    with pytest.raises(Skipped, match="not a CUDA device"):
        step(bare)  # and does not try again
    assert bare.no_device


def test_without_cuda_the_meter_and_the_card_at_rest_are_measured_all_the_same(bare: Lab) -> None:
    found = meter(bare)
    assert found.windows.keys() == {"as found"} and "not a CUDA device" in found.not_run
    at_rest = idle(bare)
    assert at_rest.cold.power_w == pytest.approx(110.0, rel=0.05) and at_rest.warm is None
    assert "not a CUDA device" in at_rest.not_run


def test_engines_and_clocks_say_why_they_are_left_out(bare: Lab, lab: Lab) -> None:
    with pytest.raises(Skipped, match="vLLM is not installed"):
        engines(bare)
    with pytest.raises(Skipped, match="No SmolLM2"):
        engines(changed(lab, state_dir=Path("/nowhere")))
    with pytest.raises(Skipped, match="ALLOW_CLOCKS=1"):
        clocks(lab)


def undisturbed(measure: Callable[[], T], well: Callable[[T], bool]) -> T:
    """Measure until the cores were ours for as long as that takes, seen by the outcome; returns the last."""
    for _ in range(20):
        if well(found := measure()):
            break
    return found


def changed(lab: Lab, **values: object) -> Lab:
    for name, value in values.items():
        setattr(lab, name, value)
    return lab


def test_a_cpu_build_of_torch_is_no_cuda_device(lab_with: Callable[[str], Lab], tmp_path: Path) -> None:
    with pytest.raises(Skipped, match=r"not a CUDA device: torch 2\.13\.0"):
        engines(lab_with(interpreter(tmp_path, torch_cuda="")))
    with pytest.raises(Skipped, match="without cuda-bindings"):
        shares(lab_with(interpreter(tmp_path, cuda_bindings="")))


# ---- with kernels


def test_the_meter_is_held_against_power_at_rest_and_at_work(nvml: StubNvml, lab: Lab) -> None:
    nvml.set(0, counter_ms=5.0)
    works_w = pytest.approx(690.0, rel=0.2)
    found = undisturbed(
        lambda: meter(lab), lambda it: bool(it.counter_every_ms) and it.windows["prefill"].power_w == works_w
    )
    assert found.windows.keys() == {"as found", "prefill", "decode"} and not found.not_run
    assert found.counter_every_ms is not None and found.counter_every_ms > 4.9
    assert found.windows["prefill"].power_w == works_w
    assert found.windows["as found"].power_w == pytest.approx(110.0, rel=0.2)
    nvml.set(0, power_scale=0.7, counter_ms=0.0)  # as zeus's users saw it
    assert differs_pct(lab.watch(10.0)) == pytest.approx(100 * (1 / 0.7 - 1), abs=5.0)
    nvml.set(0, no_counter=1)
    assert meter(lab).windows["as found"].source == "integrated"


def test_the_card_at_rest_without_a_context_and_with_one(nvml: StubNvml, lab: Lab) -> None:
    found = idle(lab)
    assert found.context_ms == 12.0 and found.start_ms > 12.0 and found.after is not None
    nvml.set(0, compute_pid=os.getpid())
    with pytest.raises(Skipped, match="1 processes use this GPU"):
        idle(lab)


def test_shares_are_measured_on_every_part(nvml: StubNvml, lab: Lab) -> None:
    nvml.set(0, counter_ms=0.0)
    found = shares(lab)
    assert (found.sms, found.group_sms, found.groups) == (132, 8, 16)
    assert [row.sms for row in found.rows] == 2 * [16, 32, 64, 96, 132]
    half = found.rows[2]
    assert half.kernel == "decode" and half.speed == pytest.approx((64 / 132) ** 0.5)
    assert half.power_w == pytest.approx(110 + 580 * 64 / 132, rel=0.1) and half.source == "counter"
    assert found.rows[7].speed == pytest.approx(64 / 132)
    assert nvml.calls == []


def test_two_processes_are_measured_alone_and_beside_each_other(lab: Lab) -> None:
    found = isolation(changed(lab, pace=0.1))
    assert found.sms_each == 64 and "no control pipe" in found.turns
    assert found.on_all.decode_alone_ms == pytest.approx(MS["decode"])
    for decode, prefill in (slowed(found.on_parts), slowed(found.on_all)):
        assert decode == pytest.approx(2.0) and prefill == pytest.approx(2.0)


def test_copies_go_there_and_back(lab: Lab) -> None:
    found = copies(lab)
    assert {(each.to, round(each.gb_per_s)) for each in found.copies} == {("host", 50), ("device", 25)}
    assert found.modelled_gb_per_s == H100.host_bytes_per_ms / 1e6


def test_clocks_are_set_read_back_and_given_back(nvml: StubNvml, lab: Lab, guard: Guard) -> None:
    """By itself, and by the guard; the second clock and above are held down by heat."""
    nvml.set(0, settle_ms=10.0, thermal_mhz=750.0)
    for socket in ("", str(guard.socket)):
        found = clocks(changed(lab, allow_clocks=True, clock_guard=socket, pace=0.05))
        assert len(found.rows) == 12 and found.rows[0].asked_mhz == 345
        assert found.rows[0].settle_ms >= 5.0 and found.rows[0].real_mhz == pytest.approx(345.0)
        assert found.rows[-1].asked_mhz == 1980 and found.rows[-1].settle_ms is None
        assert found.rows[-1].real_mhz == pytest.approx(750.0) and found.rows[-1].limits == ("heat",)
    guard.stop()
    assert nvml.locked_mhz(0) is None and {call.gpu for call in nvml.calls if "lock " in call.what} == {0}


def test_clocks_that_may_not_be_set_are_left_out(nvml: StubNvml, lab: Lab) -> None:
    nvml.set(0, not_permitted=1)
    with pytest.raises(Skipped, match="CAP_SYS_ADMIN"):
        clocks(changed(lab, allow_clocks=True))


# ---- all of it


def test_all_steps_run_and_are_told_whatever_becomes_of_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(lab: Lab) -> None:
        raise FestinaError("it broke")

    def unforeseen(lab: Lab) -> None:
        raise KeyError("what")

    monkeypatch.setitem(STEPS, "copies", Step(broken, 1.0))
    monkeypatch.setitem(STEPS, "isolation", Step(unforeseen, 1.0))
    monkeypatch.setattr(lab, "pace", 0.01)
    told: list[str] = []
    kept: list[int] = []
    report = run(lab, told.append, lambda so_far: kept.append(len(so_far.steps)))
    assert kept == list(range(1, 9))
    outcomes = {name: step.outcome for name, step in report.steps.items()}
    assert outcomes == dict.fromkeys(STEPS, DONE) | {
        "copies": FAILED,
        "isolation": FAILED,
        "engines": SKIPPED,
        "clocks": SKIPPED,
    }
    assert report.failed and "copies: failed it broke" in told
    lines = summary(report, H100)
    assert any("power none seen" in line for line in lines), lines  # the stub's is constant
    assert any("decode on 64" in line and "modelled 0.8" in line for line in lines), lines
    assert msgspec.json.decode(msgspec.json.encode(report))["steps"]["shares"]["found"]["sms"] == 132


def test_a_step_for_which_there_is_no_time_is_left_out(bare: Lab) -> None:
    report = run(bare, lambda line: None, lambda report: None, most_s=12.0 * PACE)
    assert report.steps["doctor"].outcome == DONE
    assert {step.why for name, step in report.steps.items() if name != "doctor"} == {
        "there is no time left for it"
    }
    assert not report.failed


def test_the_steps_fit_into_the_time() -> None:
    assert sum(step.most_s for step in STEPS.values()) <= 8 * 60 and running.MOST_S < 8 * 60


def command(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "services.cli.gpu_check", *arguments]
    return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_writes_its_results_under_the_cards_name(nvml: StubNvml, tmp_path: Path) -> None:
    env = {
        **os.environ,
        **nvml.env,
        "FESTINA_DEVICE_VLLM_PYTHON": sys.executable,
        "FESTINA_DEVICE_GPU": UUIDS[1],
    }
    done = command(env, "--pace", "0.01", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode((tmp_path / "gpu-check-nvidia-h100-80gb-hbm3.json").read_bytes())
    assert report["card"] == "NVIDIA H100 80GB HBM3" and report["steps"]["copies"]["outcome"] == SKIPPED
    assert nvml.calls == [] and "not a CUDA device" in done.stdout
    nvml.set(1, compute_mode=2)
    assert command(env, "--pace", "0.01", "--out", str(tmp_path)).returncode == 1
    (tmp_path / "file").touch()
    done = command(env, "--pace", "0.01", "--out", str(tmp_path / "file"))
    assert done.returncode == 1 and "cannot write" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("FESTINA_NVML_STUB", "LD_LIBRARY_PATH")}
    done = command(env)
    assert done.returncode == 1 and done.stderr.startswith("gpu-check needs an NVIDIA GPU: no NVIDIA driver")
    assert "Traceback" not in done.stderr
