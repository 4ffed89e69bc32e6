"""One request in flight, and what its attempts have taken."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from shared.model import Request, RequestEnd


@dataclass(slots=True)
class Owned:
    """A request in flight. `gpu` is empty until one has admitted the current attempt.

    `asked`: the last that was sent for it is a `Dispatch`, so the next is an `Inquire`, and so on.
    `stopping`: its client has all its text, and only the GPU's report is still waited for. `energy_j` is what
    earlier attempts reported, and `unreported` the GPUs of those that did not.
    """

    request: Request
    arrived_ms: float
    attempt: int = 1
    gpu: str = ""
    gpu_started_ms: float | None = None
    moved: bool = False  # to that GPU, from another
    output: list[int] = field(default_factory=list)
    attempt_start: int = 0  # len(output) when the attempt began
    first_token_ms: float | None = None
    last_token_ms: float = 0.0
    progress_ms: float = 0.0  # last admission or token
    asked: bool = False
    ask_at_ms: float = 0.0
    give_up_ms: float = 0.0
    deferred: str = ""
    lost_gpu: str = ""
    lost_started_ms: float | None = None
    stopping: bool = False
    energy_j: float | None = None
    unreported: list[str] = field(default_factory=list)

    @property
    def has_progressed(self) -> bool:
        """Whether the current attempt has given the client a token."""
        return len(self.output) > self.attempt_start


def note_energy(owned: Owned, end: RequestEnd | None) -> None:
    """Keep what a failed attempt reported of its energy; without a report it is not known."""
    if end is not None and end.energy_j is not None:
        owned.energy_j = (owned.energy_j or 0.0) + end.energy_j
    elif owned.gpu:
        owned.unreported.append(owned.gpu)


def with_earlier(owned: Owned, end: RequestEnd) -> RequestEnd:
    """Return a request's end with the energy of its earlier attempts, and with what of it is not known."""
    if owned.energy_j is None and not owned.unreported:
        return end
    known = [energy_j for energy_j in (owned.energy_j, end.energy_j) if energy_j is not None]
    sources = [end.energy_source] if end.energy_source else []
    sources += [f"not counted: what {gpu} never reported" for gpu in dict.fromkeys(owned.unreported)]
    return replace(end, energy_j=sum(known) if known else None, energy_source="; ".join(sources))
