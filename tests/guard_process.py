"""The clock guard as a process of its own, on the stub NVML, and holders that are others."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from nvml import UUIDS, StubNvml

HOLDER = """
import sys, time
from services.local_sched.clock_setters import GuardedClocks
clocks = [GuardedClocks(sys.argv[1], uuid) for uuid in sys.argv[2:]]
for each in clocks:
    each.hold(1005, 0)
print("held", flush=True)
time.sleep(60)
"""


class Guard:
    """The guard's process, for GPUs 0 to 2 of the stub's four."""

    def __init__(self, nvml: StubNvml, folder: Path, **settings: str) -> None:
        self._nvml, self._settings = nvml, settings
        self.socket = folder / "clocks.sock"
        self.log = folder / "guard.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        names = {"gpus": ",".join(UUIDS[:3]), "socket": str(self.socket), **self._settings}
        env = {f"FESTINA_CLOCK_GUARD_{name.upper()}": value for name, value in names.items()}
        argv = [sys.executable, "-m", "services.local_sched.clock_guard"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, env={**os.environ, **self._nvml.env, **env}, stderr=log)
        wait_for(lambda: self.process.poll() is not None or self._listens())

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(5)
        made.connect(str(self.socket))
        return made

    def holder(self, *uuids: str) -> subprocess.Popen[bytes]:
        """Another process that holds GPUs at 1005 MHz, and does not renew its leases of 5 s."""
        argv = [sys.executable, "-c", HOLDER, str(self.socket), *uuids]
        child = subprocess.Popen(argv, env={**os.environ, **self._nvml.env}, stdout=subprocess.PIPE)
        self.children.append(child)
        assert child.stdout.readline() == b"held\n"
        return child

    def logged(self, message: str) -> list[dict]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["message"] == message]

    def _listens(self) -> bool:
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Kill what still runs of it and its holders."""
        for process in (self.process, *self.children):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            if process is not None and process.stdout:
                process.stdout.close()


def wait_for(condition, within_s: float = 5.0) -> float:
    """Wait until something is so; returns the seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"still not so after {within_s} s"
        time.sleep(0.01)
    return time.monotonic() - started
