"""A house of a few services, started one by one: a gateway, a global scheduler, GPUs, a migrator.

There is no consolidator: the test places the one model on all GPUs, and orders the moves. It hears all that
is said on the bus, and can have the bus hold a kind of message back.
"""

import asyncio
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import nats
from nats.aio.client import Client
from support import Servers, bare_environ, eventually

from services.cli.supervise import free_port, free_ports
from shared import events as ev
from shared.model import Instance, ModelSpec, Placement
from shared.store import Store
from shared.subjects import PLACEMENT_KEY, subject_of

HOST = "host-0"
NOWHERE = "host-none"
SERVICES = {"gateway": "gateway", "scheduler": "global_sched", "gpu": "local_sched", "host": "migrator"}


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
    """The processes, and what they say to each other.

    Args:
        env: settings of all services.
        prompt, max_tokens: what is asked, always.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelSpec,
        gpus: int,
        env: Mapping[str, str],
        prompt: str,
        max_tokens: int,
    ) -> None:
        self.folder = folder
        self.model = model
        self.gpus = tuple(f"gpu-{number}" for number in range(gpus))
        self.prompt, self.max_tokens = prompt, max_tokens
        self.port = free_port()
        self.metrics_ports = dict(zip(self.gpus, free_ports(gpus), strict=True))
        self.stage_dir = folder / "stages"
        self.host_of = dict.fromkeys(self.gpus, HOST)
        self.heard: list[tuple[str, bytes]] = []
        self._listener: Callable[[str], None] | None = None
        self.held: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._bus_rules = folder / "nats.conf"
        self._servers = Servers(folder, nats=("-c", str(self._bus_rules)))
        self._settings = self._servers.settings
        self._env = dict(env)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._bus: Client | None = None
        self._launched_ms: dict[str, float] = {}
        self._moves = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["House"]:
        """Start everything, and have the model loaded on all GPUs; stop it all in the end."""
        self._bus_rules.write_text("")
        self._servers.start("nats")
        self._servers.start("store")
        try:
            await asyncio.sleep(0.5)
            await self._start()
            yield self
        finally:
            await self._stop()
            self._servers.stop_all()

    async def _start(self) -> None:
        self._bus = await nats.connect(self._settings.nats_url)
        await self._bus.subscribe("festina.v1.>", cb=self._listen)
        await self._bus.subscribe("held.>", cb=self._hold)
        store = Store(self._settings)
        await store.connect()
        placed = Placement(version=1, instances=tuple(Instance(self.model.name, (gpu,)) for gpu in self.gpus))
        store.put(PLACEMENT_KEY, placed)
        await store.close()
        for ident in ("gateway-0", "scheduler-0", HOST, *self.gpus):
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
        await self.all_ready()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self, ident: str) -> None:
        service = SERVICES[ident.partition("-")[0]]
        own = {
            "FESTINA_ID": ident,
            "FESTINA_NATS_URL": self._settings.nats_url,
            "FESTINA_REDIS_URL": self._settings.redis_url,
            "FESTINA_TRACING": "0",
            "FESTINA_GATEWAY_PORT": str(self.port),
            "FESTINA_STAGES_DIR": str(self.stage_dir),
            "FESTINA_DEVICE_HOST": self.host_of.get(ident, ""),
            "FESTINA_DEVICE_RUN_DIR": str(self.folder / ident),
            "FESTINA_METRICS_PORT": str(self.metrics_ports.get(ident, -1)),
            **self._env,
        }
        self._launched_ms[ident] = 1000 * time.time()
        with (self.folder / f"{ident}.log").open("ab") as log:
            self._running[ident] = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}.main"],
                env={**bare_environ(), **own},
                stdout=log,
                stderr=log,
            )

    async def ready(self, gpu: str) -> None:
        """Have the model loaded on a GPU, asking again as a consolidator would."""
        deadline = time.monotonic() + 240
        asked_s = 0.0
        while self.engine(gpu).get("state") != "ready":
            assert time.monotonic() < deadline, self.story(gpu)
            if time.monotonic() - asked_s > 2.0:
                await self.say(gpu, ev.Load(model=self.model, placement_version=1))
                asked_s = time.monotonic()
            await asyncio.sleep(0.2)

    async def all_ready(self) -> None:
        """Have the model loaded on every GPU; an engine that has failed must have been taken by the machine.

        It may have been killed for its memory, or have had no processor for as long as vLLM is waited for.
        """
        for gpu in self.gpus:
            if (engine := self.engine(gpu)).get("state") == "failed":
                reason = str(engine.get("reason", ""))
                assert "SIGKILL" in reason or "was heard" in reason, self.story(gpu)
                warnings.warn(self.story(gpu), stacklevel=2)
        await asyncio.gather(*(self.ready(gpu) for gpu in self.gpus))

    def story(self, gpu: str) -> str:
        """Return what is known of a GPU that is not as expected: what it says of itself, and what it and its
        engine logged last."""
        logs = [self.folder / f"{gpu}.log", *sorted((self.folder / gpu).glob("*.log"))]
        ended = self._running[gpu].poll()
        tails = [f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists()]
        return "\n".join([f"{gpu}: ended with {ended}, engine {self.engine(gpu)}", *tails])

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
        if self._listener is not None:
            self._listener(verb)

    @contextmanager
    def listening(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Have each message's kind told to a listener as soon as it is heard."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    async def _hold(self, message: nats.aio.msg.Msg) -> None:
        self.held.put_nowait((message.subject.replace("held.", "festina.v1.", 1), message.data))

    def hold(self, verb: str) -> None:
        """Have the bus hold messages of moves back: whoever waits for one stands exactly there.

        The server delivers them under another subject.
        """
        rules = [f"{way}.*.{verb}" for way in ("cmd.gpu", "evt.migrator")]
        held = [f'"festina.v1.{rule}": "held.{rule.replace("*", "{{wildcard(1)}}")}"' for rule in rules]
        self._bus_rules.write_text(f"mappings = {{ {', '.join(held)} }}\n")
        self._servers.reload("nats")

    async def let_go(self, *late: tuple[str, bytes]) -> None:
        """Hold nothing back any more, and deliver these."""
        self.hold("nothing")
        await asyncio.sleep(0.05)  # the server reads its rules
        while not self.held.empty():
            late = (*late, self.held.get_nowait())
        await self.deliver(*late)

    async def deliver(self, *messages: tuple[str, bytes]) -> None:
        """Send messages that were held back on."""
        assert self._bus is not None
        for subject, data in messages:
            await self._bus.publish(subject, data)
        await self._bus.flush()

    async def nurse(self) -> None:
        """Have the model loaded wherever it is not, as a consolidator would, for as long as this runs."""
        while True:
            for gpu in self.gpus:
                if self.engine(gpu).get("state") != "ready":
                    await self.say(gpu, ev.Load(model=self.model, placement_version=1))
            await asyncio.sleep(0.5)

    def kill(self, ident: str) -> None:
        self._running[ident].send_signal(signal.SIGKILL)
        self._running[ident].wait()

    async def _stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(30)
        if self._bus is not None:
            await self._bus.close()

    # ---- requests and moves

    async def ask(self, answer: Answer) -> None:
        """Stream an answer to its end."""
        body = {
            "model": self.model.name,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
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

    async def expected(self) -> str:
        """Return what the client is answered when nothing moves."""
        answer = Answer()
        await self.ask(answer)
        assert (answer.finish_reasons, answer.errors) == (["length"], []), (
            answer.finish_reasons,
            answer.errors,
        )
        return answer.text

    async def source(self) -> str:
        """Return which GPU runs something, as soon as one does."""
        async with asyncio.timeout(60):
            while True:
                running = [gpu for gpu in self.gpus if self.engine(gpu).get("running")]
                if running:
                    return running[0]
                await asyncio.sleep(0.05)

    def other(self, source: str) -> str:
        """Return the GPU to which what runs on this one is moved."""
        others = [gpu for gpu in self.gpus if gpu != source]
        able = [gpu for gpu in others if self.engine(gpu).get("state") == "ready"]
        assert able, "\n".join(map(self.story, others))
        return able[0]

    def order(self, source: str, destination: str, by_tokens: bool = False) -> ev.Move:
        """Make an order to move what runs on a GPU to another; by its tokens, if to a host no KV gets to."""
        self._moves += 1
        host, other = self.host_of[source], self.host_of[destination]
        far = NOWHERE if by_tokens else other if other != host else ""
        return ev.Move(f"move-{self._moves}", "**", self.model.name, source, destination, far)

    async def move(self, source: str) -> None:
        """Order a move of what runs on a GPU to the other."""
        await self.say(self.host_of[source], self.order(source, self.other(source)))

    async def say_until(
        self, done: Callable[[], bool], to: str, message: ev.Message, within_s: float
    ) -> None:
        """Say something again and again until it is done: one that was killed may not listen yet."""
        async with asyncio.timeout(within_s):
            while not done():
                await self.say(to, message)
                await asyncio.sleep(0.1)

    def has_heard(self, verb: str) -> bool:
        return any(heard == verb for heard, _ in self.heard)

    def last(self, verb: str) -> bytes:
        said = [data for heard, data in self.heard if heard == verb]
        assert said, f"nobody said {verb}, but {Counter(heard for heard, _ in self.heard)}"
        return said[-1]

    def stages(self) -> list[str]:
        return [path.name for path in self.stage_dir.glob("*/*") if path.name != ".lock"]

    async def at_rest(self) -> None:
        """Wait until nothing runs, and no stage is left."""
        idle = lambda gpu: not self.engine(gpu).get("running") and not self.engine(gpu).get("queued")  # noqa: E731
        await eventually(lambda: all(idle(gpu) for gpu in self.gpus), within_s=15.0, every_s=0.2)
        await eventually(lambda: not self.stages(), within_s=15.0)
