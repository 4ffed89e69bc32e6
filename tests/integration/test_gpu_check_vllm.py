"""What `make gpu-check` runs in the engine's environment, on CPU: its kernels' code, and two real engines."""

import asyncio
import subprocess
from pathlib import Path

import pytest
from nvml import StubNvml
from vllm_support import MODEL, PYTHON, ROOT, needs_vllm, told_by_vllm

from services.cli.gpu_check import engines
from services.cli.gpu_check.lab import Lab
from services.local_sched.host_facts import HostFacts
from services.local_sched.host_probe import ask_engine
from services.local_sched.nvml import NvmlGpu
from shared.devices import device_for

pytestmark = needs_vllm

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
