"""Output-length prediction (3.2.2)."""

import msgspec

from services.global_sched.core import GlobalSchedCore
from services.global_sched.predict import (
    Learnt,
    LearntRead,
    OutputPredictor,
    RunningQuantile,
    prior_tokens,
)
from services.global_sched.predict_standin import MEASURED, ORACLE, PAPER, stand_in
from services.global_sched.settings import GlobalSettings
from shared import events as ev
from shared.catalog import emulated_models
from shared.model import Objectives, Request


def predictor(quantile: float = 0.5, window: int = 100) -> OutputPredictor:
    return OutputPredictor(quantile, 0.05, window)


def test_the_prior_is_the_quantile_table():
    assert prior_tokens(0.5) == 259
    assert prior_tokens(0.55) == (259 + 307) / 2
    assert prior_tokens(0.001) == 16 and prior_tokens(1.0) == 1309


def test_cold_start_is_near_the_prior_with_margin():
    predicted = predictor(0.5).predict("m", 500, 10_000, 100_000)
    assert 259 * 0.9 * 1.05 < predicted < 259 * 1.1 * 1.05
    assert predictor(0.8).predict("m", 500, 10_000, 100_000) > predicted


def test_margin_is_five_percent_and_exact():
    p = predictor(0.5, window=10)
    for _ in range(10):
        p.observe("m", 500, 100)
    assert p.predict("m", 500, 10_000, 100_000) == 105


def test_bounded_by_max_tokens_and_by_the_context():
    p = predictor()
    assert p.predict("m", 500, 16, 8192) == 16
    assert p.predict("m", 8000, 4096, 8192) == 192
    assert p.predict("m", 8191, 4096, 8192) == 1


def test_classes_and_models_learn_apart():
    p = predictor(window=10)
    for _ in range(10):
        p.observe("m", 100, 20)  # class S
    assert p.predict("m", 200, 10_000, 100_000) == 21
    assert p.predict("m", 500, 10_000, 100_000) > 200
    assert p.predict("other", 100, 10_000, 100_000) > 200
    p.forget("m")
    assert p.predict("m", 200, 10_000, 100_000) > 200


def test_a_resumed_request_is_longer_than_what_it_has():
    p = predictor(window=4)
    for tokens in (10, 20, 300, 400):
        p.observe("m", 100, tokens)
    assert p.predict("m", 100, 10_000, 100_000, given_tokens=20) == 315  # median of those above 20
    assert p.predict("m", 100, 10_000, 100_000, given_tokens=500) == 1050  # as much again
    assert p.predict("m", 100, 501, 100_000, given_tokens=500) == 501


def test_window_keeps_the_newest_and_drops_the_prior():
    q = RunningQuantile(window=5)
    for value in range(1000):
        q.add(float(value))
    assert [q.at(p, above=-1) for p in (0.2, 0.4, 0.6, 0.8, 1.0)] == [995, 996, 997, 998, 999]
    assert q.at(0.5, above=999) is None


# ---- what is kept, and what stands in


def request(request_id: str = "r", prompt: int = 100, max_tokens: int = 10_000, given: int = 0) -> Request:
    return Request(
        request_id=request_id,
        attempt=1,
        gateway="g",
        model="m",
        prompt_tokens=(1,) * prompt,
        max_tokens=max_tokens,
        objectives=Objectives(ttft_ms=1.0, tbt_ms=1.0),
        output_tokens=(2,) * given,
    )


def test_what_is_learnt_can_be_taken_up_again():
    p = predictor(window=10)
    for tokens in range(100, 115):
        p.observe("m", 100, tokens)
    p.observe("m", 2000, 900)
    p.observe("other", 100, 5)
    learnt = p.learnt("s", "m")
    assert learnt.output_tokens["S"] == tuple(float(t) for t in range(105, 115))
    assert set(learnt.output_tokens) == {"S", "L"}
    again = predictor(window=10)
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(learnt), type=Learnt))
    for inputs in (100, 2000):
        assert again.predict("m", inputs, 10_000, 100_000) == p.predict("m", inputs, 10_000, 100_000)
    assert again.predict("other", 100, 10_000, 100_000) > 100  # the prior


def test_the_core_stores_what_it_learns_at_most_so_often():
    core = GlobalSchedCore("s", GlobalSettings(prediction_save_ms=1000.0))
    core.step(0.0, ev.ModelRegistered(model=msgspec.structs.replace(emulated_models(1)[0], name="m")))

    def ended(now_ms, tokens):
        event = ev.RequestEnded(
            request_id="r", model="m", tenant="t", outcome="stop", input_tokens=100, output_tokens=tokens
        )
        return core.step(now_ms, event)

    assert ended(0.0, 40) == [] and ended(500.0, 41) == []
    assert core.wake_ms == 1000.0
    (put,) = core.step(1000.0, ev.Tick())
    assert put.key == "festina:v1:learnt:s:m" and put.ttl_ms > 0
    assert put.value.output_tokens["S"][-2:] == (40.0, 41.0)
    assert core.wake_ms is None and core.step(2000.0, ev.Tick()) == []
    fresh = GlobalSchedCore("other", GlobalSettings())
    fresh.step(0.0, LearntRead(learnt=put.value))
    assert fresh._predictor.of_request(request(), 100_000) == core._predictor.of_request(request(), 100_000)
    assert ev.Delete(key="festina:v1:learnt:s:m") in core.step(3000.0, ev.ModelRemoved(model="m"))


def test_the_oracle_knows_and_is_bounded_like_the_others():
    predict = stand_in(lambda r: 200, ORACLE)
    assert predict(request(), 100_000) == 210
    assert predict(request(max_tokens=205), 100_000) == 205
    assert predict(request(prompt=8000), 8100) == 100
    assert predict(request(given=300), 100_000) == 301


def test_the_papers_error_is_within_five_percent_for_98_percent():
    predict = stand_in(lambda r: 1000, PAPER, margin=0.0)
    errors = [predict(request(f"r{n}"), 10**6) / 1000 - 1 for n in range(4000)]
    within = sum(abs(e) <= 0.051 for e in errors) / len(errors)
    assert 0.97 < within < 0.99
    assert max(map(abs, errors)) <= 0.11
    assert predict(request("r7"), 10**6) == predict(request("r7"), 10**6)


def test_the_measured_error_is_as_wide_as_published():
    true = {f"r{n}": n % 500 + 2 for n in range(6000)}
    predict = stand_in(lambda r: true[r.request_id], MEASURED, margin=0.0)
    ratios = [predict(request(name), 10**6) / tokens for name, tokens in true.items()]
    within = sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / len(ratios)
    assert 0.2 < within < 0.4
    long = sorted(r for r, tokens in zip(ratios, true.values(), strict=True) if tokens > 243)
    assert 0.7 < long[len(long) // 2] < 0.9  # long outputs are underestimated
