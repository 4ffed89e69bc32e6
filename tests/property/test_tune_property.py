"""The sweep against brute force."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from services.local_sched import tune
from services.local_sched.tune import Candidate, Load
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.lut import build

H100 = DEVICES["h100-80gb"]
LUTS = [build(H100, model) for model in emulated_models(3)]
SIZES = H100.sm_sizes_pct

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


def meets(load, clock_mhz, share_pct, bandwidth, compute):
    """The deadlines of one engine, written out from the table."""
    step_ms = 0.0
    if load.decodes:
        step_ms = load.lut.tbt_ms(clock_mhz, share_pct, load.decodes, load.mean_context_tokens) / bandwidth
    if step_ms > load.decode_budget_ms:
        return False
    prefill_ms = 0.0
    for tokens, slack_ms in load.prefills:
        prefill_ms += load.lut.ttft_ms(clock_mhz, share_pct, tokens) / compute
        if prefill_ms > slack_ms * (1.0 - step_ms / load.decode_budget_ms) * (1 + 1e-9):
            return False
    return True


@settings(max_examples=30, deadline=None)
@given(st.lists(loads, min_size=2, max_size=2), st.sampled_from([0, 4, 9]))
def test_least_shares_are_the_smallest_that_meet_all_deadlines_together(both, clock):
    clocks = [int(c) for c in both[0].lut.clocks_mhz]
    profiles = [tune.profile(H100, load, clocks) for load in both]
    found = tune.least_shares(H100, profiles, clock)
    fitting = []
    for pair in product(SIZES, repeat=2):
        scales = tune.scales(H100, pair)
        if all(meets(load, clocks[clock], s, *scales) for load, s in zip(both, pair, strict=True)):
            fitting.append(pair)
    if None in found:
        assert not fitting
    else:
        assert found == tuple(min(pair[engine] for pair in fitting) for engine in range(2))


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=10))
def test_proportional_shares_fit_and_leave_little(needs):
    given_pct = tune.proportional(tuple(needs), SIZES)
    assert all(share in SIZES for share in given_pct)
    assert sum(given_pct) <= max(100, 10 * len(needs))
    assert sum(given_pct) == 100
    for (need, share), (other_need, other_share) in product(zip(needs, given_pct, strict=True), repeat=2):
        assert need <= other_need or share >= other_share - 10
