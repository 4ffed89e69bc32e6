"""Shares of a bounded room, turns in it, and how fast it empties, against hand-computed numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.overload import DrainRate, ahead, has_room, turns


def test_a_tenant_alone_leaves_one_place_in_eight_to_whoever_comes():
    assert has_room({"flood": 13}, {"flood": 1.0}, "flood", 1.0, 16)
    assert not has_room({"flood": 14}, {"flood": 1.0}, "flood", 1.0, 16)
    assert has_room({"flood": 14}, {"flood": 1.0}, "other", 1.0, 16)
    assert not has_room({"flood": 14, "other": 2}, {"flood": 1.0, "other": 1.0}, "other", 1.0, 16)  # full


def test_weights_divide_the_last_places():
    held, weights = {"a": 9, "b": 5}, {"a": 2.0, "b": 1.0}
    assert not has_room(held, weights, "a", 2.0, 16)  # its share is 16 * 2 / (2 + 1 + 1) = 8
    assert not has_room(held, weights, "b", 1.0, 16)  # 16 / 4 = 4
    assert has_room(held, weights, "b", 3.0, 16)  # 16 * 3 / (2 + 3 + 1) = 8


def test_a_small_room_is_filled():
    assert has_room({}, {}, "a", 1.0, 1) and not has_room({"a": 1}, {"a": 1.0}, "a", 1.0, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200), st.integers(8, 40))
def test_who_always_wants_more_gets_its_share_in_the_end(script, capacity):
    """One tenant asks for everything all the time; whatever the others do, they find places up to theirs."""
    weights = dict.fromkeys(("flood", "a", "b", "c"), 1.0)
    held: dict[str, int] = {}

    def ask(name):
        present = {n: count for n, count in held.items() if count}
        allowed = has_room(present, {n: weights[n] for n in present}, name, 1.0, capacity)
        held[name] = held.get(name, 0) + allowed
        return allowed

    for name, comes in script:
        while ask("flood"):
            pass
        assert sum(held.values()) <= capacity
        if comes and held.get(name, 0) < 1:
            one_each = sum(held.get(n, 0) for n in "abc") < capacity // 8
            assert ask(name) or not one_each
        elif held.get(name):
            held[name] -= 1
        held["flood"] -= held["flood"] > capacity // 2  # something of it ends


def test_turns():
    holders = [("flood", 1.0)] * 4 + [("other", 1.0), ("heavy", 2.0), ("heavy", 2.0)]
    assert turns(holders) == [5, 0, 4, 6, 1, 2, 3]


def test_ahead():
    waiting = {"flood": 100, "other": 3}
    assert ahead(waiting, "newcomer", 1.0) == 2.0  # one of each
    assert ahead(waiting, "flood", 1.0) == 103.0
    assert ahead(waiting, "newcomer", 2.0) == 1.0
    assert ahead({}, "newcomer", 1.0) == 0.0


def test_drain_rate():
    rate = DrainRate(window_ms=10_000.0)
    assert rate.per_s(0.0) is None and rate.retry_after_s(0.0, 5.0, 1.5) == 1.5
    for i in range(401):
        rate.note(i * 100.0)  # 10 per second for 40 s
    assert rate.per_s(40_000.0) == pytest.approx(10.0, rel=0.05)
    assert rate.wait_s(40_000.0, 50.0) == pytest.approx(5.0, rel=0.05)
    assert rate.retry_after_s(40_000.0, 1.0, 9.0) == 1.0  # not below a second
    assert rate.retry_after_s(40_000.0, 1e6, 9.0) == 60.0
    assert rate.per_s(50_000.0) is None  # nothing for a whole window: nothing is known


def test_a_few_departures_in_a_moment_are_no_rate():
    rate = DrainRate(window_ms=10_000.0)
    for i in range(4):
        rate.note(i * 300.0)
    assert rate.per_s(1100.0) is None
    rate.note(1200.0)
    assert rate.per_s(1200.0) == pytest.approx(5 / 1.2, rel=0.15)
