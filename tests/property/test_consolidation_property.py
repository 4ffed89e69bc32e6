"""Placement of whole clusters, against plain statements of what it promises and brute force."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from services.consolidator import pack as packing_module
from services.consolidator.capacity import Capacity, best_fit_decreasing
from services.consolidator.demand import Demand
from services.consolidator.ewr import served_share, waste
from services.consolidator.mapping import assign
from services.consolidator.moves import stages
from services.consolidator.pack import _Bins, pack
from services.consolidator.plan import groupings

CAPACITY = Capacity(95.0, 95)
demand_lists = st.lists(
    st.builds(
        Demand,
        model=st.sampled_from("abcdefgh"),
        sm_pct=st.integers(0, 60).map(float),
        need_bytes=st.integers(1, 95),
        clock_mhz=st.integers(8, 16).map(lambda step: 100.0 * step),
        busy=st.floats(0.01, 1.0),
        least_pct=st.integers(1, 10).map(lambda step: 10.0 * step),
    ),
    max_size=12,
)


def numbered(demands: list[Demand]) -> list[Demand]:
    """Give copies of one model numbers of their own."""
    seen: dict[str, int] = {}
    found = []
    for demand in demands:
        copy = seen[demand.model] = seen.get(demand.model, -1) + 1
        found.append(replace(demand, copy=copy))
    return found


@settings(max_examples=200, deadline=None)
@given(demand_lists, st.integers(1, 6))
def test_packing_keeps_to_capacity_and_keeps_everyone(drawn: list[Demand], gpus: int) -> None:
    demands = numbered(drawn)
    packing = pack(demands, gpus, CAPACITY)
    placed = [demand for group in packing.groups for demand in group]
    assert sorted((d.model, d.copy) for d in placed) == sorted((d.model, d.copy) for d in demands)
    for group in packing.groups:
        assert sum(demand.sm_pct for demand in group) <= CAPACITY.sm_pct
        assert sum(demand.need_bytes for demand in group) <= CAPACITY.usable_bytes
        assert len({demand.model for demand in group}) == len(group)
    assert packing.direct + packing.swaps + packing.fallbacks + packing.opened == len(demands)
    assert len(packing.groups) == gpus + packing.opened


@settings(max_examples=200, deadline=None)
@given(demand_lists, st.integers(2, 4))
def test_a_swap_wastes_less_than_placing_the_model_without_one(drawn: list[Demand], gpus: int) -> None:
    """Watches each swap: it wastes less than the GPU with room and the closest clock, or none has room."""
    original, swaps = packing_module._swap, []

    def watched(bins: _Bins, demand: Demand, target: int, instead: int | None) -> tuple[Demand, int] | None:
        found = original(bins, demand, target, instead)
        assert (instead is None) == (not bins.fits(demand).any())
        if found is not None:
            outlier, candidate = found
            swapped = [[each for each in group if each is not outlier] for group in bins.groups]
            swapped[target].append(demand)
            swapped[candidate].append(outlier)
            if instead is not None:
                placed = [[*group, demand] if i == instead else group for i, group in enumerate(bins.groups)]
                assert waste(swapped) < waste(placed)
            swaps.append(found)
        return found

    packing_module._swap = watched
    try:
        packing = pack(numbered(drawn), gpus, CAPACITY)
    finally:
        packing_module._swap = original
    assert len(swaps) == packing.swaps


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """The optimum, by trying all first bins that hold the largest item."""
    if not sizes:
        return 0
    first, *rest = sorted(sizes, reverse=True)
    best = len(sizes)
    for count in range(len(rest) + 1):
        for chosen in combinations(range(len(rest)), count):
            if first + sum(rest[i] for i in chosen) <= capacity:
                left = [rest[i] for i in range(len(rest)) if i not in chosen]
                best = min(best, 1 + fewest_bins(left, capacity))
    return best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 95), max_size=6))
def test_best_fit_decreasing_is_near_the_optimum(sizes: list[int]) -> None:
    best, found = fewest_bins(sizes, 95), best_fit_decreasing(sizes, 95)
    assert best <= found <= 11 / 9 * best + 1


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n), st.integers(0, 2**31))))
def test_the_assignment_is_the_best_permutation(drawn: tuple[int, int, int]) -> None:
    groups, gpus, seed = drawn
    costs = np.random.default_rng(seed).integers(0, 50, (gpus, groups)).astype(float)
    chosen = assign(costs)
    assert len(set(chosen)) == groups
    totals = (sum(costs[row, c] for c, row in enumerate(rows)) for rows in permutations(range(gpus), groups))
    assert sum(costs[row, c] for c, row in enumerate(chosen)) == min(totals)


def outcomes(group: list[Demand]) -> Iterator[tuple[float, float]]:
    """Yield (chance, percent needed) for each set of models that may run at one time."""
    for mask in range(2 ** len(group)):
        chance, pct = 1.0, 0.0
        for i, demand in enumerate(group):
            runs = mask >> i & 1
            chance *= demand.busy if runs else 1.0 - demand.busy
            pct += demand.least_pct * runs
        yield chance, pct


@settings(max_examples=100, deadline=None)
@given(demand_lists.filter(lambda drawn: 0 < len(drawn) <= 6))
def test_served_share_is_that_of_all_sets_that_may_run(group: list[Demand]) -> None:
    needed = sum(chance * pct for chance, pct in outcomes(group))
    found = sum(chance * min(100.0, pct) for chance, pct in outcomes(group))
    assert abs(served_share(group) - found / needed) < 1e-9


@settings(max_examples=150, deadline=None)
@given(demand_lists, st.integers(1, 12), st.sampled_from([0.0, 0.9, 0.99]))
def test_the_search_for_the_fewest_gpus_keeps_what_it_promises(
    drawn: list[Demand], most: int, least_served: float
) -> None:
    demands = numbered(drawn)
    *_, groups = groupings(demands, most, CAPACITY, least_served)

    def works(gpus: int) -> bool:
        packings = [pack(demands, gpus, CAPACITY, spread).groups for spread in (False, True)]
        used = [[group for group in each if group] for each in packings]
        return any(len(u) <= most and min(map(served_share, u), default=1.0) >= least_served for u in used)

    if groups is None:
        assert not works(most)
    else:
        assert len(groups) <= most and sum(map(len, groups)) == len(demands)
        assert min(map(served_share, groups), default=1.0) >= least_served


MOVES = ((0, 1), (1, 0), (0, 0), (1, 1), (2, 2), (1, 2))
State = frozenset[tuple[str, str]]
"""Which model is on which GPU."""


def reaches(start: State, goal: State, need: dict[str, int], totals: dict[str, int], idle: set[str]) -> bool:
    """Whether some order of loads and unloads leads there: all fits, and what is in use always serves."""
    ends = start | goal
    seen, todo = {start}, [start]
    while todo and goal not in seen:
        state = todo.pop()
        for pair in ends:
            model, gpu = pair
            if pair in state:
                served = pair not in goal and (
                    model in idle or any((model, g) in state & goal for g in totals)
                )
                after = state - {pair} if served else state
            else:
                used = sum(need[m] for m, g in state if g == gpu)
                after = state | {pair} if used + need[model] <= totals[gpu] else state
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return goal in seen


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([set(), {"a"}]))
def test_every_stage_of_a_plan_fits_and_can_be_reached_from_the_one_before(seed: int, idle: set[str]) -> None:
    """One copy of each model; two GPUs exchange some, with little to spare, and there is a third."""
    draw = random.Random(seed)
    places = {"a": (0, 1), "b": (1, 0)} | {model: draw.choice(MOVES) for model in "cdef"}
    need = {model: draw.choice((20, 20, 11)) for model in places}
    spare = (draw.choice((0, 10)), draw.choice((0, 10)), draw.randint(0, 40))
    gpus = [str(gpu) for gpu in range(3)]
    holds, plan = (
        {gpu: sorted(m for m, at in places.items() if str(at[end]) == gpu) for gpu in gpus} for end in (0, 1)
    )

    def filled(held: dict[str, list[str]]) -> dict[str, int]:
        return {gpu: sum(need[model] for model in models) for gpu, models in held.items()}

    def used(held: dict[str, list[str]]) -> int:
        return sum(map(bool, held.values()))

    totals = {
        gpu: max(filled(holds)[gpu], filled(plan)[gpu]) + more for gpu, more in zip(gpus, spare, strict=True)
    }
    free_bytes = {gpu: totals[gpu] - filled(holds)[gpu] for gpu in gpus}
    found = stages(holds, plan, free_bytes, lambda _, model: need[model], idle)

    def state(held: dict[str, list[str]]) -> State:
        return frozenset((model, gpu) for gpu, models in held.items() for model in models)

    if found and found[-1] == plan:
        event("in stages" if len(found) > 1 else "at once")
        on_the_way = found[:-1]
    else:
        event("in part" if found else "not at all")
        assert len(found) <= 1
        on_the_way = found
    for held in on_the_way:
        assert all(filled(held)[gpu] <= totals[gpu] for gpu in gpus)
        assert {model for models in held.values() for model in models} == places.keys()
        assert used(held) <= used(holds)
    for before, after in pairwise([holds, *found]):
        assert before != after and reaches(state(before), state(after), need, totals, idle)
