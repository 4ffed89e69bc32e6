"""From samples that a profiler measured to the grids of a table (3.2.1): polynomials between lengths.

Per (clock, share) for prefill and per (clock, share, batch) for decode, the logarithm of the latency is a
polynomial in the logarithm of the length; its degree, and from where on the logarithm is taken, are what best
predicts each length from the others. Points that were not measured are interpolated between neighbours in
clock, share and batch, never extrapolated.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import LutMiss
from shared.lut_table import Axes, Regression
from shared.model import Struct

MOST_DEGREE = 5
# Up to about so many tokens the latency may be nearly constant: added to a length before its logarithm.
SHORT_TOKENS = (1, 32, 128, 512)
PREFILL, DECODE = "prefill", "decode"


class Sample(Struct):
    """One measured point, the middle of its repeats.

    Args:
        phase: ``prefill`` or ``decode``.
        input_tokens: prompt tokens of a prefill.
        batch, context_tokens: of a decode step; the context is the mean over the batch.
        latency_ms: of the whole prefill, or of one decode step.
        power_w: of the whole device meanwhile; None without a meter.
    """

    phase: str
    sm_clock_mhz: int
    sm_share_pct: int
    latency_ms: float
    power_w: float | None = None
    input_tokens: int = 0
    batch: int = 0
    context_tokens: int = 0


class Grids(NamedTuple):
    """What samples give: axes, the four grids of a table, and how well the polynomials fit."""

    axes: Axes
    values: list[NDArray[np.float64]]
    prefill_fit: Regression
    decode_fit: Regression


def grids(name: str, samples: Sequence[Sample], lengths: Sequence[int], contexts: Sequence[int]) -> Grids:
    """Return the grids that `samples` give, with the lengths and contexts to fill between the measured ones.

    Raises LutMiss, naming what to profile, where a phase has no sample or a hole has no neighbours.
    """
    by_phase = {phase: [s for s in samples if s.phase == phase] for phase in (PREFILL, DECODE)}
    for phase, found in by_phase.items():
        if not found:
            raise LutMiss(f"{name} has no {phase} samples; profile that phase")
    prefill, decode = by_phase[PREFILL], by_phase[DECODE]
    axes = Axes(
        clocks_mhz=_points(s.sm_clock_mhz for s in samples),
        shares_pct=_points(s.sm_share_pct for s in samples),
        input_tokens=_between([s.input_tokens for s in prefill], lengths),
        batches=_points(s.batch for s in decode),
        context_tokens=_between([s.context_tokens for s in decode], contexts),
    )
    point = (axes.clocks_mhz, axes.shares_pct)
    at_prefill = [(s.sm_clock_mhz, s.sm_share_pct) for s in prefill]
    at_decode = [(s.sm_clock_mhz, s.sm_share_pct, s.batch) for s in decode]
    values, fits = [], []
    for phase, found, keys, key_axes, tokens, along in (
        (PREFILL, prefill, at_prefill, point, axes.input_tokens, [s.input_tokens for s in prefill]),
        (
            DECODE,
            decode,
            at_decode,
            (*point, axes.batches),
            axes.context_tokens,
            [s.context_tokens for s in decode],
        ),
    ):
        ms, fit = _grid(keys, along, [s.latency_ms for s in found], key_axes, tokens)
        _refuse_holes(f"{name}, {phase}", ms, key_axes)
        metered = [i for i, s in enumerate(found) if s.power_w is not None]
        if metered:
            watts = [found[i].power_w or math.nan for i in metered]
            power, _ = _grid([keys[i] for i in metered], [along[i] for i in metered], watts, key_axes, tokens)
        else:
            power = np.full(ms.shape, math.nan)
        values += [ms, power]
        fits.append(fit)
    return Grids(axes, values, fits[0], fits[1])


def _points(values: Any) -> tuple[int, ...]:
    return tuple(sorted({int(value) for value in values}))


def _between(measured: list[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """The measured lengths, and of those wanted the ones that lie between them."""
    low, high = min(measured), max(measured)
    return _points([*measured, *(tokens for tokens in wanted if low < tokens < high)])


def _grid(
    keys: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    measured: Sequence[float],
    key_axes: tuple[tuple[int, ...], ...],
    tokens: tuple[int, ...],
) -> tuple[NDArray[np.float64], Regression]:
    """Return values over (key axes, tokens), nan where nothing is known, and the error of the fit.

    Several samples of one point: their median.
    """
    points: dict[tuple[int, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, length, value in zip(keys, lengths, measured, strict=True):
        points[key][length].append(value)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)  # series of the same lengths
    for key in sorted(points):
        groups[tuple(sorted(points[key]))].append(key)
    logs = np.full((*map(len, key_axes), len(tokens)), math.nan)
    place = [{point: i for i, point in enumerate(axis)} for axis in key_axes]
    degree, errors = 0, [np.zeros(0)]
    for known, members in groups.items():
        series = np.array([[float(np.median(points[key][length])) for length in known] for key in members])
        fitted, used, left_out = regress(np.array(known), np.log(series), np.array(tokens))
        degree = max(degree, used)
        errors.append(np.abs(np.expm1(left_out)).ravel())
        # A polynomial holds only between the lengths it was fitted to.
        inside = (np.array(tokens) >= known[0]) & (np.array(tokens) <= known[-1])
        for key, line in zip(members, fitted, strict=True):
            at = tuple(axis[part] for axis, part in zip(place, key, strict=True))
            logs[at] = np.where(inside, line, math.nan)
    for axis, axis_points in enumerate((*key_axes, tokens)):
        logs = _filled(logs, axis, np.array(axis_points, dtype=float))
    all_errors = np.concatenate(errors)
    mean, worst = (float(all_errors.mean()), float(all_errors.max())) if all_errors.size else (0.0, 0.0)
    return np.exp(logs), Regression(degree, round(100 * mean, 3), round(100 * worst, 3))


def regress(
    lengths: NDArray[Any], logs: NDArray[Any], at: NDArray[Any]
) -> tuple[NDArray[Any], int, NDArray[Any]]:
    """Fit polynomials to rows of log values at `lengths`, all of one degree, and evaluate them.

    Returns:
        The log values at `at`, a row per row; the degree; the error of each inner length (not the two ends,
        which nothing brackets) when the polynomial is fitted without it.
    """
    most_degree = min(MOST_DEGREE, max(1, len(lengths) - 2), len(lengths) - 1)
    best: tuple[float, int, NDArray[Any], NDArray[Any]] | None = None
    for short_tokens in SHORT_TOKENS:
        low = math.log(lengths[0] + short_tokens)
        span = (math.log(lengths[-1] + short_tokens) - low) or 1.0
        x, where = ((np.log(tokens + short_tokens) - low) / span for tokens in (lengths, at))
        for degree in range(most_degree + 1):
            design = np.vander(x, degree + 1)
            inverse = np.linalg.pinv(design)
            left_out = (logs @ (np.eye(len(x)) - design @ inverse).T)[:, 1:-1]
            hat = np.einsum("ij,ji->i", design, inverse)[1:-1]
            left_out = left_out / np.maximum(1.0 - hat, 1e-9)
            error = float(np.abs(left_out).mean()) if left_out.size else -float(degree)
            if best is None or error < best[0]:
                best = (error, degree, logs @ inverse.T @ np.vander(where, degree + 1).T, left_out)
    assert best is not None
    _, degree, fitted, left_out = best
    return fitted, degree, left_out


def _filled(logs: NDArray[Any], axis: int, points: NDArray[Any]) -> NDArray[Any]:
    """Fill what is not known from known neighbours on both sides along one axis."""
    lines = np.moveaxis(logs, axis, -1).copy()
    for line in lines.reshape(-1, lines.shape[-1]):
        known = np.flatnonzero(~np.isnan(line))
        if 1 < len(known) < len(line):
            inside = slice(known[0], known[-1] + 1)
            line[inside] = np.interp(points[inside], points[known], line[known])
    return np.moveaxis(lines, -1, axis)


def _refuse_holes(name: str, ms: NDArray[Any], key_axes: tuple[tuple[int, ...], ...]) -> None:
    """Raise LutMiss for the first point of clock, share and batch that nothing brackets."""
    holes = np.argwhere(np.isnan(ms).any(axis=-1))
    if not len(holes):
        return
    clock, share, *batch = (axis[i] for axis, i in zip(key_axes, holes[0].tolist(), strict=True))
    batch_of = f", batch {batch[0]}" if batch else ""
    raise LutMiss(
        f"{name} has no sample at {clock} MHz, {share} % of the SMs{batch_of}, and none on both sides of it"
        f" ({len(holes)} such points); profile them"
    )
