"""The clock guard's decisions: one holder a GPU, for a while, and default clocks for whoever is free."""

import msgspec
import pytest

from services.local_sched.clock_lease import (
    MESSAGES,
    RETRY_MS,
    Answer,
    Ask,
    GuardCore,
    Heard,
    Hold,
    Left,
    Release,
    Standing,
    Tell,
    Write,
    Written,
)
from shared.events import Tick

A, B = "GPU-a", "GPU-b"
OK = Answer()


class Guard:
    """The core with a device under it that takes everything but what `broken` names."""

    def __init__(self, *gpus: str) -> None:
        self.core = GuardCore(gpus)
        self.now_ms = 0.0
        self.clocks: dict[str, tuple[int, int]] = {}
        self.broken: dict[str, str] = {}
        self.answers: list[tuple[int, Answer]] = []
        self.writes = 0

    def do(self, event, after_ms: float = 0.0) -> Answer | None:
        """Let an event happen; returns the answer to it."""
        self.now_ms += after_ms
        said = len(self.answers)
        self._perform(self.core.step(self.now_ms, event))
        return self.answers[-1][1] if len(self.answers) > said else None

    def hold(self, holder: int, gpu: str, sm_clock_mhz: int = 0, for_ms: float = 5_000.0, **more):
        message = Hold(gpu=gpu, for_ms=for_ms, sm_clock_mhz=sm_clock_mhz)
        return self.do(Heard(holder=holder, message=message), **more)

    def _perform(self, actions) -> None:
        for action in actions:
            if isinstance(action, Tell):
                self.answers.append((action.holder, action.answer))
                continue
            assert isinstance(action, Write)
            self.writes += 1
            error = self.broken.get(action.gpu, "")
            if not error:
                self.clocks[action.gpu] = (action.sm_clock_mhz, action.memory_clock_mhz)
            written = Written(gpu=action.gpu, holder=action.holder, error=error)
            self._perform(self.core.step(self.now_ms, written))


def test_at_its_start_the_guard_frees_what_an_earlier_one_left():
    guard = Guard(A, B)
    guard.do(Tick())
    assert guard.clocks == {A: (0, 0), B: (0, 0)} and guard.core.wake_ms == float("inf")


def test_a_gpu_has_one_holder_until_its_lease_ends():
    guard = Guard(A)
    assert guard.hold(1, A, 1005) == OK and guard.clocks[A] == (1005, 0)
    assert "held by another process for 5.0 s" in guard.hold(2, A, 1635).refused
    assert guard.hold(1, A, 1005, after_ms=4_000.0) == OK  # renewed, and not written again
    writes = guard.writes
    guard.do(Tick(), after_ms=4_999.0)
    assert guard.writes == writes and guard.core.wake_ms == guard.now_ms + 1.0
    guard.do(Tick(), after_ms=1.0)
    assert guard.clocks[A] == (0, 0)
    assert guard.hold(2, A, 1635) == OK and guard.clocks[A] == (1635, 0)


def test_a_holder_that_leaves_leaves_default_clocks():
    guard = Guard(A, B)
    guard.hold(1, A, 1005)
    guard.hold(1, B, 795)
    guard.do(Left(holder=1))
    assert guard.clocks == {A: (0, 0), B: (0, 0)} and not guard.core.leases


def test_a_gpu_can_be_released_by_its_holder_alone():
    guard = Guard(A)
    guard.hold(1, A, 1005)
    assert guard.do(Heard(holder=2, message=Release(gpu=A))).refused
    assert guard.clocks[A] == (1005, 0)
    assert guard.do(Heard(holder=1, message=Release(gpu=A))) == OK
    assert guard.clocks[A] == (0, 0)


def test_only_gpus_of_the_configuration_are_touched():
    guard = Guard(A)
    assert "not configured for GPU-b" in guard.hold(1, B, 1005).refused
    assert set(guard.clocks) == {A}


def test_a_lock_that_fails_ends_in_default_clocks_of_that_gpu_alone():
    guard = Guard(A, B)
    guard.do(Tick())
    guard.hold(1, B, 795)
    guard.broken[A] = "Insufficient Permissions"
    assert guard.hold(1, A, 1005).refused == "Insufficient Permissions"
    assert A not in guard.core.leases and guard.clocks[B] == (795, 0)
    guard.broken.clear()
    guard.clocks[A] = (1005, 0)  # who knows
    guard.do(Tick(), after_ms=RETRY_MS)
    assert guard.clocks[A] == (0, 0)


def test_freeing_is_tried_until_it_is_done():
    guard = Guard(A)
    guard.broken[A] = "GPU is lost"
    for _ in range(3):
        writes = guard.writes
        guard.do(Tick(), after_ms=RETRY_MS)
        assert guard.writes == writes + 1
    guard.broken.clear()
    guard.do(Tick(), after_ms=RETRY_MS)
    assert guard.clocks == {A: (0, 0)} and guard.core.wake_ms == float("inf")


def test_whoever_asks_hears_how_every_gpu_stands_and_changes_nothing():
    guard = Guard(A, B)
    guard.do(Tick())
    guard.hold(1, A, 1005)
    guard.broken[B] = "Insufficient Permissions"
    guard.hold(1, B, 1005)
    writes = guard.writes
    told = guard.do(Heard(holder=2, message=Ask()))
    assert told == Answer(gpus=(Standing(gpu=A, held=True), Standing(gpu=B, trouble=guard.broken[B])))
    assert guard.writes == writes
    guard.broken.clear()
    guard.do(Tick(), after_ms=RETRY_MS)
    assert guard.do(Heard(holder=2, message=Ask())).gpus[1] == Standing(gpu=B)


def test_a_guard_that_ends_frees_what_is_held():
    guard = Guard(A, B)
    guard.do(Tick())
    guard.hold(1, A, 1005)
    assert [action.gpu for action in guard.core.close()] == [A]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"type":"Hold","gpu":"GPU-a"}',
        b'{"type":"Hold","gpu":"","for_ms":1}',
        b'{"type":"Hold","gpu":"GPU-a","for_ms":1e9}',
        b'{"type":"Hold","gpu":"GPU-a","for_ms":1,"sm_clock_mhz":-1}',
        b'{"type":"Hold","gpu":"GPU-a","for_ms":1,"power_limit_w":700}',
        b'{"type":"Reboot"}',
    ],
)
def test_what_is_no_message_is_none(text: bytes):
    with pytest.raises(msgspec.DecodeError):
        MESSAGES.decode(text)
