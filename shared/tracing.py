"""Traces: OpenTelemetry, exported by OTLP over HTTP; harmless while no collector listens.

Cores name spans in `Span` actions with the times they know; this file turns them into real ones below the
trace context that travels with the request. A request's `traceparent` is a field of the request rather than a
header of one message, because it has to survive queues, further attempts and moves.
"""

import logging

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.config import Common
from shared.events import Span

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The tracer of one service."""

    def __init__(self, settings: Common, service: str, ident: str) -> None:
        resource = Resource.create({"service.name": f"festina-{service}", "service.instance.id": ident})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.enabled = settings.tracing
        if settings.tracing:
            # the exporter would log every failed try; a missing collector is not an error of ours
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
            exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint.rstrip("/") + "/v1/traces", timeout=2)
            self._provider.add_span_processor(
                BatchSpanProcessor(exporter, max_queue_size=4096, schedule_delay_millis=500)
            )
        self.tracer: Tracer = self._provider.get_tracer("festina")

    def export(self, span: Span) -> None:
        """Record a finished span of a core."""
        if not (self.enabled and span.traceparent):
            return
        made = self.tracer.start_span(
            span.name,
            context=context_of(span.traceparent),
            start_time=int(span.start_ms * 1e6),
            attributes=span.attributes,
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(end_time=int(max(span.end_ms, span.start_ms) * 1e6))

    def close(self) -> None:
        """Export what is left, for two seconds at most."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


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
