"""The clock guard: the one process that has the right to set GPU clocks, and sets them on a lease.

It listens on a Unix socket of whole messages (``SOCK_SEQPACKET``), takes connections from the users that its
configuration names (the kernel says who is at the other end), and does what `clock_lease.py` decides. When it
is told to stop, and whenever it starts, the GPUs of its configuration get their default clocks back.

Run it as ``python -m services.local_sched.clock_guard`` (docs/operations.md).
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.local_sched.clock_lease import (
    MESSAGES,
    MOST_BYTES,
    Answer,
    GuardCore,
    Heard,
    Left,
    Tell,
    Write,
    Written,
)
from services.local_sched.nvml import NvmlGpu
from shared.clock import now_ms
from shared.config import Common, load
from shared.errors import ActuatorRefused, ConfigError
from shared.events import Action, Event, Tick
from shared.process import run_service

log = logging.getLogger(__name__)

MOST_HOLDERS = 64
PEER = struct.Struct("3i")  # pid, uid, gid: struct ucred
ENCODER = msgspec.json.Encoder()


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard may touch, and for whom (section ``clock_guard``).

    Args:
        gpus: the GPUs it may touch, by UUID (``GPU-…``) or number, with commas between. Numbers shift when a
            GPU is missing.
        socket: where it listens.
        uids, gids: users and groups that may connect, with commas between; besides its own user.
    """

    gpus: str = ""
    socket: str = "/run/festina/clocks.sock"
    uids: str = ""
    gids: str = ""


class Peer(NamedTuple):
    """Who is at the other end of a connection."""

    connection: socket.socket
    pid: int
    uid: int


class Guard:
    """The shell around `GuardCore`.

    Args:
        gpus: those of the configuration, by UUID.
        listener: bound and listening.
        uids, gids: who may connect.
    """

    def __init__(
        self, gpus: dict[str, NvmlGpu], listener: socket.socket, uids: set[int], gids: set[int]
    ) -> None:
        self._gpus = gpus
        self._listener = listener
        self._uids, self._gids = uids, gids
        self._core = GuardCore(tuple(gpus))
        self._peers: dict[int, Peer] = {}
        self._numbers = count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._failing: dict[str, str] = {}

    def start(self) -> None:
        """Free the GPUs, and take connections from now on."""
        self._loop.add_reader(self._listener, self._accept)
        self._step(Tick())

    def close(self) -> None:
        """Free the GPUs, and close every connection."""
        self._loop.remove_reader(self._listener)
        for holder in list(self._peers):
            self._drop(holder)
        self._perform(self._core.close())
        if self._timer is not None:
            self._timer.cancel()

    # ---- connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # gone again
        connection.setblocking(False)
        pid, uid, gid = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        why = ""
        if uid not in self._uids and gid not in self._gids:
            why = f"user {uid} (group {gid}) may not set clocks: see FESTINA_CLOCK_GUARD_UIDS"
        elif len(self._peers) >= MOST_HOLDERS:
            why = f"the clock guard has {MOST_HOLDERS} connections, which is its limit"
        if why:
            log.warning("connection refused", extra={"peer_pid": pid, "peer_uid": uid, "why": why})
            _send(connection, Answer(refused=why))
            connection.close()
            return
        holder = next(self._numbers)
        self._peers[holder] = Peer(connection, pid, uid)
        self._loop.add_reader(connection, self._receive, holder)

    def _receive(self, holder: int) -> None:
        """Take a message; one that is none ends the connection, and with it what the holder holds."""
        peer = self._peers[holder]
        try:
            data = peer.connection.recv(MOST_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(holder)
            return
        try:
            if len(data) > MOST_BYTES:
                raise msgspec.DecodeError(f"it is longer than {MOST_BYTES} bytes")
            message = MESSAGES.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning(
                "message refused", extra={"peer_pid": peer.pid, "peer_uid": peer.uid, "why": str(error)[:200]}
            )
            _send(peer.connection, Answer(refused=f"that is no message of the clock guard's: {error}"[:400]))
            self._drop(holder)
            return
        self._step(Heard(holder=holder, message=message))

    def _drop(self, holder: int) -> None:
        peer = self._peers.pop(holder)
        self._loop.remove_reader(peer.connection)
        peer.connection.close()
        self._step(Left(holder=holder))

    # ---- the core

    def _step(self, event: Event) -> None:
        self._perform(self._core.step(now_ms(), event))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (wake_ms := self._core.wake_ms) != float("inf"):
            delay_s = max(0.001, (wake_ms - now_ms()) / 1000.0)
            self._timer = self._loop.call_later(delay_s, self._step, Tick())

    def _perform(self, actions: list[Action]) -> None:
        """Carry out actions; what comes of one may give further ones."""
        for action in actions:
            match action:
                case Tell(holder=holder, answer=answer):
                    if (peer := self._peers.get(holder)) and not _send(peer.connection, answer):
                        self._drop(holder)  # it asks and does not listen
                case Write():
                    written = self._write(action)
                    self._perform(self._core.step(now_ms(), written))

    def _write(self, action: Write) -> Written:
        gpu, holder, error = action.gpu, action.holder, ""
        try:
            self._gpus[gpu].lock(action.sm_clock_mhz, action.memory_clock_mhz)
        except ActuatorRefused as refused:
            error = str(refused)
        if error != self._failing.get(gpu, ""):  # a GPU that is to be freed is tried again and again
            self._failing[gpu] = error
            log.log(logging.ERROR if error else logging.INFO, error or "clocks can be set again")
        return Written(gpu=gpu, holder=holder, error=error)


def _send(connection: socket.socket, answer: Answer) -> bool:
    try:
        connection.send(ENCODER.encode(answer))
    except OSError:
        return False
    return True


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path. Raises ConfigError: another guard does, or it cannot be."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ConfigError(f"another clock guard listens at {path}")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o666)  # whom the kernel names is what counts
        listener.listen(MOST_HOLDERS)
    except OSError as error:
        raise ConfigError(f"the clock guard cannot listen at {path}: {error}") from None
    listener.setblocking(False)
    return listener


def _named(numbers: str, what: str) -> set[int]:
    try:
        return {int(number) for number in numbers.split(",") if number.strip()}
    except ValueError:
        raise ConfigError(f"FESTINA_CLOCK_GUARD_{what}={numbers} are no numbers") from None


async def guard(settings: GuardSettings, stop: asyncio.Event) -> bool:
    """Guard until told to stop.

    Every GPU is found before anything is done to one. Raises ConfigError: one is not there, or none is named.
    """
    names = [name.strip() for name in settings.gpus.split(",") if name.strip()]
    if not names:
        raise ConfigError("FESTINA_CLOCK_GUARD_GPUS names no GPU; set it to their UUIDs (nvidia-smi -L)")
    uids, gids = _named(settings.uids, "UIDS") | {os.geteuid()}, _named(settings.gids, "GIDS")
    gpus = {gpu.uuid: gpu for gpu in map(NvmlGpu, names)}
    path = Path(settings.socket)
    with listen(path) as listener:
        guarding = Guard(gpus, listener, uids, gids)
        guarding.start()
        log.info("guarding clocks", extra={"gpus": list(gpus), "socket": settings.socket})
        try:
            await stop.wait()
        finally:
            guarding.close()
            path.unlink(missing_ok=True)
    return True


def main() -> None:
    """Entry point."""
    settings = load(GuardSettings, "clock_guard")
    run_service(load(Common), lambda stop: guard(settings, stop))


if __name__ == "__main__":
    main()
