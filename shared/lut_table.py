"""What a look-up table (3.2) consists of: axes, one block of numbers, where they come from, and its bytes.

A table is one float32 block with four grids one after another: prefill ms, prefill W, decode ms, decode W.
The first two are over (clock, share, input tokens), the others over (clock, share, batch, context tokens).
"""

import hashlib
import math
from bisect import bisect_right
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import LutRefused
from shared.model import ModelSpec, Struct

SCHEMA = 1  # of the stored form; a table of another is refused, never guessed at


class Axes(Struct):
    """Grid points of a table, ascending along each axis."""

    clocks_mhz: tuple[int, ...]
    shares_pct: tuple[int, ...]
    input_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    context_tokens: tuple[int, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each of the four grids, in the order they lie in the block."""
        point = (len(self.clocks_mhz), len(self.shares_pct))
        prefill = (*point, len(self.input_tokens))
        decode = (*point, len(self.batches), len(self.context_tokens))
        return (prefill, prefill, decode, decode)

    def grids(self, block: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Cut a block into its four grids, without copying."""
        sizes = [math.prod(shape) for shape in self.shapes]
        ends = np.cumsum(sizes)
        return [
            block[end - size : end].reshape(shape)
            for size, end, shape in zip(sizes, ends, self.shapes, strict=True)
        ]


class Provenance(Struct):
    """Where the numbers of a table come from.

    Args:
        kind: ``measured``, or ``modelled`` where no device was asked.
        device: the device as its driver names it, or the row of the device table.
        driver, engine_version: of the driver and the engine that were measured; empty when modelled.
        date: day of the measurement, ISO 8601.
        parameters_digest: `Device.digest` of the numbers a modelled table was made with.
        note: what else a reader should know, such as dimensions that could not be moved.
    """

    kind: str
    device: str
    driver: str = ""
    engine_version: str = ""
    date: str = ""
    parameters_digest: str = ""
    note: str = ""


class Regression(Struct):
    """How well the polynomials between measured lengths fit, each length left out in turn (3.2.1).

    Args:
        degree: the largest degree used.
        mean_pct, worst_pct: error of the latency at the length left out.
    """

    degree: int
    mean_pct: float
    worst_pct: float


class Stored(Struct):
    """A table as it is stored; `sha256` is over all the rest."""

    schema: int
    sha256: str
    gpu_type: str
    model: ModelSpec
    axes: Axes
    provenance: Provenance
    prefill_fit: Regression | None
    decode_fit: Regression | None
    block: bytes


class _Version(msgspec.Struct):
    schema: int


def content_hash(stored: Stored) -> str:
    """Return the sha256 of a table's content, in hex."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(stored, sha256=""))).hexdigest()


def encode(stored: Stored) -> bytes:
    """Return the bytes of a table (msgpack), its hash set."""
    return msgspec.msgpack.encode(msgspec.structs.replace(stored, sha256=content_hash(stored)))


def decode(data: bytes) -> Stored:
    """Return the table that `data` holds.

    Raises LutRefused where it is no table, is damaged, or is of another schema version.
    """
    again = "profile or build it again"
    try:
        schema = msgspec.msgpack.decode(data, type=_Version).schema
    except msgspec.DecodeError as error:
        raise LutRefused(f"not a stored look-up table, or a damaged one ({error}); {again}") from None
    if schema != SCHEMA:
        raise LutRefused(f"the look-up table has schema {schema}, this version reads {SCHEMA}; {again}")
    try:
        stored = msgspec.msgpack.decode(data, type=Stored)
    except msgspec.DecodeError as error:
        raise LutRefused(f"the look-up table is damaged ({error}); {again}") from None
    name = f"the look-up table of {stored.model.name} on {stored.gpu_type}"
    if content_hash(stored) != stored.sha256:
        raise LutRefused(f"{name} is damaged: its content does not have the hash stored with it; {again}")
    if len(stored.block) != 4 * sum(map(math.prod, stored.axes.shapes)):
        raise LutRefused(f"{name} is damaged: {len(stored.block)} bytes do not fill its axes; {again}")
    return stored


# ---- interpolation


FAR_TOKENS = 1e9  # where an open end is carried on to; no coordinate lies beyond


class _Axis:
    """One axis: its points, and by whole number the cell that a coordinate lies in."""

    def __init__(self, points: tuple[int, ...], is_open: bool) -> None:
        self.points = [float(point) for point in points]
        self.last = len(points) - 1
        self.is_open = is_open and self.last > 0
        last_cell = self.last - 1 if self.is_open else self.last
        self.low = np.array(self.points)
        self.inverse_width = np.append(1.0 / np.diff(self.low), 0.0)
        self.with_far = np.append(self.low, FAR_TOKENS)
        # Grid points are whole numbers, so a coordinate's floor tells its cell: no search per row.
        whole = np.arange(int(points[-1]) + 1)
        self.cells = np.clip(np.searchsorted(self.low, whole, side="right") - 1, 0, last_cell)

    def locate(self, coordinate: float) -> tuple[int, float]:
        """Return (cell, part of the way to the next point); the part is over 1 past an open end."""
        points = self.points
        if coordinate <= points[0]:
            return 0, 0.0
        cell = bisect_right(points, coordinate) - 1
        if cell >= self.last:
            if not self.is_open:
                return self.last, 0.0
            cell = self.last - 1
        low = points[cell]
        return cell, (coordinate - low) / (points[cell + 1] - low)

    def locate_many(self, coordinates: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same for an array."""
        cell = self.cells.take(coordinates.astype(np.intp), mode="clip")
        part = (coordinates - self.low.take(cell)) * self.inverse_width.take(cell)
        return cell, np.maximum(part, 0.0, out=part)

    def along(self, values: NDArray[Any], coordinates: NDArray[Any]) -> NDArray[Any]:
        """Interpolate values that lie along this axis alone."""
        beyond = values[-1]
        if self.is_open:
            beyond = beyond + (beyond - values[-2]) * self.inverse_width[-2] * (FAR_TOKENS - self.points[-1])
        return np.asarray(np.interp(coordinates, self.with_far, np.append(values, beyond)))


@lru_cache(maxsize=256)
def _axis(points: tuple[int, ...], is_open: bool) -> _Axis:
    return _Axis(points, is_open)


GRIDS_KEPT = 16  # sets of clocks and shares that one table remembers


class Table:
    """Values on a grid, interpolated linearly; outside it the nearest edge; on open-ended axes its slope.

    The first two axes are clock and share, closed, and nearly always asked at grid points.
    """

    def __init__(
        self, values: NDArray[np.float32], axes: tuple[tuple[int, ...], ...], open_ended: tuple[bool, ...]
    ):
        assert values.shape == tuple(map(len, axes)), "one axis per dimension"
        strides = [math.prod(values.shape[axis + 1 :]) for axis in range(values.ndim)]
        self._values = values
        self._read = values.reshape(-1).data  # numbers are read 3 times as fast from here
        self._axes = [
            (_axis(points, is_open), stride)
            for points, is_open, stride in zip(axes, open_ended, strides, strict=True)
        ]
        self._grids: dict[tuple[bytes, bytes, int], NDArray[Any] | None] = {}
        self._at_point = {
            (clock, share): i * strides[0] + j * strides[1]
            for i, clock in enumerate(axes[0])
            for j, share in enumerate(axes[1])
        }

    def __call__(self, *point: Any) -> Any:
        """Return the value at a point of numbers, in microseconds, or the values at arrays that broadcast."""
        for coordinate in point:
            if isinstance(coordinate, np.ndarray):
                return self._many(point)
        known = self._at_point.get(point[:2])
        skipped = 0 if known is None else 2
        corners = [(known or 0, 1.0)]  # (place in memory, weight) of the grid points around the point
        for coordinate, (axis, stride) in zip(point[skipped:], self._axes[skipped:], strict=True):
            cell, weight = axis.locate(coordinate)
            at = cell * stride
            if weight:
                corners = [
                    corner
                    for place, part in corners
                    for corner in ((place + at, part - part * weight), (place + at + stride, part * weight))
                ]
            elif at:
                corners = [(place + at, part) for place, part in corners]
        read = self._read
        return sum([read[place] * part for place, part in corners])

    def _grid(self, clocks: Any, shares: Any) -> NDArray[Any] | None:
        """Return the values at the crossings of a column of clocks and a row of shares, all grid points.

        So a sweep asks, again and again for the same few; None where it is no such thing.
        """
        if not (isinstance(clocks, np.ndarray) and isinstance(shares, np.ndarray)):
            return None
        if clocks.shape[:2] != (clocks.size, 1) or shares.shape[:2] != (1, shares.size):
            return None
        key = (clocks.tobytes(), shares.tobytes(), clocks.ndim)
        if key not in self._grids:
            axes = (self._axes[0][0].points, self._axes[1][0].points)
            wanted = (clocks.ravel().tolist(), shares.ravel().tolist())
            inside = all(set(w) <= set(p) for w, p in zip(wanted, axes, strict=True))
            rows = [[p.index(x) for x in w] if inside else [] for w, p in zip(wanted, axes, strict=True)]
            if len(self._grids) >= GRIDS_KEPT:
                self._grids.clear()
            self._grids[key] = self._values[np.ix_(*rows)].astype(np.float64) if inside else None
        return self._grids[key]

    def _on_grid(self, grid: NDArray[Any], ndim: int, point: tuple[Any, ...]) -> NDArray[Any] | None:
        """Interpolate along the other axes: at numbers, or at a row of coordinates of the last one."""
        arrays = [coordinate for coordinate in point if isinstance(coordinate, np.ndarray)]
        if len(arrays) > 1 or ndim != 2 + len(arrays) or (arrays and point[-1] is not arrays[0]):
            return None
        values = grid
        for coordinate, (axis, _) in zip(point, self._axes[2:], strict=True):
            if isinstance(coordinate, np.ndarray):
                if coordinate.ndim != 1:
                    return None
                cells, parts = axis.locate_many(coordinate)
                after = np.minimum(cells + 1, axis.last)
                low, high = values.take(cells, axis=2), values.take(after, axis=2)
                return np.asarray(low * (1.0 - parts) + high * parts)
            cell, part = axis.locate(coordinate)
            low = values[:, :, cell]
            values = low * (1.0 - part) + values[:, :, cell + 1] * part if part else low
        return values

    def _many(self, point: tuple[Any, ...]) -> NDArray[Any]:
        """The same for arrays: numbers first shrink the grid, then each row reads its corners."""
        grid = self._grid(point[0], point[1])
        if grid is not None:
            found = self._on_grid(grid, point[0].ndim, point[2:])
            if found is not None:
                return found
        values: Any = self._values
        arrays: list[tuple[NDArray[Any], _Axis]] = []
        for coordinate, (axis, _) in zip(point, self._axes, strict=True):
            if isinstance(coordinate, np.ndarray):
                arrays.append((coordinate, axis))
                continue
            cell, weight = axis.locate(coordinate)
            lead = (slice(None),) * len(arrays)
            low = values[(*lead, cell)]
            part = np.float64(weight)  # so that the sum is of float64
            values = low * (1.0 - part) + values[(*lead, cell + 1)] * part if weight else low
        if len(arrays) == 1:
            coordinates, axis = arrays[0]
            return axis.along(values, coordinates)
        flat = values.reshape(-1).astype(np.float64)
        corners: list[tuple[Any, Any]] = [(0, 1.0)]
        for dimension, (coordinates, axis) in enumerate(arrays):
            cells, parts = axis.locate_many(coordinates)
            stride = math.prod(values.shape[dimension + 1 :])
            corners = [(place + cells * stride, part) for place, part in corners]
            if parts.any():
                step = np.where(cells < axis.last, stride, 0)
                corners = [
                    corner
                    for place, part in corners
                    for corner in ((place, part - part * parts), (place + step, part * parts))
                ]
        total = sum(flat.take(place) * part for place, part in corners)
        return np.asarray(total)
