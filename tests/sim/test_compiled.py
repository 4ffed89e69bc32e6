"""The compiled form (`make compiled`) and the interpreted one do the same, to the last bit of a number."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.wild import scenario
from sim.world import run

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "build/compiled"
SEEDS = (20, 41)


def named() -> list[str]:
    """Return the modules that are to be compiled, as `deploy/compiled.py` names them."""
    for node in ast.parse((ROOT / "deploy/compiled.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOT":
            hot: dict[str, str] = ast.literal_eval(node.value)
            return [f"{folder}/{name}" for folder, names in hot.items() for name in names.split()]
    raise AssertionError("deploy/compiled.py names no HOT modules")


PLAYED = f"""
import gc, importlib
from sim import world, wild
modules = [importlib.import_module(name.replace("/", ".")) for name in {named()}]
interpreted = [module.__name__ for module in modules if not module.__file__.endswith(".so")]
assert not interpreted, f"named in deploy/compiled.py, but not compiled: {{interpreted}}"
print(*[world.run(wild.scenario(seed), check=True).trace_hash for seed in {SEEDS}])
gc.collect()
assert not [each for each in gc.get_objects() if isinstance(each, world.World)], "a world outlives its run"
"""


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
        [sys.executable, "-P", "-c", PLAYED],
        env={**os.environ, "PYTHONPATH": str(COMPILED)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [run(scenario(seed), check=True).trace_hash for seed in SEEDS]
