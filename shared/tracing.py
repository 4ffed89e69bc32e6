"""Traces: OpenTelemetry, exported by OTLP over HTTP and to a folder; harmless while no collector listens.

Cores name spans in `Span` actions with the times they know; this file turns them into real ones below the
trace context that travels with the request. A request's `traceparent` is a field of the request rather than a
header of one message, because it has to survive queues, further attempts and moves.

A core's span costs the service little: it is put into queues, and whatever it carries, down to the candidates
of a decision, is turned into text by the exporters' threads.
"""

import contextlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, Tracer, set_span_in_context
from opentelemetry.trace.propagation import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.config import Common
from shared.events import Span
from shared.span_log import SpanLog
from shared.spans import SpanLine

PERIOD_MS = 500  # at which the exporters' threads look at their queues
RETRY_S = 5.0  # a collector that did not answer is left alone for so long

_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Tracing:
    """The tracer of one service."""

    def __init__(self, settings: Common, service: str, ident: str) -> None:
        self._resource = Resource.create({"service.name": f"festina-{service}", "service.instance.id": ident})
        exporters = _exporters(settings, service, ident)
        sampler = DEFAULT_ON if exporters else ALWAYS_OFF  # an unsampled request makes no spans anywhere
        self._provider = TracerProvider(sampler, self._resource, shutdown_on_exit=False)
        self._processors = [
            BatchSpanProcessor(exporter, max_queue_size=4096, schedule_delay_millis=PERIOD_MS)
            for exporter in exporters
        ]
        for processor in self._processors:
            self._provider.add_span_processor(processor)
        self.tracer: Tracer = self._provider.get_tracer("festina")

    def export(self, span: Span) -> None:
        """Record a finished span of a core."""
        if not (self._processors and span.traceparent):
            return
        parent = get_current_span(context_of(span.traceparent)).get_span_context()
        if not parent.trace_flags.sampled:
            return
        made = ReadableSpan(
            name=span.name,
            context=SpanContext(
                parent.trace_id,
                int(span.span_id, 16) if span.span_id else random.getrandbits(64),
                False,
                _SAMPLED,
            ),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            start_time=int(span.start_ms * 1e6),
            end_time=int(max(span.end_ms, span.start_ms) * 1e6),
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        )
        for processor in self._processors:
            processor.on_end(made)

    def close(self) -> None:
        """Export what is left, for two seconds at most."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


def _exporters(settings: Common, service: str, ident: str) -> list[SpanExporter]:
    if not settings.tracing:
        return []
    found: list[SpanExporter] = []
    if settings.trace_dir:
        log = SpanLog(Path(settings.trace_dir), service, ident, settings.trace_mb * 1_000_000)
        found.append(_ToFile(log, service, ident))
    if settings.otlp_endpoint:
        # the exporter would log every failed try; a missing collector is not an error of ours
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        found.append(_ToCollector(settings.otlp_endpoint))
    return found


class _ToCollector(SpanExporter):
    """Sends spans by OTLP; drops them, unencoded, for a while after nobody has answered."""

    def __init__(self, endpoint: str) -> None:
        self._otlp = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=2)
        self._again_s = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if time.monotonic() < self._again_s:
            return SpanExportResult.FAILURE
        result = self._otlp.export([_flat(span) for span in spans])
        if result is not SpanExportResult.SUCCESS:
            self._again_s = time.monotonic() + RETRY_S
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


class _ToFile(SpanExporter):
    """Writes spans to this process's file."""

    def __init__(self, log: SpanLog, service: str, ident: str) -> None:
        self._log, self._service, self._ident = log, service, ident

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._log.write([self._line(span) for span in spans])
        except OSError:  # a full disk costs the trace, nothing else
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._log.close()

    def _line(self, span: ReadableSpan) -> SpanLine:
        context, parent, failed = span.context, span.parent, span.status.status_code is StatusCode.ERROR
        return SpanLine(
            service=self._service,
            id=self._ident,
            name=span.name,
            start_ms=(span.start_time or 0) / 1e6,
            end_ms=(span.end_time or 0) / 1e6,
            attributes={name: _plain(value) for name, value in (span.attributes or {}).items()},
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_id=f"{parent.span_id:016x}" if parent else "",
            error=(span.status.description or "failed") if failed else "",
        )


def _flat(span: ReadableSpan) -> ReadableSpan:
    """Return a span as OpenTelemetry has them: what is not a plain value becomes JSON text."""
    attributes: Mapping[str, Any] = span.attributes or {}
    if all(isinstance(value, (str, bool, int, float)) for value in attributes.values()):
        return span
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes={
            name: value if isinstance(value, (str, bool, int, float)) else _json(value)
            for name, value in attributes.items()
        },
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(_plain(value), enc_hook=str).decode()


def _plain(value: Any) -> Any:
    """Return a value with its named tuples as objects, whose names JSON would lose."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def context_of(traceparent: str) -> Context:
    """Return the context that a W3C ``traceparent`` names; an empty or malformed one names none."""
    return _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()


def traceparent_of(span: OtelSpan) -> str:
    """Return the W3C ``traceparent`` of a span, empty if it is not sampled."""
    if not span.get_span_context().trace_flags.sampled:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=set_span_in_context(span))
    return carrier.get("traceparent", "")
