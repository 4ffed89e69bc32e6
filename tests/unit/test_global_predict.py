"""Output-length prediction (3.2.2)."""

from services.global_sched.predict import OutputPredictor, RunningQuantile, prior_tokens


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
