"""How far apart the decode steps of an engine are to start: as far as the KV memory lets requests stay.

A step reads all weights, whoever shares it; so the longer an engine waits from one to the next, the less
memory it reads, and the longer its requests hold their KV. With W bytes of weights and an interval p a model
reads W / p a second, while its KV holds B, which grows as p does (Little's law). Of all intervals with which
the KV of a GPU's models takes a given room in all, those read least with which W / p is to B as it is for the
others (Lagrange's condition): p is in proportion to W / B, which is found by following it. The formulation
is ours (docs/decisions.md).
"""

from collections.abc import Sequence

from services.local_sched.state import Engine, State

ROUND = 20
"""Parts are rounded down to multiples of one in so many, or each request that comes would change the plan."""


def pace_parts(state: State, engines: Sequence[Engine]) -> list[float]:
    """Return of each engine the time from one decode step to the next, as a part of its shortest TBT.

    0: steps follow one another. Engines with a pool of their own have its room to themselves; the others
    share what is free by their weights.
    """
    settings, pools = state.settings, state.ledger.pools
    elastic_bytes = sum([e.spec.weight_bytes for e in engines if not pools[e.spec.name].pool_bytes])
    parts = []
    for engine in engines:
        model, pool = engine.spec.name, pools[engine.spec.name]
        share = 1.0 if pool.pool_bytes else engine.spec.weight_bytes / elastic_bytes
        room_bytes = share * state.ledger.free_kv_bytes(model)
        part = pace_part(room_bytes, pool.held_bytes, settings.pace_part, settings.ample_memory)
        parts.append(int(part * ROUND) / ROUND)
    return parts


def pace_part(room_bytes: float, held_bytes: int, longest: float, ample: float) -> float:
    """Return the part of a TBT from one step to the next: the longest, or less in proportion to memory.

    Args:
        room_bytes: free KV memory that is for this engine.
        held_bytes: what its requests have been promised.
        longest: the part while there is room of `ample` times what is held.
    """
    return longest * min(1.0, room_bytes / (ample * held_bytes)) if held_bytes else longest
