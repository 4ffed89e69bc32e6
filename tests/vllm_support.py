"""What the tests of the real vLLM engine share: its environment and model, and a look at its processes."""

import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from services.local_sched.vllm_child import HOST_MODULE, child_environment
from services.local_sched.vllm_env import smollm2_spec, vllm_python
from shared.errors import FestinaError
from shared.model import ModelSpec

ROOT = Path(__file__).parents[1]
ENV = Path(os.environ.get("FESTINA_VLLM_ENV", ROOT / ".venv-vllm"))
MODELS_DIR = Path(os.environ.get("FESTINA_VLLM_MODELS", ROOT / ".festina" / "models"))
PYTHON = vllm_python(ENV)


def _model() -> ModelSpec | None:
    try:
        return smollm2_spec(MODELS_DIR)
    except FestinaError:
        return None


MODEL = _model()

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        PYTHON is None or MODEL is None, reason="no vLLM environment or model: run `make setup-vllm`"
    ),
]


def widened(name: str) -> ModelSpec:
    """SmolLM2 in fp32: its weights and its KV are twice as large."""
    assert MODEL is not None
    return msgspec.structs.replace(
        MODEL, name=name, weight_bytes=4 * MODEL.params, kv_bytes_per_token=2 * MODEL.kv_bytes_per_token
    )


def widened_folder(models_dir: Path) -> Path:
    """Write SmolLM2 in fp32 into a folder of models, as `make setup-vllm` would leave it; returns its folder.

    In fp32 an answer does not hang on how its prompt was cut, or where it was computed anew.
    """
    assert MODEL is not None
    source, folder = Path(MODEL.weights), models_dir / Path(MODEL.weights).name
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).symlink_to(path)
    content = np.memmap(source / "model.safetensors", np.uint8, "r")
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(content[8:start].tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            entry["dtype"] = "F32"
            entry["data_offsets"] = [2 * offset for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        (content[start:].view("<u2").astype("<u4") << 16).tofile(file)
    return folder


def told_by_vllm(program: str, *arguments: object) -> Any:
    """Run a program in vLLM's environment; returns the value it prints as JSON behind ``TOLD``.

    Its arguments are in ``sys.argv[1]``, as JSON; it may import Festina's modules.
    """
    with tempfile.TemporaryDirectory() as temp_dir:
        done = subprocess.run(
            [str(PYTHON), "-c", program, json.dumps(arguments)],
            env=child_environment(os.environ, temp_dir),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("TOLD "))


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
COLOURS = "<|im_start|>user\nName three primary colours, and say why.<|im_end|>\n<|im_start|>assistant\n"
QUESTION_TOKENS, COLOURS_TOKENS = 24, 48

OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
model, question, colours, of_question, of_colours = json.loads(sys.argv[1])
engine = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=2048,
             kv_cache_memory_bytes=128 << 20, block_size=32, distributed_executor_backend="uni")
greedy = lambda tokens: SamplingParams(temperature=0, max_tokens=tokens)
asked = engine.chat(question, greedy(of_question), use_tqdm=False)[0]
colours = engine.generate([colours], greedy(of_colours), use_tqdm=False)[0]
said = asked.outputs[0]
answer = [said.text, len(asked.prompt_token_ids), len(said.token_ids)]
print("TOLD " + json.dumps([answer, list(colours.outputs[0].token_ids)]))
"""


class Offline(NamedTuple):
    """What vLLM's own engine, with its own scheduler, answers to `QUESTION` and to `COLOURS`, in fp32."""

    text: str
    prompt_tokens: int
    output_tokens: int
    colours: list[int]


@cache
def offline() -> Offline:
    """Ask vLLM's own engine, once for all tests of a run: its start is what takes long."""
    assert MODEL is not None
    asked = (MODEL.weights, QUESTION, COLOURS, QUESTION_TOKENS, COLOURS_TOKENS)
    answer, colours = told_by_vllm(OFFLINE, *asked)
    return Offline(*answer, colours)


def children(parent: int) -> list[int]:
    """Process ids of the engine processes below a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and HOST_MODULE in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
