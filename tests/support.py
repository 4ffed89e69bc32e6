"""What several kinds of test need: real servers, waiting, a whole pool, what a GPU says of itself."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import redis

from services.cli.pool import nats_server_argv, store_server_argv
from services.cli.supervise import free_port, free_ports
from shared.config import Common
from shared.model import GpuSummary


def bare_environ() -> dict[str, str]:
    """The environment of this process without settings of Festina's, for processes that get their own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FESTINA_")}


def gpu_summary(gpu: str, **fields: Any) -> GpuSummary:
    """What an emulated H100 with nothing free says of itself, unless it is told otherwise."""
    said: dict[str, Any] = {
        "gpu": gpu,
        "host": "h",
        "gpu_type": "h100-80gb",
        "engine": "emulated",
        "started_ms": 1.0,
        "seq": 1,
        "state": "active",
        "sm_clock_mhz": 1155,
        "total_bytes": 80 << 30,
        "free_bytes": 0,
    }
    return GpuSummary(**(said | fields))


class Servers:
    """A real NATS and a real Redis-protocol server on free ports, which a test may stop and start again.

    `nats` and `store` are further arguments of theirs.
    """

    def __init__(self, folder: Path, nats: Sequence[str] = (), store: Sequence[str] = ()) -> None:
        self.nats_port, self.store_port = free_port(), free_port()
        self._argv = {
            "nats": [*nats_server_argv(self.nats_port), *nats],
            "store": [*store_server_argv(self.store_port, folder), *store],
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def settings(self) -> Common:
        return Common(
            nats_url=f"nats://127.0.0.1:{self.nats_port}",
            redis_url=f"redis://127.0.0.1:{self.store_port}/0",
            tracing=False,
        )

    def start(self, name: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._running[name] = subprocess.Popen(self._argv[name], **quiet)

    def reload(self, name: str) -> None:
        """Have it read its configuration again."""
        self._running[name].send_signal(signal.SIGHUP)

    def stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.terminate()
        process.wait(10)

    def stop_all(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def flush(self) -> None:
        redis.Redis(port=self.store_port).flushall()


async def eventually(condition: Callable[[], bool], within_s: float = 5.0, every_s: float = 0.02) -> None:
    """Wait until `condition()` is true; fail with its name when it does not become so."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {within_s} s: {condition}"
        await asyncio.sleep(every_s)


ROUNDS = int(os.environ.get("FESTINA_RESILIENCE_ROUNDS", "1"))
"""Of what is killed and cut off: the default run is short; `make test-resilience` sets 10."""

FAST_ANSWERS = {"FESTINA_LOCAL_SCHED_PACING": "off"}
"""Tokens come as soon as the device has them: a test waits for its answers, whatever they cost."""


class RunningPool:
    """`festina up` as a person starts it, on free ports and in a folder of its own. `urls`: its gateways."""

    def __init__(
        self, folder: Path, *flags: str, gateways: int = 1, env: Mapping[str, str] | None = None
    ) -> None:
        ports = free_ports(gateways)
        self.port = ports[0]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.url = self.urls[0]
        self.folder = folder
        program = str(Path(sys.executable).parent / "festina")
        argv = [program, "up", "--port", str(self.port), "--state-dir", str(folder / "state"), *flags]
        argv += ["--gateways", str(gateways)]
        self._log = (folder / "up.log").open("ab")
        self._process = subprocess.Popen(
            argv,
            env={**bare_environ(), **FAST_ANSWERS, "FESTINA_TRACING": "0", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    @property
    def output(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")

    def wait_for_models(self, *names: str, key: str = "", within_s: float = 180.0) -> None:
        """Wait until these models are loaded."""
        deadline = time.monotonic() + within_s
        missing = set(names)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        while missing:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, f"{sorted(missing)} not ready: {self.output}"
            time.sleep(0.1)
            try:
                listed = httpx.get(self.url + "/v1/models", headers=headers, trust_env=False).json()["data"]
            except (httpx.HTTPError, json.JSONDecodeError, KeyError):
                continue
            missing = set(names) - {m["id"] for m in listed if m["state"] == "ready"}

    def pid_of(self, ident: str) -> int:
        """Process id of the service with this id."""
        for pid in self.children():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"FESTINA_ID={ident}" in environ:
                return pid
        raise AssertionError(f"no process has the id {ident}: {self.children()}")

    def children(self) -> dict[int, str]:
        """Process id -> command line of every process below `festina up`."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
        parents, commands = {}, {}
        for line in listed.stdout.splitlines()[1:]:
            pid, ppid, args = line.split(None, 2)
            parents[int(pid)], commands[int(pid)] = int(ppid), args
        found: dict[int, str] = {}
        for pid in parents:
            above = pid
            while above in parents and above != self._process.pid:
                above = parents[above]
            if above == self._process.pid and pid != above:
                found[pid] = commands[pid]
        return found

    def stop(self, within_s: float = 60.0) -> int:
        """Ctrl-C; returns the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
        finally:
            self._log.close()
