"""Workloads: who asks which model for what, and when.

A workload is made by name (`generate`) or replayed from a trace (`replay`; `sim/traces.py` reads the files).
All chance comes from the seed: each model draws from a stream of its own, so a model more changes nothing for
the others. "rps" is per model, as in the paper (Fig. 10).
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from shared.errors import ConfigError
from shared.model import ModelSpec, Struct
from sim.lengths import SHAREGPT, SHAREGPT_FIRST_TURN, SHAREGPT_GPT4, Lengths

MOST_TOKENS = 8192  # prompt and output together; the paper leaves longer requests out (4, Metrics)
MARKET_RPS = 0.037  # Aegaeon's marketplace: requests per second and model, each of which lasts 16.79 s
POWER_LAWS = (0.7, 0.9, 1.3, 1.7, 2.1)  # exponents of MuxServe's evaluation
WINDOW_S = 600.0  # ServeGen describes a client's arrivals by windows of this length


class Arrival(Struct):
    """One request of a workload: `at_ms` since its start, and how long prompt and reply are."""

    at_ms: float
    model: str
    input_tokens: int
    output_tokens: int
    tenant: str = "default"


class Workload(Struct):
    """Arrivals in order of time.

    Args:
        left_out: requests over 8,192 tokens, which are not among them.
        shortened: requests over their model's context, prompt and output scaled down to fit, as Aegaeon does.
    """

    arrivals: tuple[Arrival, ...]
    left_out: int = 0
    shortened: int = 0


class Window(Struct):
    """One client's arrivals in one ServeGen window: `pattern` of the gaps is ``Gamma`` or ``Weibull``."""

    rate_rps: float
    pattern: str
    shape: float


class Client(Struct):
    """One client of ServeGen: its windows in order of time (None: silent), and its lengths."""

    name: str
    windows: tuple[Window | None, ...]
    lengths: Lengths


Times = np.ndarray[Any, np.dtype[np.float64]]
"""Arrival times."""

Rate = Callable[[float], float]
"""Arrival rate at a time (0 to 1) of the run, as a part of the highest."""


class Recipe(Struct):
    """How a workload is made from exponential gaps and tables of lengths.

    Args:
        power: exponent of the models' popularity (MuxServe); 0: equal rates.
        rps: requests per second and model, whatever was asked for; None: as asked.
        rate: how the rate moves over the run.
        mean_rate: the highest rate is the asked one over this; with the mean of `rate`, what is asked for is
            the mean.
        least_output_tokens: shorter outputs are made this long.
    """

    lengths: Lengths = SHAREGPT
    input_factor: float = 1.0
    output_factor: float = 1.0
    power: float = 0.0
    rps: float | None = None
    rate: Rate | None = None
    mean_rate: float = 1.0
    least_output_tokens: int = 16  # of Aegaeon's generator


def _day(time: float) -> float:
    """One day from midnight to midnight: highest at noon, a ninth of it at the ends."""
    return (1.0 - 0.8 * math.cos(2 * math.pi * time)) / 1.8


def _step(time: float) -> float:
    """The full rate, a tenth of it in the middle third, and the full rate again."""
    return 0.1 if 1 / 3 <= time < 2 / 3 else 1.0


RECIPES: dict[str, Recipe] = {
    "sharegpt": Recipe(),
    "sharegpt-ix2": Recipe(input_factor=2.0),
    "sharegpt-ox2": Recipe(output_factor=2.0),
    "sharegpt-first": Recipe(lengths=SHAREGPT_FIRST_TURN, least_output_tokens=1),
    "sharegpt-gpt4": Recipe(lengths=SHAREGPT_GPT4, least_output_tokens=1),
    **{f"powerlaw-{power}": Recipe(power=power) for power in POWER_LAWS},
    "market": Recipe(rps=MARKET_RPS),
    "diurnal": Recipe(rate=_day, mean_rate=1 / 1.8),
    "step": Recipe(rate=_step),
}
SERVEGEN = "servegen"
NAMES = (*RECIPES, SERVEGEN)


def generate(
    name: str,
    *,
    models: Sequence[ModelSpec],
    rps_per_llm: float,
    minutes: float,
    seed: int = 0,
    clients: Sequence[Client] = (),
) -> Workload:
    """Make the workload of this name.

    Args:
        models: who is asked.
        rps_per_llm: mean requests per second and model (``step``: outside its trough; ``market`` has its
            own).
        minutes: how long requests arrive.
        clients: what ``servegen`` draws from.

    Raises:
        ConfigError: no such workload; or a number, `models` or `clients` that nothing can be made from.
    """
    if not models or rps_per_llm <= 0 or minutes <= 0:
        raise ConfigError(
            f"a workload needs models, a rate and a time above 0; got {len(models)} models, "
            f"{rps_per_llm} requests/s each, {minutes} minutes"
        )
    if name == SERVEGEN:
        return _fitting(_servegen(models, rps_per_llm, minutes * 60.0, seed, clients), models)
    if name not in RECIPES:
        raise ConfigError(f"no workload is called {name!r}; there are: {', '.join(NAMES)}, or a CSV file")
    return _fitting(_by_recipe(RECIPES[name], models, rps_per_llm, minutes * 60.0, seed), models)


def powerlaw_shares(count: int, power: float) -> list[float]:
    """Return MuxServe's popularity of `count` models, the most popular first: i^-power over their sum."""
    weights = [rank**-power for rank in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


def replay(
    rows: Sequence[Arrival],
    *,
    models: Sequence[ModelSpec],
    rps_per_llm: float | None = None,
    minutes: float | None = None,
    seed: int = 0,
) -> Workload:
    """Replay a trace on these models, from its first request on.

    A row that names one of `models` goes there. Other names are dealt to the models in turn, in the order of
    their sorting; rows without a name go to a model drawn with equal chances.

    Args:
        rps_per_llm: time is stretched so that the mean rate becomes this; None: as fast as it was.
        minutes: only what arrives within this time of the replay; None: all.

    Raises:
        ConfigError: nothing is left to replay.
    """
    rows = sorted(rows, key=lambda row: row.at_ms)
    if not rows or not models:
        raise ConfigError(f"nothing to replay: {len(rows)} requests in the trace, {len(models)} models")
    stretch = 1.0
    span_ms = rows[-1].at_ms - rows[0].at_ms
    if rps_per_llm is not None and span_ms > 0:
        stretch = 1000.0 * len(rows) / (rps_per_llm * len(models) * span_ms)
    own = {model.name for model in models}
    strange = sorted({row.model for row in rows if row.model and row.model not in own})
    dealt = {name: models[i % len(models)].name for i, name in enumerate(strange)}
    drawn = np.random.default_rng(seed).integers(len(models), size=len(rows)).tolist()
    until_ms = math.inf if minutes is None else minutes * 60_000.0
    arrivals = [
        Arrival(
            at_ms=(row.at_ms - rows[0].at_ms) * stretch,
            model=dealt.get(row.model, row.model) or models[index].name,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            tenant=row.tenant,
        )
        for row, index in zip(rows, drawn, strict=True)
    ]
    made = _fitting([arrival for arrival in arrivals if arrival.at_ms < until_ms], models)
    if not made.arrivals:
        raise ConfigError(f"nothing to replay: all {made.left_out} requests have over {MOST_TOKENS} tokens")
    return made


def _by_recipe(
    recipe: Recipe, models: Sequence[ModelSpec], rps: float, seconds: float, seed: int
) -> list[Arrival]:
    mean_rps = rps if recipe.rps is None else recipe.rps
    shares = powerlaw_shares(len(models), recipe.power)
    # the popular ones are the small ones, as in MuxServe; with equal rates the order says nothing
    ranked = sorted(models, key=lambda model: model.params) if recipe.power else models
    arrivals: list[Arrival] = []
    for index, (model, share) in enumerate(zip(ranked, shares, strict=True)):
        rng = np.random.default_rng((seed, index))
        expected = mean_rps * len(models) * share * seconds / recipe.mean_rate
        # Exponential gaps: their number in a time is Poisson, and given it the times are uniform.
        at = np.sort(rng.random(rng.poisson(expected)))
        if recipe.rate is not None:  # thinned where the rate is below the highest
            kept = rng.random(len(at)) < [recipe.rate(time) for time in at.tolist()]
            at = at[kept]
        arrivals += _arrivals(rng, model, at * (seconds * 1000.0), recipe)
    return arrivals


def _arrivals(
    rng: np.random.Generator,
    model: ModelSpec,
    at_ms: Times,
    recipe: Recipe,
) -> list[Arrival]:
    """Give lengths to arrivals; prompt and output are drawn from uniforms of their own."""
    uniforms = rng.random((2, len(at_ms)))
    inputs = recipe.lengths.input_tokens.lengths(uniforms[0], recipe.input_factor)
    outputs = recipe.lengths.output_tokens.lengths(
        uniforms[1], recipe.output_factor, recipe.least_output_tokens
    )
    return [
        Arrival(at_ms=at, model=model.name, input_tokens=taken, output_tokens=given)
        for at, taken, given in zip(at_ms.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
    ]


def _servegen(
    models: Sequence[ModelSpec], rps: float, seconds: float, seed: int, clients: Sequence[Client]
) -> list[Arrival]:
    """Draw bursts as ServeGen does: per client and window, gaps of its shape, rescaled to fill the window.

    The clients are dealt to the models in turn, and each model's are scaled to the asked mean rate together,
    so that the bursts and the drift of a client stay, and no single client is most of the load.
    """
    if not clients:
        raise ConfigError("servegen needs clients to draw from; name their files")
    windows = math.ceil(seconds / WINDOW_S)
    arrivals: list[Arrival] = []
    for index, model in enumerate(models):
        rng = np.random.default_rng((seed, index))
        mine = clients[index :: len(models)] or [clients[index % len(clients)]]
        total = sum(_rate(client, number) for client in mine for number in range(windows)) / windows
        if total == 0:
            raise ConfigError(f"servegen: the clients of {model.name} are silent for all {seconds:.0f} s")
        for client in mine:
            recipe = Recipe(lengths=client.lengths, least_output_tokens=1)
            for number in range(windows):
                at_s = _window_times(rng, client, number, rps / total) + number * WINDOW_S
                arrivals += _arrivals(rng, model, at_s[at_s < seconds] * 1000.0, recipe)
    return arrivals


def _window(client: Client, number: int) -> Window | None:
    """Return a client's window; after the last comes the first again."""
    return client.windows[number % len(client.windows)]


def _rate(client: Client, number: int) -> float:
    window = _window(client, number)
    return 0.0 if window is None else window.rate_rps


def _window_times(rng: np.random.Generator, client: Client, number: int, factor: float) -> Times:
    """Return arrival times within one window, in s, at `factor` times the client's rate."""
    window = _window(client, number)
    if window is None:
        return np.empty(0)
    if window.pattern not in ("Gamma", "Weibull"):
        raise ConfigError(f"servegen client {client.name}: pattern {window.pattern!r}; known: Gamma, Weibull")
    count = math.floor(window.rate_rps * factor * WINDOW_S + rng.random())
    draw = rng.gamma if window.pattern == "Gamma" else rng.weibull
    ends: Times = np.cumsum(draw(window.shape, size=count + 1))
    times: Times = ends[:-1] / ends[-1] * WINDOW_S
    return times


def _fitting(arrivals: Sequence[Arrival], models: Sequence[ModelSpec]) -> Workload:
    """Sort; leave out what exceeds 8,192 tokens; scale down what exceeds its model's context."""
    context_tokens = {model.name: model.context_tokens for model in models}
    kept: list[Arrival] = []
    shortened = 0
    for arrival in arrivals:
        tokens = arrival.input_tokens + arrival.output_tokens
        most = context_tokens[arrival.model]
        if tokens > MOST_TOKENS:
            continue
        if tokens > most:
            scale = most / (tokens + 32)
            shortened += 1
            arrival = Arrival(
                at_ms=arrival.at_ms,
                model=arrival.model,
                input_tokens=max(1, int(arrival.input_tokens * scale)),
                output_tokens=max(1, int(arrival.output_tokens * scale)),
                tenant=arrival.tenant,
            )
        kept.append(arrival)
    kept.sort(key=lambda arrival: (arrival.at_ms, arrival.model))
    assert all(a.at_ms <= b.at_ms for a, b in pairwise(kept))
    return Workload(arrivals=tuple(kept), left_out=len(arrivals) - len(kept), shortened=shortened)
