"""Scenarios at random, with faults at random: nothing that must not happen does."""

import pytest

from services.local_sched.ledger import Ledger
from sim.check import InvariantBroken
from sim.soak import play

SEEDS = 200
PER_TEST = 10
OTHERS = {
    "festina-paper": 20,
    "festina-pdd": 12,
    "aegaeon": 12,
}  # how many seeds of each; `make sim-soak SYSTEM=...` plays more


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_no_invariant_breaks(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        play(seed)


@pytest.mark.parametrize("system", OTHERS)
def test_no_invariant_breaks_under_other_systems(system: str) -> None:
    for seed in range(OTHERS[system]):
        play(seed, system)


def test_a_failure_names_its_seed_and_tells_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "release", lambda self, model, holder: None)
    with pytest.raises(InvariantBroken) as caught:
        for seed in range(10):
            play(seed)
    text = str(caught.value)
    assert f"python -m sim.soak --seed {caught.value.seed}" in text
    assert "keeps memory" in text and "gpu-" in text
