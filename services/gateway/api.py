"""The REST API, as OpenAI's: completions, models, health; and errors in its shape everywhere."""

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.gateway.admin import add_admin
from services.gateway.completions import complete, visible_model
from services.gateway.openai_schema import Body, ChatBody, CompletionBody
from services.gateway.service import Gateway
from services.gateway.web import error_response, json_response
from shared.errors import InvalidRequest
from shared.model import ModelSpec

DESCRIPTION = """Serves many language models on few shared GPUs, for the least energy that meets each
request's latency objectives. The completions take OpenAI's requests; their answers carry, beside `usage`, a
`festina` object with the energy and the times of the request. The headers `x-festina-ttft-ms` and
`x-festina-tbt-ms` set a request's own objectives."""
CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 422: "invalid_value"}


def create_app(gateway: Gateway) -> FastAPI:
    """Return the application that serves `gateway`."""
    app = FastAPI(title="Festina", description=DESCRIPTION, version="1")
    _add_errors(app, gateway)
    _add_completions(app, gateway)
    _add_models(app, gateway)
    _add_health(app, gateway)
    add_admin(app, gateway)
    return app


def _add_completions(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions", tags=["completions"], openapi_extra=_body_docs(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, at once or as a stream."""
        return await complete(gateway, request, ChatBody)

    @app.post("/v1/completions", tags=["completions"], openapi_extra=_body_docs(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a text, at once or as a stream."""
        return await complete(gateway, request, CompletionBody)


def _body_docs(kind: type[Body]) -> dict[str, Any]:
    _, parts = msgspec.json.schema_components((kind,), ref_template="{name}")
    schema = parts[kind.__name__]
    schema["properties"]["stream_options"] = parts["StreamOptions"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    created_s = int(time.time())

    def entry(model: ModelSpec) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created_s,
            "owned_by": "festina",
            "context_tokens": model.context_tokens,
            "state": gateway.registry.state_of(model.name),
        }

    @app.get("/v1/models", tags=["models"])
    async def models(request: Request) -> Response:
        """List the models that the caller may use."""
        tenant = gateway.keys.tenant_of(request.headers.get("authorization"))
        registry = gateway.registry
        found = [entry(registry.models[name]) for name in registry.models if registry.visible(name, tenant)]
        return json_response({"object": "list", "data": found})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str, request: Request) -> Response:
        """Describe one model."""
        tenant = gateway.keys.tenant_of(request.headers.get("authorization"))
        return json_response(entry(visible_model(gateway, name, tenant)))


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", tags=["health"])
    async def health() -> Response:
        """Say that the process is alive."""
        return json_response({"status": "alive"})

    @app.get("/ready", tags=["health"])
    async def ready() -> Response:
        """Say whether requests can be served now, else 503 and what is missing."""
        missing = await gateway.missing()
        return json_response({"ready": not missing, "missing": missing}, 503 if missing else 200)


def _add_errors(app: FastAPI, gateway: Gateway) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidRequest)
        return error_response(error, gateway.new_id())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = CODES.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(InvalidRequest(error.status_code, code, message), gateway.new_id())
        response.headers.update(error.headers or {})
        return response

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return error_response(
            InvalidRequest(422, CODES[422], f"{param}: {first['msg']}", param), gateway.new_id()
        )

    async def broken(request: Request, error: Exception) -> Response:
        message = "the gateway has a fault; its log tells more"
        return error_response(InvalidRequest(500, "internal_error", message), gateway.new_id())

    app.add_exception_handler(InvalidRequest, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(Exception, broken)
