"""The compiled form (`make compiled`) and the interpreted one do the same, to the last bit of a number."""

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
PLAYED = f"""
import gc
from sim import world, wild
assert world.__file__.endswith(".so"), world.__file__
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
