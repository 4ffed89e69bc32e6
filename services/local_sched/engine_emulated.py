"""The emulated GPU in real time: the pure device of `emulated.py` behind asyncio timers.

The device keeps exact device time. A timer that fires late makes reports late, never steps longer: `advance`
then goes through everything that was due, in order.
"""

import asyncio
from collections.abc import Callable

from services.local_sched.emulated import EmulatedGpu
from shared.engine import DeviceSampled, Order
from shared.events import Event

LOOP_TICK_S = 0.001
"""Finest timer of the event loop. Device time that is sped up must not be rounded up to it at every step."""


class EmulatedEngines:
    """Takes orders for an emulated device and reports what it does; the same surface as the vLLM engines.

    Args:
        gpu: the device.
        now_ms: the service's clock.
        report: called in the event loop with each event, in order of device time; it may call `perform`.
        speedup: device time passes this much faster than `now_ms`; for benchmarks of everything else.
    """

    def __init__(
        self,
        *,
        gpu: EmulatedGpu,
        now_ms: Callable[[], float],
        report: Callable[[Event], None],
        speedup: float = 1.0,
    ) -> None:
        start_ms = now_ms()

        def device_ms() -> float:
            return start_ms + (now_ms() - start_ms) * speedup

        self._gpu = gpu
        self._speedup = speedup
        self._now_ms = device_ms
        self._report = report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_ms: float | None = None

    async def start(self) -> None:
        """Start the device's time and energy count."""
        self._loop = asyncio.get_running_loop()
        self._run()

    def perform(self, order: Order) -> None:
        """Give the device an order; call it in the event loop, between `start` and `close`."""
        assert self._loop is not None, "perform() needs a started engine"
        self._gpu.order(self._now_ms(), order)
        self._set_timer()

    def sample(self) -> DeviceSampled:
        """Read the device; what was due is reported first, so call it from outside `report`."""
        self._run()
        return self._gpu.sample(self._now_ms())

    def requests(self) -> dict[str, int]:
        """Return by model how many requests its engine has."""
        return {name: len(engine.sequences) for name, engine in self._gpu.engines.items()}

    async def close(self) -> None:
        """Stop the device's time; nothing is reported any more."""
        self._loop = None
        self._cancel_timer()

    def _run(self) -> None:
        """Bring the device up to now, report, and sleep until something is next due."""
        self._cancel_timer()
        for event in self._gpu.advance(self._now_ms()):
            self._report(event)
        self._set_timer()

    def _set_timer(self) -> None:
        wake_ms = self._gpu.wake_ms
        if self._loop is None or wake_ms is None or wake_ms == self._timer_ms:
            return
        self._cancel_timer()
        self._timer_ms = wake_ms
        delay_s = max(0.0, wake_ms - self._now_ms()) / (1000.0 * self._speedup)
        if self._speedup > 1.0 and delay_s < LOOP_TICK_S:
            self._timer = self._loop.call_soon(self._run)
        else:
            self._timer = self._loop.call_later(delay_s, self._run)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_ms = None
