"""The cache of weights against a brute-force one."""

from hypothesis import given
from hypothesis import strategies as st

from services.migrator.weight_cache import WeightCache

CAPACITY_BYTES = 100


SIZES = st.integers(1, 120)


@given(sizes=st.dictionaries(st.sampled_from("abcdefg"), SIZES, min_size=1), data=st.data())
def test_it_keeps_the_latest_used_that_fit(sizes: dict[str, int], data: st.DataObject) -> None:
    """It equals a list in order of use, and says of each that leaves that it does."""
    uses = data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=40))
    cache, present = WeightCache(CAPACITY_BYTES), set[str]()
    for key in uses:
        dropped = cache.use(key, sizes[key])
        present |= {key} if sizes[key] <= CAPACITY_BYTES else set()
        present -= set(dropped)
        assert cache.taken_bytes == sum(sizes[kept] for kept in cache.kept) <= CAPACITY_BYTES
        assert set(cache.kept) == present
    assert list(cache.kept) == least_recent_first([(key, sizes[key]) for key in uses])


def least_recent_first(uses: list[tuple[str, int]]) -> list[str]:
    """Play an LRU by the book: a list in order of use, from whose front all that is too much goes."""
    order: list[tuple[str, int]] = []
    for use in uses:
        if use[1] > CAPACITY_BYTES:
            continue
        order = [other for other in order if other[0] != use[0]] + [use]
        while sum(n_bytes for _, n_bytes in order) > CAPACITY_BYTES:
            order = order[1:]
    return [key for key, _ in order]


@given(st.lists(st.tuples(st.sampled_from("abcdefg"), SIZES), max_size=40))
def test_a_size_may_change(uses: list[tuple[str, int]]) -> None:
    """A key that comes with another size takes that from then on."""
    cache = WeightCache(CAPACITY_BYTES)
    for key, n_bytes in uses:
        cache.use(key, n_bytes)
    assert list(cache.kept) == least_recent_first(uses)
