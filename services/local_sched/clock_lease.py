"""Who may hold which GPU's clocks, and until when: the pure half of the clock guard.

A lock on a clock outlives whoever set it. So nobody has one but for a while: a lease is renewed or ends, and
ends with its holder's connection; then the GPU gets its default clocks back, tried again until it has them.
At the start every GPU of the configuration gets them: whoever held one may have died with an earlier guard.
GPUs that are not in the configuration cannot be named here, so nothing can be done to them.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from shared.events import Action, Event
from shared.model import Struct

MOST_BYTES = 512
ANSWER_BYTES = 16_384
"""A message is at most so long, and an answer."""
RETRY_MS = 1_000.0

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=96)]
Clock = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Span = Annotated[float, msgspec.Meta(gt=0.0, le=60_000.0)]


class Hold(Struct, tag=True, forbid_unknown_fields=True):
    """Give me this GPU for `for_ms` from now, at these clocks; 0 leaves one to the driver.

    Sent again it renews the lease, and writes only clocks that are others than before.
    """

    gpu: Name
    for_ms: Span
    sm_clock_mhz: Clock = 0
    memory_clock_mhz: Clock = 0


class Release(Struct, tag=True, forbid_unknown_fields=True):
    """I need this GPU no longer."""

    gpu: Name


class Ask(Struct, tag=True, forbid_unknown_fields=True):
    """Which GPUs do you lease, and how do they stand? Changes nothing."""


class Standing(Struct):
    """A GPU that the guard leases: whether somebody holds it, and why its clocks could not be set lately."""

    gpu: str
    held: bool = False
    trouble: str = ""


class Answer(Struct):
    """What became of a message; `refused` says why nothing did, and is empty otherwise.

    `gpus` answers an `Ask`.
    """

    refused: str = ""
    gpus: tuple[Standing, ...] = ()


MESSAGES = msgspec.json.Decoder(Hold | Release | Ask)


class Heard(Event):
    """A holder, by the number of its connection, has sent a message."""

    holder: int
    message: Hold | Release | Ask


class Left(Event):
    """A holder's connection is gone: it has closed it, or died."""

    holder: int


class Written(Event):
    """What came of a `Write`: done, or not, for the reason given."""

    gpu: str
    holder: int | None
    error: str = ""


class Write(Action):
    """Set a GPU's clocks, 0: to its default. `holder` asked for it; None: it is to be free again."""

    gpu: str
    holder: int | None = None
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0


class Tell(Action):
    """Answer a holder."""

    holder: int
    answer: Answer


@dataclass(slots=True)
class Lease:
    """A GPU's holder, the end of its lease, and the clocks that it has."""

    holder: int
    until_ms: float
    clocks_mhz: tuple[int, int] = (0, 0)


class GuardCore:
    """Leases of the GPUs that the configuration names, by their UUIDs."""

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._gpus = gpus
        self.leases: dict[str, Lease] = {}
        self._troubles: dict[str, str] = {}  # what the last write of a GPU's clocks failed with
        self._to_free = dict.fromkeys(gpus, 0.0)  # not known to have its default clocks; when to try again

    @property
    def wake_ms(self) -> float:
        """When it next wants a `Tick`: a lease ends, or a GPU is to be freed; infinite if neither."""
        ends_ms = [lease.until_ms for lease in self.leases.values()]
        return min([*ends_ms, *self._to_free.values()], default=float("inf"))

    def step(self, now_ms: float, event: Event) -> list[Action]:
        """Take an event; then end leases whose time is over, and free what is to be freed."""
        actions: list[Action] = []
        match event:
            case Heard(holder=holder, message=Hold() as message):
                actions = self._hold(now_ms, holder, message)
            case Heard(holder=holder, message=Release(gpu=gpu)):
                actions = self._release(now_ms, holder, gpu)
            case Heard(holder=holder, message=Ask()):
                actions = [Tell(holder=holder, answer=Answer(gpus=self._standings()))]
            case Left(holder=holder):
                for gpu in [gpu for gpu, lease in self.leases.items() if lease.holder == holder]:
                    self._end(now_ms, gpu)
            case Written():
                actions = self._written(now_ms, event)
        for gpu in [gpu for gpu, lease in self.leases.items() if lease.until_ms <= now_ms]:
            self._end(now_ms, gpu)
        due = [gpu for gpu, due_ms in self._to_free.items() if due_ms <= now_ms]
        self._to_free.update(dict.fromkeys(due, now_ms + RETRY_MS))
        return [*(Write(gpu=gpu) for gpu in due), *actions]  # who releases one hears when it is done

    def close(self) -> list[Action]:
        """End every lease; returns what frees the GPUs."""
        freed = [*self.leases, *self._to_free]
        self.leases.clear()
        return [Write(gpu=gpu) for gpu in dict.fromkeys(freed)]

    def _hold(self, now_ms: float, holder: int, message: Hold) -> list[Action]:
        gpu = message.gpu
        if gpu not in self._gpus:
            known = ", ".join(self._gpus)
            return _refusal(holder, f"the clock guard is not configured for {gpu}, only for: {known}")
        lease = self.leases.get(gpu)
        if lease is not None and lease.holder != holder:
            left_s = (lease.until_ms - now_ms) / 1000.0
            return _refusal(holder, f"{gpu} is held by another process for {left_s:.1f} s more")
        if lease is None:
            lease = self.leases[gpu] = Lease(holder, 0.0)
        lease.until_ms = now_ms + message.for_ms
        clocks_mhz = (message.sm_clock_mhz, message.memory_clock_mhz)
        if clocks_mhz == lease.clocks_mhz:
            return [Tell(holder=holder, answer=Answer())]
        lease.clocks_mhz = clocks_mhz
        self._to_free.pop(gpu, None)
        return [Write(gpu=gpu, holder=holder, sm_clock_mhz=clocks_mhz[0], memory_clock_mhz=clocks_mhz[1])]

    def _standings(self) -> tuple[Standing, ...]:
        return tuple(
            Standing(gpu=gpu, held=gpu in self.leases, trouble=self._troubles.get(gpu, "")[:200])
            for gpu in self._gpus
        )

    def _release(self, now_ms: float, holder: int, gpu: str) -> list[Action]:
        lease = self.leases.get(gpu)
        if lease is None or lease.holder != holder:
            return _refusal(holder, f"{gpu} is not yours to release")
        self._end(now_ms, gpu)
        return [Tell(holder=holder, answer=Answer())]

    def _end(self, now_ms: float, gpu: str) -> None:
        del self.leases[gpu]
        self._to_free[gpu] = now_ms

    def _written(self, now_ms: float, event: Written) -> list[Action]:
        """A lock that failed may have been done in part: the lease ends, and the GPU is freed."""
        gpu, holder = event.gpu, event.holder
        self._troubles[gpu] = event.error
        if holder is None:
            if not event.error and gpu not in self.leases:
                self._to_free.pop(gpu, None)
            return []
        if event.error and gpu in self.leases:
            self._end(now_ms, gpu)
        return [Tell(holder=holder, answer=Answer(refused=event.error))]


def _refusal(holder: int, why: str) -> list[Action]:
    return [Tell(holder=holder, answer=Answer(refused=why))]
