"""What the services add to a request, and how much they carry, with engines that take no time.

A pool of one emulated GPU whose device time passes a thousand times faster, so that what is measured is HTTP,
the bus, the cores and the text, on whatever cores this machine has, the client's own load included.
"""

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from bench.load import Outcome, load
from services.cli.pool import nats_server_argv
from services.cli.supervise import free_port
from tests.support import RunningPool

MODEL = "Qwen2.5-7B-Instruct"
SECONDS = 6.0
SHORT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 8,
    "ignore_eos": True,
}
SPEEDUP = "1000"


def run() -> dict[str, float]:
    """Measure latency at 1 client, rates at 32, tokens per second, messages per request, and memory."""
    nats_port, monitor_port = free_port(), free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    nats = subprocess.Popen([*nats_server_argv(nats_port), "-m", str(monitor_port)], **quiet)  # type: ignore[call-overload]
    env = {"FESTINA_NATS_URL": f"nats://127.0.0.1:{nats_port}", "FESTINA_DEVICE_SPEEDUP": SPEEDUP}
    with tempfile.TemporaryDirectory() as folder:
        pool = RunningPool(Path(folder), "--emulated", "--gpus", "1", "--models", "1", env=env)
        try:
            pool.wait_for_models(MODEL)
            return _measure(pool, monitor_port)
        finally:
            pool.stop()
            nats.terminate()
            nats.wait(10)


def _measure(pool: RunningPool, monitor_port: int) -> dict[str, float]:
    url = pool.url + "/v1/chat/completions"
    load(url, 1.0, 4, False, SHORT)  # warm-up
    one = load(url, SECONDS, 1, False, SHORT)
    centiles = statistics.quantiles(one.latencies_ms, n=100)
    before = _messages(monitor_port)
    many = load(url, SECONDS, 32, False, SHORT)
    messages = _messages(monitor_port) - before - _idle_messages(monitor_port, many.seconds)
    streamed = load(url, SECONDS, 32, True, SHORT)
    long = load(url, SECONDS, 32, True, {**SHORT, "max_tokens": 400})
    return {
        "gateway.p50_added_ms": centiles[49],
        "gateway.p99_added_ms": centiles[98],
        "gateway.rps_32": _rate(many),
        "gateway.stream_rps_32": _rate(streamed),
        "gateway.tokens_per_s": _rate(long) * 400,
        "gateway.bus_messages_per_request": messages / len(many.latencies_ms),
        "gateway.errors": one.errors + many.errors + streamed.errors + long.errors,
        **{f"rss_mb.{name}": megabytes for name, megabytes in _memory(pool).items()},
    }


def _rate(outcome: Outcome) -> float:
    return len(outcome.latencies_ms) / outcome.seconds


def _messages(monitor_port: int) -> int:
    with urlopen(f"http://127.0.0.1:{monitor_port}/varz") as answer:
        return int(json.load(answer)["in_msgs"])


def _idle_messages(monitor_port: int, seconds: float) -> float:
    """Messages that flow anyway in as much time: heartbeats."""
    before = _messages(monitor_port)
    time.sleep(2.0)
    return (_messages(monitor_port) - before) * seconds / 2.0


def _memory(pool: RunningPool) -> dict[str, float]:
    found = {}
    for pid, command in pool.children().items():
        name = command.partition("services.")[2].partition(".main")[0]
        if name:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
            found[name] = kilobytes / 1024
    return found
