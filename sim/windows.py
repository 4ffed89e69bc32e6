"""Short stretches of a long trace: chosen by their load, played alone, and taken for the whole.

A window is played as it would be met in the whole run: what came just before it is played first, the models
that would be loaded are, and the schedulers know the output lengths that they would have seen.

Totals over all windows are predicted from those that were played: rates (on time per request, joules per ms)
are taken to go with a window's rank by load, linearly between two played ones, up to a noise of its own per
window. How large the noise is shows in the played windows: each but the ends is predicted from its
neighbours. Nothing is uncertain once all are played, except what the seams between windows do.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from scipy.stats import t as student

from services.global_sched.predict import Learnt, OutputPredictor
from services.global_sched.settings import GlobalSettings
from shared.lut import Lut
from shared.model import Struct
from shared.slo import TBT_MS
from sim.workload import Arrival

REQUESTS = 150  # a window is as long as so many requests take to arrive on average,
LEAST_MS, MOST_MS = 15_000.0, 60_000.0  # within these
WARM_MS = 15_000.0  # before a window, with all that arrives then
TAIL_MS = 5_000.0  # after it, so that its last requests do not have the GPUs for themselves
LOADING_MS = 10_000.0  # before all that: time to load the models
REMEMBERED = 3_000  # requests before a window, from whose outputs schedulers have learnt
BEFORE_PART = 0.25  # of the load of the window before
IDLE_PART = 0.5  # of the mean load, as which an idle window counts: GPUs draw power all the same
LEAST_PLAYED = 6  # windows, of which some may be empty
LEAST_RATES = 4  # windows that are not; fewer say nothing of the noise
FEW = 2 * LEAST_PLAYED  # a trace has no fewer windows than this
CONFIDENCE = 0.95

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int_]]


class Window(Struct):
    """One stretch of a trace.

    Args:
        first, past: its arrivals are those from index `first` to before `past`.
        gpus: GPUs that its work fills at the highest clock, if decoding goes in the largest batches that meet
            TBT: no fewer can serve it for long.
    """

    from_ms: float
    until_ms: float
    first: int
    past: int
    gpus: float

    @property
    def span_ms(self) -> float:
        """How long it is."""
        return self.until_ms - self.from_ms

    @property
    def requests(self) -> int:
        """How many requests arrive in it."""
        return self.past - self.first


class Excerpt(Struct):
    """What is played of a trace for one window: arrivals from its own start, where the window lies in it."""

    arrivals: tuple[Arrival, ...]
    from_ms: float
    until_ms: float
    learnt: tuple[Learnt, ...] = ()


class Estimate(Struct):
    """A figure, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def split(arrivals: Sequence[Arrival], luts: Mapping[str, Lut]) -> tuple[Window, ...]:
    """Cut a trace into `FEW` or more windows of equal length; `luts` are by model."""
    end_ms = arrivals[-1].at_ms + 1.0
    wanted_ms = min(MOST_MS, max(LEAST_MS, REQUESTS * end_ms / len(arrivals)))
    edges = np.linspace(0.0, end_ms, max(FEW, round(end_ms / wanted_ms)) + 1)
    places = np.searchsorted([arrival.at_ms for arrival in arrivals], edges).tolist()
    ends = zip(edges.tolist(), edges[1:].tolist(), places, places[1:], strict=False)
    return tuple(
        Window(low_ms, high_ms, first, past, gpus_filled(arrivals[first:past], high_ms - low_ms, luts))
        for low_ms, high_ms, first, past in ends
    )


def gpus_filled(arrivals: Sequence[Arrival], span_ms: float, luts: Mapping[str, Lut]) -> float:
    """Return the GPUs that these requests fill for `span_ms` at the highest clock (3.2: from the table).

    A model decodes in a batch as large as if each of its requests took the longest time between tokens that
    it may, and as memory holds beside the weights.
    """
    busy_ms = 0.0
    for name in sorted({arrival.model for arrival in arrivals}):
        lut, mine = luts[name], [arrival for arrival in arrivals if arrival.model == name]
        clock_mhz, model = lut.device.f_max_mhz, lut.model
        inputs = np.array([arrival.input_tokens for arrival in mine])
        outputs = np.array([arrival.output_tokens for arrival in mine])
        busy_ms += float(np.sum(lut.ttft_ms(clock_mhz, 100, inputs)))
        tokens = int(np.sum(outputs - 1))
        if tokens == 0:
            continue
        context_tokens = float(np.average(inputs + outputs / 2, weights=outputs))
        tbt_ms = model.objectives.tbt_ms if model.objectives else TBT_MS
        room = (lut.device.total_bytes - model.weight_bytes) / (model.kv_bytes_per_token * context_tokens)
        batch = max(1.0, min(tokens * tbt_ms / span_ms, room))
        busy_ms += tokens / batch * float(lut.tbt_ms(clock_mhz, 100, batch, context_tokens))
    return busy_ms / span_ms


def ranked(windows: Sequence[Window]) -> list[int]:
    """Return the windows by load, the least busy first.

    A part of the load before counts as well: its models are still there, and draw power.
    """
    before = [0.0, *(window.gpus for window in windows)]
    return sorted(range(len(windows)), key=lambda i: (windows[i].gpus + BEFORE_PART * before[i], i))


def playing_order(windows: Sequence[Window]) -> list[int]:
    """Return the windows in the order in which to play them: any beginning is a good sample.

    First the busiest and the least busy; then always the one in the middle of the widest gap, by the energy
    that may lie between those chosen, so that busy windows come sooner and lie closer.
    """
    by_load = ranked(windows)
    mean = sum(window.gpus for window in windows) / len(windows)
    done = np.cumsum([windows[i].gpus + IDLE_PART * mean for i in by_load])
    order = [by_load[-1], *by_load[: len(by_load) > 1]]
    gaps = [(0, len(by_load) - 1)]
    while len(order) < len(windows):
        low, high = max(gaps, key=lambda gap: (done[gap[1]] - done[gap[0]]) * (gap[1] - gap[0] > 1))
        middle = int(np.searchsorted(done, (done[low] + done[high]) / 2))
        middle = min(max(middle, low + 1), high - 1)
        gaps.remove((low, high))
        gaps += [(low, middle), (middle, high)]
        order.append(by_load[middle])
    return order


def excerpt(
    arrivals: Sequence[Arrival], window: Window, keep_alive_ms: Mapping[str, float | None]
) -> Excerpt:
    """Return what to play for a window.

    Args:
        keep_alive_ms: of each model; before the warm-up, each model's last request within it is played, so
            that the model is loaded where it would be.
    """
    settings = GlobalSettings()
    predictor = OutputPredictor(settings.output_quantile, settings.margin, settings.prediction_window)
    longest_ms = max((kept or 0.0 for kept in keep_alive_ms.values()), default=0.0)
    warm_ms = window.from_ms - WARM_MS
    start_ms = warm_ms - longest_ms - LOADING_MS
    last: dict[str, Arrival] = {}
    played: list[Arrival] = []
    for arrival in arrivals[max(0, window.first - REMEMBERED) :]:
        if arrival.at_ms >= window.until_ms + TAIL_MS:
            break
        if arrival.at_ms >= warm_ms:
            played.append(arrival)
        else:
            last[arrival.model] = arrival
            predictor.observe(arrival.model, arrival.input_tokens, arrival.output_tokens)
    kept = [
        one
        for one in last.values()
        if (keep_ms := keep_alive_ms[one.model]) is not None and one.at_ms > warm_ms - keep_ms
    ]
    kept.sort(key=lambda arrival: arrival.at_ms)
    return Excerpt(
        arrivals=tuple(
            msgspec.structs.replace(arrival, at_ms=arrival.at_ms - start_ms) for arrival in (*kept, *played)
        ),
        from_ms=window.from_ms - start_ms,
        until_ms=window.until_ms - start_ms,
        learnt=tuple(predictor.learnt("scheduler-0", model) for model in sorted(last)),
    )


def total(played: Mapping[int, float], sizes: Sequence[float], order: Sequence[int]) -> Estimate:
    """Return the sum of a figure over all windows.

    Args:
        played: the figure of each window that was played, by its index.
        sizes: of all windows, what the figure is in proportion to: their requests, or their ms.
        order: all windows, by load.
    """
    filled = [index for index in order if sizes[index] > 0]
    size = np.array([sizes[index] for index in filled], dtype=float)
    known = np.array([rank for rank, index in enumerate(filled) if index in played], dtype=int)
    values = np.array([played[filled[rank]] for rank in known.tolist()])
    value = float(values.sum())
    rest = np.setdiff1d(np.arange(len(filled)), known)
    if not len(rest):
        return Estimate(value, value, value)
    if not len(known):
        return Estimate(0.0, -math.inf, math.inf)
    rates = values / size[known]
    # a row for each window that was not played: the weights of the played ones' rates in its own
    weights = np.stack([np.interp(rest, known, column) for column in np.eye(len(known))], axis=1)
    value += float(size[rest] @ weights @ rates)
    if len(known) < LEAST_RATES:
        return Estimate(value, -math.inf, math.inf)
    noise = _noise(rates, known)
    variance = (size[rest] @ weights) ** 2 @ noise + (size[rest] ** 2) @ weights @ noise
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(known) - 2) * np.sqrt(variance))
    return Estimate(value, value - half, value + half)


def _noise(rates: Floats, ranks: Ints) -> Floats:
    """Return the variance of each played window's rate about what its rank gives."""
    before, after = ranks[1:-1] - ranks[:-2], ranks[2:] - ranks[1:-1]
    part = before / (before + after)
    missed = rates[1:-1] - (1 - part) * rates[:-2] - part * rates[2:]
    squares = missed**2 / (1 + part**2 + (1 - part) ** 2)
    three = np.ones(3)
    smooth = np.convolve(squares, three)[1:-1] / np.convolve(np.ones(len(squares)), three)[1:-1]
    return np.concatenate([smooth[:1], smooth, smooth[-1:]])
