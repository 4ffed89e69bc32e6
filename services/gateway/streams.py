"""From the core's deliveries to OpenAI's answers: JSON at once, or server-sent events as tokens come.

Chunks are put together from bytes: at hundreds of requests a second building them as objects would be the
most expensive thing this process does.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from opentelemetry.trace import Span, Status, StatusCode
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.core import Deliver, Fail
from services.gateway.quota import Ticket
from services.gateway.service import Gateway, Inbox, Item
from services.gateway.text import TextStream
from services.gateway.web import error_body, error_response
from shared import slo
from shared.errors import InvalidRequest
from shared.model import Objectives

_encode = msgspec.json.Encoder().encode


@dataclass
class Choice:
    """One answer of a call, as far as it has come."""

    index: int
    text: TextStream
    finish_reason: str = ""
    last: Deliver | None = None
    pieces: list[str] = field(default_factory=list)  # of an answer that is not streamed

    def take(self, item: Deliver) -> str:
        """Take the next tokens and return the text to be sent."""
        text = self.text.push(item.token_ids)
        if item.end is not None and self.text.stopped is None:
            text += self.text.finish()
        self.last = item
        if item.end is not None:
            self.finish_reason = "stop" if self.text.stopped is not None else item.end.finish_reason
        return text


@dataclass
class Call:
    """One client call: what was asked, and its choices by request id."""

    call_id: str
    is_chat: bool
    model: str
    created_s: int
    prompt_tokens: int
    objectives: Objectives
    stream: bool
    include_usage: bool
    choices: dict[str, Choice]

    @property
    def ended(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason for choice in self.choices.values())

    @property
    def name(self) -> str:
        """The call's id as OpenAI's clients know it."""
        return ("chatcmpl-" if self.is_chat else "cmpl-") + self.call_id

    def usage(self) -> dict[str, int]:
        """Return the token counts of all choices; a prompt counts once, as OpenAI does."""
        completion = sum(choice.text.tokens_seen for choice in self.choices.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }

    def report(self) -> dict[str, Any]:
        """Return the ``festina`` object: where it ran, how long it took and what it cost.

        Of several choices: energy is summed, times are the worst.
        """
        lasts = [choice.last for choice in self.choices.values() if choice.last is not None]
        ends = [last.end for last in lasts if last.end is not None]
        known = [end.energy_j for end in ends if end.energy_j is not None]
        ttft_ms = max(last.ttft_ms for last in lasts)
        tbt_ms = max(last.mean_tbt_ms for last in lasts)
        sources = [end.energy_source for end in ends]
        return {
            "gpu": ",".join(dict.fromkeys(last.gpu for last in lasts)),
            "attempt": max(last.attempt for last in lasts),
            "ttft_ms": round(ttft_ms, 3),
            "mean_tbt_ms": round(tbt_ms, 3),
            "energy_j": sum(known) if len(known) == len(lasts) else None,
            "energy_source": "; ".join(dict.fromkeys(filter(None, sources))),
            "slo_met": all(slo.met(self.objectives, last.ttft_ms, last.mean_tbt_ms) for last in lasts),
            "queue_ms": max((end.queue_ms for end in ends), default=None),
            "best_effort": any(end.dispatch == "best_effort" for end in ends),
        }

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = []
        for choice in self.choices.values():
            text = "".join(choice.pieces)
            content: dict[str, Any] = {"text": text}
            if self.is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            ending = {"logprobs": None, "finish_reason": choice.finish_reason}
            choices.append({"index": choice.index, **content, **ending})
        return _encode(
            {
                "id": self.name,
                "object": "chat.completion" if self.is_chat else "text_completion",
                "created": self.created_s,
                "model": self.model,
                "choices": choices,
                "usage": self.usage(),
                "festina": self.report(),
            }
        )


class Frames:
    """Makes the server-sent events of one call."""

    def __init__(self, call: Call) -> None:
        kind = "chat.completion.chunk" if call.is_chat else "text_completion"
        head = _encode({"id": call.name, "object": kind, "created": call.created_s, "model": call.model})
        self._call = call
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"
        self._open = b',"delta":{' if call.is_chat else b',"text":'
        self._close = b"}" if call.is_chat else b""

    def roles(self) -> bytes:
        """Return the events that open the choices of a chat; a plain completion has none."""
        if not self._call.is_chat:
            return b""
        role = b'"role":"assistant","content":""'
        return b"".join(self._chunk(choice, role) for choice in self._call.choices.values())

    def text(self, choice: Choice, text: str) -> bytes:
        """Return the event that carries new text."""
        content = _encode(text)
        return self._chunk(choice, b'"content":' + content if self._call.is_chat else content)

    def finish(self, choice: Choice) -> bytes:
        """Return a choice's one event with a finish reason; the call's report rides on the last one."""
        report = b""
        if self._call.ended and not self._call.include_usage:
            report = b',"festina":' + _encode(self._call.report())
        return self._chunk(choice, b"" if self._call.is_chat else b'""', choice.finish_reason, report)

    def end(self) -> bytes:
        """Return what follows the last choice: usage if it was asked for, and the end mark."""
        if not self._call.include_usage:
            return b"data: [DONE]\n\n"
        usage, report = _encode(self._call.usage()), _encode(self._call.report())
        return b"".join(
            (self._head, b'],"usage":', usage, b',"festina":', report, b"}\n\n", b"data: [DONE]\n\n")
        )

    def _chunk(self, choice: Choice, content: bytes, finish_reason: str = "", report: bytes = b"") -> bytes:
        reason = _encode(finish_reason) if finish_reason else b"null"
        tail = self._tail[:-3] + report + self._tail[-3:] if report else self._tail
        return b"".join(
            (
                self._head,
                b'{"index":%d' % choice.index,
                self._open,
                content,
                self._close,
                b',"logprobs":null,"finish_reason":',
                reason,
                b"}",
                tail,
            )
        )


class CallResponse(Response):
    """Answers one call, and watches for its client going away meanwhile.

    The status is sent with the first result, so an early failure has its proper status; a later one is an
    error event, after which the stream ends without its end mark.
    """

    def __init__(
        self, gateway: Gateway, call: Call, inbox: Inbox, span: Span, ticket: Ticket | None = None
    ) -> None:
        super().__init__()
        self._ticket = ticket
        self._gateway = gateway
        self._call = call
        self._inbox = inbox
        self._span = span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the call (ASGI)."""
        watch = asyncio.create_task(_watch(receive, self._inbox))
        outcome = "cancelled"
        try:
            answer = self._answer_stream if self._call.stream else self._answer_whole
            outcome = await answer(scope, receive, send)
        finally:
            watch.cancel()
            reason = "the client has gone" if outcome == "cancelled" else "another choice of its call failed"
            for request_id in self._call.choices:
                self._gateway.cancel(request_id, reason)
            self._give_back(outcome)
            self._end_span(outcome)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> str:
        while not self._call.ended:
            item = await self._inbox.get()
            if item is None:
                return "cancelled"
            if isinstance(item, Fail):
                await self._fail(item, scope, receive, send)
                return item.code
            choice = self._call.choices[item.request_id]
            choice.pieces.append(self._take(choice, item))
        body = self._call.whole()
        await _start(send, self._call, self._limits, b"application/json", len(body))
        await send({"type": "http.response.body", "body": body})
        return ""

    async def _answer_stream(self, scope: Scope, receive: Receive, send: Send) -> str:
        first = await self._inbox.get()
        if isinstance(first, Fail):
            await self._fail(first, scope, receive, send)
            return first.code
        frames = Frames(self._call)
        items = [first, *self._inbox.drain()]
        if first is not None:
            await _start(send, self._call, self._limits, b"text/event-stream; charset=utf-8")
        parts = [frames.roles()]
        while True:
            failed = self._frame(frames, items, parts)
            if failed is None:
                return "cancelled"
            ended = bool(failed) or self._call.ended
            if self._call.ended and not failed:
                parts.append(frames.end())
            body = b"".join(parts)
            if body or ended:
                await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                return failed
            items = [await self._inbox.get(), *self._inbox.drain()]
            parts = []

    def _frame(self, frames: Frames, items: list[Item | None], parts: list[bytes]) -> str | None:
        """Turn items into events; return the code of a failure, None if the client has gone, else empty."""
        for item in items:
            if item is None:
                return None
            choice = self._call.choices[item.request_id]
            if isinstance(item, Fail):
                parts.append(b"data: " + error_body(item.status, item.code, item.message) + b"\n\n")
                return item.code
            text = self._take(choice, item)
            if text:
                parts.append(frames.text(choice, text))
            if choice.finish_reason:
                parts.append(frames.finish(choice))
        return ""

    def _take(self, choice: Choice, item: Deliver) -> str:
        """Take the next tokens; at a stop string, stop the work and wait for nothing but its end."""
        stopped_before = choice.text.stopped
        text = choice.take(item)
        if choice.text.stopped is not None and stopped_before is None and item.end is None:
            self._gateway.stop(item.request_id)
        return text

    async def _fail(self, item: Fail, scope: Scope, receive: Receive, send: Send) -> None:
        error = InvalidRequest(
            item.status, item.code, item.message, retry_after_s=item.retry_after_s, headers=self._limits
        )
        await error_response(error, self._call.call_id)(scope, receive, send)

    @property
    def _limits(self) -> dict[str, str]:
        return self._ticket.headers if self._ticket else {}

    def _give_back(self, outcome: str) -> None:
        """End the call for its tenant's limits; a failed one without an answer has used no tokens."""
        if self._ticket is None:
            return
        usage = self._call.usage()
        unserved = outcome not in ("", "cancelled") and not usage["completion_tokens"]
        self._gateway.quota.give_back(self._ticket, 0 if unserved else usage["total_tokens"])

    def _end_span(self, failed: str) -> None:
        if self._span.is_recording():
            if failed:
                self._span.set_status(Status(StatusCode.ERROR, failed))
            else:
                report = self._call.report()
                for name in ("gpu", "attempt", "ttft_ms", "mean_tbt_ms", "energy_j", "slo_met"):
                    if report[name] is not None:
                        self._span.set_attribute(f"festina.{name}", report[name])
            usage = self._call.usage()
            self._span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
            self._span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        self._span.end()


async def _start(
    send: Send, call: Call, limits: dict[str, str], content_type: bytes, length: int | None = None
) -> None:
    headers = [(b"content-type", content_type), (b"x-request-id", call.call_id.encode())]
    headers += [(name.encode(), value.encode()) for name, value in limits.items()]
    if length is None:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    else:
        headers.append((b"content-length", b"%d" % length))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _watch(receive: Receive, inbox: Inbox) -> None:
    """Tell the inbox when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.put(None)
