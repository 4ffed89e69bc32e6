"""What came of a trace on each number of GPUs that was tried: in windows, or whole."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from shared.model import Struct
from sim.nodes import lut_of
from sim.tasks import Case, Counts, Play, Task, banded_cases
from sim.windows import FEW, LEAST_PLAYED, Estimate, Excerpt, excerpt, playing_order, ranked, split, total

BANDS_PART = 0.5  # of what time is left once the number of GPUs is known
_BANDS = "bands of the device model"


class Outcome(Struct):
    """What came of one number of GPUs.

    Args:
        windows: how many were played, of all; `whole` if in one run, from start to end.
        attainment: share of the requests, 0 to 1; `token_attainment` of the tokens asked for.
        active_gpus: (minute, GPUs with a model) of each window that was played.
    """

    gpus: int
    changed: str
    windows: int
    whole: bool
    attainment: Estimate
    token_attainment: Estimate
    energy_kwh: Estimate
    j_per_token: float | None
    active_gpus_mean: Estimate
    active_gpus: tuple[tuple[float, float], ...]


class Band(Struct):
    """One unmeasured number of the device model at one end of its band, compared on the same windows.

    Args:
        energy_factor: joules with it, over those without.
        attainment_change: share of the requests on time with it, less that without.
    """

    changed: str
    windows: int
    energy_factor: float
    attainment_change: float


class Tries:
    """A trace in windows, and what has come of those that were played, by number of GPUs.

    Args:
        base: the case; its number of GPUs is replaced.
        whole: play everything whole.
    """

    def __init__(self, base: Case, play: Play, whole: bool) -> None:
        self._base = base
        self._play = play
        luts = {model.name: lut_of(base.device, model) for model in base.models}
        self.windows = split(base.arrivals, luts)
        self._order = playing_order(self.windows)
        self._requests = [window.requests for window in self.windows]
        self._tokens = [
            sum(arrival.output_tokens for arrival in base.arrivals[window.first : window.past])
            for window in self.windows
        ]
        self._spans_ms = [window.span_ms for window in self.windows]
        self._by_load = ranked(self.windows)
        self.whole = whole or len(self.windows) <= FEW
        self._kept_ms = {model.name: model.keep_alive_ms for model in base.models}
        self._excerpts: dict[int, Excerpt] = {}
        self._sampled: dict[int, dict[int, Counts]] = {}  # by number of GPUs, of windows played alone
        self._played_whole: dict[int, dict[int, Counts]] = {}
        self._wall_s: dict[int, list[tuple[int, float]]] = {}  # of windows: (requests played, seconds)

    @property
    def tried(self) -> list[int]:
        """The numbers of GPUs that were tried, ascending."""
        return sorted({*self._sampled, *self._played_whole})

    def search(self, gpus: int, for_s: float) -> None:
        """Play what is needed to judge a number of GPUs: the same windows as on those before."""
        if self.whole:
            [played] = self._play(f"{gpus} GPUs", [self._task(self._case(gpus))], math.inf, 1)
            self._played_whole[gpus] = played.counts
        else:
            most = min((len(counts) for counts in self._sampled.values()), default=len(self.windows))
            self._play_windows(gpus, for_s, most)

    def finish(self, gpus: int, left_s: float) -> tuple[Band, ...]:
        """Play the rest of the trace on the chosen number of GPUs, as far as time allows, and the bands.

        Whole, where that takes no longer than what is left: the bands are played beside it. With no time left
        there are no bands.
        """
        case = self._case(gpus)
        cases = banded_cases(case)
        if self.whole:
            played = self._play(_BANDS, [self._task(one) for one in cases], math.inf, len(cases))
            reference = self._played_whole[gpus]
            return tuple(
                self._band(one.changed, done.counts, reference)
                for one, done in zip(cases, played, strict=True)
            )
        reference = dict(self._sampled[gpus])
        order = [*self._order[2:], *self._order[:2]]  # neither the busiest window first nor the emptiest
        tasks = [self._task(one, index) for index in order if index in reference for one in cases]
        whole = [self._task(case)] if self._whole_s(gpus) <= left_s else []
        least = len(cases) + len(whole) if left_s > 0 else 0
        played = self._play(_BANDS, [*whole, *tasks], left_s * BANDS_PART, least)
        if whole:
            self._played_whole[gpus] = played.pop(0).counts
        else:
            self._play_windows(gpus, left_s * (1.0 - BANDS_PART), len(self.windows))
        banded: dict[str, dict[int, Counts]] = {one.changed: {} for one in cases}
        for task, done in zip(tasks, played, strict=False):
            banded[task.case.changed].update(done.counts)
        return tuple(self._band(changed, counts, reference) for changed, counts in banded.items() if counts)

    def _play_windows(self, gpus: int, for_s: float, most: int) -> None:
        """Play windows on so many GPUs until `most` are played, or time is up."""
        have = self._sampled.setdefault(gpus, {})
        rest = [index for index in self._order[:most] if index not in have]
        tasks = [self._task(self._case(gpus), index) for index in rest]
        played = self._play(f"{gpus} GPUs", tasks, for_s, LEAST_PLAYED - len(have))
        for task, done in zip(tasks, played, strict=False):
            have.update(done.counts)
            self._wall_s.setdefault(gpus, []).append((len(task.played.arrivals), done.wall_s))

    def outcome(self, gpus: int) -> Outcome:
        """Return what came of a number of GPUs."""
        counts = self._played_whole.get(gpus) or self._sampled[gpus]
        requests, tokens, spans_ms = self._requests, self._tokens, self._spans_ms

        def all_of(name: str, sizes: Sequence[float], unit: float, most: float) -> Estimate:
            sums = total({index: getattr(one, name) for index, one in counts.items()}, sizes, self._by_load)
            ends = (min(most, max(0.0, end / unit)) for end in (sums.value, sums.low, sums.high))
            return Estimate(*ends)

        def share(name: str, sizes: Sequence[float]) -> Estimate:
            found = all_of(name, sizes, sum(sizes), 1.0)
            seen = sum(requests[index] for index in counts)
            # what was never seen in so many may still be there (rule of three)
            unseen = 3.0 / max(3, seen) * (1.0 - seen / sum(requests))
            return Estimate(
                found.value,
                max(0.0, min(found.low, found.value - unseen)),
                min(1.0, max(found.high, found.value + unseen)),
            )

        energy_kwh = all_of("energy_j", spans_ms, 3.6e6, math.inf)
        given = all_of("tokens", tokens, 1.0, math.inf).value
        return Outcome(
            gpus=gpus,
            changed="",
            windows=len(counts),
            whole=gpus in self._played_whole,
            attainment=share("on_time", requests),
            token_attainment=share("tokens_on_time", tokens),
            energy_kwh=energy_kwh,
            j_per_token=energy_kwh.value * 3.6e6 / given if given else None,
            active_gpus_mean=all_of("gpu_ms", spans_ms, sum(spans_ms), gpus),
            active_gpus=tuple(
                (round(self.windows[i].from_ms / 6e4, 2), round(max(0.0, counts[i].gpu_ms) / spans_ms[i], 2))
                for i in sorted(counts)
            ),
        )

    def _case(self, gpus: int) -> Case:
        return msgspec.structs.replace(self._base, gpus=gpus)

    def _task(self, case: Case, index: int | None = None) -> Task:
        """Return the task of a window; None: of the whole trace."""
        if index is None:
            played = Excerpt(self._base.arrivals, 0.0, self._base.span_ms)
            counted = [(i, window.from_ms, window.until_ms) for i, window in enumerate(self.windows)]
        else:
            if index not in self._excerpts:
                self._excerpts[index] = excerpt(self._base.arrivals, self.windows[index], self._kept_ms)
            played = self._excerpts[index]
            counted = [(index, played.from_ms, played.until_ms)]
        return Task(msgspec.structs.replace(case, arrivals=()), played, tuple(counted))

    def _whole_s(self, gpus: int) -> float:
        """Return how long the whole trace will take, by the windows' time per request."""
        requests, seconds = map(sum, zip(*self._wall_s[gpus], strict=True))
        return len(self._base.arrivals) * seconds / max(1, requests)

    def _band(self, changed: str, counts: Mapping[int, Counts], as_in_table: Mapping[int, Counts]) -> Band:
        same = [as_in_table[index] for index in counts]
        requests = sum(self.windows[index].requests for index in counts)
        more = sum(one.on_time for one in counts.values()) - sum(one.on_time for one in same)
        return Band(
            changed=changed,
            windows=len(counts),
            energy_factor=sum(one.energy_j for one in counts.values()) / sum(one.energy_j for one in same),
            attainment_change=more / max(1, requests),
        )
