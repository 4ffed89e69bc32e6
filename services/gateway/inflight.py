"""One request in flight, and whether another attempt can go on exactly where the last one ended."""

from dataclasses import dataclass, field
from typing import Any

from shared.model import Request


@dataclass
class Owned:
    """A request in flight. `gpu` is empty until one has admitted the current attempt."""

    request: Request
    arrived_ms: float
    attempt: int = 1
    gpu: str = ""
    gpu_started_ms: float | None = None
    output: list[int] = field(default_factory=list)
    attempt_start: int = 0  # len(output) when the attempt began
    first_token_ms: float | None = None
    last_token_ms: float = 0.0
    progress_ms: float = 0.0  # last admission or token
    ask_at_ms: float = 0.0
    give_up_ms: float = 0.0
    deferred: str = ""
    lost_gpu: str = ""
    lost_started_ms: float | None = None

    @property
    def has_progressed(self) -> bool:
        """Whether the current attempt has given the client a token."""
        return len(self.output) > self.attempt_start


def resumable(sampling: dict[str, Any], emulated: bool) -> bool:
    """Say whether generation goes on exactly as it would have, given only the tokens so far.

    Greedy sampling does; a random state or anything counted over the output does not. Emulated engines make
    token i from the request alone.
    """
    if emulated:
        return True
    neutral = (
        ("temperature", 1.0, 0.0),  # (parameter, default, value that leaves no state behind)
        ("presence_penalty", 0.0, 0.0),
        ("frequency_penalty", 0.0, 0.0),
        ("repetition_penalty", 1.0, 1.0),
        ("min_tokens", 0, 0),
    )
    stateless = all(sampling.get(name, default) == value for name, default, value in neutral)
    return stateless and "logits_processors" not in sampling
