"""What measures a device, with real engines on this machine's CPU: the profiler, and `make gpu-check`.

The profiler has a short grid; of `make gpu-check` it is its kernels' code, and its two engines.
"""

import asyncio
import subprocess
from pathlib import Path

import pytest
from nvml import StubNvml
from vllm_support import MODEL, PYTHON, ROOT, needs_vllm, told_by_vllm

from services.cli.gpu_check import engines
from services.cli.gpu_check.lab import Lab
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.host_facts import HostFacts
from services.local_sched.host_probe import ask_engine
from services.local_sched.nvml import NvmlGpu
from services.local_sched.profile import Bench, run_sweeps
from services.local_sched.profile_grid import Grid, Point
from services.local_sched.profile_journal import Heading, Journal
from services.local_sched.profile_lab import EngineLab
from services.local_sched.profile_stats import Effort, samples_of
from shared.devices import device_for
from shared.lut import from_samples, pack, unpack
from shared.lut_table import Provenance
from shared.shelf import Shelf

pytestmark = needs_vllm

GRID = Grid((0,), (100,), (16, 128, 512), (1, 4), (32, 256), pool_tokens=4 * (256 + 64))

KERNELS = """
import json, torch
from services.local_sched import gpu_kernels
kernels = gpu_kernels.Kernels(torch, "cpu", hidden=64, intermediate=128)
gpu_kernels.tell = lambda line: None
found = [kernels.device(), kernels.run("decode", 0.05), kernels.run("prefill", 0.05)]
found += [kernels.copy("host", 1 << 20, 0.05), kernels.copy("device", 1 << 20, 0.05)]
print("TOLD " + json.dumps(found))
"""


def test_the_kernels_compute_what_they_say_they_do() -> None:
    device, decode, prefill, to_host, to_device = told_by_vllm(KERNELS)
    assert device["name"] == "cpu" and device["start_ms"] > 0
    assert decode["n_bytes"] == 2 * 64 * 256 and decode["flop"] == 2 * 16 * 64 * 256
    assert prefill["flop"] == 2 * 4096 * 64 * 256
    for ran in (decode, prefill, to_host, to_device):
        assert ran["runs"] >= 1 and ran["ran_s"] >= 0.05
    assert decode["ran_s"] / decode["runs"] < prefill["ran_s"] / prefill["runs"]


def test_their_process_says_that_there_is_no_cuda_device() -> None:
    argv = [str(PYTHON), "-m", "services.local_sched.gpu_kernels"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 3 and done.stderr.strip().startswith("not a CUDA device: torch")


def test_two_engines_are_held_let_go_put_to_sleep_and_woken(
    nvml: StubNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MODEL is not None
    for limit in ("LOAD_S", "ANSWER_S"):
        monkeypatch.setattr(engines, limit, 600.0)  # a busy machine takes its time
    host = HostFacts(engine=ask_engine(str(PYTHON)))
    assert host.engine.vllm in host.engine.tested and host.engine.torch_cuda == ""
    gpu = NvmlGpu("0")
    try:
        lab = Lab(gpu=gpu, device=device_for("h100-80gb"), host=host, state_dir=tmp_path, pace=0.1)
        found = asyncio.run(engines.exercise(lab, MODEL))
    finally:
        gpu.close()
    assert found.held_steps == 0 and found.resumed and found.woken_same, found
    assert found.freed_bytes > 0 and min(found.load_ms) > 0 and found.wake_ms > 0
    assert min(found.alone_tokens_per_s, *found.beside_tokens_per_s) > 0


async def test_a_short_profile_gives_a_table_that_serves(tmp_path: Path) -> None:
    assert MODEL is not None and PYTHON is not None
    lab = EngineLab(lambda report: VllmEngines(python=str(PYTHON), run_dir=tmp_path, report=report))
    heading = Heading(gpu_type="cpu", model=MODEL.name, source="vLLM on CPU", grid=repr(GRID))
    journal = Journal(tmp_path / "journal", heading)
    bench = Bench(lab, MODEL, Effort(precision=0.1, least=3, most=5))
    try:
        await bench.load(2 * MODEL.context_tokens * MODEL.kv_bytes_per_token)
        readings = await asyncio.wait_for(run_sweeps(bench, GRID, 0.0, journal, lambda entry: None), 300)
    finally:
        await lab.close()
    assert bench.load_ms > 1000
    assert len(readings) == 3 + 4
    newest = {entry.point: entry for entry in journal.entries}
    assert newest.keys() == readings.keys()
    for entry in newest.values():
        assert len(entry.repeats_ms) >= 3 and entry.latency_ms > 1.0
        assert entry.power_w is None  # no meter, and none made up
        assert (
            abs(entry.context_tokens - entry.tokens * (entry.phase == "decode")) <= 16 + 0.05 * entry.tokens
        )
    # a prompt 32 times as long takes many times as long, whatever else this machine does
    times = {point: ms for point, (ms, _) in readings.items()}
    assert times[Point("prefill", 512, 1, 0, 100)] > 3 * times[Point("prefill", 16, 1, 0, 100)]

    provenance = Provenance(kind="measured", device="vLLM on CPU")
    lut = unpack(pack(from_samples(device_for("cpu"), MODEL, samples_of(readings), provenance)))
    shelf = Shelf(lambda gpu_type, model: pytest.fail("the measured table covers this device"))
    assert shelf.put(lut) == ""
    assert shelf.get("cpu", MODEL).ttft_ms(0, 100, 300) > shelf.get("cpu", MODEL).tbt_ms(0, 100, 1, 64)
