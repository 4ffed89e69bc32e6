"""How the processes of vLLM engines are begun and ended, with a stand-in for the process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support import eventually

from services.local_sched import vllm_child
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.partition import SmFacts, partition_for
from services.local_sched.sleepers import need_bytes
from services.local_sched.vllm_ext.wire import SmCut
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.engine import (
    EngineEnded,
    EngineReady,
    LoadEngine,
    Order,
    RestDevice,
    RunRequest,
    SetPlan,
    UnloadEngine,
)
from shared.events import Event
from shared.model import Objectives, Plan, Request

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
    monkeypatch.setattr(vllm_child, "EXIT_S", 0.2)
    lab = Lab(tmp_path, seconds=60.0)
    await lab.engines.start()
    lab.engines.perform(LoadEngine(model=MODEL))
    await asyncio.sleep(0)  # its life has begun
    lab.engines.perform(UnloadEngine(model=MODEL.name))
    assert (await lab.ended(within_s=5.0)).reason == ""


async def test_a_process_that_does_not_end_is_killed_though_it_is_unloaded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_child, "EXIT_S", 0.6)
    lab = Lab(tmp_path, seconds=60.0)
    await lab.engines.start()
    lab.engines.perform(LoadEngine(model=MODEL))
    pid = await lab.started()
    await asyncio.sleep(0.2)
    lab.engines.perform(UnloadEngine(model=MODEL.name))
    assert "SIGKILL" in (await lab.ended(within_s=5.0)).reason
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---- asleep, awake, and on parts of the SMs: with a stand-in that notes its orders, and answers them

ANSWERS = """
import os, pathlib, socket, sys
sys.path.insert(0, {root!r})
from services.local_sched.vllm_ext import wire
from shared import engine as en
folder = pathlib.Path(__file__).parent
told = folder / f"{{os.getpid()}}.orders"
percentage = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
told.write_text(" ".join(sys.argv[5:]) + "\\n" + percentage + "\\n")
ours = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
stream = ours.makefile("rb")
name = ""
def ready(model):
    return en.EngineReady(model=model, kv_pool_bytes=1, block_tokens=16, load_ms=1.0)
while header := stream.read(wire.HEADER.size):
    order = wire.decode_order(stream.read(wire.HEADER.unpack(header)[0]))
    with told.open("a") as file:
        file.write(str(order)[:60] + "\\n")
    refused = (folder / "refuse").exists()
    if isinstance(order, en.LoadEngine):
        name = order.model.name
        ours.sendall(wire.frame(ready(name)))
    elif isinstance(order, en.SleepEngine):
        ours.sendall(wire.frame(en.EngineAsleep(name, 0 if refused else 1, reason="busy" if refused else "")))
    elif isinstance(order, en.WakeEngine) and refused:
        ours.sendall(wire.frame(en.EngineAsleep(name, 1, reason="of another architecture")))
    elif isinstance(order, en.WakeEngine):
        name = order.serve.name
        ours.sendall(wire.frame(ready(name)))
"""


class Home:
    """Engines whose processes are quick to load, sleep and wake; a file `refuse` makes them refuse these."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        program = folder / "child.py"
        program.write_text(f"#!{sys.executable}" + ANSWERS.format(root=str(Path(__file__).parents[2])))
        program.chmod(0o755)
        self.heard: asyncio.Queue[Event] = asyncio.Queue()
        more = {"sleep_bytes": 3 * need_bytes(MODEL)} | more
        run_dir = folder / "run"
        self.engines = VllmEngines(python=str(program), run_dir=run_dir, report=self.heard.put_nowait, **more)

    async def do(self, order: Order) -> Event:
        """Give an order, and return the report that follows."""
        self.engines.perform(order)
        return await asyncio.wait_for(self.heard.get(), 10.0)

    def orders(self) -> list[list[str]]:
        """Return what each process was told, in the order in which they were started."""
        files = sorted(self.folder.glob("*.orders"), key=lambda file: int(file.stem))
        return [file.read_text().splitlines() for file in files]

    async def alone(self, processes: int) -> bool:
        """Wait until so many processes are left."""
        await eventually(lambda: len(self.engines._lives) == processes, 5.0)
        return True


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    made = Home(tmp_path)
    await made.engines.start()
    yield made
    await made.engines.close()


TWIN = replace(MODEL, name="twin", weights="/twin")
UNLOADED = EngineEnded(model=MODEL.name)


async def test_an_unloaded_engine_sleeps_and_the_next_load_wakes_it(home: Home) -> None:
    assert isinstance(await home.do(LoadEngine(model=MODEL)), EngineReady)
    assert await home.do(UnloadEngine(model=MODEL.name)) == UNLOADED
    sample = home.engines.sample()
    assert (sample.state, sample.asleep, sample.used_bytes, sample.unheard_ms) == (
        "sleeping",
        (MODEL.name,),
        0,
        {},
    )
    assert isinstance(await home.do(LoadEngine(model=MODEL)), EngineReady)
    assert home.engines.sample().state == "warm" and home.engines.sample().asleep == ()
    assert len(home.engines._lives) == 1  # it is the same process
    assert await home.do(UnloadEngine(model=MODEL.name)) == UNLOADED  # and again


async def test_an_engine_asleep_goes_on_with_the_weights_of_another_model(home: Home) -> None:
    await home.do(LoadEngine(model=MODEL))
    await home.do(UnloadEngine(model=MODEL.name))
    ready = await home.do(LoadEngine(model=TWIN))
    assert isinstance(ready, EngineReady) and ready.model == TWIN.name
    assert len(home.engines._lives) == 1 and list(home.engines.requests()) == [TWIN.name]
    assert await home.do(UnloadEngine(model=TWIN.name)) == EngineEnded(model=TWIN.name)
    assert home.engines.sample().asleep == (TWIN.name,)


async def test_where_that_is_refused_a_process_of_its_own_is_started(home: Home) -> None:
    await home.do(LoadEngine(model=MODEL))
    await home.do(UnloadEngine(model=MODEL.name))
    (home.folder / "refuse").touch()
    ready = await home.do(LoadEngine(model=TWIN))
    assert isinstance(ready, EngineReady) and ready.model == TWIN.name
    assert await home.alone(1) and home.heard.empty()
    assert home.engines.sample().asleep == ()


async def test_an_engine_that_cannot_sleep_ends(home: Home) -> None:
    await home.do(LoadEngine(model=MODEL))
    (home.folder / "refuse").touch()
    assert await home.do(UnloadEngine(model=MODEL.name)) == UNLOADED
    assert await home.alone(0)


async def test_nothing_sleeps_where_no_memory_is_given_for_it_or_it_has_to_end_at_once(
    tmp_path: Path,
) -> None:
    for sleep_bytes, at_once in [(0, False), (need_bytes(MODEL) - 1, False), (1 << 60, True)]:
        home = Home(tmp_path, sleep_bytes=sleep_bytes)
        await home.engines.start()
        await home.do(LoadEngine(model=MODEL))
        assert await home.do(UnloadEngine(model=MODEL.name, at_once=at_once)) == UNLOADED
        assert await home.alone(0)


async def test_a_device_that_is_to_be_cold_ends_its_sleepers_and_says_nothing_of_them(home: Home) -> None:
    await home.do(LoadEngine(model=MODEL))
    await home.do(UnloadEngine(model=MODEL.name))
    home.engines.perform(RestDevice(state="cold"))
    assert await home.alone(0) and home.heard.empty()
    assert home.engines.sample().state == "cold"


async def test_one_that_dies_in_its_sleep_is_not_told_of_and_one_that_dies_waking_is(home: Home) -> None:
    await home.do(LoadEngine(model=MODEL))
    await home.do(UnloadEngine(model=MODEL.name))
    (sleeper,) = home.engines._lives
    assert sleeper.process is not None
    os.kill(sleeper.process.pid, 9)
    assert await home.alone(0) and home.heard.empty() and home.engines.sample().asleep == ()
    await home.do(LoadEngine(model=MODEL))
    await home.do(UnloadEngine(model=MODEL.name))
    (sleeper,) = home.engines._lives
    assert sleeper.process is not None
    os.kill(sleeper.process.pid, 19)
    home.engines.perform(LoadEngine(model=MODEL))
    os.kill(sleeper.process.pid, 9)
    end = await asyncio.wait_for(home.heard.get(), 5.0)
    assert isinstance(end, EngineEnded) and "SIGKILL" in end.reason


async def test_where_engines_share_their_fate_sleepers_are_gone_before_a_death_is_told(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path, partition=partition_for("auto", 40, DEVICES["h100-80gb"], SmFacts("", "no driver")))
    await home.engines.start()
    await home.do(LoadEngine(model=TWIN))
    await home.do(UnloadEngine(model=TWIN.name))
    await home.do(LoadEngine(model=replace(MODEL, layers=1)))
    dying = home.engines._engines[MODEL.name]
    assert dying.process is not None and len(home.engines._lives) == 2
    os.kill(dying.process.pid, 9)
    end = await asyncio.wait_for(home.heard.get(), 5.0)
    assert isinstance(end, EngineEnded) and "SIGKILL" in end.reason
    assert not home.engines._lives and home.engines.sample().asleep == ()
    assert [told[:2] for told in home.orders()] == [["", "40"], ["", "40"]]


async def test_engines_are_told_their_parts_of_the_sms_before_the_plan_that_counts_on_them(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path, partition=partition_for("auto", 100, DEVICES["h100-80gb"], SmFacts("", "")))
    await home.engines.start()
    for model, share_pct in [(MODEL, 48), (TWIN, 24)]:
        await home.do(LoadEngine(model=model))
        home.engines.perform(SetPlan(model=model.name, plan=Plan(plan_id=1, sm_share_pct=share_pct)))
    asked = Request("r", 1, "g", MODEL.name, (1,), 5, Objectives(ttft_ms=1, tbt_ms=1))
    home.engines.perform(RunRequest(model=MODEL.name, request=asked))
    home.engines.perform(SetPlan(model=TWIN.name, plan=Plan(plan_id=2, sm_share_pct=24)))
    await eventually(lambda: len(home.orders()) == 2 and len(home.orders()[1]) == 7, 5.0)
    await home.engines.close()
    one, other = home.orders()
    arguments, percentage, *_ = one
    cut = msgspec.json.decode(arguments.removeprefix("--sms "), type=SmCut)
    assert (cut.sm_count, cut.group_sms, cut.units, percentage) == (132, 8, 8, "100")
    kinds = [order.partition("(")[0] for order in one[2:]]
    assert kinds == ["LoadEngine", "UseSms", "SetPlan", "RunRequest"]
    assert one[3] == "UseSms(first=0, units=4)"
    assert [order for order in other if order.startswith("UseSms")] == [
        "UseSms(first=0, units=2)",  # it computes alone
        "UseSms(first=4, units=2)",
    ]
