"""The compiled form (`make compiled`) and the interpreted one do the same, to the last bit of a number."""

import ast
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.catalog import emulated_models
from sim import wild
from sim.scenario import FAST, Scenario
from sim.workload import generate
from sim.world import World, run

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "build/compiled"
IN_A_CHILD = "import sys; sys.path.append(sys.argv[1]); import test_compiled; test_compiled.play_compiled()"


def named() -> list[str]:
    """Return the modules that are to be compiled, as `deploy/compiled.py` names them."""
    for node in ast.parse((ROOT / "deploy/compiled.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOT":
            hot: dict[str, str] = ast.literal_eval(node.value)
            return [f"{folder}/{name}" for folder, names in hot.items() for name in names.split()]
    raise AssertionError("deploy/compiled.py names no HOT modules")


def trace_hashes() -> Iterator[str]:
    """Play two scenarios of the soak, and models of which some have one shape until they are consolidated."""
    for seed in (20, 41):
        yield run(wild.scenario(seed), check=True).trace_hash
    models = emulated_models(32)
    load = generate("sharegpt", models=models, rps_per_llm=0.1, minutes=2.5, seed=0)
    yield run(Scenario(models, load.arrivals, gpus=8, settings=FAST, horizon_ms=150_000.0)).trace_hash


def play_compiled() -> None:
    """Print the hashes of the compiled form, which is what this process imports."""
    modules = [importlib.import_module(name.replace("/", ".")) for name in named()]
    interpreted = [module.__name__ for module in modules if not str(module.__file__).endswith(".so")]
    assert not interpreted, f"named in deploy/compiled.py, but not compiled: {interpreted}"
    print(*trace_hashes())
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, World)], "a world outlives its run"


def is_current() -> bool:
    sources = [path for package in ("services", "shared", "sim") for path in (ROOT / package).rglob("*.py")]
    copies = [COMPILED / path.relative_to(ROOT) for path in sources]
    return (COMPILED / ".done").exists() and all(
        copy.exists() and copy.read_bytes() == path.read_bytes()
        for path, copy in zip(sources, copies, strict=True)
    )


def test_what_is_to_be_compiled_is_there_and_named_once() -> None:
    names = named()
    assert [name for name in names if not (ROOT / f"{name}.py").exists()] == []
    assert len(set(names)) == len(names) and len(names) > 60


@pytest.mark.skipif(not is_current(), reason="build/compiled is missing or old: make compiled")
def test_compiled_cores_leave_the_same_trace() -> None:
    child = subprocess.run(
        [sys.executable, "-P", "-c", IN_A_CHILD, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": str(COMPILED)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == list(trace_hashes())
