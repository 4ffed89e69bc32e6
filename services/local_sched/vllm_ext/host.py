"""The process that holds one vLLM engine: ``python -m services.local_sched.vllm_ext.host --fd N``.

The engine lives in this very process and the main thread steps it, so a step is reported with exactly the
plan it ran under, and there is no further process that could be left behind. A second thread only takes
orders off the socket `N`, and a third says regularly that the process is there. When the local scheduler
closes its end, or dies, this process ends at once, whatever it is doing: that is how an engine is unloaded.
"""

import argparse
import gc
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.local_sched.vllm_ext.version import check_vllm_version
from services.local_sched.vllm_ext.wire import (
    BEAT_S,
    HEADER,
    Alive,
    EngineOrder,
    EngineReport,
    SmCut,
    decode_order,
    frame,
)
from shared.engine import EngineEnded, LoadEngine
from shared.errors import FestinaError

MAX_ORDERS = 4096
"""Orders taken off the socket but not yet obeyed; beyond that the socket fills and the sender waits."""

MAX_REASON = 500
"""Characters of an error that are reported; the log has the rest."""

RETRY_S = 0.005
"""Pause after a step that could run nothing, such as while a grammar is still being compiled."""


class Reports:
    """The way back through the socket, for more than one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, report: EngineReport) -> None:
        """Send a report; waits while the scheduler does not read."""
        with self._lock:
            self._connection.sendall(frame(report))

    def beat(self) -> None:
        """Say for as long as the process lives that it does; raises OSError once that is not to be had."""
        while True:
            self.send(Alive())
            time.sleep(BEAT_S)


def main() -> None:
    """Serve one engine to the local scheduler at the other end of an inherited socket."""
    parser = argparse.ArgumentParser(prog="host", description=main.__doc__)
    parser.add_argument("--fd", type=int, required=True, help="number of the socket")
    parser.add_argument("--stages", type=Path, help="folder of the host's stages, for KV that is moved")
    parser.add_argument("--sms", type=msgspec.json.Decoder(SmCut).decode, help="parts of the SMs, as JSON")
    given = parser.parse_args()
    os.setpgrp()  # an interrupt from the terminal is for the scheduler, not for this process
    connection = socket.socket(fileno=given.fd)
    orders: queue.Queue[EngineOrder] = queue.Queue(MAX_ORDERS)
    _begin(lambda: _receive(connection, orders))
    load = orders.get()
    assert isinstance(load, LoadEngine), "an engine's first order is to load"
    reports = Reports(connection)
    try:
        _serve(reports, orders, load, given.stages, given.sms)
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        reports.send(EngineEnded(model=load.model.name, reason=reason[:MAX_REASON]))
        os._exit(1)  # at once: what vLLM would tidy up may hang, and goes with the process


def _begin(work: Callable[[], None]) -> None:
    """Begin a thread with whose work the process ends: without orders or beats it is no engine."""

    def to_the_end() -> None:
        try:
            work()
        except ConnectionError:
            os._exit(0)  # the scheduler has gone
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    threading.Thread(target=to_the_end, daemon=True).start()


def _receive(connection: socket.socket, orders: "queue.Queue[EngineOrder]") -> None:
    """Pass orders on as they come, until the stream ends."""
    with connection.makefile("rb") as stream:
        while header := stream.read(HEADER.size):
            (length,) = HEADER.unpack(header)
            orders.put(decode_order(stream.read(length)))


def _serve(
    reports: Reports,
    orders: "queue.Queue[EngineOrder]",
    load: LoadEngine,
    stages: Path | None,
    sms: SmCut | None,
) -> None:
    """Load the engine, then obey orders and make steps for as long as the process lives."""
    started = time.perf_counter()
    check_vllm_version()
    if not Path(load.model.weights).is_dir():
        raise FestinaError(
            f"{load.model.name}: its weights {load.model.weights!r} are no folder on this host."
        )
    # Importing vLLM takes seconds, part of the load; to look through it for garbage would take a third more.
    gc.disable()
    from services.local_sched.vllm_ext.served import ServedModel

    gc.freeze()
    gc.enable()
    served = ServedModel(load, stages, sms)
    reports.send(served.ready(load_ms=(time.perf_counter() - started) * 1000))
    _begin(reports.beat)
    while True:
        while (order := _next_order(orders, served.wait_s())) is not None:
            for report in served.obey(order):
                reports.send(report)
        done = list(served.step())
        for report in done:
            reports.send(report)
        if not done and served.has_runnable():
            time.sleep(RETRY_S)


def _next_order(orders: "queue.Queue[EngineOrder]", wait_s: float | None) -> EngineOrder | None:
    """Return the next order, or None if there is none within the time that a step may wait."""
    try:
        return orders.get(timeout=wait_s)
    except queue.Empty:
        return None


if __name__ == "__main__":
    main()
