"""ServerlessLLM (OSDI '24): models are changed between requests; what runs is never interrupted.

`until_done`: a GPU belongs to one model while a request of it runs. All of its requests that wait begin
together, and others join them, but not once one of another model waits: that would wait for ever.
`while_they_fit`, the generous form: a GPU's time is shared by all models that fit into its memory together;
one leaves when none of its requests runs and another wants the room.

Weights come from host memory at the speed of the link, as its loader has them, into an engine process that
stands ready (`activation_ms` of the device); a GPU that has a model loaded, or is free, goes before one where
a request would wait (`global_sched/choices.py`).

Simplified: all weights are in host memory once they have been registered, so its tiers below that, and where
a model's checkpoint lies, decide nothing; nothing is migrated away to make a GPU free.
"""

from collections.abc import Sequence

from services.local_sched.policies.turns import Contender, Rota, Terms


def until_done(now_ms: float, rota: Rota, contenders: Sequence[Contender], terms: Terms) -> Rota:
    """Let one model have the GPU until all have ended that it began with, or that came before another's."""
    if not contenders:
        return Rota(on=rota.on)
    first = min(contenders, key=_first)
    holder = next((c for c in contenders if c.model in rota.on and c.running), first)
    rest = [contender for contender in contenders if contender is not holder]
    if not rest:
        return Rota(on=(holder.model,))
    other = min(rest, key=_first)
    only = rota.only
    if not holder.running:
        only = frozenset([request for _, request in holder.prompts])
    elif only is None:
        only = frozenset([request for came_ms, request in holder.prompts if came_ms <= other.since_ms])
    return Rota(on=(holder.model,), only=only, ahead=(other.model,))


def while_they_fit(now_ms: float, rota: Rota, contenders: Sequence[Contender], terms: Terms) -> Rota:
    """Let all models run that fit together, those that run first, then as their requests came."""
    left_bytes = terms.total_bytes
    on: list[Contender] = []
    waiting = None
    for contender in sorted(contenders, key=lambda c: (not c.running, _first(c))):
        left_bytes -= contender.need_bytes
        if left_bytes < 0 and on:
            waiting = contender
            break
        on.append(contender)
    models = tuple([contender.model for contender in on])
    if waiting is None:
        return Rota(on=models)
    before = _first(waiting)
    only = [request for c in on for came_ms, request in c.prompts if (came_ms, c.model) < before]
    return Rota(on=models, only=frozenset(only))


def _first(contender: Contender) -> tuple[float, str]:
    """Return when the first request came that a model has still to start."""
    return (contender.prompts[0][0] if contender.prompts else contender.since_ms), contender.model
