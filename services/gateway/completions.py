"""From a request's bytes to work for the core: who asks, what for, and whether it can be served at all."""

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.gateway.openai_schema import Body, ChatBody, CompletionBody, invalid, parse, sampling_of
from services.gateway.quota import Ticket
from services.gateway.service import Gateway
from services.gateway.streams import Call, CallResponse, Choice
from services.gateway.text import TextStream
from services.gateway.tokenizers import ChatTokenizer
from services.gateway.web import error_response, read_body
from shared import slo
from shared.errors import InvalidRequest
from shared.model import ModelSpec, Objectives, Tenant
from shared.model import Request as Work
from shared.tracing import context_of, traceparent_of

INLINE_BODY_BYTES = 16_384  # a longer prompt is tokenised in a thread, so that other streams go on


async def complete(gateway: Gateway, request: Request, kind: type[Body]) -> Response:
    """Serve one completion request, of a chat or plain."""
    arrived_s = time.monotonic()
    call_id = gateway.new_id()
    span = gateway.tracer.start_span(
        "gateway.request",
        context=context_of(request.headers.get("traceparent", "")),
        kind=SpanKind.SERVER,
        attributes={"festina.request_id": call_id},
    )
    try:
        tenant = gateway.tenants.get(gateway.keys.tenant_of(request.headers.get("authorization")))
        gateway.check_room(tenant)
        data = await read_body(request, gateway.settings.max_body_bytes)
        asked = await _understand(gateway, parse(data, kind), tenant, len(data))
        asked.objectives = _objectives(request, asked)
        ticket = await gateway.quota.take(tenant, _tokens_asked(gateway, asked))
        return _start(gateway, asked, call_id, span, arrived_s, ticket)
    except InvalidRequest as error:
        span.set_status(Status(StatusCode.ERROR, error.code))
        span.end()
        return error_response(error, call_id)
    except ClientDisconnect:
        span.set_status(Status(StatusCode.ERROR, "cancelled"))
        span.end()
        return Response(status_code=499)


@dataclass
class _Asked:
    """A request that makes sense."""

    body: Body
    tenant: Tenant
    model: ModelSpec
    tokenizer: ChatTokenizer
    prompt: tuple[int, ...]
    max_tokens: int
    objectives: Objectives


async def _understand(gateway: Gateway, body: Body, tenant: Tenant, body_bytes: int) -> _Asked:
    model = visible_model(gateway, body.model, tenant.name)
    tokenizer = await gateway.tokenizer(model)
    if body_bytes <= INLINE_BODY_BYTES:
        prompt = _prompt(tokenizer, body)
    else:
        prompt = await asyncio.to_thread(_prompt, tokenizer, body)
    if len(prompt) > gateway.settings.max_prompt_tokens:
        message = (
            f"the prompt has {len(prompt)} tokens; at most {gateway.settings.max_prompt_tokens} are taken"
        )
        raise InvalidRequest(413, "prompt_too_long", message, _prompt_param(body))
    _check_vocabulary(body, tokenizer)
    objectives = model.objectives or slo.objectives_for(len(prompt))
    return _Asked(body, tenant, model, tokenizer, prompt, _output_limit(body, model, len(prompt)), objectives)


def _tokens_asked(gateway: Gateway, asked: _Asked) -> int:
    """Return the tokens that a call is counted for until it has ended and its own are known."""
    body, each = asked.body, asked.max_tokens
    if body.output_limit is None:  # it may answer at any length, which is seldom all that fits
        each = min(each, gateway.settings.assumed_output_tokens)
    return len(asked.prompt) + body.choices * each


def visible_model(gateway: Gateway, name: str, tenant: str) -> ModelSpec:
    """Return the model of that exact name. Raises InvalidRequest (404) if `tenant` knows of none."""
    model = gateway.registry.visible(name, tenant)
    if model is None:
        message = f"there is no model {name!r} here; GET /v1/models lists them, and case counts"
        raise InvalidRequest(404, "model_not_found", message, "model")
    return model


def _prompt_param(body: Body) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _prompt(tokenizer: ChatTokenizer, body: Body) -> tuple[int, ...]:
    if isinstance(body, ChatBody):
        return tuple(tokenizer.encode_chat([_for_template(message) for message in body.messages]))
    assert isinstance(body, CompletionBody)
    prompt = body.single_prompt
    if isinstance(prompt, str):
        prompt = tuple(tokenizer.encode(prompt))
    elif prompt and max(prompt) >= tokenizer.vocab_size:
        raise invalid("prompt", f"token id {max(prompt)} is not in the vocabulary of {tokenizer.vocab_size}")
    if not prompt:
        raise invalid("prompt", "the prompt is empty")
    return prompt


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates know it: `developer` is the newer name of `system`."""
    plain = {name: value for name, value in message.items() if value is not None}
    return {**plain, "role": "system"} if plain["role"] == "developer" else plain


def _check_vocabulary(body: Body, tokenizer: ChatTokenizer) -> None:
    for param, ids in (("stop_token_ids", body.stop_token_ids or ()), ("logit_bias", body.logit_bias or ())):
        for token_id in ids:
            if int(token_id) >= tokenizer.vocab_size:
                message = f"{param}: token id {token_id} is not in the vocabulary of {tokenizer.vocab_size}"
                raise invalid(param, message)


def _output_limit(body: Body, model: ModelSpec, prompt_tokens: int) -> int:
    room = model.context_tokens - prompt_tokens
    limit = room if body.output_limit is None else body.output_limit
    if room < 1 or limit > room or (body.min_tokens or 0) > limit:
        asked = max(1, body.min_tokens or 0, body.output_limit or 0)
        message = (
            f"this model's context is {model.context_tokens} tokens; the prompt has {prompt_tokens} and "
            f"{asked} more are asked for: shorten the prompt or the output"
        )
        raise InvalidRequest(400, "context_length_exceeded", message, _prompt_param(body))
    return limit


def _objectives(request: Request, asked: _Asked) -> Objectives:
    """Return the request's objectives: by header, else the model's, else its SLO class's."""

    def header(name: str, default: float) -> float:
        text = request.headers.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise invalid(name, f"header {name} must be a positive number of milliseconds, not {text!r}")
        return value

    return Objectives(
        ttft_ms=header("x-festina-ttft-ms", asked.objectives.ttft_ms),
        tbt_ms=header("x-festina-tbt-ms", asked.objectives.tbt_ms),
    )


def _start(
    gateway: Gateway, asked: _Asked, call_id: str, span: Span, arrived_s: float, ticket: Ticket | None
) -> Response:
    body = asked.body
    span.set_attribute("festina.model", asked.model.name)
    span.set_attribute("festina.tenant", asked.tenant.name)
    span.set_attribute("festina.ttft_objective_ms", asked.objectives.ttft_ms)
    span.set_attribute("festina.tbt_objective_ms", asked.objectives.tbt_ms)
    ids = [call_id] if body.choices == 1 else [f"{call_id}-{i}" for i in range(body.choices)]
    works = [
        Work(
            request_id=request_id,
            attempt=1,
            gateway=gateway.gateway_id,
            model=asked.model.name,
            prompt_tokens=asked.prompt,
            max_tokens=asked.max_tokens,
            objectives=asked.objectives,
            tenant=asked.tenant.name,
            tenant_weight=asked.tenant.weight,
            priority=body.priority or 0,
            sampling=sampling_of(body, i),
            waited_ms=(time.monotonic() - arrived_s) * 1000.0,
            traceparent=traceparent_of(span),
        )
        for i, request_id in enumerate(ids)
    ]
    call = Call(
        call_id=call_id,
        is_chat=isinstance(body, ChatBody),
        model=asked.model.name,
        created_s=int(time.time()),
        prompt_tokens=len(asked.prompt),
        objectives=asked.objectives,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        choices={
            request_id: Choice(i, TextStream(asked.tokenizer.decoder(asked.prompt), stop=body.stops))
            for i, request_id in enumerate(ids)
        },
    )
    return CallResponse(gateway, call, gateway.submit(works), span, ticket)
