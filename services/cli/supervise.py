"""Child processes that do not outlive their parent: started, watched, restarted, stopped in order."""

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.errors import FestinaError

_PR_SET_PDEATHSIG = 1
RESTART_DELAYS_S = (0.2, 1.0, 3.0, 10.0)
STABLE_S = 10.0  # one that has run for so long starts again at the first delay


class Child:
    """One supervised process, its output appended to a log file.

    It runs in a process group of its own, so that a Ctrl-C meant for the supervisor does not reach it, and on
    Linux the kernel ends it when the supervisor dies, however that happens.
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log_file: Path) -> None:
        self.name = name
        self._argv = list(argv)
        self._env = dict(env)
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def start(self, restart: bool = True) -> None:
        """Start it; with `restart`, start it again, with growing delays, whenever it ends unasked."""
        await self._spawn()
        if restart:
            self._watcher = asyncio.create_task(self._watch())

    def expect_alive(self) -> None:
        """Raise if it has ended, with the last lines of its log.

        Raises:
            FestinaError: it has ended.
        """
        if self._process is not None and self._process.returncode is not None:
            raise FestinaError(
                f"{self.name} ended with status {self._process.returncode}: {self.last_line()} "
                f"(log: {self._log_file})"
            )

    def last_line(self) -> str:
        """Last line of the log."""
        try:
            lines = self._log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    async def stop(self, grace_s: float) -> None:
        """Ask it to end with SIGTERM, and after `grace_s` make it."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _spawn(self) -> None:
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # the same session: Linux shares cores fairly within one, not among many
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    async def _watch(self) -> None:
        tries = 0
        while not self._stopping:
            assert self._process is not None
            started = asyncio.get_running_loop().time()
            await self._process.wait()
            if asyncio.get_running_loop().time() - started > STABLE_S:
                tries = 0
            await asyncio.sleep(RESTART_DELAYS_S[min(tries, len(RESTART_DELAYS_S) - 1)])
            tries += 1
            await self._spawn()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> range:
    """Return so many ports of the loopback interface in a row that are free now.

    They lie below those that systems hand out by themselves (from 32768), so that nothing else that starts or
    connects meanwhile is given one of them.

    Raises:
        FestinaError: there seem to be none.
    """
    for _ in range(1000):
        first = random.randrange(10_000, 32_000)
        if all(port_is_free("127.0.0.1", port) for port in range(first, first + count)):
            return range(first, first + count)
    raise FestinaError(f"there are no {count} free ports in a row")


def port_is_free(host: str, port: int) -> bool:
    """Say whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
