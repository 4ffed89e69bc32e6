"""The clock guard as a process of its own, on the stub NVML: leases, deaths, strangers, and nonsense."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from guard_process import Guard, wait_for
from nvml import HOST, UUIDS, StubNvml

from services.local_sched.clock_lease import MOST_BYTES, Answer, Ask, Hold, Release

FUZZ_S = float(os.environ.get("FESTINA_FUZZ_S", "2"))
"""`make test-resilience` fuzzes for a minute."""


def ask(connection: socket.socket, message: Hold | Release) -> str:
    connection.send(msgspec.json.encode(message))
    return msgspec.json.decode(connection.recv(MOST_BYTES), type=Answer).refused


def test_whoever_dies_leaves_default_clocks(nvml: StubNvml, guard: Guard) -> None:
    """kill -9 of the holder, of the guard, and of both; a GPU that is not the guard's is never touched."""
    nvml.set(3, locked_min_mhz=795.0, locked_max_mhz=795.0)  # somebody else's
    holder = guard.holder(*UUIDS[:2])
    assert nvml.locked_mhz(0) == nvml.locked_mhz(1) == (1005, 1005)
    holder.kill()
    assert wait_for(lambda: nvml.locked_mhz(0) is None and nvml.locked_mhz(1) is None) < 2.0

    holder = guard.holder(UUIDS[2])
    guard.stop(signal.SIGKILL)
    assert nvml.locked_mhz(2) == (1005, 1005)  # an orphan: a lock outlives its process
    guard.start()
    wait_for(lambda: nvml.locked_mhz(2) is None)

    guard.holder(UUIDS[0])
    assert guard.stop() == 0 and nvml.locked_mhz(0) is None and not guard.socket.exists()
    assert {call.gpu for call in nvml.calls} == {0, 1, 2} and nvml.locked_mhz(3) == (795, 795)
    pids = {call.pid for call in nvml.calls}
    assert len(pids) == 2 and holder.pid not in pids  # the two guards'


def test_a_gpu_that_fails_is_that_gpu_alone(nvml: StubNvml, guard: Guard) -> None:
    with guard.connect() as ours, guard.connect() as theirs:
        nvml.set(1, not_permitted=1)
        nvml.set(2, lost=1)
        refusals = [ask(ours, Hold(gpu=uuid, for_ms=5_000, sm_clock_mhz=1005)) for uuid in UUIDS]
        assert refusals[0] == "" and nvml.locked_mhz(0) == (1005, 1005)
        assert "Insufficient Permissions" in refusals[1] and "GPU is lost" in refusals[2]
        assert "not configured" in refusals[3]
        assert "held by another" in ask(theirs, Hold(gpu=UUIDS[0], for_ms=5_000))
        nvml.set(2, lost=0)
        assert ask(theirs, Hold(gpu=UUIDS[2], for_ms=100, sm_clock_mhz=1500)) == ""
        assert nvml.locked_mhz(2) == (1500, 1500)
        wait_for(lambda: nvml.locked_mhz(2) is None)  # its lease has ended
        assert nvml.locked_mhz(0) == (1005, 1005)
        assert ask(ours, Release(gpu=UUIDS[0])) == "" and nvml.locked_mhz(0) is None
    assert 3 not in {call.gpu for call in nvml.calls}


@pytest.mark.parametrize(
    ("fault", "why"),
    [({"listing_fails": 1}, "no GPU GPU-0"), ({"no_driver": 1}, "no NVIDIA driver"), ({"gpus": 2}, "no GPU")],
)
def test_where_gpus_cannot_be_listed_nothing_is_changed(
    nvml: StubNvml, tmp_path: Path, fault: dict[str, float], why: str
) -> None:
    nvml.set(0, locked_min_mhz=1005.0, locked_max_mhz=1005.0)
    nvml.set(HOST, **fault)
    guard = Guard(nvml, tmp_path)
    guard.start()
    assert guard.process.wait(5) == 1 and why in guard.log.read_text()
    assert nvml.calls == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_turned_away(nvml: StubNvml, guard: Guard) -> None:
    code = (
        "from services.local_sched.host_probe import ask_guard;"
        "from services.local_sched.clock_setters import GuardedClocks;"
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "os.chdir(sys.argv[1]); os.setgid(12345); os.setuid(12345);"
        "s.connect('clocks.sock'); print(s.recv(512).decode()); print(s.recv(512));"
        "facts = ask_guard('clocks.sock'); print(len(facts.gpus), facts.trouble);"
        "GuardedClocks('clocks.sock', 'GPU-0').hold(1005, 0)"
    )
    for folder in (guard.socket.parent, guard.socket.parent.parent):
        folder.chmod(0o711)  # pytest's are its own user's
    argv = [sys.executable, "-c", code, str(guard.socket.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "user 12345 (group 12345) may not set clocks" in done.stdout, done.stderr
    assert done.stdout.splitlines()[1] == "b''"
    assert done.stdout.splitlines()[2].startswith("0 user 12345")
    assert "ActuatorRefused: user 12345 (group 12345) may not" in done.stderr
    lines = guard.logged("connection refused")
    assert [line["peer_uid"] for line in lines] == 3 * [12345] and lines[0]["peer_pid"] > 0


def test_nonsense_is_refused_and_logged(nvml: StubNvml, guard: Guard) -> None:
    too_long = b'{"type":"Hold","gpu":"' + b"G" * 97 + b'","for_ms":1}'
    for text in (b"{", b"x" * (MOST_BYTES + 1), too_long, b'{"type":"Ask","gpu":"%s"}' % UUIDS[0].encode()):
        with guard.connect() as connection:
            connection.send(text)
            answer = msgspec.json.decode(connection.recv(MOST_BYTES), type=Answer)
            assert "no message of the clock guard's" in answer.refused
            assert connection.recv(MOST_BYTES) == b""
    assert len(guard.logged("message refused")) == 4
    with guard.connect() as connection:
        assert ask(connection, Hold(gpu=UUIDS[0], for_ms=100, sm_clock_mhz=1005)) == ""


def _nonsense(chance: random.Random) -> bytes:
    """Make something like a message: bytes at random, or a message with some of them changed."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.choice([1, 10, 100, MOST_BYTES, MOST_BYTES + 1, 9_000]))
    clocks = {"sm_clock_mhz": chance.choice([0, 345, 1005, 99, 10_000]), "memory_clock_mhz": 0}
    gpu = chance.choice(UUIDS)
    hold = Hold(gpu=gpu, for_ms=chance.choice([1.0, 50.0]), **clocks)
    message = bytearray(msgspec.json.encode(chance.choice([hold, Release(gpu=gpu), Ask()])))
    for _ in range(chance.choice([0, 0, 1, 3])):
        message[chance.randrange(len(message))] = chance.randrange(256)
    return bytes(message)


def _fuzz(guard: Guard, until: float, chance: random.Random) -> int:
    """Send nonsense on several connections at once, some of which never listen or leave at once."""
    sent, connections = 0, []
    while time.monotonic() < until:
        if len(connections) < 20 and (not connections or chance.random() < 0.2):
            connection = guard.connect()
            connection.setblocking(False)
            connections.append(connection)
        connection = chance.choice(connections)
        try:
            connection.send(_nonsense(chance))
            sent += 1
            if chance.random() < 0.7:
                connection.recv(MOST_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            connections.remove(connection)
            connection.close()
    for connection in connections:
        connection.close()
    return sent


@pytest.mark.resilience
def test_nonsense_at_random_does_not_hurt_it(nvml: StubNvml, guard: Guard) -> None:
    sent = _fuzz(guard, time.monotonic() + FUZZ_S, random.Random(1))
    assert guard.process.poll() is None and sent > 100 * FUZZ_S
    assert not [line for line in guard.log.read_text().splitlines() if "Traceback" in line]
    wait_for(lambda: all(nvml.locked_mhz(gpu) is None for gpu in range(4)))
    with guard.connect() as connection:
        assert ask(connection, Hold(gpu=UUIDS[0], for_ms=5_000, sm_clock_mhz=1005)) == ""
    assert 3 not in {call.gpu for call in nvml.calls}
    assert guard.stop() == 0
