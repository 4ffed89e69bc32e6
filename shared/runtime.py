"""The shell that every service runs in: decode -> core.step -> perform the actions -> publish.

The core decides, the shell does. Actions that are common to all services (publish, store, span, count) are
performed here; each service's ``main.py`` adds performers for its own.
"""

import asyncio
import gc
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shared import events as ev
from shared.bus import Bus
from shared.clock import now_ms
from shared.config import Common
from shared.errors import LutRefused, Unavailable
from shared.known_models import KnownModels
from shared.lut import unpack
from shared.metrics import Metrics
from shared.model import GpuSummary, ModelSpec, Placement
from shared.recording import recorder
from shared.store import Store
from shared.subjects import (
    GPU_KEYS,
    LUT_KEYS,
    MODEL_KEYS,
    PLACEMENT_KEY,
    ROUTES,
    lut_key,
    subject_of,
    subscriptions,
)
from shared.tracing import Tracing

log = logging.getLogger("festina")

HELD_MESSAGES = 65_536
REREAD_S = 5.0  # after the bus is back the store is read at once, and again after so long
REREAD_TRIES = 60  # while the store is away as well

Performer = Callable[[Any], None]


class Shell:
    """One service: its connections, and the loop that feeds its core.

    Args:
        service: name of the service, as in `shared/subjects.py`.
        ident: id of this replica, GPU or host; its own subjects carry it.
    """

    def __init__(self, service: str, ident: str, settings: Common) -> None:
        self.service = service
        self.ident = ident or f"{socket.gethostname()}-{os.getpid()}"
        self.settings = settings
        self.bus = Bus(lambda: self.heard(ev.BusLost()), lambda: self.heard(ev.BusRestored()))
        self.store = Store(settings)
        self.metrics = Metrics(service, self.ident)
        self.tracing = Tracing(settings, service, self.ident)
        self.stopping = asyncio.Event()
        self.failed = False
        self._core: ev.Core | None = None
        self._held: deque[ev.Message] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._luts: dict[str, bytes] = {}  # tables that the core has had, by their keys
        self._reading: asyncio.Task[None] | None = None
        self._models = KnownModels()
        self._rereading: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._recorder = recorder(service, self.ident)
        self._performers: dict[type, Performer] = {
            ev.Send: self._send,
            ev.Put: lambda a: self.store.put(a.key, a.value, a.ttl_ms),
            ev.Delete: lambda a: self.store.delete(a.key),
            ev.Span: self.tracing.export,
            ev.Count: lambda a: self.metrics.count(a.name, a.labels, a.value),
        }

    async def open(self) -> None:
        """Connect to bus and store, and show metrics.

        Raises:
            Unavailable: one of them does not answer.
        """
        await self.bus.connect(self.settings, f"{self.service}/{self.ident}")
        await self.store.connect()
        self.metrics.show("started_s", {}, time.time())
        if self.settings.metrics_port >= 0:
            port = self.metrics.serve(self.settings.metrics_host, self.settings.metrics_port)
            log.info("metrics", extra={"port": port})

    async def start(self, core: ev.Core, performers: Mapping[type, Performer]) -> None:
        """Give the core its subscriptions and what the store knows; from here on it hears and is woken.

        What comes from the bus before the store has been read waits until then: a scheduler must not turn a
        request away because it has not heard of its model yet.

        Raises:
            Unavailable: the store or the bus is away.
        """
        self._core = core
        self._performers.update(performers)
        held = self._held = deque(maxlen=HELD_MESSAGES)
        for subject, queue, message_type in subscriptions(self.service, self.ident):
            await self.bus.subscribe(subject, queue, self._receiver(message_type))
        await self.bus.flush()  # nothing told is missed from here on; what was told before is read now
        self.feed(ev.Tick())
        await self._restore()
        if self._rereading is None:
            self._rereading = asyncio.create_task(self._reread(started=True))
        self._held = None
        for message in held:
            self.heard(message)
        gc.collect()
        gc.freeze()  # what has been made up to now stays; looking through it again and again costs latency
        log.info("started", extra={"service": self.service, "id": self.ident})

    async def _restore(self) -> None:
        """Tell the core what the store knows, as the messages it would have heard had it been here."""
        if self.service in ROUTES[ev.LutStored].readers:
            await self._read_luts(LUT_KEYS)
        for model in await self.store.read_all(MODEL_KEYS, ModelSpec):
            self._retell(ev.ModelRegistered(model=model))
        await self._reread_placement()
        for summary in await self.store.read_all(GPU_KEYS, GpuSummary):
            self._retell(ev.SummaryChanged(summary=summary))

    async def _reread_placement(self) -> None:
        placement = await self.store.read(PLACEMENT_KEY, Placement)
        if placement is not None:
            self._retell(ev.PlacementChanged(placement=placement))

    async def _reread(self, started: bool = False) -> None:
        """Tell the core what has changed while it could hear nothing, as the messages it has missed.

        The store is read twice; `KnownModels.news` says why.

        Args:
            started: it could not hear because it was not there. What has been stored since it read is looked
                for a while later: a model or placement may be told first. Tables are stored, then told.
        """
        missing: set[str] | None = None
        if started:
            await asyncio.sleep(REREAD_S)
        for _ in range(REREAD_TRIES):
            try:
                if not started and self.service in ROUTES[ev.LutStored].readers:
                    await self._read_luts(LUT_KEYS)
                missing = await self._reread_models(missing)
                await self._reread_placement()
            except Unavailable as error:
                log.warning("not read again yet", extra={"error": str(error)})
                await asyncio.sleep(REREAD_S)
                continue
            if missing is None:
                return
            await asyncio.sleep(REREAD_S)

    async def _reread_models(self, missing: set[str] | None) -> set[str] | None:
        """Tell of models added and changed, and of those gone that were `missing` at the look before.

        Returns those that are missing now; None after the second look.
        """
        told, missing_now = self._models.news(await self.store.read_all(MODEL_KEYS, ModelSpec), missing)
        for message in told:
            self._retell(message)
        return missing_now if missing is None else None

    def _retell(self, message: ev.Message) -> None:
        if self.service in ROUTES[type(message)].readers:
            self.heard(message)

    def _note(self, event: ev.Message | ev.Event) -> None:
        """Keep in step with what the core knows of the models."""
        self._models.note(event)
        if isinstance(event, ev.BusRestored):
            if self._rereading is not None:
                self._rereading.cancel()
            self._rereading = asyncio.create_task(self._reread())

    def feed(self, event: ev.Message | ev.Event) -> None:
        """Let the core take one event, and do what it says."""
        assert self._core is not None, "start() comes before feed()"
        at_ms = now_ms()
        actions = self._core.step(at_ms, event)
        if self._recorder is not None:
            self._recorder.write(at_ms, event, actions)
        for action in actions:
            self._performers[type(action)](action)
        self._arm()

    async def close(self) -> None:
        """Leave: everything queued goes out first."""
        if self._timer is not None:
            self._timer.cancel()
        if self._rereading is not None:
            self._rereading.cancel()
        await self.bus.close()
        await self.store.close()
        self.metrics.close()
        if self._recorder is not None:
            self._recorder.close()
        await asyncio.to_thread(self.tracing.close)
        log.info("stopped", extra={"service": self.service, "id": self.ident})

    async def _read_luts(self, prefix: str) -> None:
        """Hand the core the stored look-up tables below `prefix` that it has not had yet."""
        try:
            found = await self.store.read_bytes(prefix)
        except Unavailable as error:
            log.warning("look-up tables not read", extra={"error": str(error)})
            return
        for key, packed in found.items():
            if self._luts.get(key) == packed:
                continue
            self._luts[key] = packed
            try:
                unpack(packed)
            except LutRefused as error:
                log.warning("look-up table refused", extra={"key": key, "error": str(error)})
                self.metrics.count("luts_refused", {"key": key})
                continue
            self.heard(ev.LutRead(packed=packed))

    def _receiver(self, message_type: type[ev.Message]) -> Callable[[bytes], None]:
        decoder = msgspec.msgpack.Decoder(message_type)

        def receive(payload: bytes) -> None:
            try:
                message = decoder.decode(payload)
            except msgspec.DecodeError as error:
                # a newer or broken peer; one bad message must not take the service down
                log.error("undecodable message", extra={"type": message_type.__name__, "error": str(error)})
                self.metrics.count("undecodable_messages", {"type": message_type.__name__})
                return
            if isinstance(message, ev.LutStored):  # too large for the bus: it is in the store
                key = lut_key(message.gpu_type, message.model)
                self._reading = asyncio.create_task(self._read_luts(key))
                return
            self._models.hear(message)
            if self._held is None:
                self.heard(message)
            else:
                self._held.append(message)

        return receive

    def heard(self, event: ev.Message | ev.Event) -> None:
        """Feed the core from a callback. A broken invariant ends the process; its state is rebuilt."""
        if self._core is None:
            return
        self._note(event)
        try:
            self.feed(event)
        except Exception:
            log.exception("core broke", extra={"event": repr(event)[:2000]})
            self.failed = True
            self.stopping.set()

    def _send(self, action: ev.Send) -> None:
        self.bus.publish(subject_of(type(action.message), action.to), self._encoder.encode(action.message))

    def _arm(self) -> None:
        assert self._core is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_ms = self._core.wake_ms
        if wake_ms is not None:
            # The loop's timers count whole ms: rounded down, the core would be asked again and again.
            delay_s = math.ceil(max(0.0, wake_ms - now_ms())) / 1000.0
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.heard, ev.Tick())


async def wait_for_stop(shell: Shell, stop: asyncio.Event) -> bool:
    """Wait until the service is told to stop, or its core breaks; returns True for the former."""
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(shell.stopping.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    return not shell.failed
