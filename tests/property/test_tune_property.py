"""The sweep against brute force."""

import math
from functools import cache
from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.local_sched import tune
from services.local_sched.divide import divider_of, proportional
from services.local_sched.grid import Load, grid_of
from services.local_sched.tune import Candidate
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.lut import build

H100 = DEVICES["h100-80gb"]
LUTS = [build(H100, model) for model in emulated_models(3)]
SIZES = H100.sm_sizes_pct
CLOCKS = tuple(int(clock) for clock in LUTS[0].clocks_mhz[::-1])

shares = st.one_of(st.none(), st.sampled_from(SIZES))
candidates = st.lists(
    st.builds(
        Candidate,
        st.sampled_from([795, 1005, 1605]),
        st.tuples(shares, shares),
        st.integers(1, 5).map(float),
    ),
    max_size=8,
)
loads = st.builds(
    Load,
    st.sampled_from(LUTS),
    st.integers(0, 64),
    st.floats(1.0, 4000.0),
    st.floats(10.0, 100.0),
    st.floats(1.0, 300.0),
    st.lists(st.tuples(st.integers(1, 8000), st.floats(20.0, 2000.0)), max_size=3).map(
        lambda prefills: tuple(sorted(prefills, key=lambda prefill: prefill[1]))
    ),
    st.sampled_from([0.0, 50.0]),
)


@given(candidates)
def test_choose_is_the_least_energy_of_all_that_fit(found):
    fitting = [c for c in found if None not in c.shares_pct and sum(c.shares_pct) <= 100]
    best = tune.choose(found)
    if not fitting:
        assert best is None
    else:
        assert best in fitting
        assert best.energy_j == min(c.energy_j for c in fitting)


def slowest(ask, clock_mhz):
    """What the table says at a clock, or at a higher one where the power cap makes that slower."""
    return max(float(ask(higher_mhz)) for higher_mhz in CLOCKS if higher_mhz >= clock_mhz)


@cache
def step_ms(load, clock_mhz, share_pct):
    if not load.decodes:
        return 0.0
    at = (share_pct, load.decodes, load.mean_context_tokens)
    return slowest(lambda mhz: load.lut.tbt_ms(mhz, *at), clock_mhz)


@cache
def prefills_ms(load, clock_mhz, share_pct):
    return [
        slowest(lambda mhz, n=n: load.lut.ttft_ms(mhz, share_pct, n), clock_mhz) for n, _ in load.prefills
    ]


def meets(load, clock_mhz, share_pct, bandwidth, compute):
    """The deadlines of one engine, written out from the table."""
    share_of_time = step_ms(load, clock_mhz, share_pct) / bandwidth / load.decode_budget_ms
    if share_of_time > 1.0:
        return False
    total_ms = 0.0
    for ms, (_, slack_ms) in zip(prefills_ms(load, clock_mhz, share_pct), load.prefills, strict=True):
        total_ms += ms / compute
        if total_ms > slack_ms * (1.0 - share_of_time) * (1 + 1e-9):
            return False
    return True


def energy_j(loads, clock_mhz, shares_pct, bandwidth, compute):
    """The energy of all the work, written out from the table (docs/decisions.md, 16)."""
    longest_ms = dynamic_j = 0.0
    for load, share in zip(loads, shares_pct, strict=True):
        ms = step_ms(load, clock_mhz, share)
        parts = [(ms * load.decode_steps, load.lut.decode_power_w, (load.decodes, load.mean_context_tokens))]
        waits_ms = max(0.0, load.step_interval_ms - ms) * load.decode_steps if load.decodes else 0.0
        for ms, (tokens, _) in zip(prefills_ms(load, clock_mhz, share), load.prefills, strict=True):
            parts.append((ms, load.lut.prefill_power_w, (tokens,)))
        longest_ms = max(longest_ms, waits_ms + sum(ms for ms, _, _ in parts))
        for ms, power_w, at in parts:
            dynamic_j += (float(power_w(clock_mhz, share, *at)) - H100.static_w) * ms / 1e3
    return H100.static_w * longest_ms / min(bandwidth, compute) / 1e3 + dynamic_j


def scales(shares_pct):
    division = divider_of(H100)(tuple(map(SIZES.index, shares_pct)))
    return division.bandwidth, division.compute


def fits(loads, clock_mhz, shares_pct):
    return all(
        meets(load, clock_mhz, s, *scales(shares_pct)) for load, s in zip(loads, shares_pct, strict=True)
    )


def least_of_all(loads, clock_mhz):
    """The least shares by trying every pair; None if none fits."""
    fitting = [pair for pair in product(SIZES, repeat=2) if fits(loads, clock_mhz, pair)]
    return tuple(min(pair[engine] for pair in fitting) for engine in range(2)) if fitting else None


def profiles_of(loads):
    return [grid_of(load.lut, CLOCKS).profile(load) for load in loads]


@settings(max_examples=15, deadline=None)
@given(st.lists(loads, min_size=2, max_size=2), st.sampled_from([1, 6, 10]))
def test_least_shares_are_the_smallest_that_meet_all_deadlines_together(both, clock):
    found = tune.least_shares(H100, profiles_of(both), clock)
    assert (None if None in found else found) == least_of_all(both, CLOCKS[clock])


IDLE, BUSY = (Load(LUTS[i], n, 2.0, 16.0, 1.0, (), 0.0) for i, n in ((0, 0), (1, 5)))


@settings(max_examples=8, deadline=None)
@given(st.lists(loads, min_size=2, max_size=2), st.booleans(), st.sampled_from([None, *CLOCKS]))
@example([IDLE, BUSY], True, None)  # filled shares that hold at no clock
def test_the_sweep_finds_the_least_energy_at_every_clock_with_least_and_with_filled_shares(
    both, wide, now_mhz
):
    weighed = []
    for clock_mhz in CLOCKS:
        least = least_of_all(both, clock_mhz)
        if least is None or sum(least) > 100:
            continue
        filled = proportional(least, SIZES)
        pairs = [filled] if fits(both, clock_mhz, filled) else []
        if not (wide and pairs):
            pairs.append(least)
        weighed += [(energy_j(both, clock_mhz, pair, *scales(pair)), clock_mhz, pair) for pair in set(pairs)]
    found = tune.sweep(H100, profiles_of(both), len(CLOCKS), wide=wide)
    told = [c for c in tune.candidates(found, CLOCKS) if tune.feasible(c)]
    assert sorted((c.sm_clock_mhz, c.shares_pct) for c in told) == sorted(w[1:] for w in weighed)
    current = CLOCKS.index(now_mhz) if now_mhz else None
    for may_switch in (True, False):
        how = {"current_mhz": now_mhz, "may_switch": may_switch, "min_gain": 0.02}
        best = tune.choose(tune.finalists(found, CLOCKS, current), **how)
        assert best == tune.choose(told, **how)
    best = tune.choose(told)
    assert (best is None) == (not weighed)
    assert best is None or math.isclose(best.energy_j, min(weighed)[0], rel_tol=1e-6)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=10))
def test_proportional_shares_fit_and_leave_little(needs):
    given_pct = proportional(tuple(needs), SIZES)
    assert all(share in SIZES for share in given_pct)
    assert sum(given_pct) <= max(100, 10 * len(needs))
    assert sum(given_pct) == 100
    for (need, share), (other_need, other_share) in product(zip(needs, given_pct, strict=True), repeat=2):
        assert need <= other_need or share >= other_share - 10
