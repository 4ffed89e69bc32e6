"""The vLLM engines of one device, as its local scheduler's shell drives them: one child process per model.

Orders and reports are those of `shared/engine.py`; they cross a socket pair to `vllm_ext/host.py`, which runs
in the engine's own Python environment (`vllm_env.py` makes it).
"""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.local_sched.partition import Partition, Parts
from services.local_sched.vllm_ext.wire import (
    HEADER,
    Alive,
    EngineOrder,
    EngineReport,
    SmCut,
    UseSms,
    decode_report,
    frame,
)
from shared.engine import (
    ClockApplied,
    DeviceSampled,
    EngineEnded,
    EngineReady,
    ExportKv,
    LoadEngine,
    Order,
    RunRequest,
    SetClock,
    SetPlan,
    SleepEngine,
    StepDone,
    StopRequest,
    UnloadEngine,
    WakeEngine,
)
from shared.events import Event
from shared.model import slug

HOST_MODULE = "services.local_sched.vllm_ext.host"

MAX_ORDERS = 65_536
"""Orders on their way to one engine. The core gives an engine far fewer, even while it loads."""

EXIT_S = 5.0
"""A child gets this long to end by itself before it is killed."""


@dataclass(eq=False)
class _Engine:
    """One child: the orders on their way to it, the requests it has, and why it ended, once that is known.

    `leave` is set when it is to end; `unloading` says that this was ordered, and `at_once` that it gets no
    time for it. `heard_s` is when it was last heard, by the loop's clock; None before it has loaded.
    """

    model: str
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    orders: asyncio.Queue[EngineOrder] = field(default_factory=lambda: asyncio.Queue(MAX_ORDERS))
    requests: set[str] = field(default_factory=set)
    process: Process | None = None
    reason: str = ""
    unloading: bool = False
    at_once: bool = False
    heard_s: float | None = None


class VllmEngines:
    """Starts, drives and ends the vLLM processes of one device. Use it in one asyncio loop.

    Args:
        python: interpreter of the engine environment.
        run_dir: folder for the children's logs, made by `start`.
        report: called in the loop, never from within `perform`, with EngineReady, EngineAsleep, StepDone,
            OutOfMemory, KvExported, KvImported, EngineEnded and ClockApplied.
        stages: folder of the host's stages; None: KV is not moved.
        partition: how they share the SMs of their GPU; None: not at all.
    """

    def __init__(
        self,
        *,
        python: str,
        run_dir: Path,
        report: Callable[[Event], None],
        stages: Path | None = None,
        partition: Partition | None = None,
    ) -> None:
        self._python = python
        self._arguments = ["--stages", str(stages.absolute())] if stages else []
        self._environment = partition.environment if partition else {}
        self._parts: Parts | None = None
        if partition is not None and (cut := partition.cut) is not None:
            self._parts = Parts(cut)
            self._arguments += ["--sms", msgspec.json.encode(SmCut(*cut, parts=cut.parts)).decode()]
        self._run_dir = run_dir
        self._report = report
        self._engines: dict[str, _Engine] = {}
        self._lives: dict[_Engine, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Make the folder for the logs."""
        self._run_dir.mkdir(parents=True, exist_ok=True)

    def perform(self, order: Order) -> None:
        """Carry out an order. One to an engine that is gone is dropped: EngineEnded has told, or will."""
        match order:
            case LoadEngine():
                self._load(order)
            case UnloadEngine(model=name, at_once=at_once):
                self._unload(name, at_once)
            case (
                RunRequest(model=name)
                | StopRequest(model=name)
                | SetPlan(model=name)
                | ExportKv(model=name)
                | SleepEngine(model=name)
                | WakeEngine(model=name)
            ):
                if engine := self._engines.get(name):
                    self._share_sms(order)
                    self._pass_on(engine, order)
            case SetClock(sm_clock_mhz=asked_mhz):
                applied = ClockApplied(asked_mhz=asked_mhz, applied_mhz=0, reason="no clock control on cpu")
                asyncio.get_running_loop().call_soon(self._report, applied)
            case _:
                raise TypeError(f"vLLM engines know no order {type(order).__name__}.")

    async def close(self) -> None:
        """End every engine, and return when no process is left; nothing is reported any more."""
        self._report = _drop
        for name in list(self._engines):
            self._unload(name)
        if self._lives:
            await asyncio.wait(self._lives.values())

    def sample(self) -> DeviceSampled:
        """Return the bytes that the engines occupy; no meter tells one process's energy from another's."""
        engines = self._engines.values()
        now_s = asyncio.get_running_loop().time()
        busy = any(engine.requests for engine in engines)
        return DeviceSampled(
            state="active" if busy else "warm" if engines else "cold",
            used_bytes=sum(_resident_bytes(engine.process.pid) for engine in engines if engine.process),
            power_w=None,
            energy_j=None,
            unheard_ms={
                engine.model: 1000 * (now_s - engine.heard_s)
                for engine in engines
                if engine.heard_s is not None
            },
        )

    def requests(self) -> dict[str, int]:
        """Return by model how many requests its engine has."""
        return {name: len(engine.requests) for name, engine in self._engines.items()}

    def _load(self, order: LoadEngine) -> None:
        name = order.model.name
        if name in self._engines:
            return
        engine = self._engines[name] = _Engine(name)
        engine.orders.put_nowait(order)
        self._lives[engine] = asyncio.get_running_loop().create_task(self._live(engine), name=f"vllm {name}")

    def _unload(self, name: str, at_once: bool = False) -> None:
        if engine := self._engines.pop(name, None):
            engine.unloading, engine.at_once = True, at_once
            engine.leave.set()

    def _share_sms(self, order: Order) -> None:
        """Before an order that changes who computes on which share: tell engines their parts of the SMs."""
        if self._parts is None or not isinstance(order, RunRequest | SetPlan):
            return
        if isinstance(order, SetPlan):
            self._parts.plan(order.model, order.plan.sm_share_pct)
        computing = {name for name, engine in self._engines.items() if engine.requests or name == order.model}
        for name, part in self._parts.moved(computing).items():
            self._pass_on(self._engines[name], UseSms(*part))

    def _pass_on(self, engine: _Engine, order: EngineOrder) -> None:
        """Queue an order for the child; one that has let the queue fill up counts as dead."""
        match order:
            case RunRequest(request=request):
                engine.requests.add(request.request_id)
            case StopRequest(request_id=request_id):
                engine.requests.discard(request_id)
        try:
            engine.orders.put_nowait(order)
        except asyncio.QueueFull:
            engine.reason = f"it takes no orders: {MAX_ORDERS} are waiting"
            del self._engines[engine.model]
            engine.leave.set()

    async def _live(self, engine: _Engine) -> None:
        """Run one child from its start to its end, and report the end, however it comes about."""
        log_path = self._run_dir / f"vllm-{slug(engine.model)}.log"
        try:
            folder = tempfile.TemporaryDirectory("", "vllm-", self._run_dir, ignore_cleanup_errors=True)
            with folder as temp_dir:
                try:
                    environment = child_environment(os.environ, temp_dir) | self._environment
                    await self._run(engine, log_path, environment)
                finally:
                    self._forget(engine)  # it may take seconds to end, and takes no orders any more
                    await _ended(engine.process, 0.0 if engine.at_once else EXIT_S)
        except (OSError, msgspec.DecodeError) as error:
            engine.reason = f"{self._python} could not be started or understood: {error}"
        finally:
            self._forget(engine)
            del self._lives[engine]
            reason = "" if engine.unloading else f"{engine.reason or _cause(engine.process)}; see {log_path}"
            self._report(EngineEnded(model=engine.model, reason=reason))

    def _forget(self, engine: _Engine) -> None:
        if self._engines.get(engine.model) is engine:
            del self._engines[engine.model]
            if self._parts is not None:
                self._parts.forget(engine.model)

    async def _run(self, engine: _Engine, log_path: Path, environment: dict[str, str]) -> None:
        """Start the child and talk with it until either side has had enough.

        Closing the socket, which happens on return, is what tells the child to end.
        """
        if engine.leave.is_set():
            return
        ours, theirs = socket.socketpair()
        with ours, theirs, log_path.open("ab") as log:
            engine.process = await asyncio.create_subprocess_exec(
                *(self._python, "-m", HOST_MODULE, "--fd", str(theirs.fileno()), *self._arguments),
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,  # an interrupt from the terminal is not for the child
            )
            theirs.close()
            talk = asyncio.create_task(self._talk(engine, ours))
            leave = asyncio.create_task(engine.leave.wait())
            try:
                await asyncio.wait((talk, leave), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leave.cancel()
                talk.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talk

    async def _talk(self, engine: _Engine, ours: socket.socket) -> None:
        """Exchange orders and reports with the child until it closes its end of the socket."""
        reader, writer = await asyncio.open_connection(sock=ours)
        sender = asyncio.create_task(_send(engine.orders, writer))
        try:
            while header := await reader.read(1):
                header += await reader.readexactly(HEADER.size - 1)
                (length,) = HEADER.unpack(header)
                self._hear(engine, decode_report(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass  # killed in the middle of a report
        finally:
            sender.cancel()
            writer.transport.abort()

    def _hear(self, engine: _Engine, report: EngineReport) -> None:
        if engine.heard_s is not None or isinstance(report, EngineReady):
            engine.heard_s = asyncio.get_running_loop().time()
        match report:
            case Alive():
                return
            case EngineReady(model=name) if (
                name != engine.model and self._engines.get(engine.model) is engine
            ):
                self._engines[name] = self._engines.pop(engine.model)
                engine.model = name  # it has been given other weights
            case EngineEnded(reason=reason):
                engine.reason = reason  # its last words; reported when the process is gone
                return
            case StepDone(outputs=outputs):
                engine.requests.difference_update(each.request_id for each in outputs if each.finish_reason)
        self._report(report)


def child_environment(environ: Mapping[str, str], temp_dir: str) -> dict[str, str]:
    """Return the environment of an engine process: no hub, no usage reports, temporary files in `temp_dir`.

    Settings that would reach vLLM past its arguments (such as ``VLLM_CPU_KVCACHE_SPACE``), and those of the
    parent's Python, are left out. An engine gets half of the cores unless ``OMP_NUM_THREADS`` says otherwise:
    threads that wait for one that has lost its core to another process cost far more than they bring.
    """
    inherited = {name: value for name, value in environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    cores = len(os.sched_getaffinity(0))
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // 2)), "OMP_WAIT_POLICY": "PASSIVE"}
    fixed = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": temp_dir,
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return defaults | inherited | fixed


def _drop(event: Event) -> None:
    """Report to nobody."""


async def _send(orders: "asyncio.Queue[EngineOrder]", writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # the reading side sees the same end, and deals with it
        while True:
            writer.write(frame(await orders.get()))
            await writer.drain()


async def _ended(process: Process | None, within_s: float) -> None:
    """Return once a child has ended; kill it if it does not end by itself."""
    if process is None:
        return
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        process.kill()
        await process.wait()


def _cause(process: Process | None) -> str:
    status = process.returncode if process else None
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _resident_bytes(pid: int) -> int:
    """Return a process's resident memory; 0 once it is gone."""
    try:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return resident_pages * os.sysconf("SC_PAGE_SIZE")
