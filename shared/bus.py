"""The bus: NATS, with publishing that never blocks a core and reconnecting that never gives up."""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.config import Common
from shared.errors import Unavailable

log = logging.getLogger("festina.bus")

CONNECT_WITHIN_S = 10.0  # for a server that starts with us
BUFFERED_BYTES = 4 << 20
RETRY_S = 0.05
OUTBOX_MESSAGES = 65_536  # beyond this the oldest go; the cores send again what is not answered


class Bus:
    """One connection to NATS.

    `publish` writes at once into the client's buffer, while there is room in it; what finds none, because the
    connection is down for long or the server slow, waits in a bounded outbox: every protocol on the bus asks
    again for what was not answered, so a lost message costs time, never a request.
    """

    def __init__(self, on_lost: Callable[[], None], on_restored: Callable[[], None]) -> None:
        self._client = Client()
        self._on_lost = on_lost
        self._on_restored = on_restored
        self._outbox: deque[tuple[str, bytes]] = deque(maxlen=OUTBOX_MESSAGES)
        self._retry: asyncio.TimerHandle | None = None
        self._last_error = ""

    async def connect(self, settings: Common, name: str) -> None:
        """Connect, waiting some seconds for a server that is still starting.

        Raises:
            Unavailable: no server answers, or it refuses the credentials.
        """
        options: dict[str, Any] = {
            "servers": [settings.nats_url],
            "name": name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.25,
            "ping_interval": 1,  # with the next line: a cut without a word is noticed within 3 s
            "max_outstanding_pings": 2,
            "pending_size": 2 * BUFFERED_BYTES,
            "skip_subject_validation": True,  # ours are made in one place, of checked ids
            "disconnected_cb": self._lost,
            "reconnected_cb": self._restored,
            "error_cb": self._error,
            "user": settings.nats_user or None,
            "password": settings.nats_password or None,
            "token": settings.nats_token or None,
            "user_credentials": settings.nats_credentials or None,
        }
        if settings.nats_ca_file:
            options["tls"] = ssl.create_default_context(cafile=settings.nats_ca_file)
        try:
            # the client itself tries again and again, at first as later
            await asyncio.wait_for(self._client.connect(**options), CONNECT_WITHIN_S)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            where = settings.nats_url.rpartition("@")[2]  # never show a password
            raise Unavailable(
                f"no NATS server at {where}: {self._last_error or error}; check FESTINA_NATS_URL, "
                "FESTINA_NATS_USER, FESTINA_NATS_PASSWORD and FESTINA_NATS_CA_FILE"
            ) from error

    async def subscribe(self, subject: str, queue: str, handler: Callable[[bytes], None]) -> None:
        """Call `handler` with the payload of each message on `subject`; with `queue`, one replica gets it."""

        async def received(message: Msg) -> None:
            handler(message.data)

        await self._client.subscribe(subject, queue=queue, cb=received)

    async def flush(self) -> None:
        """Wait until the server has taken all that was sent, subscriptions among it. Raises Unavailable."""
        try:
            await self._client.flush()
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"the NATS server has gone silent: {error}") from error

    def publish(self, subject: str, payload: bytes) -> None:
        """Send a message, without waiting: what cannot be written now is written later, in order."""
        self._outbox.append((subject, payload))
        if self._retry is None:
            self._write()

    async def close(self) -> None:
        """Send what is queued, for a second at most, and close."""
        deadline = asyncio.get_running_loop().time() + 1.0
        while self._outbox and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if self._retry is not None:
            self._retry.cancel()
        if self._client.is_connected:
            try:
                await self._client.flush(timeout=1)
            except (nats.errors.Error, OSError) as error:
                log.warning("bus closed before all was sent", extra={"error": str(error)})
        await self._client.close()

    def _write(self) -> None:
        """Move messages from the outbox into the client's buffer, and come again if it is full."""
        self._retry = None
        while self._outbox:
            if self._client.pending_data_size > BUFFERED_BYTES:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._write)
                return
            subject, payload = self._outbox.popleft()
            try:
                # With room in its buffer the client has nothing to wait for: its coroutine ends at once, and
                # a task for it would only cost time. What it may wait for at its end is a flush, which comes.
                self._client.publish(subject, payload).send(None)
            except StopIteration:
                continue
            except nats.errors.MaxPayloadError:
                log.error("message too large for the bus", extra={"subject": subject, "bytes": len(payload)})
            except nats.errors.Error as error:
                log.warning("not sent: the bus is closed", extra={"subject": subject, "error": str(error)})

    async def _lost(self) -> None:
        log.warning("bus lost")
        self._on_lost()

    async def _restored(self) -> None:
        log.warning("bus restored")
        self._on_restored()

    async def _error(self, error: Exception) -> None:
        told = str(error) or type(error).__name__
        if not isinstance(error, OSError) or not self._last_error:  # its word tells more than its reset
            self._last_error = told
        log.warning("bus error", extra={"error": told})
