"""What to profile, and what need not be (3.2.1): the grid of operating points, and a sweep that skips.

A full grid has thousands of points, most of which lie on a smooth curve between two others. The sweep
measures the ends of every axis first, then the middle, then the middles of the halves. A point that its
neighbours foretold within the tolerance, in power and in latency, ends the search around it: what lies
between them is taken from them instead of being measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from shared.devices import Device
from shared.lut import CLOCK_FLOOR_MHZ, CLOCK_STRIDE_MHZ
from shared.model import ModelSpec

INPUT_TOKENS = (32, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""3.2.1 sweeps 256-8192; the two below keep short prompts from being extrapolated."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
CONTEXT_TOKENS = (64, 256, 1024, 2048, 4096, 8192)
SMALL_INPUT_TOKENS = (16, 64, 256, 512, 1024, 1984)
SMALL_BATCHES = (1, 2, 4, 8)
SMALL_CONTEXT_TOKENS = (64, 512, 1024, 1792)

WRITTEN_TOKENS = 64
"""Tokens that each request of a decoding batch may write while it is being timed."""

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Grid:
    """The axes of a profile, each ascending; a dimension that the device cannot move has one value.

    Args:
        fixed: by dimension that cannot be moved, why.
        pool_tokens: tokens of KV that the engine has room for.
    """

    clocks_mhz: tuple[int, ...]
    shares_pct: tuple[int, ...]
    input_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    context_tokens: tuple[int, ...]
    pool_tokens: int
    fixed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, order=True)
class Point:
    """One point to measure. `tokens`: of the prompt for a prefill, of context per request for a decode."""

    phase: str
    tokens: int
    batch: int
    sm_clock_mhz: int
    sm_share_pct: int


def clocks_of(device: Device, offered_mhz: Sequence[int]) -> tuple[int, ...]:
    """Return the paper's clocks, 795 MHz and on by 90 up to F_max, as the device offers them (3.2.1).

    The default clock is one more: a device runs at it until the first decision.
    """
    wanted = [*range(CLOCK_FLOOR_MHZ, device.f_max_mhz, CLOCK_STRIDE_MHZ), device.f_max_mhz]
    snapped = {min(offered_mhz, key=lambda c, mhz=mhz: (abs(c - mhz), c)) for mhz in wanted}  # type: ignore[misc]
    return tuple(sorted(snapped | {device.default_clock_mhz}))


def grid_for(
    device: Device,
    model: ModelSpec,
    *,
    pool_bytes: int,
    max_batch: int,
    small: bool = False,
    offered_mhz: Sequence[int] = (),
    fixed_clock: str = "",
    fixed_share: str = "",
) -> Grid:
    """Return the grid of a model on a device.

    Args:
        pool_bytes: KV memory that the engine will have.
        max_batch: most requests that the engine runs at once.
        small: the short grid of an engine that is slow, on CPU.
        offered_mhz: the clocks that the driver offers; by default those of the device table.
        fixed_clock, fixed_share: why this dimension cannot be moved, where it cannot: it then has one value.
    """
    inputs = SMALL_INPUT_TOKENS if small else INPUT_TOKENS
    contexts = SMALL_CONTEXT_TOKENS if small else CONTEXT_TOKENS
    room = model.context_tokens - WRITTEN_TOKENS
    pool_tokens = int(0.9 * pool_bytes / model.kv_bytes_per_token)
    most = min(max_batch, pool_tokens // (contexts[0] + WRITTEN_TOKENS))
    clocks = (
        (device.default_clock_mhz,) if fixed_clock else clocks_of(device, offered_mhz or device.clocks_mhz)
    )
    shares = (100,) if fixed_share else tuple(device.sm_sizes_pct)
    reasons = (("SM clock", fixed_clock), ("SM share", fixed_share))
    return Grid(
        clocks_mhz=clocks,
        shares_pct=shares,
        input_tokens=tuple(t for t in inputs if t <= room),
        batches=tuple(b for b in (SMALL_BATCHES if small else BATCHES) if b <= most),
        context_tokens=tuple(t for t in contexts if t <= room),
        pool_tokens=pool_tokens,
        fixed=tuple((what, why) for what, why in reasons if why),
    )


def axes_of(grid: Grid, phase: str) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a phase in the order of `Point`: tokens, batch, clock, share.

    The largest batch comes first: a smaller one is part of it and needs no prefill of its own.
    """
    if phase == PREFILL:
        return grid.input_tokens, (1,), grid.clocks_mhz, grid.shares_pct
    return grid.context_tokens, tuple(reversed(grid.batches)), grid.clocks_mhz, grid.shares_pct


def possible(grid: Grid, point: Point) -> bool:
    """Return whether the engine's KV memory holds what the point needs."""
    return (point.tokens + WRITTEN_TOKENS) * point.batch <= grid.pool_tokens


@dataclass(frozen=True)
class _Bisection:
    """An axis as a tree: the ends have level 0, the middle 1, and so on; each has what it lies between."""

    level: tuple[int, ...]
    between: tuple[tuple[int, int], ...]


def _bisect(count: int) -> _Bisection:
    level, between = [0] * count, [(0, count - 1)] * count
    waiting = [(0, count - 1, 1)]
    while waiting:
        low, high, depth = waiting.pop()
        if high - low > 1:
            middle = (low + high) // 2
            level[middle], between[middle] = depth, (low, high)
            waiting += [(low, middle, depth + 1), (middle, high, depth + 1)]
    return _Bisection(tuple(level), tuple(between))


Index = tuple[int, ...]
Reading = tuple[float, float | None]  # ms, W


class Sweep:
    """One phase's points, in the order in which to measure them, with those left out that need not be.

    Call `next` for a point and `record` what it measured, until `next` returns None. A reading that is
    recorded before its turn (from an earlier run) is not asked for again, so a sweep that is resumed takes
    the same decisions.

    Args:
        tolerance: relative error within which a point counts as foretold; 0 measures everything.
    """

    def __init__(self, grid: Grid, phase: str, tolerance: float) -> None:
        self._phase = phase
        self._axes = axes_of(grid, phase)
        self._trees = [_bisect(len(axis)) for axis in self._axes]
        self._tolerance = tolerance
        self._known: dict[Point, Reading] = {}
        self._values: dict[Index, Reading] = {}
        self._foretold: set[Index] = set()  # whose neighbours were right about it, or were believed
        indices = product(*(range(len(axis)) for axis in self._axes))
        here = [index for index in indices if possible(grid, self.point(index))]
        self._order = sorted(here, key=lambda index: (self._level(index), index))
        self._place = 0
        self.total = len(self._order)
        self.skipped: list[Point] = []

    def point(self, index: Index) -> Point:
        """Return the point at a place of the grid."""
        tokens, batch, clock, share = (axis[i] for axis, i in zip(self._axes, index, strict=True))
        return Point(self._phase, tokens, batch, clock, share)

    def next(self) -> Point | None:
        """Return the next point to measure, or None at the end."""
        while self._place < len(self._order):
            index = self._order[self._place]
            point = self.point(index)
            reading = self._known.get(point)
            if reading is None:
                guess = self._guess(index) if self._settled(index) else None
                if guess is None:
                    return point
                self._values[index] = guess
                self._foretold.add(index)
                self.skipped.append(point)
            else:
                self._take(index, reading)
            self._place += 1
        return None

    def record(self, point: Point, ms: float, power_w: float | None) -> None:
        """Take what a point measured."""
        self._known[point] = (ms, power_w)

    def readings(self) -> dict[Point, Reading]:
        """Return what is known so far of every point: measured, or foretold by its neighbours."""
        return {self.point(index): reading for index, reading in self._values.items()}

    def _take(self, index: Index, reading: Reading) -> None:
        guess = self._guess(index)
        self._values[index] = reading
        if guess is not None and self._error(guess, reading) <= self._tolerance:
            self._foretold.add(index)

    def _error(self, guess: Reading, reading: Reading) -> float:
        pairs = [(g, r) for g, r in zip(guess, reading, strict=True) if g is not None and r is not None]
        return max(abs(g - r) / r for g, r in pairs)

    def _level(self, index: Index) -> int:
        return sum(tree.level[i] for tree, i in zip(self._trees, index, strict=True))

    def _settled(self, index: Index) -> bool:
        """Return whether every point that this one refines was foretold."""
        parents = list(self._parents(index))
        return self._tolerance > 0 and bool(parents) and all(p in self._foretold for p in parents)

    def _parents(self, index: Index) -> Iterator[Index]:
        for axis, tree in enumerate(self._trees):
            i = index[axis]
            if tree.level[i]:
                parent = max(tree.between[i], key=lambda j, tree=tree: tree.level[j])  # type: ignore[misc]
                yield (*index[:axis], parent, *index[axis + 1 :])

    def _guess(self, index: Index) -> Reading | None:
        """Return the mean of what the neighbours on each axis say; None if they say nothing."""
        guesses = []
        for axis, tree in enumerate(self._trees):
            i = index[axis]
            if not tree.level[i]:
                continue
            pair = [self._values.get((*index[:axis], j, *index[axis + 1 :])) for j in tree.between[i]]
            if pair[0] is not None and pair[1] is not None:
                low, high = tree.between[i]
                at = [_position(axis, self._axes[axis][j]) for j in (low, i, high)]
                part = (at[1] - at[0]) / (at[2] - at[0])
                guesses.append([_between(a, b, part) for a, b in zip(*pair, strict=True)])
        if not guesses:
            return None
        ms = [guess[0] for guess in guesses if guess[0] is not None]
        watts = [guess[1] for guess in guesses if guess[1] is not None]
        return sum(ms) / len(ms), sum(watts) / len(watts) if watts else None


def _position(axis: int, value: float) -> float:
    """Return where a value stands on its axis: times are linear in tokens, batch, 1 / clock and 1 / share."""
    return value if axis < 2 else 1.0 / value


def _between(low: float | None, high: float | None, part: float) -> float | None:
    return None if low is None or high is None else low + part * (high - low)
