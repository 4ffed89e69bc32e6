"""Small words of HTTP: bodies in, JSON and errors in OpenAI's shape out."""

import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import InvalidRequest

_encode = msgspec.json.Encoder().encode


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the body of a request. Raises InvalidRequest (413) as soon as it is too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit_bytes: int) -> InvalidRequest:
    return InvalidRequest(413, "request_too_large", f"the body may have at most {limit_bytes} bytes")


def json_response(content: Any, status: int = 200) -> Response:
    """Return `content` as JSON."""
    return Response(_encode(content), status, media_type="application/json")


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """Return an error in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(error: InvalidRequest, call_id: str) -> Response:
    """Return an error as a whole answer."""
    headers = {"x-request-id": call_id, **error.headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(error.status, error.code, error.message, error.param)
    return Response(body, error.status, headers, "application/json")
