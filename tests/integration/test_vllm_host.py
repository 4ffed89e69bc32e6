"""The process that holds a vLLM engine: how it ends, and what it says then; here it has no vLLM to load."""

import socket
import subprocess
import sys

from services.local_sched.vllm_child import HOST_MODULE
from services.local_sched.vllm_ext.wire import HEADER, decode_report, frame
from shared.catalog import emulated_models
from shared.engine import EngineEnded, LoadEngine

NO_ORDER = HEADER.pack(1) + b"\xc1"


def ended_after(sent: bytes) -> tuple[int, str, bytes]:
    """Return with which status it ends after these bytes, or the end of them; what it logged and told."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", HOST_MODULE, "--fd", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True)
        theirs.close()
        ours.sendall(sent)
        if not sent:
            ours.shutdown(socket.SHUT_WR)
        _, log = process.communicate(timeout=60)
        ours.settimeout(5)
        told = b""
        while data := ours.recv(1 << 16):
            told += data
        return process.returncode, log, told


def test_it_ends_with_the_scheduler() -> None:
    assert ended_after(b"") == (0, "", b"")


def test_what_it_cannot_read_ends_it_and_is_logged() -> None:
    status, log, _ = ended_after(NO_ORDER)
    assert status == 1 and "DecodeError" in log


def test_why_it_cannot_load_are_its_last_words() -> None:
    status, log, told = ended_after(frame(LoadEngine(model=emulated_models(1)[0])))
    (length,) = HEADER.unpack(told[: HEADER.size])
    last_words = decode_report(told[HEADER.size :][:length])
    assert isinstance(last_words, EngineEnded) and "vLLM" in last_words.reason
    assert status == 1 and "Traceback" in log
