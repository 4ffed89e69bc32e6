"""Running requests move between two real vLLM engines by the services themselves, and each gets killed.

All processes are real: a gateway, a global scheduler, two local schedulers with their engines, and the host's
migrator. There is no consolidator: the test places the model on both GPUs, and orders the moves.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from support import Servers, eventually
from vllm_support import PYTHON, needs_vllm, widened

from services.cli.supervise import free_port
from shared import events as ev
from shared.model import Instance, ModelSpec, Placement
from shared.store import Store
from shared.subjects import PLACEMENT_KEY, subject_of

pytestmark = [*needs_vllm, pytest.mark.asyncio(loop_scope="module")]

NAME, HOST, OTHER_HOST, GPUS = "smol-fp32", "host-0", "host-1", ("gpu-0", "gpu-1")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 30 + "Go on."
MAX_TOKENS, MOVED_AT = 120, 15


@dataclass
class Answer:
    """What one client has had of its stream."""

    pieces: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def longest_gap_ms(self) -> float:
        return 1000 * max(b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False))


class House:
    """The processes, and what they say to each other."""

    def __init__(self, folder: Path, servers: Servers, model: ModelSpec) -> None:
        self.folder = folder
        self.model = model
        self.port = free_port()
        self.stage_dir = folder / "stages"
        self.host_of = dict.fromkeys(GPUS, HOST)
        self.heard: list[tuple[str, bytes]] = []
        self.on_message: Callable[[str], None] = lambda verb: None
        self._settings = servers.settings
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._bus: Client | None = None
        self._launched_ms: dict[str, float] = {}
        self._moves = 0

    async def start(self) -> None:
        self._bus = await nats.connect(self._settings.nats_url)
        await self._bus.subscribe("festina.v1.>", cb=self._listen)
        store = Store(self._settings)
        await store.connect()
        placed = Placement(version=1, instances=tuple(Instance(NAME, (gpu,)) for gpu in GPUS))
        store.put(PLACEMENT_KEY, placed)
        await store.close()
        for ident in ("gateway-0", "scheduler-0", HOST, *GPUS):
            self.launch(ident)
        async with httpx.AsyncClient(trust_env=False) as http:
            body = msgspec.json.encode(self.model)
            deadline = time.monotonic() + 60
            while True:
                try:
                    answer = await http.post(f"{self.url}/admin/models", content=body)
                    break
                except httpx.HTTPError:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.2)
            assert answer.status_code == 201, answer.text
        for gpu in GPUS:
            await self.ready(gpu)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self, ident: str) -> None:
        services = {"gateway-0": "gateway", "scheduler-0": "global_sched"}
        service = services.get(ident, "local_sched" if ident in GPUS else "migrator")
        own = {
            "FESTINA_ID": ident,
            "FESTINA_NATS_URL": self._settings.nats_url,
            "FESTINA_REDIS_URL": self._settings.redis_url,
            "FESTINA_TRACING": "0",
            "FESTINA_GATEWAY_PORT": str(self.port),
            "FESTINA_STAGES_DIR": str(self.stage_dir),
            "FESTINA_LINK_SECRET": "of the test",
            "FESTINA_MIGRATOR_NETWORK_BYTES_S": "1e9",
            "FESTINA_DEVICE_HOST": self.host_of.get(ident, ""),
            "FESTINA_DEVICE_ENGINE": "vllm",
            "FESTINA_DEVICE_GPU_TYPE": "cpu",
            "FESTINA_DEVICE_VLLM_PYTHON": str(PYTHON),
            "FESTINA_DEVICE_RUN_DIR": str(self.folder / ident),
            "FESTINA_MIGRATOR_CHUNK_BYTES": str(4 << 20),
        }
        base = {name: value for name, value in os.environ.items() if not name.startswith("FESTINA_")}
        self._launched_ms[ident] = 1000 * time.time()
        with (self.folder / f"{ident}.log").open("ab") as log:
            self._running[ident] = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}.main"],
                env={**base, **own},
                stdout=log,
                stderr=log,
            )

    async def ready(self, gpu: str) -> None:
        """Have the model loaded on a GPU, asking again as a consolidator would."""
        deadline = time.monotonic() + 240
        asked_s = 0.0
        while self.engine(gpu).get("state") != "ready":
            assert time.monotonic() < deadline, (self.folder / f"{gpu}.log").read_text()[-3000:]
            if time.monotonic() - asked_s > 2.0:
                await self.say(gpu, ev.Load(model=self.model, placement_version=1))
                asked_s = time.monotonic()
            await asyncio.sleep(0.2)

    def engine(self, gpu: str) -> dict[str, object]:
        """Return what the GPU's latest local scheduler says of its engine; nothing before it has spoken."""
        try:
            gpus = httpx.get(f"{self.url}/admin/gpus", trust_env=False).json()["gpus"]
        except httpx.HTTPError:
            return {}
        mine = [each for each in gpus if each["gpu"] == gpu and each["started_ms"] > self._launched_ms[gpu]]
        engines = [engine for each in mine for engine in each["engines"]]
        return engines[0] if engines else {}

    async def say(self, to: str, message: ev.Message) -> None:
        assert self._bus is not None
        await self._bus.publish(subject_of(type(message), to), msgspec.msgpack.encode(message))
        await self._bus.flush()

    async def _listen(self, message: nats.aio.msg.Msg) -> None:
        verb = message.subject.rpartition(".")[2]
        self.heard.append((verb, message.data))
        self.on_message(verb)

    def kill(self, ident: str) -> None:
        self._running[ident].send_signal(signal.SIGKILL)
        self._running[ident].wait()

    async def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(30)
        assert self._bus is not None
        await self._bus.close()

    # ---- requests and moves

    async def ask(self, answer: Answer) -> None:
        """Stream an answer to its end."""
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            httpx.AsyncClient(trust_env=False, timeout=180.0) as http,
            http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as stream,
        ):
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    answer.errors.append(event["error"]["message"])
                for choice in event.get("choices", ()):
                    if choice["delta"].get("content"):
                        answer.pieces.append(choice["delta"]["content"])
                        answer.times_s.append(time.monotonic())
                    if choice["finish_reason"]:
                        answer.finish_reasons.append(choice["finish_reason"])

    async def source(self) -> str:
        """Return which GPU runs something, as soon as one does."""
        async with asyncio.timeout(60):
            while True:
                running = [gpu for gpu in GPUS if self.engine(gpu).get("running")]
                if running:
                    return running[0]
                await asyncio.sleep(0.05)

    async def move(self, source: str) -> None:
        """Order a move of what runs on a GPU to the other."""
        self._moves += 1
        destination = next(gpu for gpu in GPUS if gpu != source)
        host, other = self.host_of[source], self.host_of[destination]
        order = ev.Move(
            f"move-{self._moves}", "**", NAME, source, destination, other if other != host else ""
        )
        await self.say(host, order)

    def last(self, verb: str) -> bytes:
        said = [data for heard, data in self.heard if heard == verb]
        assert said, f"nobody said {verb}, but {Counter(heard for heard, _ in self.heard)}"
        return said[-1]

    def stages(self) -> list[str]:
        return [path.name for path in self.stage_dir.glob("*/*") if path.name != ".lock"]

    async def at_rest(self) -> None:
        """Wait until nothing runs, and no stage is left."""
        idle = lambda gpu: not self.engine(gpu).get("running") and not self.engine(gpu).get("queued")  # noqa: E731
        await eventually(lambda: all(idle(gpu) for gpu in GPUS), within_s=15.0, every_s=0.2)
        await eventually(lambda: not self.stages(), within_s=15.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("moves-pool")
    model = widened(NAME)
    servers = Servers(folder)
    servers.start("nats")
    servers.start("store")
    made = House(folder, servers, model)
    try:
        await asyncio.sleep(0.5)
        await made.start()
        yield made
    finally:
        await made.stop()
        servers.stop_all()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(house: House) -> str:
    """What the client is answered when nothing moves."""
    answer = Answer()
    await house.ask(answer)
    assert answer.finish_reasons == ["length"] and not answer.errors
    return answer.text


async def move_one(house: House, expected: str) -> None:
    """Move a request while it decodes, and expect its KV to go with it."""
    answer = Answer()
    asking = asyncio.create_task(house.ask(answer))
    source = await house.source()
    await eventually(lambda: len(answer.pieces) >= MOVED_AT, within_s=60)
    await house.move(source)
    await asking
    assert (answer.text, answer.finish_reasons, answer.errors) == (expected, ["length"], [])
    loaded = msgspec.msgpack.decode(house.last("kv_loaded"), type=ev.KvLoaded)
    assert loaded.tokens > 0 and not loaded.reason
    print(f"\n{loaded.tokens} tokens moved with their KV; longest gap {answer.longest_gap_ms:.0f} ms")
    await house.at_rest()


async def test_a_running_request_moves_with_its_kv_and_its_client_does_not_notice(
    house: House, expected: str
) -> None:
    await move_one(house, expected)


async def kill_in_a_move(house: House, expected: str, victim: str, verb: str) -> None:
    """Kill a process as soon as a message is sent, start it again, and expect the answer to be whole."""
    killed: list[str] = []
    answer = Answer()
    asking = asyncio.create_task(house.ask(answer))
    source = await house.source()
    who = {"source": source, "destination": next(g for g in GPUS if g != source)}.get(victim, victim)

    def kill_at(heard: str) -> None:
        if heard == verb and not killed:
            killed.append(who)
            house.kill(who)

    await eventually(lambda: len(answer.pieces) >= MOVED_AT, within_s=60)
    house.on_message = kill_at
    await house.move(source)
    await eventually(lambda: bool(killed), within_s=20)
    house.launch(who)
    await asking
    house.on_message = lambda verb: None
    assert (answer.text, answer.finish_reasons, answer.errors) == (expected, ["length"], [])
    if who in GPUS:
        await house.ready(who)
    await house.at_rest()


MIGRATOR = [(HOST, verb) for verb in ("prepared", "kv_staged", "released", "adopted", "commit_move")]
SOURCE = [("source", verb) for verb in ("kv_staged", "adopt")]
DESTINATION = [("destination", verb) for verb in ("released", "adopted")]


@pytest.mark.parametrize(("victim", "verb"), [*MIGRATOR, *SOURCE, *DESTINATION])
async def test_whoever_is_killed_when_a_message_is_sent_the_request_ends_once(
    house: House, expected: str, victim: str, verb: str
) -> None:
    await kill_in_a_move(house, expected, victim, verb)


async def test_between_hosts_kv_goes_by_tcp_and_without_the_other_migrator_it_is_computed(
    house: House, expected: str
) -> None:
    moving = GPUS[1]
    house.kill(moving)
    house.host_of[moving] = OTHER_HOST
    house.launch(OTHER_HOST)
    house.launch(moving)
    await house.ready(moving)
    await move_one(house, expected)
    await kill_in_a_move(house, expected, OTHER_HOST, "kv_staged")
