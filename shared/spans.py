"""Spans as they are kept and read again."""

from typing import Any

import msgspec


class SpanLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished span; times are Unix milliseconds, attributes whatever JSON can hold."""

    service: str
    id: str
    name: str
    start_ms: float
    end_ms: float
    attributes: dict[str, Any]
    trace_id: str
    span_id: str
    parent_id: str = ""
    error: str = ""
