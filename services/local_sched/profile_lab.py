"""Where a model is profiled: the product's own engines, in virtual or real time, and a device's meter."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from services.local_sched.emulated import EmulatedGpu
from services.local_sched.gpu_nvml import Engines
from services.local_sched.made_up import VocabSlice
from shared import engine as en
from shared.devices import Device
from shared.errors import Unavailable
from shared.events import Event

SILENT_S = 300.0
"""An engine that reports nothing for this long, while it has work, is given up."""


class Lab(Protocol):
    """A device with its engines, and its meter and clocks where it has them."""

    async def start(self) -> None:
        """Get ready for orders."""

    def perform(self, order: en.Order) -> None:
        """Carry out an order."""

    async def heard(self) -> Event:
        """Wait for the next report."""

    def meter(self) -> tuple[float, float] | None:
        """Return (joules, ms) of the device's counter and its clock on the wall; None without a meter."""

    async def close(self) -> None:
        """End the engines."""


class VirtualLab:
    """An emulated device in virtual time: between two events no time passes for us."""

    def __init__(self, device: Device) -> None:
        vocab = VocabSlice(token_ids=(1, 2), eos_id=0)
        self._gpu = EmulatedGpu(device, vocab=vocab)
        self._now_ms = 0.0
        self._events: list[Event] = []

    async def start(self) -> None:
        """Nothing to get ready."""

    def perform(self, order: en.Order) -> None:
        """Give the device an order at the present virtual time."""
        self._gpu.order(self._now_ms, order)

    async def heard(self) -> Event:
        """Move time on to the next event."""
        while not self._events:
            wake_ms = self._gpu.wake_ms
            assert wake_ms is not None, "the profiler waits for a device that has nothing to do"
            self._now_ms = wake_ms
            self._events = self._gpu.advance(wake_ms)[::-1]
        return self._events.pop()

    def meter(self) -> None:
        """Return None: the emulated engine tells each request's energy with its step."""

    async def close(self) -> None:
        """Nothing to end."""


class EngineLab:
    """Real engines, with the meter and the clocks of their device where it has them."""

    def __init__(self, make_engines: Callable[[Callable[[Event], None]], Engines]) -> None:
        self._heard: asyncio.Queue[Event] = asyncio.Queue()
        self._engines = make_engines(self._heard.put_nowait)

    async def start(self) -> None:
        """Start the engines."""
        await self._engines.start()

    def perform(self, order: en.Order) -> None:
        """Pass an order on."""
        self._engines.perform(order)

    async def heard(self) -> Event:
        """Wait for the next report. Raises Unavailable after a long silence."""
        try:
            return await asyncio.wait_for(self._heard.get(), SILENT_S)
        except TimeoutError:
            raise Unavailable(f"the engine has reported nothing for {SILENT_S:.0f} s") from None

    def meter(self) -> tuple[float, float] | None:
        """Read the device's meter."""
        energy_j = self._engines.sample().energy_j
        return None if energy_j is None else (energy_j, time.perf_counter() * 1000)

    async def close(self) -> None:
        """End the engines."""
        await self._engines.close()
