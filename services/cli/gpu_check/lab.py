"""The card that `make gpu-check` is about, and how its steps go about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.gpu_check.kernels import Kernels, Ran, Skipped
from services.cli.gpu_check.watched import Watched, watch
from services.local_sched.host_facts import HostFacts
from services.local_sched.nvml import NvmlGpu
from shared.devices import Device

LATE_S = 0.2
"""A kernel runs for so much longer than it is watched: whoever watches may be late."""


@dataclass
class Lab:
    """A card, and how to go about it.

    Args:
        gpu: the card.
        device: the row of the device table that Festina takes it for, whose model is held against it.
        host: what the preflight has found.
        state_dir: where the small real model is, and engines have their logs.
        clock_guard: socket of the clock guard; empty: clocks are set by this process.
        allow_clocks: clocks may be changed.
        pace: every span of time is so many times as long; below 1 for tests.
        no_device: why kernels cannot run on it, once that is known.
    """

    gpu: NvmlGpu
    device: Device
    host: HostFacts
    state_dir: Path = Path(".festina")
    clock_guard: str = ""
    allow_clocks: bool = False
    pace: float = 1.0
    no_device: str = ""

    @contextmanager
    def kernels(self) -> Iterator[Kernels]:
        """Give a process with a context on the card. Raises Skipped: there is no CUDA device."""
        if self.no_device:
            raise Skipped(self.no_device)
        process = Kernels(self.host.engine.python, self.gpu.uuid)
        try:
            process.start()
        except Skipped as why:
            self.no_device = str(why)  # to find out takes seconds
            raise
        try:
            yield process
        finally:
            process.close()

    def watch(self, for_s: float, every_s: float = 0.1) -> Watched:
        """Read the card over and over for a while."""
        return watch(self.gpu, for_s * self.pace, every_s * self.pace, self.device.power_cap_w)

    def watch_running(self, kernels: Kernels, for_s: float, **order: Any) -> tuple[Ran, Watched]:
        """Watch the card while a kernel runs, from when it is warm."""
        kernels.begin(do="run", for_s=1.1 * for_s * self.pace + LATE_S, **order)
        watched = self.watch(for_s)
        return kernels.ended(), watched

    def run(self, kernels: Kernels, for_s: float, **order: Any) -> Ran:
        """Run something for a while, unwatched."""
        return kernels.run(for_s=for_s * self.pace, **order)
