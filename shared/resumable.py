"""Whether generation goes on exactly as it would have, given only the tokens so far."""

from typing import Any


def resumable(sampling: dict[str, Any], emulated: bool) -> bool:
    """Say whether another engine would go on from the tokens so far as this one would.

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
