"""How the processes of vLLM engines are begun and ended, with a stand-in for the process."""

import asyncio
import os
from pathlib import Path

import pytest
from support import eventually

from services.local_sched import engine_vllm
from services.local_sched.engine_vllm import VllmEngines
from shared.catalog import emulated_models
from shared.engine import EngineEnded, LoadEngine, UnloadEngine
from shared.events import Event

MODEL = emulated_models(1)[0]

DIES_SLOWLY = """
import os, pathlib, sys, time
pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
os.close(int(sys.argv[sys.argv.index("--fd") + 1]))
time.sleep({seconds})
"""


class Lab:
    """Engines whose process closes its socket at once, but takes its time to end."""

    def __init__(self, folder: Path, seconds: float) -> None:
        program = folder / "child.py"
        program.write_text("#!/usr/bin/env python3" + DIES_SLOWLY.format(seconds=seconds))
        program.chmod(0o755)
        self.heard: list[Event] = []
        self.pid_path = program.with_suffix(".pid")
        self.engines = VllmEngines(python=str(program), run_dir=folder / "run", report=self.heard.append)

    async def ended(self, within_s: float) -> EngineEnded:
        """Wait for the report of the one engine."""
        await eventually(lambda: bool(self.heard), within_s)
        (end,) = self.heard
        assert isinstance(end, EngineEnded)
        assert not self.engines._lives and not self.engines._engines
        assert list((self.engines._run_dir).glob("vllm-*/")) == []  # its temporary files are gone
        return end

    async def started(self) -> int:
        """Wait until the process runs, and return its id."""
        await eventually(lambda: self.pid_path.exists() and bool(self.pid_path.read_text()))
        return int(self.pid_path.read_text())


async def test_an_engine_unloaded_while_its_process_is_ending_is_reported(tmp_path: Path) -> None:
    lab = Lab(tmp_path, seconds=1.0)
    await lab.engines.start()
    lab.engines.perform(LoadEngine(model=MODEL))
    await lab.started()
    await asyncio.sleep(0.3)  # it has closed its socket
    lab.engines.perform(UnloadEngine(model=MODEL.name))
    await lab.ended(within_s=5.0)


async def test_load_and_unload_in_one_turn_of_the_loop_start_nothing_and_are_reported(tmp_path: Path) -> None:
    lab = Lab(tmp_path, seconds=1.0)
    await lab.engines.start()
    lab.engines.perform(LoadEngine(model=MODEL))
    lab.engines.perform(UnloadEngine(model=MODEL.name))
    assert (await lab.ended(within_s=5.0)).reason == ""
    assert not lab.pid_path.exists()


async def test_an_unload_while_the_process_is_being_started_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_vllm, "EXIT_S", 0.2)
    lab = Lab(tmp_path, seconds=60.0)
    await lab.engines.start()
    lab.engines.perform(LoadEngine(model=MODEL))
    await asyncio.sleep(0)  # its life has begun
    lab.engines.perform(UnloadEngine(model=MODEL.name))
    assert (await lab.ended(within_s=5.0)).reason == ""


async def test_a_process_that_does_not_end_is_killed_though_it_is_unloaded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_vllm, "EXIT_S", 0.6)
    lab = Lab(tmp_path, seconds=60.0)
    await lab.engines.start()
    lab.engines.perform(LoadEngine(model=MODEL))
    pid = await lab.started()
    await asyncio.sleep(0.2)
    lab.engines.perform(UnloadEngine(model=MODEL.name))
    assert "SIGKILL" in (await lab.ended(within_s=5.0)).reason
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
