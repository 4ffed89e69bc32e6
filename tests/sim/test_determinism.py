"""The same scenario is the same world, in whichever process it is played."""

import os
import subprocess
import sys
from pathlib import Path

from msgspec.structs import replace

from sim.wild import scenario
from sim.world import run

ROOT = Path(__file__).resolve().parents[2]
PLAY = "from sim.wild import scenario; from sim.world import run; print(run(scenario({seed})).trace_hash)"
SEED = 7


def played_elsewhere(hash_seed: int) -> str:
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    argv = [sys.executable, "-c", PLAY.format(seed=SEED)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_a_seed_has_one_trace_whatever_python_hashes_with() -> None:
    here = run(scenario(SEED)).trace_hash
    assert {here, played_elsewhere(1), played_elsewhere(2)} == {here}


def test_checking_changes_nothing() -> None:
    assert run(scenario(SEED), check=True).trace_hash == run(scenario(SEED)).trace_hash


def test_another_seed_of_the_network_is_another_world() -> None:
    base = scenario(SEED)
    noisy = replace(base, network=replace(base.network, jitter_ms=5.0))
    assert run(noisy).trace_hash != run(replace(noisy, seed=base.seed + 1)).trace_hash
