"""A small stand-in for Jaeger: takes OTLP over HTTP, keeps the spans, answers Jaeger's query API.

It imports nothing of Festina: ``python trace_collector.py`` runs it by itself, on Jaeger's ports.
"""

import gzip
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

OTLP_PORT, QUERY_PORT = 4318, 16686
FAILED = 2  # OpenTelemetry's status code


class TraceCollector:
    """Takes OTLP over HTTP as Jaeger does, and answers Jaeger's query API."""

    def __init__(self, host: str = "127.0.0.1", ports: tuple[int, ...] = (0,)) -> None:
        self._spans: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(ExportTraceServiceRequest.FromString(body))
                self._answer(200, b"")

            def do_GET(self) -> None:
                self._answer(200, json.dumps({"data": collector._query(urlparse(self.path))}).encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._servers = [ThreadingHTTPServer((host, port), Handler) for port in ports]
        self.url = f"http://127.0.0.1:{self._servers[0].server_port}"
        for server in self._servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_spans:
                attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
                process = (attributes["service.name"], attributes.get("service.instance.id", ""))
                for scope in resource.scope_spans:
                    self._spans += [_jaeger_span(process, span) for span in scope.spans]

    def _query(self, url: Any) -> list[Any]:
        with self._lock:
            spans = list(self._spans)
        if url.path == "/api/services":
            return sorted({span["service"] for span in spans})
        wanted = url.path.removeprefix("/api/traces").strip("/")
        asked = parse_qs(url.query)
        service = asked.get("service", [None])[0]
        tags = json.loads(asked.get("tags", ["{}"])[0]).items()
        traces: dict[str, list[dict[str, Any]]] = {}
        for span in spans:
            traces.setdefault(span["traceID"], []).append(span)
        found = {wanted: traces[wanted]} if wanted in traces else {} if wanted else traces
        return [
            _jaeger_trace(trace_id, members)
            for trace_id, members in found.items()
            if any(
                (service is None or s["service"] == service)
                and all({"key": key, "value": value} in s["tags"] for key, value in tags)
                for s in members
            )
        ]


def _jaeger_span(process: tuple[str, str], span: Any) -> dict[str, Any]:
    value = lambda v: getattr(v, v.WhichOneof("value"))  # noqa: E731
    parent = span.parent_span_id.hex()
    failed = [{"key": "otel.status_code", "value": "ERROR"}] if span.status.code == FAILED else []
    if failed and span.status.message:
        failed.append({"key": "otel.status_description", "value": span.status.message})
    return {
        "service": process[0],
        "process": process,
        "traceID": span.trace_id.hex(),
        "spanID": span.span_id.hex(),
        "operationName": span.name,
        "references": [{"refType": "CHILD_OF", "spanID": parent}] if parent else [],
        "startTime": span.start_time_unix_nano // 1000,
        "duration": (span.end_time_unix_nano - span.start_time_unix_nano) // 1000,
        "tags": [{"key": a.key, "value": value(a.value)} for a in span.attributes] + failed,
    }


def _jaeger_trace(trace_id: str, spans: list[dict[str, Any]]) -> dict[str, Any]:
    found = sorted({span["process"] for span in spans})
    shown = [{**span, "processID": f"p{found.index(span['process'])}"} for span in spans]
    processes = {
        f"p{i}": {"serviceName": name, "tags": [{"key": "service.instance.id", "value": ident}]}
        for i, (name, ident) in enumerate(found)
    }
    return {"traceID": trace_id, "spans": shown, "processes": processes}


def main() -> None:
    """Run until told to stop."""
    collector = TraceCollector("0.0.0.0", (OTLP_PORT, QUERY_PORT))
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    told.wait()
    collector.close()


if __name__ == "__main__":
    main()
