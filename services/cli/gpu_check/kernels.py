"""A process of the engine's environment that runs kernels on the card as it is told (`gpu_kernels.py`)."""

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import FestinaError

ROOT = Path(__file__).resolve().parents[3]
MODULE = "services.local_sched.gpu_kernels"
NO_DEVICE = 3
"""The process's status where there is no CUDA device."""
START_S, SPARE_S, END_S = 90.0, 30.0, 10.0
"""For a process to have its context, for an answer beyond the time that was asked for, and to end."""


class Skipped(FestinaError):
    """A step that cannot run here; the message says why."""


class Ran(msgspec.Struct, frozen=True):
    """A kernel that ran over and over: what one run reads and computes, and how many there were."""

    runs: int
    ran_s: float
    n_bytes: int = 0
    flop: int = 0

    @property
    def ms(self) -> float:
        """One run."""
        return 1000.0 * self.ran_s / self.runs

    @property
    def gb_per_s(self) -> float:
        """Bytes read or copied."""
        return self.n_bytes * self.runs / self.ran_s / 1e9

    @property
    def tflop_per_s(self) -> float:
        """Computed."""
        return self.flop * self.runs / self.ran_s / 1e12


class Kernels:
    """The process, once it is started. Any answer may be one of these errors.

    Args:
        python: interpreter of the engine's environment.
        uuid: the card.

    Raises:
        Skipped: there is no such environment, or no CUDA device.
        FestinaError: it died, does not answer, or could not do it.
    """

    def __init__(self, python: str, uuid: str) -> None:
        self._argv = [python, "-m", MODULE]
        self._uuid = uuid
        self._answers: queue.Queue[str] = queue.Queue()
        self._for_s = 0.0
        self.device: dict[str, Any] = {}

    def start(self) -> None:
        """Start it; returns when it has its context."""
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            self._process = subprocess.Popen(
                self._argv,
                cwd=ROOT,
                env=ours | {"CUDA_VISIBLE_DEVICES": self._uuid},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
            )
        except OSError as error:
            self._said.close()
            raise Skipped(f"not a CUDA device: no engine environment ({error})") from None
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.device = self.ask(do="device", within_s=START_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it, and its context."""
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._said.close()

    def ask(self, *, within_s: float = SPARE_S, **order: Any) -> dict[str, Any]:
        """Give an order, and return the answer."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its status says why
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        return self._answer(within_s)

    def begin(self, **order: Any) -> None:
        """Give an order to run something for ``for_s``; returns when it has begun."""
        self._for_s = order["for_s"]
        self.ask(**order)

    def ended(self) -> Ran:
        """Wait for what has begun."""
        return msgspec.convert(self._answer(self._for_s + SPARE_S), Ran)

    def run(self, **order: Any) -> Ran:
        """Run something, and wait for its end."""
        self.begin(**order)
        return self.ended()

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._answers.put(line)
        self._answers.put("")

    def _answer(self, within_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise FestinaError(f"the kernels' process does not answer within {within_s:.0f} s") from None
        if not line:
            status = self._process.wait()
            self._said.seek(0)
            last = (self._said.read().strip().splitlines() or ["no message"])[-1]
            if status == NO_DEVICE:
                raise Skipped(last)
            raise FestinaError(f"the kernels' process has ended with status {status}: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise FestinaError(answer["error"])
        return answer
