"""Interpolation on a grid against numbers by hand and a plain implementation, for numbers and for arrays."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.lut_grid import SCRATCH_ROWS, Grid

CLOCKS, SHARES, BATCHES, TOKENS = (345, 795, 1605, 1980), (10, 50, 100), (1, 8, 64), (0, 256, 1024, 8192)
AXES = (CLOCKS, SHARES, BATCHES, TOKENS)
RANDOM = np.random.default_rng(7).uniform(1.0, 9.0, tuple(map(len, AXES))).astype(np.float32)
OPEN, CLOSED = Grid(RANDOM, AXES, is_open=True), Grid(RANDOM, AXES, is_open=False)
LINES = Grid(np.array([[[2.0, 4.0, 12.0]]], dtype=np.float32), ((0,), (100,), (1, 3, 11)), is_open=True)

CLOCK = st.one_of(st.sampled_from(CLOCKS), st.integers(0, 2500), st.floats(0, 2500))
SHARE = st.one_of(st.sampled_from(SHARES), st.integers(0, 120), st.floats(0, 120))
BATCH = st.one_of(st.sampled_from(BATCHES), st.integers(0, 100), st.floats(0, 100))
CONTEXT = st.one_of(st.sampled_from(TOKENS), st.integers(0, 20_000), st.floats(0, 20_000))


def plain(is_open: bool, *point: float) -> float:
    """Interpolate one axis after the other, as the docstring of `Grid` says."""
    values = RANDOM.astype(float)
    for dimension, (x, axis) in enumerate(zip(point, AXES, strict=True)):
        if not (is_open and dimension >= 2):
            x = min(x, axis[-1])
        x = max(x, axis[0])
        cell = max(i for i, (low, _) in enumerate(pairwise(axis)) if low <= x)
        part = (x - axis[cell]) / (axis[cell + 1] - axis[cell])
        values = values[cell] * (1 - part) + values[cell + 1] * part
    return float(values)


def test_between_before_and_after_the_points() -> None:
    assert [LINES(0, 100, x) for x in (0, 1, 2, 3, 5, 11, 12)] == [2, 2, 3, 4, 6, 12, 13]
    assert LINES(0, 100, np.array([0, 1, 2, 3, 5, 11, 12])).tolist() == [2, 2, 3, 4, 6, 12, 13]
    assert LINES(99, 1, 2.5) == 3.5, "a single clock and share are those of every query"


@settings(max_examples=200, deadline=None)
@given(CLOCK, SHARE, BATCH, CONTEXT)
def test_numbers_are_as_a_plain_implementation_has_them(
    clock: float, share: float, batch: float, context: float
) -> None:
    point = (clock, share, batch, context)
    assert OPEN(*point) == pytest.approx(plain(True, *point), rel=1e-9, abs=1e-9)
    assert CLOSED(*point) == pytest.approx(plain(False, *point), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CLOCK, SHARE, BATCH, CONTEXT), min_size=1, max_size=8), st.sets(st.integers(0, 3)))
def test_arrays_are_as_numbers_are(points: list[tuple[float, ...]], alone: set[int]) -> None:
    columns = [np.array(column) for column in zip(*points, strict=True)]
    for axis in alone:
        columns[axis] = columns[axis][:1]
    at = [column[0].item() if axis in alone else column for axis, column in enumerate(columns)]
    many = OPEN(*at)
    rows = np.broadcast_arrays(*columns) if len(alone) < 4 else columns
    for i, value in enumerate(np.atleast_1d(many)):
        assert value == OPEN(*(row[i].item() for row in rows))


@settings(max_examples=60, deadline=None)
@given(CLOCK, SHARE, BATCH)
def test_values_along_the_last_axis_are_as_numbers_are(clock: float, share: float, batch: float) -> None:
    for grid in (OPEN, CLOSED):
        assert grid.along(clock, share, batch) == [grid(clock, share, batch, tokens) for tokens in TOKENS]
    assert LINES.along(clock, share) == [2.0, 4.0, 12.0]


def test_columns_and_rows_broadcast_and_many_rows_are_no_different() -> None:
    clocks, shares = np.array(CLOCKS)[:, None], np.array(SHARES)
    assert OPEN(clocks, shares, 5, 700).shape == (4, 3)
    assert OPEN(clocks, shares, 5, 700)[2, 1] == OPEN(1605, 50, 5, 700)
    contexts = np.arange(SCRATCH_ROWS + 9)
    values = OPEN(795, 50, 5, contexts)
    assert values[[0, 700, -1]].tolist() == [OPEN(795, 50, 5, x) for x in (0, 700, SCRATCH_ROWS + 8)]
    kept = values.copy()
    OPEN(345, 10, 5, contexts[:5000])
    assert (values == kept).all(), "what a query has given is the caller's"


def test_what_is_not_known_stays_so() -> None:
    grid = Grid(np.full((1, 1, 2), math.nan, dtype=np.float32), ((0,), (100,), (1, 9)), is_open=False)
    assert math.isnan(grid(0, 100, 4))
    assert np.isnan(grid(0, 100, np.array([1, 4, 99]))).all()


def test_rows_are_worked_out_only_for_the_clocks_and_shares_asked_for() -> None:
    grid = Grid(RANDOM, AXES, is_open=True)
    grid(795, 50, 5, np.arange(9))
    assert grid._made == 1
    grid(1000, 30, 5, 700)
    assert grid._made == 4, "(795, 50) is one of its corners"
    clocks, shares = np.array(CLOCKS[:2])[:, None], np.array(SHARES)
    assert (grid(clocks, shares, 5, 700) == OPEN(clocks, shares, 5, 700)).all()
    assert grid._made == 8, "all shares at two clocks, and two at a third"
    grid(np.full(SCRATCH_ROWS, 345), 10, 5, 700)
    assert grid._made == 12, "so many may ask for any"
