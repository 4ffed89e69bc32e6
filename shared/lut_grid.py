"""Values on the grid of a look-up table (3.2), linear along every axis between its points.

Between two lengths (prefill), or in a rectangle of batches and contexts (decode), a value is a polynomial of
the coordinates themselves, whose coefficients lie side by side::

    a + b x                      x input tokens
    a + b x + (c + d x) y        x requests in the batch, y context tokens

So a query finds its cell and reads one row. The rows of a clock and a share are worked out when one of them
is first asked for: few pairs ever are, and all rows would take ten times the memory of the values. What lies
beyond the ends of an axis is a cell as well: before the first point values stay, after the last they stay or
go on with the last slope. Queries of arrays share memory for the rows they read, so no two threads may ask at
once.
"""

import math
from bisect import bisect_right
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

CORNERS_KEPT = 4096  # pairs of clock and share that one grid remembers
ROWS_KEPT = 512  # cells at several clocks
SWEEP_POINTS, SWEEPS_KEPT = 64, 16  # clocks and shares of a sweep, asked again and again; how many such sets
SMALL_ROWS, SCRATCH_ROWS = 256, 1 << 14

# Rows read by a query of many: as an allocation of its own, memory of this size costs more than the query.
_scratch = np.empty(4 * SCRATCH_ROWS)


class _Axis:
    """One axis of a grid: its points, and how many rows of the coefficients lie from one to the next.

    Points are whole numbers, so where a coordinate lies is read by its floor: arrays need no search.
    """

    def __init__(self, points: tuple[int, ...], rows: int) -> None:
        self.points = [float(point) for point in points]
        self.rows = rows
        self.low = np.array(self.points)
        self.inverse_width = np.append(1.0 / np.diff(self.low), 0.0)
        whole = np.arange(points[-1] + 1)
        before = np.searchsorted(self.low, whole, side="right")  # points at or before it, which is its cell
        self._cell_rows = before * rows
        self._point_rows = np.where(np.isin(whole, points), before - 1, -1) * rows

    def cell_row(self, coordinate: Any) -> Any:
        """Return where the coefficients of a coordinate's cell begin: of a number, or of each in an array."""
        if isinstance(coordinate, np.ndarray):
            return self._cell_rows.take(coordinate.astype(np.intp, copy=False), mode="clip")
        return bisect_right(self.points, coordinate) * self.rows

    def sides(self, coordinate: float) -> list[tuple[int, float]]:
        """Return (first row, weight) of the points around a coordinate; beyond the ends of the nearest."""
        point = max(0, bisect_right(self.points, coordinate) - 1)
        part = float((coordinate - self.points[point]) * self.inverse_width[point])
        row = point * self.rows
        return [(row, 1.0 - part), (row + self.rows, part)] if part > 0.0 else [(row, 1.0)]

    def sides_of(self, coordinates: NDArray[Any]) -> list[tuple[NDArray[Any], Any]]:
        """The same for an array: of one point each where all coordinates are points, else of two."""
        if coordinates.dtype.kind == "i":
            row = self._point_rows.take(coordinates, mode="clip")
            if row.min(initial=0) >= 0:
                return [(row, 1.0)]
        row = np.maximum(self.cell_row(coordinates) - self.rows, 0)
        point = row // self.rows
        part = np.maximum((coordinates - self.low.take(point)) * self.inverse_width.take(point), 0.0)
        return [(row, 1.0 - part), (row + self.rows, part)]

    def lines(self, values: NDArray[Any], axis: int, is_open: bool) -> list[NDArray[Any]]:
        """Return (a, b) of the line a + b x in each cell along one axis of `values`, the ends among them."""
        values = np.moveaxis(values, axis, -1)
        slope = np.diff(values) * self.inverse_width[:-1]
        level = np.zeros((*values.shape[:-1], 1))
        after = slope[..., -1:] if is_open and len(self.points) > 1 else level
        slope = np.concatenate([level, slope, after], axis=-1)
        start = np.concatenate([values[..., :1], values], axis=-1)
        offset = start - slope * np.append(self.low[:1], self.low)
        return [np.moveaxis(offset, -1, axis), np.moveaxis(slope, -1, axis)]


@lru_cache(maxsize=256)
def _axis(points: tuple[int, ...], rows: int) -> _Axis:
    return _Axis(points, rows)


_Corner = tuple[float, float, float, float, float]
"""A cell at one point of clock and share: that one's weight, and a, b, c, d of above."""


class Grid:
    """Values over clock, share and one or two axes more; beyond a clock or a share the nearest one's.

    Args:
        values: one axis per dimension.
        axes: their points, ascending whole numbers from 0.
        is_open: whether the axes after the share go on with their last slope, or level.
    """

    def __init__(self, values: NDArray[np.float32], axes: tuple[tuple[int, ...], ...], is_open: bool) -> None:
        assert values.shape == tuple(map(len, axes)), "one axis per dimension"
        assert values.ndim in (3, 4), "clock, share, and one or two more"
        self._values = values
        self._is_open = is_open
        cells = [len(points) + 1 for points in axes[2:]]
        rows = (len(axes[1]), 1, *cells[1:], 1)  # to the next point; along clocks and shares, pairs of them
        self._clocks, self._shares, self._x, *rest = map(_axis, axes, rows)
        self._y = rest[0] if rest else None
        self._corners: dict[tuple[float, float], list[tuple[int, float]]] = {}
        self._row_corners: dict[tuple[tuple[int, ...], int], list[list[tuple[int, float]]]] = {}
        self._row_cells: dict[tuple[tuple[int, ...], int, int], list[list[_Corner]]] = {}
        self._sweeps: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
        self._terms = 2 if self._y is None else 4
        self._pair_rows = math.prod(cells)
        self._rows = np.empty((0, self._terms))
        self._read: Any = None  # the rows once more: single numbers are read 3 times as fast from here
        self._first_row = np.full(len(axes[0]) * len(axes[1]), -1)  # by pair of clock and share; -1: not made
        self._made = 0  # pairs

    def __call__(self, clock: Any, share: Any, x: Any, y: Any = None) -> Any:
        """Return the value at a point of numbers, or the values at arrays that broadcast."""
        for coordinate in (clock, share, x, y):
            if isinstance(coordinate, np.ndarray):
                return self._many(clock, share, x, y)
        corners = self._corners.get((clock, share)) or self._find_corners(clock, share)
        return self._value(corners, self._cell(x, y), float(x), 0.0 if y is None else float(y))

    def row(self, clocks: tuple[int, ...], share: int, x: float, y: float = 0.0) -> list[float]:
        """Return the values at several clocks, all else equal."""
        cell, x, y = self._cell(x, y), float(x), float(y)
        known = self._row_cells.get((clocks, share, cell)) or self._find_cells(clocks, share, cell)
        values = []
        for corners in known:
            total = 0.0
            for weight, a, b, c, d in corners:
                total += weight * (a + b * x + (c + d * x) * y)
            values.append(total)
        return values

    def along(self, clock: float, share: float, x: float = 0.0) -> list[float]:
        """Return the values at each point of the last axis; of two after the share, `x` is on the first."""
        corners = self._corners.get((clock, share)) or self._find_corners(clock, share)
        axis = self._x if self._y is None else self._y
        first = 1 if self._y is None else 1 + int(self._x.cell_row(x))  # where the first point's cell is
        values = [0.0] * len(axis.points)
        for row, weight in corners:
            cells: list[list[float]] = self._rows[row + first : row + first + len(values)].tolist()
            for at, (cell, point) in enumerate(zip(cells, axis.points, strict=True)):
                if self._y is None:
                    values[at] += weight * (cell[0] + cell[1] * point)
                else:
                    values[at] += weight * (cell[0] + cell[1] * x + (cell[2] + cell[3] * x) * point)
        return values

    def _cell(self, x: Any, y: Any) -> int:
        """Return where the coefficients of the cell of a point begin, among the rows of a pair."""
        cell: int = self._x.cell_row(x)
        return cell if self._y is None else cell + int(self._y.cell_row(y))

    def _value(self, corners: list[tuple[int, float]], cell: int, x: float, y: float) -> float:
        """Return the value at a point in this cell, given the points of clock and share around it."""
        read, total = self._read, 0.0
        for row, weight in corners:
            i = self._terms * (row + cell)
            value: float = read[i] + read[i + 1] * x
            if self._terms == 4:
                value += (read[i + 2] + read[i + 3] * x) * y
            total += weight * value
        return total

    def _make(self, pairs: list[Any], whole: bool = False) -> None:
        """Work out the rows of these pairs of clock and share, or of all, as far as they are not there."""
        if self._made == len(self._first_row):
            return
        asked = np.full(len(self._first_row), whole)
        for pair in () if whole else pairs:
            asked[np.minimum(pair, len(asked) - 1)] = True  # beyond the last, with weight 0
        missing = np.flatnonzero(asked & (self._first_row < 0))
        if not len(missing):
            return
        made = [self._values.reshape(len(asked), *self._values.shape[2:])[missing].astype(np.float64)]
        if self._y is not None:
            made = [line for values in made for line in self._y.lines(values, 2, self._is_open)]
        made = [line for values in made for line in self._x.lines(values, 1, self._is_open)]
        first, self._made = self._made, self._made + len(missing)
        self._first_row[missing] = np.arange(first, self._made) * self._pair_rows
        used, needed = first * self._pair_rows, self._made * self._pair_rows
        if needed > len(self._rows):
            kept = self._rows[:used]
            self._rows = np.empty((min(max(needed, 2 * used), len(asked) * self._pair_rows), self._terms))
            self._rows[:used] = kept
            self._read = self._rows.reshape(-1).data
        self._rows[used:needed] = np.stack(made, axis=-1).reshape(-1, self._terms)

    def _find_corners(self, clock: float, share: float) -> list[tuple[int, float]]:
        """Return (first row, weight) of the points around a clock and a share, and remember them."""
        pairs = [
            (pair + other, weight * other_weight)
            for pair, weight in self._clocks.sides(clock)
            for other, other_weight in self._shares.sides(share)
        ]
        self._make([pair for pair, _ in pairs])
        corners = [(int(self._first_row[pair]), weight) for pair, weight in pairs]
        if len(self._corners) >= CORNERS_KEPT:
            self._corners.clear()
        self._corners[clock, share] = corners
        return corners

    def _find_row(self, clocks: tuple[int, ...], share: int) -> list[list[tuple[int, float]]]:
        """Return (first row, weight) of the points around each clock and a share, and remember them."""
        sides = [pair for clock in clocks for pair, _ in self._clocks.sides(clock)]
        self._make([pair + other for pair in sides for other, _ in self._shares.sides(share)])
        if len(self._row_corners) >= CORNERS_KEPT:
            self._row_corners.clear()
        known = self._row_corners[clocks, share] = [self._find_corners(clock, share) for clock in clocks]
        return known

    def _find_cells(self, clocks: tuple[int, ...], share: int, cell: int) -> list[list[_Corner]]:
        """Return what a cell holds at the points around each clock and a share, and remember it."""
        row = self._row_corners.get((clocks, share)) or self._find_row(clocks, share)
        if len(self._row_cells) >= ROWS_KEPT:
            self._row_cells.clear()
        read, found = self._read, []
        for corners in row:
            cells = []
            for first, weight in corners:
                i = self._terms * (first + cell)
                c, d = (read[i + 2], read[i + 3]) if self._terms == 4 else (0.0, 0.0)
                cells.append((weight, read[i], read[i + 1], c, d))
            found.append(cells)
        self._row_cells[clocks, share, cell] = found
        return found

    def _many(self, clock: Any, share: Any, x: Any, y: Any) -> NDArray[Any]:
        """The same for arrays, and for numbers among them."""
        cell = self._x.cell_row(x)
        if self._y is not None:
            cell = cell + self._y.cell_row(y)
            if isinstance(x, np.ndarray):
                x = x.astype(np.float64, copy=False)  # once, not in each of its two products
        if isinstance(clock, np.ndarray) or isinstance(share, np.ndarray):
            corners = self._array_corners(np.asarray(clock), np.asarray(share))
        else:
            corners = self._corners.get((clock, share)) or self._find_corners(clock, share)
        values = [self._at(row + cell, x, y) * weight for row, weight in corners[1:]]
        row, weight = corners[0]
        first = self._at(row + cell, x, y)
        return sum(values, first * weight) if values else first

    def _array_corners(self, clock: NDArray[Any], share: NDArray[Any]) -> list[tuple[Any, Any]]:
        """Return (rows, weights) of the points around arrays of clocks and shares; remembered for a sweep."""
        key = None
        if clock.size + share.size <= SWEEP_POINTS:
            key = (clock.tobytes(), clock.shape, clock.dtype, share.tobytes(), share.shape, share.dtype)
            if key in self._sweeps:
                return self._sweeps[key]
        pairs = [
            (pair + other, weight * other_weight)
            for pair, weight in self._clocks.sides_of(clock)
            for other, other_weight in self._shares.sides_of(share)
        ]
        self._make([pair for pair, _ in pairs], whole=key is None)
        corners = [(self._first_row.take(pair, mode="clip"), weight) for pair, weight in pairs]
        if key is not None:
            if len(self._sweeps) >= SWEEPS_KEPT:
                self._sweeps.clear()
            self._sweeps[key] = corners
        return corners

    def _at(self, row: NDArray[Any], x: Any, y: Any) -> NDArray[Any]:
        """Return the values that the coefficients in these rows give."""
        terms = self._terms
        read = None
        if SMALL_ROWS < row.size <= SCRATCH_ROWS:
            read = _scratch[: row.size * terms].reshape(*row.shape, terms)
        read = self._rows.take(row, axis=0, mode="clip", out=read)
        values = read[..., 1] * x
        values += read[..., 0]
        if terms == 4:
            slope = read[..., 3] * x
            slope += read[..., 2]
            slope *= y
            values += slope
        return np.asarray(values)
