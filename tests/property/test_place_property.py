"""Worst-fit placement and eviction against plain statements of what they promise."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.consolidator.place import IdleModel, KvFloor, Room, evict, place
from shared.model import ModelSpec


def spec(name: str, weight_bytes: int, engine: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        engine=engine,
        params=1,
        layers=1,
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=1,
    )


kinds = st.sampled_from(["emulated", "vllm"])
model_lists = st.lists(st.tuples(st.integers(1, 30), kinds), max_size=8).map(
    lambda rows: [spec(f"m{i}", weight, engine) for i, (weight, engine) in enumerate(rows)]
)
room_lists = st.lists(st.tuples(st.integers(-5, 60), kinds, st.integers(0, 9)), max_size=5).map(
    lambda rows: [Room(f"g{i}", engine, free, KvFloor(kv)) for i, (free, engine, kv) in enumerate(rows)]
)


@settings(max_examples=200, deadline=None)
@given(model_lists, room_lists, st.randoms(use_true_random=False))
def test_place_keeps_to_capacity_and_kind_and_leaves_out_only_what_has_no_room(models, rooms, random):
    chosen = place(models, rooms)
    room_of = {room.gpu: room for room in rooms}
    left = {room.gpu: room.free_bytes for room in rooms}
    for model in models:
        if model.name in chosen:
            room = room_of[chosen[model.name]]
            assert room.engine == model.engine
            left[room.gpu] -= model.weight_bytes + room.kv.n_bytes
    assert all(left[gpu] >= 0 for gpu in set(chosen.values()))
    for model in models:
        if model.name not in chosen:
            free = [left[room.gpu] - room.kv.n_bytes for room in rooms if room.engine == model.engine]
            assert max(free, default=-1) < model.weight_bytes
    random.shuffle(models)
    random.shuffle(rooms)
    assert place(models, rooms) == chosen


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_place_balances_as_worst_fit_does(weights, gpus):
    """With room for all, no GPU is fuller than another by more than the largest model (list scheduling)."""
    models = [spec(f"m{i}", weight, "emulated") for i, weight in enumerate(weights)]
    chosen = place(models, [Room(f"g{i}", "emulated", 1_000, KvFloor(2)) for i in range(gpus)])
    assert len(chosen) == len(models)
    load = [sum(m.weight_bytes + 2 for m in models if chosen[m.name] == f"g{i}") for i in range(gpus)]
    assert max(load) - min(load) <= max(weights) + 2


idle_lists = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=4), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), idle_lists, st.integers(-5, 20))
def test_evict_frees_enough_takes_the_longest_idle_and_fails_only_where_nothing_helps(need, rows, free):
    rooms = [Room(f"g{i}", "emulated", free, KvFloor(need // 2)) for i in range(len(rows))]
    idle = {
        f"g{i}": [IdleModel(f"m{i}{j}", float(ms), size) for j, (ms, size) in enumerate(row)]
        for i, row in enumerate(rows)
    }
    found = evict(spec("m", need - need // 2, "emulated"), rooms, idle)

    def least_idle_ms(candidates):
        return min((c.idle_ms for c in candidates), default=float("inf"))

    best = (
        None  # over all GPUs and all sets of victims: the longest that the most recently used has been idle
    )
    for candidates in idle.values():
        for size in range(len(candidates) + 1):
            for subset in combinations(candidates, size):
                if free + sum(c.need_bytes for c in subset) >= need:
                    best = max(best or 0.0, least_idle_ms(subset))
    if found is None:
        assert best is None
        return
    gpu, names = found
    victims = [c for c in idle[gpu] if c.model in names]
    assert free + sum(c.need_bytes for c in victims) >= need
    assert least_idle_ms(victims) == best


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 20)), max_size=6))
def test_evict_takes_no_model_whose_memory_it_could_do_without(need, rows):
    idle = [IdleModel(f"m{i}", 1.0, size, rate) for i, (rate, size) in enumerate(rows)]
    found = evict(spec("m", need, "emulated"), [Room("g", "emulated", 0, KvFloor(0))], {"g": idle})
    assert (found is None) == (sum(each.need_bytes for each in idle) < need)
    if found is not None:
        victims = [each for each in idle if each.model in found[1]]
        freed = sum(each.need_bytes for each in victims)
        assert freed >= need and all(freed - each.need_bytes < need for each in victims)


def test_evict_would_rather_lose_one_large_model_than_two_small_ones() -> None:
    """All are asked for equally often: one reload instead of two, though the large one was used last."""
    idle = [
        IdleModel(name, ms, size, 0.1) for name, ms, size in (("a", 9e9, 15), ("b", 8e9, 15), ("c", 1.0, 30))
    ]
    assert evict(spec("m", 30, "emulated"), [Room("g", "emulated", 0, KvFloor(0))], {"g": idle}) == (
        "g",
        ("c",),
    )


def test_place_leaves_models_whose_tokens_are_large_room_for_them() -> None:
    """Of four models of one size, the two with large tokens end up on one GPU only where nobody looks."""
    models = [
        replace(spec(f"m{i}", 10, "emulated"), kv_bytes_per_token=4 if i in (0, 2) else 1) for i in range(4)
    ]
    for floor, together in ((KvFloor(2, tokens=4), False), (KvFloor(16), True)):
        chosen = place(models, [Room(f"g{i}", "emulated", 60, floor) for i in range(2)])
        assert len(chosen) == 4 and (chosen["m0"] == chosen["m2"]) == together


@settings(max_examples=100, deadline=None)
@given(model_lists, st.integers(1, 20), st.integers(0, 20))
def test_place_fills_no_gpu_beyond_weights_and_tokens(models, per_token, tokens):
    models = [replace(model, kv_bytes_per_token=per_token, engine="emulated") for model in models]
    chosen = place(models, [Room("g", "emulated", 100, KvFloor(3, tokens))])
    assert sum(m.weight_bytes + max(3, per_token * tokens) for m in models if m.name in chosen) <= 100
