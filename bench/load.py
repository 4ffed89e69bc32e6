"""A lean HTTP client for load: one keep-alive connection a client, nothing parsed without need.

It runs in a process of its own (`python -m bench.load URL SECONDS CLIENTS BODY`) and prints one JSON line, so
that its cost is seen apart from the gateway's.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlparse

import uvloop


@dataclass
class Outcome:
    """What a load run saw."""

    latencies_ms: list[float] = field(default_factory=list)
    chunks: int = 0
    errors: int = 0
    seconds: float = 0.0


def load(url: str, seconds: float, clients: int, stream: bool, body: dict[str, object]) -> Outcome:
    """Send `body` again and again for `seconds` from `clients` connections, in a process of its own."""
    asked = json.dumps({**body, "stream": stream})
    command = [sys.executable, "-m", "bench.load", url, str(seconds), str(clients), asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60)
    return Outcome(**json.loads(done.stdout))


async def _client(host: str, port: int, data: bytes, until_s: float, outcome: Outcome) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    while time.monotonic() < until_s:
        started = time.monotonic()
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in head:
            while True:
                size = int((await reader.readline()).strip(), 16)
                chunk = await reader.readexactly(size + 2)
                outcome.chunks += chunk.count(b"data: ")
                if size == 0:
                    break
        else:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await reader.readexactly(length)
        if head.startswith(b"HTTP/1.1 200"):
            outcome.latencies_ms.append((time.monotonic() - started) * 1000.0)
        else:
            outcome.errors += 1
    writer.close()


async def _main(url: str, seconds: float, clients: int, body: bytes) -> Outcome:
    where = urlparse(url)
    head = f"POST {where.path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    outcome = Outcome()
    started = time.monotonic()
    data, until_s = head.encode() + body, started + seconds
    assert where.hostname and where.port
    sending = [_client(where.hostname, where.port, data, until_s, outcome) for _ in range(clients)]
    await asyncio.gather(*sending)
    outcome.seconds = time.monotonic() - started
    return outcome


if __name__ == "__main__":
    seen = uvloop.run(_main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()))
    sys.stdout.write(json.dumps(seen.__dict__))
