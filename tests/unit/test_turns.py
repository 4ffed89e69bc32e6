"""Whose turn it is on a GPU that changes models: Aegaeon and ServerlessLLM, on cases worked out by hand."""

import math

import pytest

from services.local_sched.policies.aegaeon import grouped, quotas_ms, turns, weighted_rounds
from services.local_sched.policies.serverlessllm import until_done, while_they_fit
from services.local_sched.policies.turns import Contender, Rota, Terms


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


def batch(model, prompts=(), **more):
    return Contender(model, tuple(prompts), **{"ready": True, "step_ms": 25.0, "tbt_ms": 100.0} | more)


TERMS = Terms(total_bytes=80 << 30)


class TestRounds:
    def test_batches_take_their_turns_for_their_quotas_and_begin_again(self):
        """Three as in the published example, each of which takes 1 s to bring in: 4 s each."""
        three = [
            batch(model, decodes=1, since_ms=since_ms, switch_ms=1000.0)
            for model, since_ms in (("a", 0.0), ("b", 1.0), ("c", 2.0))
        ]
        rota = weighted_rounds(0.0, Rota(), three, TERMS)
        assert (rota.on, rota.ahead, rota.ends_ms) == (("a",), ("b",), pytest.approx(4000.0))
        assert weighted_rounds(3999.0, rota, three, TERMS).on == ("a",)
        rota = weighted_rounds(4000.0, rota, three, TERMS)
        assert (rota.on, rota.ahead, rota.ends_ms) == (("b",), ("c",), pytest.approx(8000.0))
        # c comes and is not there yet: its quota begins when it is
        away = [*three[:2], three[2]._replace(ready=False)]
        rota = weighted_rounds(8000.0, rota, away, TERMS)
        assert (rota.on, rota.ahead, rota.ends_ms) == (("c",), (), math.inf)
        rota = weighted_rounds(9000.0, rota, three, TERMS)
        assert (rota.on, rota.ends_ms) == (("c",), pytest.approx(13_000.0))
        # the next round begins with the oldest
        assert weighted_rounds(13_000.0, rota, three, TERMS).on == ("a",)

    def test_a_batch_that_has_ended_gives_its_turn_up_and_one_alone_has_all_the_time(self):
        a, b = (batch(model, decodes=1, switch_ms=1000.0) for model in "ab")
        rota = weighted_rounds(0.0, Rota(), [a, b], TERMS)
        rota = weighted_rounds(10.0, rota, [b], TERMS)
        assert (rota.on, rota.ends_ms) == (("b",), math.inf)
        # another comes: the one that was alone begins a round with it
        rota = weighted_rounds(20.0, rota, [a, b._replace(since_ms=5.0)], TERMS)
        assert (rota.on, rota.left[0][0]) == (("a",), "b")

    def test_turns_are_not_shorter_than_orders_take(self):
        two = [batch(model, decodes=1, step_ms=10.0, switch_ms=1.0) for model in "ab"]
        # n = 10: 2 ms / (10 * (0.5 - 0.2)) is 0.67 ms
        assert weighted_rounds(0.0, Rota(), two, TERMS).quota_ms == pytest.approx(2.0 / 3)
        terms = TERMS._replace(quota_min_ms=250.0)
        assert weighted_rounds(0.0, Rota(), two, terms).quota_ms == 250.0


class TestGroups:
    def test_requests_join_the_last_group_of_their_model_until_it_is_full(self):
        a = batch("a", [(0.0, "a1"), (2.0, "a2"), (3.0, "a3")])
        b = batch("b", [(1.0, "b1")])
        rota = grouped(0.0, Rota(), [a, b], TERMS._replace(group_requests=2))
        assert [(g.model, sorted(g.joined)) for g in rota.groups] == [
            ("a", ["a1", "a2"]),
            ("b", ["b1"]),
            ("a", ["a3"]),
        ]
        assert (rota.on, sorted(rota.only), rota.at_once, rota.ahead) == (("a",), ["a1", "a2"], 1, ("b",))
        # a1 is computed and gone; a4 finds room in the last group, the first is full for ever
        a = batch("a", [(2.0, "a2"), (3.0, "a3"), (9.0, "a4")])
        rota = grouped(9.0, rota, [a, b], TERMS._replace(group_requests=2))
        assert sorted(rota.groups[2].joined) == ["a3", "a4"]
        assert rota.on == ("a",)

    def test_the_next_group_begins_while_requests_of_the_last_leave(self):
        b = batch("b", [(1.0, "b1")])
        rota = grouped(0.0, Rota(), [batch("a", [(0.0, "a1")]), b], TERMS)
        rota = grouped(100.0, rota, [batch("a", decodes=1), b], TERMS)
        assert (rota.on, rota.ends_ms) == (("b", "a"), 1100.0)
        # it has not left after a second: it waits, as the last group, for a turn to decode here
        rota = grouped(1100.0, rota, [batch("a", decodes=1), b], TERMS)
        assert (rota.on, [g.model for g in rota.groups]) == (("b",), ["b", "a"])
        rota = grouped(1200.0, rota, [batch("a", decodes=1)], TERMS)
        assert (rota.on, rota.ends_ms) == (("a",), 2200.0)

    def test_a_gpu_for_both_phases_goes_round_batches(self):
        a = batch("a", [(0.0, "a1")], switch_ms=1.0)
        assert turns(0.0, Rota(), [a, a._replace(model="b")], TERMS).only is None
        assert turns(0.0, Rota(), [a], TERMS._replace(role="prefill")).only == {"a1"}
        assert turns(0.0, Rota(on=("a",)), [], TERMS).on == ("a",)


class TestServerlessLlm:
    def test_a_model_keeps_the_gpu_until_what_it_began_with_has_ended(self):
        a = batch("a", [(0.0, "a1"), (1.0, "a2")])
        b = batch("b", [(2.0, "b1")], since_ms=2.0)
        rota = until_done(2.0, Rota(), [a, b], TERMS)
        assert (rota.on, sorted(rota.only), rota.ahead) == (("a",), ["a1", "a2"], ("b",))
        # a3 came after b1: it waits for the next turn of its model
        later = batch("a", [(3.0, "a3")], running=2)
        assert until_done(3.0, rota, [later, b], TERMS).only == rota.only
        rota = until_done(4.0, rota, [later._replace(running=0), b], TERMS)
        assert (rota.on, sorted(rota.only)) == (("b",), ["b1"])

    def test_while_nobody_else_waits_all_may_join(self):
        running = batch("a", [(3.0, "a3")], running=2)
        rota = until_done(3.0, Rota(on=("a",), only=frozenset(["a1"])), [running], TERMS)
        assert (rota.on, rota.only) == (("a",), None)
        more = running._replace(prompts=((3.0, "a3"), (5.0, "a5")))
        rota = until_done(5.0, rota, [more, batch("b", [(4.0, "b1")], since_ms=4.0)], TERMS)
        assert (rota.on, sorted(rota.only)) == (("a",), ["a3"])

    def test_all_that_fit_run_together_and_nobody_passes_the_one_that_does_not(self):
        a = batch("a", [(3.0, "a3")], running=1, need_bytes=30 << 30)
        b = batch("b", [(1.0, "b1"), (9.0, "b9")], need_bytes=40 << 30)
        c = batch("c", [(2.0, "c1")], need_bytes=20 << 30)
        rota = while_they_fit(0.0, Rota(), [c, b, a], TERMS)
        # 30 + 40 of 80 GiB; the 20 of c do not fit, and a3 and b9 came after it
        assert (rota.on, rota.only) == (("a", "b"), frozenset(["b1"]))
        rota = while_they_fit(0.0, Rota(), [b, a], TERMS)
        assert (rota.on, rota.only) == (("a", "b"), None)
