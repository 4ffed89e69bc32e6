"""Attempts on their way through the global scheduler, and the answers about them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from shared import events as ev
from shared.model import Request
from shared.overload import has_room, turns


@dataclass(slots=True)
class Refusal:
    """A GPU's refusal of an attempt, and when it came."""

    message: ev.Refused
    at_ms: float


@dataclass(slots=True)
class Ask:
    """One attempt to be placed.

    Args:
        heard_ms: when the gateway's message came.
        span_ms: where the next trace span starts.
        refused: by GPU, its refusal of the attempt.
        since_ms: since when it has been waiting for its model; None while it does not.
    """

    request: Request
    excluded: tuple[str, ...]
    heard_ms: float
    span_ms: float
    refused: dict[str, Refusal] = field(default_factory=dict)
    since_ms: float | None = None

    def waited_ms(self, now_ms: float) -> float:
        """Return how long ago the request reached its gateway."""
        return self.request.waited_ms + now_ms - self.heard_ms

    def request_as_of(self, now_ms: float) -> Request:
        """Return the request with its `waited_ms` of now, as must be sent."""
        return msgspec.structs.replace(self.request, waited_ms=self.waited_ms(now_ms))

    def deferred(self, scheduler: str) -> ev.Send:
        """Tell the gateway that the attempt is being kept."""
        message = ev.Deferred(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            scheduler=scheduler,
            reason="model_loading",
        )
        return ev.Send(to=self.request.gateway, message=message)

    def rejected(
        self,
        now_ms: float,
        status: int,
        code: str,
        message: str,
        retry_after_s: float,
        attributes: dict[str, object],
    ) -> list[ev.Action]:
        """Tell the gateway that the attempt cannot be placed; only 429 and 503 are worth another try.

        Args:
            attributes: of the span that tells the decision.
        """
        answer = ev.Rejected(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            status=status,
            code=code,
            message=message,
            retry_after_s=retry_after_s if status in (429, 503) else None,
        )
        return [
            ev.Send(to=self.request.gateway, message=answer),
            ev.Count(name="rejections", labels={"code": code}),  # no model: it may be any string here
            *self.span(now_ms, {"festina.reason": code, **attributes}, error=message),
        ]

    def span(self, now_ms: float, attributes: dict[str, object], error: str = "") -> Iterator[ev.Span]:
        """Yield the span of the decision just made, if the request is traced."""
        request, start_ms = self.request, self.span_ms
        self.span_ms = now_ms
        if request.traceparent:
            common = {
                "festina.request_id": request.request_id,
                "festina.attempt": request.attempt,
                "festina.model": request.model,
                "festina.tenant": request.tenant,
            }
            yield ev.Span(
                name="global.dispatch",
                traceparent=request.traceparent,
                start_ms=start_ms,
                end_ms=now_ms,
                attributes=common | attributes,
                error=error,
            )


class WaitingRoom:
    """The attempts that wait for their model, in the order in which they came; also by model."""

    def __init__(self) -> None:
        self._asks: dict[str, Ask] = {}
        self._by_model: dict[str, dict[str, Ask]] = {}
        self._held: Counter[str] = Counter()  # by tenant
        self._weights: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def get(self, request_id: str) -> Ask | None:
        """Return the waiting attempt of a request."""
        return self._asks.get(request_id)

    def has_room(self, request: Request, places: int) -> bool:
        """Say whether one more request of this tenant may wait, where there are so many places."""
        return has_room(self._held, self._weights, request.tenant, request.tenant_weight, places)

    def enter(self, now_ms: float, ask: Ask) -> None:
        """Let an attempt wait from now on."""
        ask.since_ms = now_ms
        self._held[ask.request.tenant] += 1
        self._weights[ask.request.tenant] = ask.request.tenant_weight
        self._asks[ask.request.request_id] = ask
        self._by_model.setdefault(ask.request.model, {})[ask.request.request_id] = ask

    def leave(self, ask: Ask) -> None:
        """Let an attempt wait no longer; nothing happens if it did not."""
        if ask.since_ms is None:
            return
        ask.since_ms = None
        request_id, model, tenant = ask.request.request_id, ask.request.model, ask.request.tenant
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant], self._weights[tenant]
        del self._asks[request_id]
        del self._by_model[model][request_id]
        if not self._by_model[model]:
            del self._by_model[model]

    def models(self) -> list[str]:
        """Return the models that are waited for."""
        return list(self._by_model)

    def of(self, model: str) -> list[Ask]:
        """Return the attempts that wait for a model, in order; tenants take turns."""
        asks = list(self._by_model.get(model, {}).values())
        if len(self._held) < 2:
            return asks
        return [asks[i] for i in turns([(ask.request.tenant, ask.request.tenant_weight) for ask in asks])]

    def oldest(self) -> tuple[float, Ask] | None:
        """Return the attempt that has waited longest, and since when."""
        ask = next(iter(self._asks.values()), None)
        if ask is None:
            return None
        assert ask.since_ms is not None
        return ask.since_ms, ask


@dataclass(slots=True)
class Sent:
    """One attempt handed to a GPU, which may still refuse it."""

    ask: Ask
    gpu: str
    submit: ev.Submit
    sent_ms: float


class SentBook:
    """The attempts handed out lately, by request; bounded in time and number, the oldest go first."""

    def __init__(self, remember_ms: float, max_remembered: int) -> None:
        self._remember_ms = remember_ms
        self._max_remembered = max_remembered
        self._sent: dict[str, Sent] = {}  # oldest first

    def get(self, request_id: str) -> Sent | None:
        """Return what was last sent of a request."""
        return self._sent.get(request_id)

    def pop(self, request_id: str) -> None:
        """Forget a request."""
        self._sent.pop(request_id, None)

    def put(self, sent: Sent) -> None:
        """Remember an attempt as the newest."""
        request_id = sent.ask.request.request_id
        self._sent.pop(request_id, None)
        self._sent[request_id] = sent
        while True:
            oldest = next(iter(self._sent))
            aged = sent.sent_ms - self._sent[oldest].sent_ms >= self._remember_ms
            if not aged and len(self._sent) <= self._max_remembered:
                break
            del self._sent[oldest]
