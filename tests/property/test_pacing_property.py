"""Decode pacing against its promise: of all intervals that take as much KV memory, those that read least."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.local_sched.pacing import pace_part

AMPLE, LONGEST, MEMORY_GB = 0.5, 0.7, 40.0


@st.composite
def shared_gpus(draw):
    """Weights of models in GB, and the KV in GB that each takes per part of a TBT between its steps."""
    count = draw(st.integers(2, 4))
    weights = draw(st.lists(st.floats(4.0, 30.0), min_size=count, max_size=count))
    demands = draw(st.lists(st.floats(20.0, 400.0), min_size=count, max_size=count))
    return weights, demands


def settled(weights, demands):
    """Return the parts that the policy stays at, and what is free then: with more free they are longer."""
    low, high = 0.0, MEMORY_GB
    for _ in range(60):
        free = (low + high) / 2
        scale = LONGEST * free / (AMPLE * sum(weights))
        parts = [min(LONGEST, (scale * w / d) ** 0.5) for w, d in zip(weights, demands, strict=True)]
        used = sum(part * demand for part, demand in zip(parts, demands, strict=True))
        low, high = (free, high) if used + free < MEMORY_GB else (low, free)
    return parts, free


@given(shared_gpus(), st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4))
def test_where_it_settles_no_other_intervals_in_the_same_memory_read_less(gpu, factors):
    weights, demands = gpu
    parts, free = settled(weights, demands)
    for part, weight, demand in zip(parts, weights, demands, strict=True):
        room = free * weight / sum(weights)
        assert pace_part(room, part * demand, LONGEST, AMPLE) == pytest.approx(part, rel=1e-6)
    held = sum(demand * part for demand, part in zip(demands, parts, strict=True))
    others = [part * factor for part, factor in zip(parts, factors, strict=False)]
    scale = held / sum(demand * part for demand, part in zip(demands, others, strict=True))
    others = [min(LONGEST, part * scale) for part in others]
    read = sum(weight / part for weight, part in zip(weights, parts, strict=True))
    assert read <= (1 + 1e-6) * sum(weight / part for weight, part in zip(weights, others, strict=True))
