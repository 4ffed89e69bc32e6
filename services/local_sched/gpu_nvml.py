"""Engines on a GPU whose clock and meter are driven by NVML; to the core they are engines like any others.

The GPU is read regularly, in a thread, so that no event loop waits for the driver, and less often while it
has nothing to do. Its clock is set by somebody with the right to: the clock guard, or, where a process has
the GPU to itself, that process.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from services.local_sched.clock_setters import Clocks
from services.local_sched.clocks import ClockKeeper
from services.local_sched.meter import EnergyMeter
from services.local_sched.nvml import NvmlGpu, Reading
from shared import engine as en
from shared.errors import ActuatorRefused, ConfigError, Unavailable
from shared.events import Event

log = logging.getLogger(__name__)

BUSY_S, IDLE_S = 0.1, 1.0
"""Between two readings while there is work, and while there is none."""


class Engines(Protocol):
    """The engines that run on the GPU."""

    async def start(self) -> None:
        """Get ready for orders."""

    def perform(self, order: en.Order) -> None:
        """Carry out an order."""

    async def close(self) -> None:
        """End every engine."""

    def sample(self) -> en.DeviceSampled:
        """Read what only they know."""

    def requests(self) -> dict[str, int]:
        """Return by model how many requests its engine has."""


class NvmlEngines:
    """Engines, with the clock and the meter of the GPU that they run on.

    The engines hear which clock runs: emulated ones take it for theirs.

    Args:
        make_engines: makes them, given whom to report to.
        gpu: the GPU; closed at the end.
        clocks: sets its clocks; closed at the end.
        memory_clock_mhz: memory clock to hold, one that is offered; 0 leaves it to the driver.
        cap_w: the most that the GPU draws.
        now_ms: the service's clock.
        report: told of what engines and GPU report, in the event loop.

    Raises:
        ConfigError: it has no clocks to choose, or not this memory clock.
    """

    def __init__(
        self,
        make_engines: Callable[[Callable[[Event], None]], Engines],
        *,
        gpu: NvmlGpu,
        clocks: Clocks,
        memory_clock_mhz: int = 0,
        cap_w: float,
        now_ms: Callable[[], float],
        report: Callable[[Event], None],
    ) -> None:
        offered_mhz, memory_mhz = gpu.clocks_mhz, gpu.memory_clocks_mhz
        if not offered_mhz:
            raise ConfigError(f"{gpu.name} offers no clocks to choose from; set FESTINA_DEVICE_CLOCKS=none")
        if memory_clock_mhz and memory_clock_mhz not in memory_mhz:
            raise ConfigError(f"{gpu.name} has no memory clock of {memory_clock_mhz} MHz, only {memory_mhz}")
        self.meter = EnergyMeter(cap_w)
        self.keeper = ClockKeeper(offered_mhz)
        self._gpu, self._clocks = gpu, clocks
        self._memory_clock_mhz = memory_clock_mhz
        self._now_ms = now_ms
        self._report = report
        self._engines = make_engines(self._engines_report)
        self._busy = False
        self._soon = asyncio.Event()
        self._driving: asyncio.Task[None] | None = None
        self._troubles = {"clock": "", "reading": ""}

    async def start(self) -> None:
        """Start the engines, and read the GPU from now on."""
        await self._engines.start()
        await self._look()
        self._driving = asyncio.get_running_loop().create_task(self._drive(), name="nvml")
        self._driving.add_done_callback(_tell)

    def perform(self, order: en.Order) -> None:
        """Carry out an order; clocks are the GPU's business, all else the engines'."""
        if isinstance(order, en.SetClock):
            self.keeper.ask(self._now_ms(), order.sm_clock_mhz)
            self._soon.set()
        else:
            self._engines.perform(order)

    async def close(self) -> None:
        """End the engines, and give the clock back."""
        await self._engines.close()
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.wait((self._driving,))
        try:
            await asyncio.to_thread(self._clocks.close)
        except ActuatorRefused as error:
            log.error(str(error))
        self._gpu.close()

    def sample(self) -> en.DeviceSampled:
        """Return what the engines tell, with the power and energy of the GPU's meter."""
        told = self._engines.sample()
        busy = told.state == "active"
        if busy and not self._busy:
            self._soon.set()
        self._busy = busy
        meter = self.meter
        return msgspec.structs.replace(
            told,
            power_w=meter.power_w,
            energy_j=meter.energy_j(self._now_ms()),
            energy_source=meter.source,
            meter_faults=dict(meter.faults),
        )

    def requests(self) -> dict[str, int]:
        """Return by model how many requests its engine has."""
        return self._engines.requests()

    # ---- the GPU

    async def _drive(self) -> None:
        """Read the GPU, and set its clock when it is time, for ever."""
        while True:
            wait_s = BUSY_S if self._busy or self.keeper.settling(self._now_ms()) else IDLE_S
            if (due_ms := self.keeper.due_ms) is not None:
                wait_s = min(wait_s, max(0.0, (due_ms - self._now_ms()) / 1000.0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), wait_s)
            self._soon.clear()
            await self._set_clock()
            await self._look()

    async def _set_clock(self) -> None:
        """Write the clock that is due, or renew the lease on the one that is held."""
        keeper = self.keeper
        clock_mhz, due = keeper.wanted(self._now_ms()), True
        if clock_mhz is None:
            clock_mhz, due = keeper.written_mhz, False
        if clock_mhz is None and not self._memory_clock_mhz:
            return
        refused = ""
        try:
            await asyncio.to_thread(self._clocks.hold, clock_mhz or 0, self._memory_clock_mhz)
        except ActuatorRefused as error:
            refused = str(error)
        if clock_mhz is not None and (due or refused):
            keeper.answered(self._now_ms(), clock_mhz, refused)
        self._note("clock", refused)

    async def _look(self) -> None:
        """Read the GPU: for the meter, and for the clock that runs. One that cannot be read is unknown."""
        trouble = ""
        try:
            reading = await asyncio.to_thread(self._gpu.read)
        except Unavailable as error:
            trouble = str(error)
            reading = Reading(self.keeper.real_mhz, (), idle=False, power_w=None, counter_j=None)
        self._note("reading", trouble)
        now_ms = self._now_ms()
        self.meter.read(now_ms, reading.counter_j, reading.power_w)
        news = self.keeper.read(now_ms, reading.clock_mhz, reading.limits, reading.idle)
        if news is not None and news.applied_mhz:
            self._engines.perform(en.SetClock(sm_clock_mhz=news.applied_mhz))
            self._report(news)

    def _engines_report(self, event: Event) -> None:
        if not isinstance(event, en.ClockApplied):  # their answer to the clock that they were told of
            self._report(event)

    def _note(self, what: str, trouble: str) -> None:
        if trouble and trouble != self._troubles[what]:
            log.error(trouble)
        self._troubles[what] = trouble


def _tell(driving: asyncio.Task[None]) -> None:
    """Log why a GPU is no longer driven, where nobody has ended that: its lease ends by itself."""
    if not driving.cancelled() and (error := driving.exception()):
        log.critical("the GPU is no longer driven", exc_info=error)
