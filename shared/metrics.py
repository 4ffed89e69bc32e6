"""Prometheus metrics of one service. Names carry their unit last, as everywhere."""

from collections.abc import Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server


class Metrics:
    """Counters and gauges made at first use, in a registry of their own, with the service as a label."""

    def __init__(self, service: str, ident: str) -> None:
        self.registry = CollectorRegistry()
        self._own = {"service": service, "id": ident}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._shown: dict[str, set[str]] = {}
        self._server: WSGIServer | None = None

    def count(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        """Add to the counter ``festina_<name>_total``; its label names are those of its first use."""
        counter = self._counters.get(name)
        if counter is None:
            counter = Counter(f"festina_{name}", name, [*self._own, *labels], registry=self.registry)
            self._counters[name] = counter
        counter.labels(**self._own, **labels).inc(value)

    def show(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Set the gauge ``festina_<name>``."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(f"festina_{name}", name, [*self._own, *labels], registry=self.registry)
            self._gauges[name] = gauge
        gauge.labels(**self._own, **labels).set(value)

    def show_each(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set the gauge ``festina_<name>`` for each value of its one label; those no longer named go away."""
        for gone in self._shown.get(name, set()) - values.keys():
            self._gauges[name].remove(*self._own.values(), gone)
        self._shown[name] = set(values)
        for named, value in values.items():
            self.show(name, {label: named}, value)

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int) -> int:
        """Show the page over HTTP in a thread; port 0 takes a free one. Returns the port."""
        self._server, _ = start_http_server(port, addr=host, registry=self.registry)
        return self._server.server_port

    def close(self) -> None:
        """Stop showing the page."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
