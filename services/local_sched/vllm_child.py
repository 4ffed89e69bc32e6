"""One child process that holds a vLLM engine: its start, the talk with it, and its end."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.local_sched.vllm_ext.wire import HEADER, EngineOrder, EngineReport, decode_report, frame
from shared.engine import LoadEngine
from shared.model import slug

HOST_MODULE = "services.local_sched.vllm_ext.host"

MAX_ORDERS = 65_536
"""Orders on their way to one engine. The core gives an engine far fewer, even while it loads."""

EXIT_S = 5.0
"""A child gets this long to end by itself before it is killed."""


@dataclass(eq=False)
class Child:
    """The orders on their way to it, the requests it has, and why it ended, once that is known.

    Args:
        load: the load order that it serves by now.
        leave: set when it is to end.
        unloading: that was ordered; at_once: and it gets no time for it.
        quiet: nobody counts on it any more, so its end is not reported.
        waking: it was asleep, and has not answered yet.
        heard_s: when it was last heard, by the loop's clock; None before it has loaded.
    """

    load: LoadEngine
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    orders: asyncio.Queue[EngineOrder] = field(default_factory=lambda: asyncio.Queue(MAX_ORDERS))
    requests: set[str] = field(default_factory=set)
    process: Process | None = None
    reason: str = ""
    unloading: bool = False
    at_once: bool = False
    quiet: bool = False
    waking: bool = False
    heard_s: float | None = None

    @property
    def model(self) -> str:
        """The model that it serves."""
        return self.load.model.name

    @property
    def resident_bytes(self) -> int:
        """Its resident memory; 0 before it is there, and once it is gone."""
        try:
            pid = self.process.pid if self.process else 0
            resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return resident_pages * os.sysconf("SC_PAGE_SIZE")

    async def live(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        run_dir: Path,
        *,
        hear: Callable[[EngineReport], None],
        leaving: Callable[[], None],
    ) -> str:
        """Run the process from its start to its end; returns why it ended, empty if that was ordered.

        Args:
            command: interpreter and arguments, less the socket.
            environment: what it is told beside this process's own environment.
            run_dir: gets its log, and its temporary files while it lives.
            hear: told of what it reports.
            leaving: called when it takes no orders any more; it may take seconds until it has ended.
        """
        log_path = run_dir / f"vllm-{slug(self.model)}.log"
        python = command[0]
        try:
            with tempfile.TemporaryDirectory("", "vllm-", run_dir, ignore_cleanup_errors=True) as temp_dir:
                try:
                    all_told = {**child_environment(os.environ, temp_dir), **environment}
                    await self._run(command, log_path, all_told, hear)
                finally:
                    leaving()
                    await _ended(self.process, 0.0 if self.at_once else EXIT_S)
        except (OSError, msgspec.DecodeError) as error:
            self.reason = f"{python} could not be started or understood: {error}"
        return "" if self.unloading else f"{self.reason or _cause(self.process)}; see {log_path}"

    async def _run(
        self,
        command: Sequence[str],
        log_path: Path,
        environment: dict[str, str],
        hear: Callable[[EngineReport], None],
    ) -> None:
        """Start the process and talk with it until either side has had enough.

        Closing the socket, which happens on return, is what tells the process to end.
        """
        if self.leave.is_set():
            return
        ours, theirs = socket.socketpair()
        with ours, theirs, log_path.open("ab") as log:
            python, *arguments = command
            self.process = await asyncio.create_subprocess_exec(
                *(python, "-m", HOST_MODULE, "--fd", str(theirs.fileno()), *arguments),
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
            )
            theirs.close()
            talk = asyncio.create_task(self._talk(ours, hear))
            leave = asyncio.create_task(self.leave.wait())
            try:
                await asyncio.wait((talk, leave), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leave.cancel()
                talk.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talk

    async def _talk(self, ours: socket.socket, hear: Callable[[EngineReport], None]) -> None:
        """Exchange orders and reports with the process until it closes its end of the socket."""
        reader, writer = await asyncio.open_connection(sock=ours)
        sender = asyncio.create_task(_send(self.orders, writer))
        try:
            while header := await reader.read(1):
                header += await reader.readexactly(HEADER.size - 1)
                (length,) = HEADER.unpack(header)
                hear(decode_report(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # killed in the middle of a report, or of an order
        finally:
            sender.cancel()
            writer.transport.abort()


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
