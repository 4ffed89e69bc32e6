"""Recordings of worlds, played again through fresh cores: every service, whatever its memory."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.recording import Recorder
from sim.nodes import Node
from sim.replay import Differs, elastic_kv, replay
from sim.scenario import Scenario, Settings
from sim.wild import scenario
from sim.world import World

QUIET = ("crash", "flush", "bus_lost", "leave", "device_lost", "remove")  # a recording is of one life


def record(played: Scenario, folder: Path) -> dict[str, Path]:
    """Play a scenario, and write what each of its cores hears and does, as its shell would."""
    world = World(played)
    recorders: dict[str, Recorder] = {}

    def recorded(node: Node) -> None:
        core, recorder = node.make(node.clock_ms(0.0), (), None), Recorder(folder, node.service, node.ident)
        step = core.step

        def write(now_ms: float, event: object) -> object:
            actions = step(now_ms, event)  # type: ignore[arg-type]
            recorder.write(now_ms, event, actions)  # type: ignore[arg-type]
            return actions

        core.step = write  # type: ignore[assignment, method-assign]
        node.make = lambda *_: core
        recorders[f"{node.service}.{node.ident}"] = recorder

    for node in world.nodes:
        recorded(node)
    world.run()
    for recorder in recorders.values():
        recorder.close()
    return {name: folder / f"{name}.rec" for name in recorders}


def calm(seed: int, **more: object) -> Scenario:
    """Return a seed's scenario as services would play it: as shipped, and each living through it."""
    base = scenario(seed)
    faults = tuple(fault for fault in base.faults if fault.kind not in QUIET)
    return replace(base, faults=faults, settings=Settings(), predictor="live", **more)


@pytest.mark.parametrize(("seed", "elastic"), [(20, True), (14, False)])
def test_every_core_does_again_what_it_did(seed: int, elastic: bool, tmp_path: Path) -> None:
    paths = record(calm(seed, elastic_kv=elastic), tmp_path)
    assert {path.stem.partition(".")[0] for path in paths.values()} == {
        "gateway",
        "global_sched",
        "local_sched",
        "consolidator",
        "migrator",
    }
    steps = {name: replay(path) for name, path in paths.items()}
    assert all(steps.values())
    assert all(elastic_kv(p) == elastic for name, p in paths.items() if name.startswith("local_sched"))


def test_moves_are_replayed(tmp_path: Path) -> None:
    paths = record(calm(20), tmp_path)
    moved = [
        path
        for name, path in paths.items()
        if name.startswith("migrator") and b"Release" in path.read_bytes()
    ]
    assert moved
    assert all(replay(path) for path in moved)


def test_another_core_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = record(calm(14), tmp_path)
    monkeypatch.setenv("FESTINA_LOCAL_SCHED_MAX_RUNNING", "1")
    with pytest.raises(Differs, match=r"step \d+ at"):
        for name, path in paths.items():
            if name.startswith("local_sched"):
                replay(path)
