"""Who sets the clocks of a GPU: the clock guard, this process, or nobody, for a reason."""

import contextlib
import socket
from typing import Protocol

import msgspec

from services.local_sched.clock_lease import ANSWER_BYTES, Answer, Ask, Hold
from services.local_sched.nvml import NvmlGpu
from shared.errors import ActuatorRefused

LEASE_MS = 5_000.0
GUARD_S = 2.0
"""The guard answers within this, or is not there."""


class Clocks(Protocol):
    """Sets the clocks of one GPU, and gives them back at the end. Called in a thread."""

    def hold(self, sm_clock_mhz: int, memory_clock_mhz: int) -> None:
        """Hold clocks from now on; 0 leaves one to the driver. Raises ActuatorRefused."""

    def close(self) -> None:
        """Give them back."""


class OwnClocks:
    """Clocks that this process sets by itself; for one that has the GPU to itself, and root."""

    def __init__(self, gpu: NvmlGpu) -> None:
        self._gpu = gpu
        self._held = (0, 0)
        gpu.lock()  # whatever an earlier run left; raises ActuatorRefused where clocks cannot be set

    def hold(self, sm_clock_mhz: int, memory_clock_mhz: int) -> None:
        """Hold clocks from now on."""
        if (sm_clock_mhz, memory_clock_mhz) != self._held:
            self._gpu.lock(sm_clock_mhz, memory_clock_mhz)
            self._held = (sm_clock_mhz, memory_clock_mhz)

    def close(self) -> None:
        """Give them back."""
        self._gpu.lock()


class FixedClocks:
    """Clocks that nobody sets, for a reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def hold(self, sm_clock_mhz: int, memory_clock_mhz: int) -> None:
        """Refuse."""
        raise ActuatorRefused(self._why)

    def close(self) -> None:
        """Nothing to give back."""


def ask(guard: socket.socket, message: Hold | Ask) -> Answer:
    """Return what the clock guard answers. Raises OSError, msgspec.DecodeError: nothing that is an answer.

    One that turns us away has said why before it hears us, and leaves what we send unread: our end tells
    of that first, and of the answer then.
    """
    with contextlib.suppress(BrokenPipeError):
        guard.send(msgspec.json.encode(message))
    with contextlib.suppress(ConnectionResetError):
        return msgspec.json.decode(guard.recv(ANSWER_BYTES), type=Answer)
    return msgspec.json.decode(guard.recv(ANSWER_BYTES), type=Answer)


class GuardedClocks:
    """Clocks that the clock guard sets for us; if this process dies, it gives them back.

    Args:
        path: the guard's socket.
        uuid: the GPU.
    """

    def __init__(self, path: str, uuid: str) -> None:
        self._path, self._uuid = path, uuid
        self._guard: socket.socket | None = None

    def hold(self, sm_clock_mhz: int, memory_clock_mhz: int) -> None:
        """Hold clocks from now on; to be said again within the lease, `LEASE_MS`."""
        hold = Hold(
            gpu=self._uuid, for_ms=LEASE_MS, sm_clock_mhz=sm_clock_mhz, memory_clock_mhz=memory_clock_mhz
        )
        try:
            if self._guard is None:
                self._guard = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._guard.settimeout(GUARD_S)
                self._guard.connect(self._path)
            answer = ask(self._guard, hold)
        except (OSError, msgspec.DecodeError) as error:
            self.close()
            raise ActuatorRefused(f"the clock guard at {self._path} does not answer: {error}") from None
        if answer.refused:
            raise ActuatorRefused(answer.refused)

    def close(self) -> None:
        """End the lease."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None


def clocks_for(gpu: NvmlGpu, guard_socket: str) -> Clocks:
    """Return who sets the clocks of a GPU for an unprivileged process; without a guard, nobody does."""
    if guard_socket:
        return GuardedClocks(guard_socket, gpu.uuid)
    return FixedClocks("no clock guard is configured: set FESTINA_DEVICE_CLOCK_GUARD to its socket")
