"""Slabs of host memory: the bound, the books, and how much of them is lost to KV of different shapes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.local_sched.settings import LocalSettings
from shared.catalog import entries
from shared.slabs import SlabPool
from shared.stage import StageSettings


def test_a_stage_takes_whole_slabs_of_its_own_shape() -> None:
    pool = SlabPool(max_bytes=10_000, slab_bytes=1_000)
    assert pool.hold("a", 300, 4) == ""  # 3 blocks to a slab: 2 slabs of 900
    assert (pool.taken_bytes, pool.used_bytes, pool.blocks_of("a")) == (1_800, 1_200, 6)
    assert pool.fragmentation == pytest.approx(1 / 3)
    assert pool.hold("a", 300, 6) == ""  # there is room already
    assert (pool.taken_bytes, pool.fragmentation) == (1_800, 0.0)
    assert pool.hold("b", 4_000, 2) == ""  # larger than a slab: one block each
    assert (pool.taken_bytes, pool.stages) == (9_800, ("a", "b"))
    assert pool.hold("a", 300, 7) == "200 of 10000 bytes for stages are free, not 900"
    assert pool.hold("b", 300, 1) == "stage b has blocks of 4000 bytes, not of 300"
    assert (pool.taken_bytes, pool.blocks_of("a")) == (9_800, 6)
    pool.free("a")
    pool.free("a")
    pool.free("b")
    assert (pool.taken_bytes, pool.used_bytes, pool.fragmentation, pool.stages) == (0, 0, 0.0, ())


STEPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from((70, 300, 2_500)), st.integers(0, 40)), max_size=60
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_the_books_are_right_and_the_bound_holds_whatever_comes(
    steps: list[tuple[str, int, int]],
) -> None:
    pool = SlabPool(max_bytes=20_000, slab_bytes=1_000)
    wanted: dict[str, tuple[int, int]] = {}
    for name, block_bytes, blocks in steps:
        if blocks == 0:
            pool.free(name)
            wanted.pop(name, None)
        elif not pool.hold(name, block_bytes, blocks):
            assert wanted.get(name, (block_bytes, 0))[0] == block_bytes
            wanted[name] = (block_bytes, max(blocks, wanted.get(name, (0, 0))[1]))
        assert pool.used_bytes == sum(size * count for size, count in wanted.values())
        assert pool.used_bytes <= pool.taken_bytes <= 20_000
        assert set(pool.stages) == wanted.keys()
        assert all(pool.blocks_of(each) >= count for each, (_, count) in wanted.items())


@pytest.mark.parametrize("slab_bytes", [StageSettings().slab_bytes, LocalSettings().offload_slab_bytes])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_with_the_models_of_the_catalog_less_than_a_fifth_is_lost(slab_bytes: int, seed: int) -> None:
    """Whoever comes and goes, in whatever order, once there are some tens of them."""
    draw, models = random.Random(seed), [entry.spec() for entry in entries()]
    pool = SlabPool(max_bytes=1 << 50, slab_bytes=slab_bytes)
    most = 0.0
    for number in range(400):
        if len(pool.stages) > 150 or draw.random() < 0.2:
            pool.free(draw.choice(pool.stages or ("none",)))
        model, context_tokens = draw.choice(models), int(draw.lognormvariate(6.5, 1.0)) + 1
        pool.hold(str(number), 16 * model.kv_bytes_per_token, -(-context_tokens // 16))
        if len(pool.stages) >= 30:
            most = max(most, pool.fragmentation)
    assert most < 0.2
    assert most > 0.0 or slab_bytes == StageSettings().slab_bytes  # of which most hold one block
    for name in pool.stages:
        pool.free(name)
    assert pool.taken_bytes == 0
