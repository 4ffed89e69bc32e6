"""What a figure of the paper is made of: cells to play, and a function from their results to a section."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from services.local_sched import presets as local_sched
from shared.model import Struct
from shared.systems import SYSTEMS
from sim.cells import Cell, Played
from sim.compare import Row, Spread, rows, spread
from sim.page import Section, Sheet

RATES = {  # requests per second and model, by number of models (Figs. 10 and 11)
    16: (2.0, 2.5, 3.0, 3.5, 4.0),
    24: (1.0, 1.5, 2.0, 2.5, 3.0),
    32: (0.5, 1.0, 1.5, 2.0, 2.5),
}
DEFAULT_CLOCKS = (1635, 1980)  # of GPUs that nobody governs: as in the paper, and as the card ships


class Scale(Struct):
    """How much of the evaluation is played.

    Args:
        points: which of the five rates.
        seeds: of the cells, at each of these rates; `slow_seeds` of systems whose models take turns, which
            take ten times as long to play; `long_seeds` of cells that are played for longer.
        minutes: that requests arrive in a cell; `long_minutes` where consolidation is to be seen, which looks
            at two minutes of load before it does anything.
    """

    name: str
    points: tuple[int, ...]
    seeds: tuple[tuple[int, ...], ...]
    slow_seeds: tuple[tuple[int, ...], ...]
    long_seeds: tuple[int, ...]
    minutes: float
    long_minutes: float

    def seeds_of(self, system: str, place: int = 0) -> tuple[int, ...]:
        """Return the seeds under which a system is played, at the rate of that place in `points`."""
        return (self.slow_seeds if "switching" in local_sched.preset(system) else self.seeds)[place]

    def place(self, cell: Cell) -> int:
        """Return the place of a cell's rate in `points`."""
        return self.rates(cell.llms).index(cell.rps)

    def rates(self, llms: int) -> list[float]:
        """Return the rates that are played for so many models."""
        return [RATES[llms][point] for point in self.points]


ONE, THREE = (0,), (0, 1, 2)
REDUCED = Scale(
    "reduced: short windows and the two lowest of five rates, the second with one seed",
    points=(0, 1),
    seeds=(THREE, ONE),
    slow_seeds=(THREE, ()),
    long_seeds=THREE,
    minutes=2.0,
    long_minutes=4.0,
)
FULL = Scale(
    "full: all rates",
    points=(0, 1, 2, 3, 4),
    seeds=(THREE,) * 5,
    slow_seeds=(THREE,) * 5,
    long_seeds=THREE,
    minutes=5.0,
    long_minutes=10.0,
)


class Results:
    """What came of cells, by cell."""

    def __init__(self, played: Iterable[Played]) -> None:
        self._by_key = {one.cell.key(""): one for one in played}

    def of(self, cells: Iterable[Cell]) -> list[Played]:
        """Return the results of these cells. Raises KeyError for one that was not played."""
        return [self._by_key[cell.key("")] for cell in cells]

    def rows(self, cells: Iterable[Cell], reference: str) -> list[Row]:
        """Return the rows of these cells against a reference."""
        return rows(self.of(cells), reference)


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper.

    Args:
        name: by which it is asked for.
        cells: what it plays at a scale.
        show: makes its section of the results.
    """

    name: str
    title: str
    show: Callable[[Results, Scale], Section]
    cells: Callable[[Scale], list[Cell]] = lambda scale: []


class Claim(Struct):
    """A number of the paper beside ours."""

    what: str
    paper: str
    ours: str
    verdict: str


def claim(what: str, paper: float, ours: Spread | float | None, unit: str = "", within: float = 0.1) -> Claim:
    """Return the paper's number beside ours, and whether they agree.

    Args:
        unit: printed behind both; ``points`` and ``%`` are differences, compared by subtraction.
        within: agreement, as a part of the paper's number; for differences, in the unit.
    """
    if ours is None:
        return Claim(what, f"{paper:g}{unit}", "-", "cannot be said")
    value = ours.mean if isinstance(ours, Spread) else ours
    text = str(ours) if isinstance(ours, Spread) else f"{value:.4g}"
    if unit in (" points", " %"):
        off, told = value - paper, f"{value - paper:+.1f}{unit}"
    else:
        off, told = value / paper - 1, f"{value / paper - 1:+.0%}"
    return Claim(
        what, f"{paper:g}{unit}", text + unit, "agrees" if abs(off) <= within else f"differs by {told}"
    )


def claims(found: Sequence[Claim]) -> Sheet:
    """Return the table of the paper's numbers beside ours."""
    header = ("the paper's number", "paper", "here", "")
    return Sheet(header, tuple((c.what, c.paper, c.ours, c.verdict) for c in found), title="Beside the paper")


def there(*names: str) -> list[str]:
    """Return those of these systems that there are."""
    return [name for name in names if name in SYSTEMS]


def settings(scale: Scale, **fields: object) -> list[Cell]:
    """Return the settings of Section 4.2 at a scale, to be given systems and seeds."""
    cells = [
        Cell(system="", llms=llms, rps=rps, minutes=scale.minutes)
        for llms in RATES
        for rps in scale.rates(llms)
    ]
    return [replace(cell, **fields) for cell in cells]


def pooled(values: Iterable[Spread | None]) -> Spread | None:
    """Return the mean of means, and the ends of all."""
    kept = [value for value in values if value is not None]
    if not kept:
        return None
    means = spread([value.mean for value in kept])
    return Spread(means.mean, min(v.low for v in kept), max(v.high for v in kept))
