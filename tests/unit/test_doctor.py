"""`festina doctor`: rows from facts, facts from the stub NVML, and the status it ends with."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pynvml
import pytest
from guard_process import Guard
from nvml import HOST, UUIDS, StubNvml
from typer.testing import CliRunner

from services.cli.main import app
from services.local_sched import host_probe
from services.local_sched.clock_lease import Standing
from services.local_sched.host_facts import (
    EngineFacts,
    GpuFacts,
    GuardFacts,
    HostFacts,
    MpsFacts,
    no_green_contexts,
    no_mps,
)
from services.local_sched.partition import sm_facts
from services.local_sched.preflight import failed, judge
from services.local_sched.preflight_gpu import FAILED, NOT_APPLICABLE, OK, WARNING, Row

replace = msgspec.structs.replace

GPU = GpuFacts(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    uuid=UUIDS[0],
    memory_bytes=85_000_000_000,
    capability=90,
    persistence=True,
    mig=False,
    power_cap_w=700.0,
    power_cap_default_w=700.0,
    clocks_mhz=(345, 1005, 1980),
    memory_clocks_mhz=(2619,),
    power_w=110.0,
    counter="moves",
)
CUDA_ENV = EngineFacts(*("p", "", "0.32.0", "2.13.0", "13.0"), cuda_bindings="13.0.1", tested=("0.32.0",))
GUARD = GuardFacts(socket="/s", named=True, gpus=(Standing(gpu=UUIDS[0]),))
MPS_ON, MPS_OFF = MpsFacts(owner_uid=1000, daemon=True), MpsFacts()
MPS_ELSEWHERE = MpsFacts(directory="/mps", named=True, owner_uid=1000)
WELL = HostFacts(
    driver="580.95.05",
    nvml="13.580",
    cuda=1300,
    gpus=(GPU,),
    uid=1000,
    guard=GUARD,
    engine=CUDA_ENV,
    mps=MPS_ON,
    gpu_type="h100-80gb",
)


def row_of(rows: list[Row], check: str, gpu: int | None = None) -> Row:
    [row] = [row for row in rows if row.check == check and (gpu is None or gpu in row.gpus)]
    return row


def with_gpu(**values: object) -> HostFacts:
    return replace(WELL, gpus=(replace(GPU, **values),))


def test_on_a_host_that_is_well_nothing_is_to_be_done() -> None:
    rows = judge(WELL)
    assert {row.outcome for row in rows} == {OK} and not failed(rows)
    assert not any(row.cure for row in rows)
    assert no_green_contexts(WELL) == no_mps(WELL) == ""
    assert "no control pipe" in no_mps(replace(WELL, mps=MPS_OFF))


@pytest.mark.parametrize(
    ("host", "check", "outcome", "words"),
    [
        (
            replace(with_gpu(compute_mode="exclusive process"), mps=MPS_OFF),
            "compute mode",
            FAILED,
            "-c DEFAULT",
        ),
        (with_gpu(compute_mode="exclusive process"), "compute mode", OK, "MPS"),
        (with_gpu(compute_mode="prohibited"), "compute mode", FAILED, "no engine"),
        (with_gpu(persistence=False), "persistence", WARNING, "nvidia-smi -pm 1"),
        (with_gpu(mig=True), "MIG", WARNING, "-mig 0"),
        (with_gpu(power_cap_w=500.0), "power limit", WARNING, "-pl 700"),
        (with_gpu(limits=("heat",)), "GPU", WARNING, "heat"),
        (replace(WELL, gpu_type="a100-80gb"), "device type", WARNING, "GPU_TYPE=h100-80gb"),
        (replace(WELL, gpu_type="a100-80gb", wanted=True), "device type", FAILED, "would take it for a100"),
        (with_gpu(name="NVIDIA B200"), "device type", WARNING, "festina profile"),
        (with_gpu(trouble="GPU is lost"), "GPU", FAILED, "Xid"),
        (with_gpu(clocks_mhz=()), "clocks", WARNING, "FESTINA_DEVICE_CLOCKS=none"),
        (replace(with_gpu(clocks_mhz=()), wanted=True), "clocks", FAILED, "none to choose"),
        (with_gpu(counter="stands still"), "energy counter", WARNING, "integrated power"),
        (with_gpu(counter="absent"), "energy counter", WARNING, "integrated power"),
        (with_gpu(counter="absent", power_w=None), "energy counter", FAILED, "unknown"),
        (replace(WELL, guard=GuardFacts()), "setting clocks", WARNING, "we may not"),
        (replace(WELL, guard=GuardFacts(), may_set_clocks=True), "setting clocks", WARNING, "we may"),
        (replace(WELL, guard=replace(GUARD, gpus=())), "setting clocks", WARNING, "FESTINA_CLOCK_GUARD_GPUS"),
        (replace(WELL, guard=replace(GUARD, trouble="gone")), "setting clocks", FAILED, "gone"),
        (
            replace(WELL, guard=replace(GUARD, trouble="gone", named=False)),
            "setting clocks",
            WARNING,
            "gone",
        ),
        (
            replace(WELL, guard=replace(GUARD, gpus=(Standing(gpu=UUIDS[0], trouble="not permitted"),))),
            "setting clocks",
            FAILED,
            "CAP_SYS_ADMIN",
        ),
        (replace(WELL, cuda=1203), "green contexts", WARNING, "CUDA 12.3"),
        (
            replace(WELL, engine=replace(CUDA_ENV, cuda_bindings="")),
            "green contexts",
            WARNING,
            "without cuda",
        ),
        (replace(WELL, engine=replace(CUDA_ENV, torch_cuda="")), "green contexts", WARNING, "CPU build"),
        (replace(WELL, engine=replace(CUDA_ENV, torch_cuda="")), "vLLM", WARNING, "stay idle"),
        (replace(WELL, engine=replace(CUDA_ENV, vllm="0.33.0")), "vLLM", FAILED, "tested with 0.32.0"),
        (replace(WELL, engine=EngineFacts(python="p", trouble="no p")), "vLLM", WARNING, "emulated"),
        (replace(WELL, mps=MPS_OFF), "MPS", WARNING, "take turns"),
        (WELL, "MPS", OK, "fatal fault"),
        (replace(WELL, mps=replace(MPS_ON, owner_uid=7)), "MPS", WARNING, "user 7's"),
        (replace(WELL, mps=replace(MPS_ON, owner_uid=0)), "MPS", OK, "user 0"),
        (replace(WELL, mps=replace(MPS_ON, daemon=False)), "MPS", WARNING, "stale"),
        (replace(WELL, mps=replace(MPS_ELSEWHERE, owner_uid=7)), "MPS", WARNING, "user 7's"),
        (replace(WELL, mps=MpsFacts(directory="/x", named=True)), "MPS", WARNING, "no control pipe in /x"),
        (replace(WELL, mps=MPS_OFF), "SM shares", WARNING, "none: engines take turns"),
        (replace(WELL, cuda=1203), "SM shares", WARNING, "mps: each engine has 100 %"),
        (WELL, "SM shares", OK, "green: green contexts of 16, 32, 64, 96 or all 132 SMs"),
    ],
)
def test_each_fault_has_its_row_with_a_cure(host: HostFacts, check: str, outcome: str, words: str) -> None:
    rows = judge(host)
    row = row_of(rows, check)
    assert row.outcome == outcome and words in f"{row.found} {row.means} {row.cure}", row
    assert outcome == OK or (row.means and row.cure)
    assert failed(rows) == (outcome == FAILED)


def test_a_daemon_in_another_container_is_believed_in_by_its_pipe() -> None:
    host = replace(with_gpu(compute_mode="exclusive process"), mps=MPS_ELSEWHERE)
    rows = judge(host)
    assert {row.outcome for row in rows} == {OK}
    assert (
        "another container" in row_of(rows, "MPS").found and "with MPS" in row_of(rows, "compute mode").found
    )
    assert row_of(rows, "SM shares").found.startswith("green") and sm_facts(host) == ("", "")


@pytest.mark.parametrize(("asked", "outcome"), [("green", FAILED), ("mps", FAILED), ("none", OK)])
def test_what_is_asked_of_sm_shares_and_does_not_work_has_failed(asked: str, outcome: str) -> None:
    rows = judge(replace(WELL, mps=MPS_OFF), asked)
    row = row_of(rows, "SM shares")
    assert row.outcome == outcome and failed(rows) == (outcome == FAILED)
    assert (row.cure == "") == (outcome == OK)


def test_gpus_that_are_alike_share_rows_and_a_lost_one_is_that_one_alone() -> None:
    others = tuple(replace(GPU, index=index) for index in range(1, 3))
    rows = judge(replace(WELL, gpus=(GPU, *others, GpuFacts(index=3, trouble="GPU is lost"))))
    assert row_of(rows, "GPU", 3).outcome == FAILED and row_of(rows, "GPU", 1).gpus == (0, 1, 2)
    assert row_of(rows, "energy counter").gpus == (0, 1, 2)


def test_without_a_gpu_what_still_works_is_said_and_only_who_wants_one_fails() -> None:
    bare = HostFacts(driver_trouble="no driver", engine=replace(CUDA_ENV, torch_cuda=""))
    rows = judge(bare)
    assert [(row.check, row.outcome) for row in rows] == [("GPU", NOT_APPLICABLE), ("vLLM", OK)]
    assert "make up" in rows[0].means
    for host in (replace(bare, wanted=True), replace(bare, pci_gpus=2), replace(bare, driver_fails=True)):
        assert judge(host)[0].outcome == FAILED and failed(judge(host))


# ---- facts, from the stub NVML


@pytest.fixture
def no_engine(tmp_path: Path) -> str:
    return str(tmp_path / "python")


Fault = dict[str, float]


@pytest.mark.parametrize(
    ("fault", "check", "outcome"),
    [
        ({"lost": 1}, "GPU", FAILED),
        ({"no_counter": 1}, "energy counter", WARNING),
        ({"counter_stalled": 1}, "energy counter", WARNING),
        ({"no_counter": 1, "no_power": 1}, "energy counter", FAILED),
        ({"compute_mode": 3}, "compute mode", FAILED),
        ({"persistence": 0}, "persistence", WARNING),
        ({"mig": 1}, "MIG", WARNING),
        ({"cap_w": 450}, "power limit", WARNING),
        ({"no_clocks": 1}, "clocks", WARNING),
        ({"load": 1, "thermal_mhz": 1005}, "GPU", WARNING),
    ],
)
def test_a_fault_of_one_gpu_is_found_and_nothing_is_changed(
    nvml: StubNvml, no_engine: str, fault: Fault, check: str, outcome: str
) -> None:
    nvml.set(2, **fault)
    rows = judge(host_probe.probe(vllm_python=no_engine, watch_s=0.2))
    assert row_of(rows, check, 2).outcome == outcome
    assert row_of(rows, check, 1).outcome == OK and 2 not in row_of(rows, check, 1).gpus
    assert nvml.calls == []


def test_the_facts_are_those_of_the_driver(nvml: StubNvml, no_engine: str) -> None:
    nvml.set(HOST, cuda=12040, driver="550.54.14")
    nvml.set(1, compute_pid=41, mps_pid=42)
    host = host_probe.probe(vllm_python=no_engine, watch_s=0.5)
    assert (host.driver, host.cuda, host.uid) == ("550.54.14", 1204, os.geteuid())
    first, second = host.gpus[:2]
    assert first.counter == "moves" and first.power_w == pytest.approx(110.0)
    assert (first.capability, first.memory_bytes, first.power_cap_w) == (90, 85_000_000_000, 700.0)
    assert (second.processes, second.mps_processes) == ((41,), (42,))
    assert len(first.clocks_mhz) == 110 and host.guard == GuardFacts()
    assert host.engine.trouble == f"there is no {no_engine}"


def test_what_a_driver_does_not_tell_us_is_unknown_and_no_fault(
    nvml: StubNvml, no_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(gpu: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    def missing(gpu: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMPSComputeRunningProcesses", refused)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", missing)
    [first, *_] = host_probe.probe(vllm_python=no_engine, watch_s=0.1).gpus
    assert (first.trouble, first.mig, first.mps_processes) == ("", None, ())


@pytest.mark.parametrize(("fault", "fails"), [({"no_driver": 1}, False), ({"listing_fails": 1}, True)])
def test_a_driver_that_fails_is_told_from_none(
    nvml: StubNvml, no_engine: str, fault: Fault, fails: bool
) -> None:
    nvml.set(HOST, **fault)
    host = host_probe.probe(vllm_python=no_engine, watch_s=0.1)
    assert host.driver_trouble and host.driver_fails == fails


def test_the_guard_is_asked_what_it_leases_and_whether_it_can(
    nvml: StubNvml, guard: Guard, no_engine: str
) -> None:
    nvml.set(1, not_permitted=1)
    with guard.connect() as holder:
        holder.send(b'{"type":"Hold","gpu":"%s","for_ms":5000,"sm_clock_mhz":1005}' % UUIDS[1].encode())
        assert b"Insufficient Permissions" in holder.recv(512)
    before = nvml.calls
    host = host_probe.probe(vllm_python=no_engine, clock_guard=str(guard.socket), watch_s=0.1)
    assert [each.gpu for each in host.guard.gpus] == UUIDS[:3] and not host.guard.gpus[0].held
    rows = judge(host)
    assert row_of(rows, "setting clocks", 0).outcome == OK
    assert "Insufficient Permissions" in row_of(rows, "setting clocks", 1).found
    assert row_of(rows, "setting clocks", 3).outcome == WARNING  # not one of the guard's
    assert {call.gpu for call in nvml.calls[len(before) :]} <= {1}  # the guard tries that one again
    guard.stop()
    gone = host_probe.ask_guard(str(guard.socket))
    assert gone.named and "does not answer" in gone.trouble


def test_mps_is_told_by_its_pipe_and_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    assert host_probe.look_for_mps(tmp_path) == MpsFacts(directory=str(tmp_path / "pipes"), named=True)
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "control")
    assert not (found := host_probe.look_for_mps(tmp_path)).daemon and found.owner_uid == os.geteuid()
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "comm").write_text("nvidia-cuda-mps\n")
    assert host_probe.look_for_mps(tmp_path).daemon


@pytest.mark.parametrize(
    ("script", "trouble"),
    [("exit 3", "no message"), ("echo nonsense", "cannot be asked"), ("echo Boom >&2; exit 1", "Boom")],
)
def test_an_environment_that_cannot_be_asked_is_no_crash(tmp_path: Path, script: str, trouble: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert trouble in host_probe.ask_engine(str(python)).trouble


def test_versions_of_an_environment_are_read_without_importing_torch() -> None:
    found = host_probe.ask_engine(sys.executable)  # ours, which has neither
    assert (found.trouble, found.vllm, found.torch, found.torch_cuda) == ("", "", "", "")


# ---- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, no_engine: str) -> Callable[..., object]:
    monkeypatch.setattr(host_probe, "WATCH_S", 0.1)
    monkeypatch.setenv("FESTINA_DEVICE_VLLM_PYTHON", no_engine)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def test_the_command_ends_with_1_where_something_failed(
    nvml: StubNvml, command: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    well = command("--json")
    told = json.loads(well.stdout)
    assert well.exit_code == 0 and told["failed"] is False and len(told["host"]["gpus"]) == 4
    assert {"check", "outcome", "found", "means", "cure", "gpus"} == told["rows"][0].keys()
    monkeypatch.setenv("FESTINA_DEVICE_GPU_TYPE", "a100-80gb")
    nvml.set(3, compute_mode=2)
    ill = command()
    assert "would take it for a100-80gb" in " ".join(ill.stdout.split())
    assert ill.exit_code == 1 and "prohibited" in ill.stdout and "compute mode, GPU 3" in ill.stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_a_machine_without_nvml_is_told_what_works(tmp_path: Path, no_engine: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("FESTINA_NVML_STUB", "LD_LIBRARY_PATH")}
    env |= {"FESTINA_DEVICE_VLLM_PYTHON": no_engine}
    for clocks, status in (("none", 0), ("nvml", 1)):
        argv = [sys.executable, "-m", "services.cli", "doctor"]
        options = {"env": env | {"FESTINA_DEVICE_CLOCKS": clocks}, "capture_output": True, "text": True}
        done = subprocess.run(argv, **options, check=False)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        assert "emulated GPUs work" in done.stdout or status
