"""Aegaeon: quotas, groups and rounds, on cases worked out by hand."""

import pytest

from services.local_sched.policies.aegaeon import quotas_ms


@pytest.mark.parametrize(
    ("most_ms", "alpha", "quota_ms", "tokens"), [(3000.0, 1.0, 3000.0, 120), (4000.0, 0.9375, 4000.0, 160)]
)
def test_the_published_quotas_of_three_batches(most_ms, alpha, quota_ms, tokens):
    """d = 100 ms, t = 25 ms, c = 3 s: n = 4 each, and 0.75 of a round is decoding."""
    quotas, found = quotas_ms([25.0] * 3, [100.0] * 3, 3000.0, most_ms)
    assert found == pytest.approx(alpha, rel=1e-12)  # 3 / (4 * 3) + 0.75; 3 / (4 * 4) + 0.75
    assert quotas == pytest.approx([quota_ms] * 3, rel=1e-12)  # 3 / (4 * (1 - 0.75)); 3 / (4 * 0.1875)
    # what a batch makes in its turn lasts its clients for the whole round, so nothing is late
    assert quotas[0] / 25.0 == pytest.approx(tokens)
    assert tokens * 100.0 >= sum(quotas) + 3000.0 - 1e-6


def test_a_slow_batch_gets_more_and_a_light_round_less():
    # n = 5 and 2: busy 0.7, alpha 1 / (2 * 4) + 0.7 = 0.825; 1 / (5 * 0.125) = 1.6 s, 1 / (2 * 0.125) = 4 s
    quotas, alpha = quotas_ms([20.0, 50.0], [100.0, 100.0], 1000.0)
    assert alpha == pytest.approx(0.825)
    assert quotas == pytest.approx([1600.0, 4000.0])
    # n = 10 twice: busy 0.2, 0.025 + 0.2 is below 0.5: 1 / (10 * 0.3) = 0.333 s
    quotas, alpha = quotas_ms([10.0, 10.0], [100.0, 100.0], 1000.0)
    assert (alpha, quotas) == (0.5, pytest.approx([1000.0 / 3] * 2))


def test_more_than_the_round_affords_makes_tokens_late():
    # n = 1.25 twice: busy 1.6, alpha 1 / (1.25 * 4) + 1.6 = 1.8: 56 % of the tokens are in time
    quotas, alpha = quotas_ms([80.0, 80.0], [100.0, 100.0], 1000.0)
    assert (alpha, quotas) == (pytest.approx(1.8), pytest.approx([4000.0] * 2))


def test_where_switching_costs_nothing_turns_are_the_longest():
    assert quotas_ms([25.0], [100.0], 0.0) == ([4000.0], 0.5)
