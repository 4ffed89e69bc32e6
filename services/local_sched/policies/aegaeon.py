"""Aegaeon (SOSP '25): models are changed between tokens, on GPUs for prompts and on others for decodes.

Prompts are served in groups: a request joins the last group of its model while that has had fewer than eight,
or begins one at the end of the queue. A GPU computes one prompt at a time, group after group, and hands each
request on to a decoding GPU. Those go round the batches of their models. A batch that makes a token in t,
while one is due every d, is ahead of its clients by d - t a step: time in which others may run. Each turn
lasts as long as the round can afford, so that what a batch has earned pays for the turns of the others and
for changing models. The next model is brought in during the turn before, if there is room.

Weights come from pinned host memory at the speed of the link, into an engine whose parts are all reused. At
the end of a turn the KV of its requests is copied to host memory, and back at the next (`switching.py`).

Simplified: a model's weights stay in the device until another needs the room. A request whose move to a
decoding GPU fails decodes where it is, as one more group; a GPU with both roles goes round batches, prompts
in them. Rounds follow the age of their batches; copies of KV do not slow each other down. Where all models of
a round fit, changing them costs next to nothing, and the formula asks for turns of single steps: they last
`quota_min_ms` at least.
"""

import math
from collections.abc import Sequence

from services.local_sched.policies.turns import Contender, Group, Rota, Terms

LEAST_ALPHA = 0.5
Q_MAX_MS = 4_000.0
LINGER_MS = 1_000.0
"""A group's requests have so long to leave for their decoding GPUs, or to decode if they do not."""


def quotas_ms(
    step_ms: Sequence[float], tbt_ms: Sequence[float], switching_ms: float, most_ms: float = Q_MAX_MS
) -> tuple[list[float], float]:
    """Return the time that each batch of a round may run, and alpha; 1 / alpha of the tokens are in time.

    Args:
        step_ms, tbt_ms: of each batch, how long a decode step takes and how often one is due.
        switching_ms: what changing models takes in the whole round; if nothing, all turns are the longest.
        most_ms: longest time (Q_MAX): whoever comes waits for a round at most.
    """
    steps = [due_ms / ms for due_ms, ms in zip(tbt_ms, step_ms, strict=True)]  # that one deadline affords
    busy = sum(1.0 / n for n in steps)
    alpha = max(switching_ms / (min(steps) * most_ms) + busy, LEAST_ALPHA)
    if not switching_ms:
        return [most_ms] * len(steps), alpha
    return [switching_ms / (n * (alpha - busy)) for n in steps], alpha


def turns(now_ms: float, rota: Rota, contenders: Sequence[Contender], terms: Terms) -> Rota:
    """Return whose turn it is, by the role of the GPU."""
    if not contenders:
        return Rota(on=rota.on[:1])
    if terms.role == "prefill":
        return grouped(now_ms, rota, contenders, terms)
    return weighted_rounds(now_ms, rota, contenders, terms)


# ---- decodes


def weighted_rounds(now_ms: float, rota: Rota, contenders: Sequence[Contender], terms: Terms) -> Rota:
    """Go round the batches, each for its quota; a batch whose requests have ended gives its turn up."""
    here = {contender.model: contender for contender in contenders}
    if len(here) == 1:
        return Rota(on=tuple(here))
    current = here.get(rota.on[0]) if rota.on else None
    if current is not None and math.isinf(rota.quota_ms):
        current = None  # it was alone until now
    if current is not None:
        if current.ready and math.isinf(rota.ends_ms):
            rota = rota._replace(ends_ms=now_ms + rota.quota_ms)
        if now_ms < rota.ends_ms:
            return rota._replace(ahead=_next(rota.left, here))
    left = tuple([turn for turn in rota.left if turn[0] in here]) or _round(rota, contenders, terms)
    model, quota_ms = left[0]
    ends_ms = now_ms + quota_ms if here[model].ready else math.inf
    return Rota(on=(model,), quota_ms=quota_ms, ends_ms=ends_ms, left=left[1:], ahead=_next(left[1:], here))


def _next(left: Sequence[tuple[str, float]], here: dict[str, Contender]) -> tuple[str, ...]:
    return tuple([model for model, _ in left if model in here])[:1]


def _round(rota: Rota, contenders: Sequence[Contender], terms: Terms) -> tuple[tuple[str, float], ...]:
    """Return the turns of the next round, the oldest batch first; the one that has just run comes last."""
    last = rota.on[0] if rota.on and not math.isinf(rota.quota_ms) else ""
    batches = sorted(contenders, key=lambda c: (c.model == last, c.since_ms, c.model))
    quotas, _ = quotas_ms(
        [batch.step_ms for batch in batches],
        [batch.tbt_ms for batch in batches],
        sum(batch.switch_ms for batch in batches),
        terms.quota_max_ms,
    )
    return tuple(
        [(b.model, max(quota, terms.quota_min_ms)) for b, quota in zip(batches, quotas, strict=True)]
    )


# ---- prompts


def grouped(now_ms: float, rota: Rota, contenders: Sequence[Contender], terms: Terms) -> Rota:
    """Serve group after group, as they were begun; requests of the last ones may still be leaving."""
    here = {contender.model: contender for contender in contenders}
    waiting = {request for contender in contenders for _, request in contender.prompts}
    leaving = {m: end_ms for m, end_ms in rota.leaving if end_ms > now_ms and m in here and here[m].decodes}
    others = [contender for contender in contenders if contender.prompts or contender.model not in leaving]
    groups = _joined([g for g in rota.groups if g.model in here], others, terms.group_requests)
    while groups and here[groups[0].model].ready and not groups[0].joined & waiting:
        model = groups.pop(0).model
        if here[model].decodes:
            leaving[model] = now_ms + LINGER_MS
    on = [groups[0].model] if groups else []
    return Rota(
        on=(*on, *(model for model in leaving if model not in on)),
        only=groups[0].joined if groups else frozenset(),
        at_once=1,
        ends_ms=min(leaving.values(), default=math.inf),
        ahead=tuple([group.model for group in groups if group.model not in on][:1]),
        groups=tuple(groups),
        leaving=tuple(leaving.items()),
    )


def _joined(groups: Sequence[Group], contenders: Sequence[Contender], most: int) -> list[Group]:
    """Return the groups with every new request in one, as they came; each model with work has one."""
    found = list(groups)
    known = {request for group in groups for request in group.joined}
    new = sorted((came_ms, request, c.model) for c in contenders for came_ms, request in c.prompts)
    for _, request, model in new:
        if request in known:
            continue
        place = max((i for i, group in enumerate(found) if group.model == model), default=None)
        if place is None or len(found[place].joined) >= most:
            found.append(Group(model, frozenset([request])))
        else:
            found[place] = Group(model, found[place].joined | {request})
    left = [c.model for c in contenders if all(group.model != c.model for group in found)]
    return [*found, *(Group(model, frozenset()) for model in left)]
