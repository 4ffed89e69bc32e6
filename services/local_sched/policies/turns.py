"""What a system's rule sees of a GPU that changes models, and what it says: whose turn it is.

More models are assigned to such a GPU than its memory holds. Their weights lie in host memory; a rule of this
shape says which of them may run now, until when, and which had better be brought in ahead of their turn.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Contender(NamedTuple):
    """A model that has requests on the GPU.

    Args:
        prompts: (arrival, id) of each request without a token, the first of them first.
        running: requests that its engine has.
        decodes: requests that have a token, wherever they are.
        since_ms: when the first of all its requests came.
        ready: its weights are in the device.
        need_bytes: memory of its weights, and the least for KV beside them.
        step_ms, tbt_ms: how long a decode step of all its requests takes, and how often one is due.
        switch_ms: time to bring in its weights if they are not there, and its KV, and to take that out again.
    """

    model: str
    prompts: tuple[tuple[float, str], ...] = ()
    running: int = 0
    decodes: int = 0
    since_ms: float = 0.0
    ready: bool = False
    need_bytes: int = 0
    step_ms: float = 0.0
    tbt_ms: float = 0.0
    switch_ms: float = 0.0


class Group(NamedTuple):
    """Requests of one model that are served together: all that ever joined it."""

    model: str
    joined: frozenset[str]


class Rota(NamedTuple):
    """Whose turn it is, and what the rule has to remember for the next time.

    Args:
        on: models whose requests may run.
        only: of their requests without a token, those that may start; None: all.
        at_once: most prompts that an engine computes at a time.
        ends_ms: the rule is asked again then at the latest; infinite: when the work changes.
        quota_ms: how long the turn lasts from when its model is in the device.
        ahead: models to be brought in meanwhile, if there is room beside those that run.
        left: (model, quota) of the turns to come in this round.
        groups: as they are to be served.
        leaving: (model, end) of those that have been served, whose requests may run on until then.
    """

    on: tuple[str, ...] = ()
    only: frozenset[str] | None = None
    at_once: float = math.inf
    ends_ms: float = math.inf
    quota_ms: float = math.inf
    ahead: tuple[str, ...] = ()
    left: tuple[tuple[str, float], ...] = ()
    groups: tuple[Group, ...] = ()
    leaving: tuple[tuple[str, float], ...] = ()


NOBODY = Rota()


class Terms(NamedTuple):
    """What a rule may know beside the contenders.

    Args:
        total_bytes: memory of the device.
        role: phase that the GPU is for: ``prefill``, ``decode`` or ``both``.
        group_requests: most requests in a group.
        quota_min_ms, quota_max_ms: shortest and longest turn.
    """

    total_bytes: int
    role: str = "both"
    group_requests: int = 8
    quota_min_ms: float = 0.0
    quota_max_ms: float = 4_000.0


Rule = Callable[[float, Rota, Sequence[Contender], Terms], Rota]
"""Returns whose turn it is now, given who had it."""
