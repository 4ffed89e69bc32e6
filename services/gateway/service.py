"""Between the API and the core: who waits for which request, and what the API may ask of the system."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

from opentelemetry.trace import Tracer

from services.gateway.auth import ApiKeys
from services.gateway.core import STOPPED, Arrived, ClientGone, Deliver, Fail, GatewayCore
from services.gateway.limits import Tenants
from services.gateway.quota import Quota
from services.gateway.tokenizers import ChatTokenizer
from shared.errors import ConfigError, InvalidRequest, Unavailable
from shared.events import Event
from shared.model import ModelSpec, Request, Tenant

Item = Deliver | Fail


class Inbox:
    """What the core has for one client call, all its choices in one bounded queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue()

    @property
    def full(self) -> bool:
        """Whether the client lags too far behind."""
        return self._queue.qsize() >= self._limit

    def put(self, item: Item | None) -> None:
        """Add an item; None says that the client has gone."""
        self._queue.put_nowait(item)

    async def get(self) -> Item | None:
        """Wait for the next item."""
        return await self._queue.get()

    def drain(self) -> list[Item | None]:
        """Return what is there already."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


class Gateway:
    """What `api.py` and `admin.py` work on.

    Args:
        core: the state machine; read here, changed only through `feed`.
        feed: gives the core an event and performs what it says; `Deliver` and `Fail` come to `route`.
        tracer: makes the spans of requests.
        keys: who may call.
        store_answers: says whether the store answers now.
        tenants, quota: how much each may call; without them there are no limits.
    """

    def __init__(
        self,
        core: GatewayCore,
        feed: Callable[[Event], None],
        tracer: Tracer,
        keys: ApiKeys,
        store_answers: Callable[[], Awaitable[bool]],
        tenants: Tenants | None = None,
        quota: Quota | None = None,
    ) -> None:
        self.settings = core.settings
        self.registry = core.registry
        self.gateway_id = core.gateway
        self.tracer = tracer
        self.keys = keys
        self.feed = feed
        self.tenants = tenants or Tenants()
        self.quota = quota or Quota(core.gateway, _no_store, lambda name, labels, value: None)
        self.draining = False
        self._core = core
        self._store_answers = store_answers
        self._inboxes: dict[str, Inbox] = {}
        self._tokenizers: dict[str, ChatTokenizer] = {}

    @property
    def inflight(self) -> int:
        """Requests without an end so far."""
        return self._core.inflight

    @property
    def listening(self) -> int:
        """Requests whose client still waits for what comes of them."""
        return len(self._inboxes)

    def new_id(self) -> str:
        """Return an id for a client call."""
        return uuid4().hex

    def check_room(self, tenant: Tenant) -> None:
        """Raise InvalidRequest (429 or 503) if no request can be taken, before work is spent on it."""
        if self.draining:
            retry_after_s = self.settings.retry_after_s
            raise InvalidRequest(503, "draining", "this gateway is stopping", retry_after_s=retry_after_s)
        full = self._core.no_room(tenant.name, tenant.weight)
        if full is not None:
            raise full
        self.quota.refuse_early(tenant)

    def submit(self, requests: Sequence[Request]) -> Inbox:
        """Give the core the choices of one call; each ends in the inbox, or by `cancel`."""
        inbox = Inbox(self.settings.stream_buffer * len(requests))
        for request in requests:
            self._inboxes[request.request_id] = inbox
            self.feed(Arrived(request))
        return inbox

    def cancel(self, request_id: str, reason: str) -> None:
        """Stop a request that nobody reads any more; harmless if it has ended."""
        if self._inboxes.pop(request_id, None) is not None:
            self.feed(ClientGone(request_id, reason))

    def stop(self, request_id: str) -> None:
        """Stop a request whose text is complete; its end still comes, with its report, within 100 ms."""
        if request_id in self._inboxes:
            self.feed(ClientGone(request_id, STOPPED))

    def route(self, item: Item) -> None:
        """Perform `Deliver` and `Fail`: bring them to the client's inbox."""
        inbox = self._inboxes.get(item.request_id)
        if inbox is None:
            return
        ended = isinstance(item, Fail) or item.end is not None
        if not ended and inbox.full:
            reason = "the client reads too slowly"
            inbox.put(Fail(item.request_id, 503, "client_too_slow", reason))
            # not at once: this runs while the core takes another event
            asyncio.get_running_loop().call_soon(self.cancel, item.request_id, reason)
            return
        if ended:
            del self._inboxes[item.request_id]
        inbox.put(item)

    async def tokenizer(self, model: ModelSpec) -> ChatTokenizer:
        """Return the model's tokenizer, read on first use. Raises InvalidRequest (503) if it cannot be."""
        found = self._tokenizers.get(model.tokenizer)
        if found is None:
            try:
                found = await asyncio.to_thread(ChatTokenizer.load, model.tokenizer)
            except ConfigError as error:
                message = f"the tokenizer of {model.name!r} cannot be read: {error}"
                raise InvalidRequest(503, "tokenizer_unavailable", message) from None
            self._tokenizers[model.tokenizer] = found
        return found

    async def missing(self) -> list[str]:
        """Return what keeps this gateway from serving: of ``bus``, ``store``, ``gpu``, ``draining``."""
        found = [] if self._core.bus_up else ["bus"]
        if not await self._store_answers():
            found.append("store")
        if not self.registry.live_gpus():
            found.append("gpu")
        return [*found, "draining"] if self.draining else found


async def _no_store(script: str, keys: list[str], args: list[Any]) -> Any:
    raise Unavailable("no store is given")
