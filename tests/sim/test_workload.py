"""Made workloads: rates, lengths, shares, bursts, and that a seed says it all."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.catalog import emulated_models, pool_models
from shared.errors import ConfigError
from shared.model import ModelSpec
from sim.lengths import SHAREGPT, SHAREGPT_FIRST_TURN, SHAREGPT_GPT4, Lengths, Quantiles
from sim.workload import (
    MOST_TOKENS,
    NAMES,
    POWER_LAWS,
    RECIPES,
    Arrival,
    Client,
    Window,
    generate,
    powerlaw_shares,
    replay,
)

MODELS = emulated_models(8)
FLAT = Lengths(Quantiles((0.0, 1.0), (100, 100)), Quantiles((0.0, 1.0), (50, 50)))


def clients(*shapes: float, pattern: str = "Gamma", rate_rps: float = 1.0) -> list[Client]:
    return [Client(str(i), (Window(rate_rps, pattern, shape),), FLAT) for i, shape in enumerate(shapes)]


def wide(models: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
    """Models whose contexts shorten nothing."""
    return tuple(replace(model, context_tokens=32_768) for model in models)


@pytest.mark.parametrize(
    ("name", "mean_in", "mean_out", "median_in", "median_out", "p95_in", "p95_out"),
    [
        # Aegaeon's 323 requests: mean 682 and 296, median 543 and 259, 95th percentile 1703 and 773; without
        # those over 8,192 tokens the mean prompt is about 17 tokens shorter.
        ("sharegpt", 665, 300, 543, 259, 1703, 773),
        ("sharegpt-ix2", 1310, 300, 1086, 259, 3400, 773),
        ("sharegpt-ox2", 665, 600, 543, 518, 1703, 1546),
        ("sharegpt-first", 161, 338, 66, 291, 523, 869),
        ("sharegpt-gpt4", 2280, 434, 1730, 415, 6400, 920),
    ],
)
def test_lengths_are_those_of_the_source(
    name: str,
    mean_in: float,
    mean_out: float,
    median_in: float,
    median_out: float,
    p95_in: float,
    p95_out: float,
) -> None:
    arrivals = generate(name, models=wide(MODELS), rps_per_llm=2.0, minutes=30, seed=3).arrivals
    inputs = np.array([a.input_tokens for a in arrivals])
    outputs = np.array([a.output_tokens for a in arrivals])
    assert len(arrivals) > 25_000
    assert inputs.mean() == pytest.approx(mean_in, rel=0.03)
    assert outputs.mean() == pytest.approx(mean_out, rel=0.02)
    assert np.median(inputs) == pytest.approx(median_in, rel=0.03)
    assert np.median(outputs) == pytest.approx(median_out, rel=0.03)
    assert np.quantile(inputs, 0.95) == pytest.approx(p95_in, rel=0.03)
    assert np.quantile(outputs, 0.95) == pytest.approx(p95_out, rel=0.03)


def test_the_tables_have_the_published_means() -> None:
    assert SHAREGPT.input_tokens.mean == pytest.approx(682, rel=0.02)
    assert SHAREGPT.output_tokens.mean == pytest.approx(296, rel=0.02)
    assert SHAREGPT_FIRST_TURN.input_tokens.mean == pytest.approx(161.3, rel=0.02)
    assert SHAREGPT_FIRST_TURN.output_tokens.mean == pytest.approx(338.0, rel=0.01)
    assert SHAREGPT_GPT4.input_tokens.mean == pytest.approx(2340, rel=0.01)
    assert SHAREGPT_GPT4.output_tokens.mean == pytest.approx(439, rel=0.01)


def test_rates_are_equal_and_gaps_exponential() -> None:
    arrivals = generate("sharegpt", models=MODELS, rps_per_llm=2.0, minutes=60, seed=0).arrivals
    counts = Counter(a.model for a in arrivals)
    assert set(counts) == {m.name for m in MODELS}
    for count in counts.values():  # 7,200 expected, standard deviation 85
        assert abs(count - 7200) < 4 * 85 + 20
    gaps_ms = np.diff([a.at_ms for a in arrivals if a.model == MODELS[0].name])
    assert gaps_ms.std() / gaps_ms.mean() == pytest.approx(1.0, abs=0.03)
    assert np.mean(gaps_ms > 500.0) == pytest.approx(np.exp(-1), abs=0.015)


@pytest.mark.parametrize("power", POWER_LAWS)
def test_power_laws_follow_the_formula_and_small_models_are_popular(power: float) -> None:
    shares = powerlaw_shares(16, power)
    weights = [i**-power for i in range(1, 17)]
    assert shares == pytest.approx([w / sum(weights) for w in weights])
    models = emulated_models(16)
    arrivals = generate(f"powerlaw-{power}", models=models, rps_per_llm=2.0, minutes=30).arrivals
    counts = Counter(a.model for a in arrivals)
    by_size = sorted(models, key=lambda m: m.params)
    assert len(arrivals) == pytest.approx(16 * 2 * 1800, rel=0.02)
    for model, share in zip(by_size[:4], shares, strict=False):
        assert counts[model.name] / len(arrivals) == pytest.approx(share, rel=0.1)


def test_published_power_law_shares() -> None:
    # MuxServe's shares for 16 models, to six digits
    assert powerlaw_shares(16, 0.9)[:3] == pytest.approx([0.262756, 0.140807, 0.097756], abs=1e-6)
    assert powerlaw_shares(16, 2.1)[:2] == pytest.approx([0.658499, 0.1536], abs=1e-6)


def test_market_keeps_46_of_100_models_active() -> None:
    """E[active] = M (1 - e^(-lambda T)) = 46.27 for M = 100, lambda = 0.037/s, T = 16.79 s."""
    models = pool_models(100)
    minutes, busy_ms = 24 * 60.0, 16_790.0
    arrivals = generate("market", models=models, rps_per_llm=1.0, minutes=minutes, seed=0).arrivals
    covered_ms = 0.0
    until_ms = dict.fromkeys((m.name for m in models), 0.0)
    for arrival in arrivals:
        end_ms = arrival.at_ms + busy_ms
        covered_ms += end_ms - max(arrival.at_ms, until_ms[arrival.model])
        until_ms[arrival.model] = end_ms
    assert covered_ms / (minutes * 60_000) == pytest.approx(46.27, rel=0.01)


def test_a_day_and_a_step() -> None:
    day = generate("diurnal", models=MODELS, rps_per_llm=2.0, minutes=60, seed=1).arrivals
    at = np.array([a.at_ms for a in day]) / 3.6e6
    assert len(day) == pytest.approx(8 * 2 * 3600, rel=0.02)
    noon, midnight = np.mean(abs(at - 0.5) < 0.05), np.mean(abs(at - 0.5) > 0.45)
    assert noon / midnight == pytest.approx(9.0, rel=0.2)  # 1.8 / 0.2, over a tenth of the day each
    step = generate("step", models=MODELS, rps_per_llm=2.0, minutes=60, seed=1).arrivals
    thirds = np.histogram([a.at_ms / 3.6e6 for a in step], bins=[0, 1 / 3, 2 / 3, 1])[0]
    assert thirds[1] / thirds[0] == pytest.approx(0.1, rel=0.1)
    assert thirds[2] / thirds[0] == pytest.approx(1.0, rel=0.05)
    assert thirds[0] == pytest.approx(8 * 2 * 1200, rel=0.03)


@pytest.mark.parametrize(("pattern", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Weibull", 0.5, 5**0.5)])
def test_servegen_gaps_have_the_shapes_variation(pattern: str, shape: float, cv: float) -> None:
    """CV of Gamma gaps is shape^-1/2; of Weibull with shape 1/2, sqrt(5)."""
    arrivals = generate(
        "servegen", models=MODELS[:1], rps_per_llm=10.0, minutes=100, clients=clients(shape, pattern=pattern)
    ).arrivals
    gaps_ms = np.diff([a.at_ms for a in arrivals])
    assert gaps_ms.std() / gaps_ms.mean() == pytest.approx(cv, rel=0.05)
    assert len(arrivals) == pytest.approx(60_000, rel=0.001)  # rescaled: every window has its number


def test_servegen_scales_each_model_to_the_asked_rate() -> None:
    busy, quiet = clients(1.0, rate_rps=90.0), clients(1.0, rate_rps=0.1)
    models = MODELS[:2]
    made = generate("servegen", models=models, rps_per_llm=1.0, minutes=60, clients=[*busy, *quiet])
    counts = Counter(a.model for a in made.arrivals)
    assert [counts[m.name] for m in models] == [3600, 3600]


def test_servegen_windows_keep_their_parts() -> None:
    client = Client("c", (Window(3.0, "Gamma", 1.0), None, Window(1.0, "Gamma", 1.0)), FLAT)
    made = generate("servegen", models=MODELS[:1], rps_per_llm=2.0, minutes=30, clients=[client])
    windows = Counter(int(a.at_ms // 600_000) for a in made.arrivals)
    assert windows == {0: 2700, 2: 900}


def test_long_requests_are_left_out_and_those_over_the_context_shortened() -> None:
    short = replace(MODELS[0], name="short", context_tokens=4096)
    long = replace(MODELS[0], name="long", context_tokens=32_768)
    rows = [
        Arrival(at_ms=0.0, model="short", input_tokens=8000, output_tokens=192),  # 8192: stays, shortened
        Arrival(at_ms=1.0, model="long", input_tokens=8000, output_tokens=193),  # 8193: left out
        Arrival(at_ms=2.0, model="long", input_tokens=8000, output_tokens=192),
    ]
    made = replay(rows, models=[short, long])
    assert (made.left_out, made.shortened) == (1, 1)
    # 4096 / (8192 + 32) of each, rounded down
    assert [(a.input_tokens, a.output_tokens) for a in made.arrivals] == [(3984, 95), (8000, 192)]


def test_replay_deals_models_and_stretches_time() -> None:
    names = ["b", "a", MODELS[1].name, "", "c"]
    rows = [
        Arrival(at_ms=1000.0 + 1000.0 * i, model=n, input_tokens=9, output_tokens=9)
        for i, n in enumerate(names)
    ]
    made = replay(rows, models=MODELS[:2], rps_per_llm=0.5).arrivals
    # strange names in the order of their sorting: a, b, c -> models 0, 1, 0
    assert [a.model for a in made[:3]] == [MODELS[1].name, MODELS[0].name, MODELS[1].name]
    assert made[4].model == MODELS[0].name and made[3].model in {m.name for m in MODELS[:2]}
    # 5 requests at 0.5/s for each of 2 models: 5 s, where 4 s lay between the first and the last
    assert [a.at_ms for a in made] == [0.0, 1250.0, 2500.0, 3750.0, 5000.0]
    assert [a.at_ms for a in replay(rows, models=MODELS, minutes=2.5 / 60).arrivals] == [0.0, 1000.0, 2000.0]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**32), st.integers(1, 6))
def test_a_workload_is_sorted_fits_and_depends_on_the_seed_alone(name: str, seed: int, count: int) -> None:
    made = generate(
        name, models=MODELS[:count], rps_per_llm=1.0, minutes=2.0, seed=seed, clients=clients(0.3, 2.0)
    )
    again = generate(
        name, models=MODELS[:count], rps_per_llm=1.0, minutes=2.0, seed=seed, clients=clients(0.3, 2.0)
    )
    assert made == again
    context = {m.name: m.context_tokens for m in MODELS}
    assert all(a.at_ms <= b.at_ms for a, b in pairwise(made.arrivals))
    for a in made.arrivals:
        assert 0.0 <= a.at_ms < 120_000.0 and a.input_tokens >= 1 and a.output_tokens >= 1
        assert a.input_tokens + a.output_tokens <= min(MOST_TOKENS, context[a.model])


def test_another_seed_is_another_workload_and_one_more_model_changes_no_other() -> None:
    few = generate("sharegpt", models=MODELS[:2], rps_per_llm=1.0, minutes=5, seed=1).arrivals
    other = generate("sharegpt", models=MODELS[:2], rps_per_llm=1.0, minutes=5, seed=2).arrivals
    more = generate("sharegpt", models=MODELS[:3], rps_per_llm=1.0, minutes=5, seed=1).arrivals
    assert few != other
    assert few == tuple(a for a in more if a.model != MODELS[2].name)


def test_errors_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'nothing'.*sharegpt.*market"):
        generate("nothing", models=MODELS, rps_per_llm=1.0, minutes=1.0)
    with pytest.raises(ConfigError, match="0 models"):
        generate("sharegpt", models=(), rps_per_llm=1.0, minutes=1.0)
    with pytest.raises(ConfigError, match="clients"):
        generate("servegen", models=MODELS, rps_per_llm=1.0, minutes=1.0)
    with pytest.raises(ConfigError, match="'Pareto'"):
        generate(
            "servegen", models=MODELS, rps_per_llm=1.0, minutes=1.0, clients=clients(1.0, pattern="Pareto")
        )
    with pytest.raises(ConfigError, match="nothing to replay"):
        replay([], models=MODELS)


def test_every_recipe_can_be_made() -> None:
    for name in RECIPES:
        assert generate(name, models=MODELS[:2], rps_per_llm=1.0, minutes=10).arrivals


def test_a_trace_of_long_requests_alone_is_an_error() -> None:
    row = Arrival(at_ms=0.0, model="", input_tokens=9000, output_tokens=1)
    with pytest.raises(ConfigError, match="all 1 requests have over 8192 tokens"):
        replay([row], models=MODELS)
