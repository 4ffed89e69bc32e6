"""Planning: what a trace would cost on so many GPUs, and how many of them it needs.

A short trace is played whole, on each number of GPUs that is tried. Of a long one only windows are played
(`sim/windows.py`), first on few, to find the number of GPUs, then on as many as there is time for; every
figure then comes with the 95 % interval that this leaves open. The number is looked for upwards from what
the look-up tables say the work alone fills.

The answer is as good as the device model, so some of what it rests on is repeated with the numbers that
nobody has measured at the ends of their bands (`shared/devices.py`), one at a time. The schedulers' look-up
table follows each time: a pool profiles its own devices.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from shared.errors import ConfigError
from shared.model import Struct
from sim.tasks import Case, Play
from sim.tries import Band, Outcome, Tries

SEARCH_PART = 0.15  # of all the time, for each number of GPUs tried


class Range(Struct):
    """A figure, and its ends over all bands of the device model."""

    value: float
    least: float
    most: float


class Plan(Struct):
    """The answer.

    Args:
        work_gpus: GPUs that the work alone fills at the highest clock: in the mean and in the busiest window.
        needed_gpus: fewest GPUs tried that met the target; None if none did, and then `chosen` is the most.
        sure: whether all of the interval of `chosen` is on the same side of the target.
        windows: of the trace; `window_s` is the length of each.
        tried: by number of GPUs.
        energy_kwh, attainment: of the chosen number of GPUs, attainment by request.
    """

    target: float
    work_gpus: tuple[float, float]
    needed_gpus: int | None
    sure: bool
    windows: int
    window_s: float
    chosen: Outcome
    tried: tuple[Outcome, ...]
    bands: tuple[Band, ...]
    energy_kwh: Range
    attainment: Range


def plan(
    base: Case, counts: Sequence[int], target: float, play: Play, budget_s: float, left_s: Callable[[], float]
) -> Plan:
    """Find the fewest GPUs of `counts` with which `target` of the requests are on time, and what they draw.

    More GPUs are taken never to be worse.

    Args:
        base: the case; its number of GPUs is replaced.
        target: share of requests, 0 to 1.
        budget_s: time for all; inf has everything played whole.
        left_s: says how much of it is left.
    """
    ascending = sorted(set(counts))
    if not ascending or not base.arrivals:
        raise ConfigError("a plan needs at least one number of GPUs and one request")
    tries = Tries(base, play, whole=budget_s == math.inf)
    loads = [window.gpus for window in tries.windows]
    mean, most = sum(loads) / len(loads), max(loads)

    def meets(gpus: int) -> bool:
        tries.search(gpus, SEARCH_PART * budget_s)
        return tries.outcome(gpus).attainment.value >= target

    place = fewest(ascending, mean * target, most, meets)
    while True:
        chosen = ascending[min(place, len(ascending) - 1)]
        bands = tries.finish(chosen, left_s())
        outcome = tries.outcome(chosen)
        if place >= len(ascending) or outcome.attainment.value >= target:
            break
        place += 1  # what more windows say of it
        if place < len(ascending):
            meets(ascending[place])
    reached = outcome.attainment
    factors, changes = [band.energy_factor for band in bands], [band.attainment_change for band in bands]
    energy_kwh = outcome.energy_kwh.value
    return Plan(
        target=target,
        work_gpus=(mean, most),
        needed_gpus=None if place >= len(ascending) else chosen,
        sure=reached.high < target if place >= len(ascending) else reached.low >= target,
        windows=len(tries.windows),
        window_s=tries.windows[0].span_ms / 1000.0,
        chosen=outcome,
        tried=tuple(tries.outcome(gpus) for gpus in tries.tried),
        bands=bands,
        energy_kwh=_range(energy_kwh, [energy_kwh * factor for factor in factors]),
        attainment=_range(reached.value, [min(1.0, max(0.0, reached.value + change)) for change in changes]),
    )


def fewest(counts: Sequence[int], least: float, first: float, meets: Callable[[int], bool]) -> int:
    """Return the place in ascending `counts` of the fewest GPUs that meet a target; past the end if none do.

    Args:
        least: fewer than that cannot, and are not tried, unless there are no others.
        first: where to begin; from there in growing steps, then by halves.
    """
    low = min(sum(count < least for count in counts), len(counts) - 1) - 1  # too few
    high = len(counts)  # enough
    place, step = sum(count < first for count in counts), 1
    while low + 1 < high:
        place = min(max(place, low + 1), high - 1)
        if meets(counts[place]):
            high, place = place, place - step
        else:
            low, place = place, place + step
        step *= 2
        if low >= 0 and high < len(counts):
            place = (low + high) // 2
    return high


def _range(value: float, others: Iterable[float]) -> Range:
    ends = [value, *others]
    return Range(value=value, least=min(ends), most=max(ends))
