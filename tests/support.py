"""What several kinds of test need: real servers, waiting, a collector of traces, a whole pool."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import httpx
import redis
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.pool import nats_server_argv, store_server_argv
from services.supervise import free_port
from shared.config import Common


class Servers:
    """A real NATS and a real Redis-protocol server on free ports, which a test may stop and start again."""

    def __init__(self, folder: Path) -> None:
        self.nats_port, self.store_port = free_port(), free_port()
        self._argv = {
            "nats": nats_server_argv(self.nats_port),
            "store": store_server_argv(self.store_port, folder),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def settings(self) -> Common:
        return Common(
            nats_url=f"nats://127.0.0.1:{self.nats_port}",
            redis_url=f"redis://127.0.0.1:{self.store_port}/0",
            tracing=False,
        )

    def start(self, name: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._running[name] = subprocess.Popen(self._argv[name], **quiet)

    def stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.terminate()
        process.wait(10)

    def stop_all(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def flush(self) -> None:
        redis.Redis(port=self.store_port).flushall()


async def eventually(condition: Callable[[], bool], within_s: float = 5.0, every_s: float = 0.02) -> None:
    """Wait until `condition()` is true; fail with its name when it does not become so."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {within_s} s: {condition}"
        await asyncio.sleep(every_s)


class TraceCollector:
    """Takes OTLP over HTTP as Jaeger does, and answers Jaeger's query API."""

    def __init__(self) -> None:
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

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_spans:
                attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._spans.append(_jaeger_span(attributes["service.name"], span))

    def _query(self, url: Any) -> list[Any]:
        with self._lock:
            spans = list(self._spans)
        if url.path == "/api/services":
            return sorted({span["service"] for span in spans})
        wanted = url.path.removeprefix("/api/traces").strip("/")
        service = parse_qs(url.query).get("service", [None])[0]
        traces: dict[str, list[dict[str, Any]]] = {}
        for span in spans:
            traces.setdefault(span["traceID"], []).append(span)
        found = {wanted: traces[wanted]} if wanted in traces else {} if wanted else traces
        return [
            _jaeger_trace(trace_id, members)
            for trace_id, members in found.items()
            if service is None or any(s["service"] == service for s in members)
        ]


def _jaeger_span(service: str, span: Any) -> dict[str, Any]:
    value = lambda v: getattr(v, v.WhichOneof("value"))  # noqa: E731
    parent = span.parent_span_id.hex()
    return {
        "service": service,
        "traceID": span.trace_id.hex(),
        "spanID": span.span_id.hex(),
        "operationName": span.name,
        "references": [{"refType": "CHILD_OF", "spanID": parent}] if parent else [],
        "startTime": span.start_time_unix_nano // 1000,
        "duration": (span.end_time_unix_nano - span.start_time_unix_nano) // 1000,
        "tags": [{"key": a.key, "value": value(a.value)} for a in span.attributes],
    }


def _jaeger_trace(trace_id: str, spans: list[dict[str, Any]]) -> dict[str, Any]:
    services = sorted({span["service"] for span in spans})
    shown = [{**span, "processID": f"p{services.index(span['service'])}"} for span in spans]
    processes = {f"p{i}": {"serviceName": name} for i, name in enumerate(services)}
    return {"traceID": trace_id, "spans": shown, "processes": processes}


class RunningPool:
    """`festina up` as a person starts it, on free ports and in a folder of its own."""

    def __init__(self, folder: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        program = str(Path(sys.executable).parent / "festina")
        argv = [program, "up", "--port", str(self.port), "--state-dir", str(folder / "state"), *flags]
        base = {k: v for k, v in os.environ.items() if not k.startswith("FESTINA_")}
        self._log = (folder / "up.log").open("ab")
        self._process = subprocess.Popen(
            argv,
            env={**base, "FESTINA_TRACING": "0", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")

    def wait_for_models(self, *names: str, key: str = "", within_s: float = 60.0) -> None:
        """Wait until these models are loaded."""
        deadline = time.monotonic() + within_s
        missing = set(names)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        while missing:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, f"{sorted(missing)} not ready: {self.output}"
            time.sleep(0.1)
            try:
                listed = httpx.get(self.url + "/v1/models", headers=headers, trust_env=False).json()["data"]
            except (httpx.HTTPError, json.JSONDecodeError, KeyError):
                continue
            missing = set(names) - {m["id"] for m in listed if m["state"] == "ready"}

    def pid_of(self, ident: str) -> int:
        """Process id of the service with this id."""
        for pid in self.children():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"FESTINA_ID={ident}" in environ:
                return pid
        raise AssertionError(f"no process has the id {ident}: {self.children()}")

    def children(self) -> dict[int, str]:
        """Process id -> command line of every process below `festina up`."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
        parents, commands = {}, {}
        for line in listed.stdout.splitlines()[1:]:
            pid, ppid, args = line.split(None, 2)
            parents[int(pid)], commands[int(pid)] = int(ppid), args
        found: dict[int, str] = {}
        for pid in parents:
            above = pid
            while above in parents and above != self._process.pid:
                above = parents[above]
            if above == self._process.pid and pid != above:
                found[pid] = commands[pid]
        return found

    def stop(self, within_s: float = 60.0) -> int:
        """Ctrl-C; returns the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
        finally:
            self._log.close()
