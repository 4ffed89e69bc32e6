"""The profiler: runs a model's engine over the grid and times its steps (3.2.1).

The engines get the same orders as the local scheduler gives them, so what is timed is what will serve.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.local_sched.profile_grid import DECODE, PREFILL, Grid, Point, Reading, Sweep
from services.local_sched.profile_journal import Journal, Measured
from services.local_sched.profile_lab import Lab
from services.local_sched.profile_stats import Effort, at_nominal, estimate, oddities
from shared import engine as en
from shared.errors import FestinaError, Unavailable
from shared.events import Event
from shared.model import ModelSpec, Objectives, Plan, Request

TOKEN_IDS = 4096
"""Prompts are made of ids below this: every tokenizer has them, and what they mean is of no concern."""

ENDLESS = Objectives(ttft_ms=1e9, tbt_ms=1e9)


@dataclass
class _Running:
    """The batch that is decoding: context tokens by request, in the order in which they joined."""

    contexts: dict[str, int] = field(default_factory=dict)

    def serves(self, point: Point) -> bool:
        """Return whether the first requests of this batch are what the point asks for."""
        contexts = list(self.contexts.values())[: point.batch]
        drift = max(16.0, 0.05 * point.tokens)
        return len(contexts) == point.batch and abs(sum(contexts) / len(contexts) - point.tokens) <= drift


@dataclass(frozen=True)
class _Take:
    """Repeats of a step: times, joules where the engine tells them, and mean context per request."""

    ms: list[float]
    energy_j: float | None
    context_tokens: float


class Bench:
    """One model loaded in a lab, set to an operating point and timed."""

    def __init__(self, lab: Lab, model: ModelSpec, effort: Effort) -> None:
        self._lab = lab
        self._model = model
        self._effort = effort
        self._plan_id = 0
        self._requests = 0
        self._clock_mhz: int | None = None
        self._applied_mhz = 0
        self._share_pct = 100
        self._running = _Running()
        self.load_ms = 0.0

    async def load(self, kv_pool_bytes: int) -> None:
        """Load the model.

        Raises:
            Unavailable: it cannot be loaded; the message says why.
        """
        await self._lab.start()
        self._lab.perform(en.LoadEngine(model=self._model, kv_pool_bytes=kv_pool_bytes))
        while not isinstance(event := await self._event(), en.EngineReady):
            pass
        self.load_ms = event.load_ms

    async def measure(self, point: Point) -> Measured:
        """Measure a point until its confidence interval is narrow, or its effort spent.

        A batch that has grown past the point's context meanwhile is begun anew.
        """
        await self._set_clock(point.sm_clock_mhz)
        self._share_pct = point.sm_share_pct
        repeats: list[float] = []
        contexts: list[float] = []
        windows = []
        while not self._effort.enough(repeats):
            if point.phase == PREFILL:
                await self._stop_all()
            elif not self._running.serves(point):
                await self._start_batch(point)
            windows.append(await self._window(point, repeats, contexts))
        joules = [window_j for window_j, _ in windows if window_j is not None]
        spent_ms = sum([window_ms for _, window_ms in windows])
        found = estimate(repeats)
        return Measured(
            phase=point.phase,
            tokens=point.tokens,
            batch=point.batch,
            sm_clock_mhz=point.sm_clock_mhz,
            sm_share_pct=point.sm_share_pct,
            applied_mhz=self._applied_mhz,
            repeats_ms=tuple(round(ms, 4) for ms in repeats),
            latency_ms=found.ms,
            context_tokens=0.0 if point.phase == PREFILL else sum(contexts) / len(contexts),
            power_w=1000.0 * sum(joules) / spent_ms if len(joules) == len(windows) else None,
            outliers=found.outliers,
            precise=found.half_width <= self._effort.precision,
        )

    async def _window(
        self, point: Point, repeats: list[float], contexts: list[float]
    ) -> tuple[float | None, float]:
        """Add repeats until there are enough, or the batch serves the point no longer.

        Returns:
            (joules, ms) meanwhile, by the device's own counter where it has one; else what the engine tells
            of its steps, and their time. The joules are None without a meter.
        """
        take = self._prefills if point.phase == PREFILL else self._decodes
        begun, told_j = len(repeats), None
        before = self._lab.meter()
        while True:
            got = await take(point, self._effort.least)
            repeats += got.ms
            contexts.append(got.context_tokens)
            if got.energy_j is not None:
                told_j = (told_j or 0.0) + got.energy_j
            drifted = point.phase == DECODE and not self._running.serves(point)
            if drifted or self._effort.enough(repeats):
                break
        after = self._lab.meter()
        if before is None or after is None:
            return told_j, sum(repeats[begun:])
        return after[0] - before[0], after[1] - before[1]

    # ---- the two phases

    async def _prefills(self, point: Point, count: int) -> _Take:
        """Time prompts of this length, one after the other, each in steps of its own."""
        self._plan(chunk_tokens=point.tokens)
        ms: list[float] = []
        joules: float | None = None
        for _ in range(count):
            name = self._run(point.tokens, max_tokens=1)
            spent = 0.0
            while True:
                step = await self._step()
                (output,) = step.outputs
                spent += step.duration_ms
                if output.energy_j is not None:
                    joules = (joules or 0.0) + output.energy_j
                if output.request_id == name and output.finish_reason:
                    break
            ms.append(spent)
        return _Take(ms, joules, 0.0)

    async def _decodes(self, point: Point, count: int) -> _Take:
        """Time steps in which exactly the batch decodes; the other requests are held."""
        contexts = self._running.contexts
        names = list(contexts)
        chosen = set(names[: point.batch])
        self._plan(held=frozenset(names) - chosen)
        ms: list[float] = []
        joules: float | None = None
        context_sum = 0.0
        while len(ms) < count:
            step = await self._step()
            if step.plan_id != self._plan_id or {o.request_id for o in step.outputs} != chosen:
                continue  # begun under the plan before
            ms.append(step.duration_ms)
            context_sum += sum(contexts[name] for name in chosen) / len(chosen)
            told = [o.energy_j for o in step.outputs if o.energy_j is not None]
            if told:
                joules = (joules or 0.0) + sum(told)
        self._plan(held=frozenset(names))
        return _Take(ms, joules, context_sum / count)

    async def _start_batch(self, point: Point) -> None:
        """Bring as many requests as the point needs to its context, all past their prefill."""
        await self._stop_all()
        self._plan()
        names = [
            self._run(point.tokens, self._model.context_tokens - point.tokens) for _ in range(point.batch)
        ]
        self._running.contexts = dict.fromkeys(names, point.tokens)
        waiting = set(names)
        while waiting:
            step = await self._step()
            waiting -= {o.request_id for o in step.outputs if o.token_ids}
            self._plan(held=frozenset(names) - waiting)  # whoever is ready waits for the others

    async def _stop_all(self) -> None:
        """Take every request out of the engine, and wait for a step that may still be under way."""
        for name in self._running.contexts:
            self._lab.perform(en.StopRequest(model=self._model.name, request_id=name))
        self._running = _Running()

    # ---- orders and reports

    def _plan(self, held: frozenset[str] = frozenset(), chunk_tokens: int = 8192) -> None:
        self._plan_id += 1
        plan = Plan(plan_id=self._plan_id, held=held, chunk_tokens=chunk_tokens, sm_share_pct=self._share_pct)
        self._lab.perform(en.SetPlan(model=self._model.name, plan=plan))

    def _run(self, tokens: int, max_tokens: int) -> str:
        self._requests += 1
        name = f"profile-{self._requests}"
        ids = tuple(3 + (self._requests * 7919 + i * 31) % (TOKEN_IDS - 3) for i in range(tokens))
        request = Request(
            request_id=name,
            attempt=1,
            gateway="profile",
            model=self._model.name,
            prompt_tokens=ids,
            max_tokens=max_tokens,
            objectives=ENDLESS,
            sampling={"ignore_eos": True, "temperature": 0.0},
        )
        self._lab.perform(en.RunRequest(model=self._model.name, request=request))
        return name

    async def _set_clock(self, clock_mhz: int) -> None:
        if clock_mhz == self._clock_mhz:
            return
        self._lab.perform(en.SetClock(sm_clock_mhz=clock_mhz))
        while not isinstance(event := await self._event(), en.ClockApplied):
            self._count(event)
        self._clock_mhz, self._applied_mhz = clock_mhz, event.applied_mhz

    async def _step(self) -> en.StepDone:
        """Wait for a step of requests that are still wanted."""
        while True:
            event = await self._event()
            self._count(event)
            if isinstance(event, en.StepDone) and event.outputs:
                return event

    def _count(self, event: Event) -> None:
        """Keep track of the running requests' contexts."""
        if isinstance(event, en.StepDone):
            for output in event.outputs:
                if output.error:
                    raise FestinaError(f"the engine refused a request: {output.error}")
                if output.request_id in self._running.contexts and not output.prefilled_tokens:
                    self._running.contexts[output.request_id] += len(output.token_ids)

    async def _event(self) -> Event:
        event = await self._lab.heard()
        if isinstance(event, en.EngineEnded):
            raise Unavailable(f"the engine of {self._model.name} ended: {event.reason}")
        if isinstance(event, en.OutOfMemory):
            raise FestinaError(
                f"the engine has no KV memory left for {event.request_id}: give it a larger pool"
            )
        return event


def _odd_points(journal: Journal, phase: str) -> list[Point]:
    """Return points out of line with their neighbours, that were not measured twice yet.

    They are measured again, and the faster measurement counts: whatever disturbs a step makes it slower.
    """
    times: dict[Point, list[float]] = {}
    for entry in journal.entries:
        if entry.phase == phase:
            times.setdefault(entry.point, []).append(entry.latency_ms)
    odd = oddities({point: found[-1] for point, found in times.items()})
    return sorted({point for pair in odd for point in pair if len(times[point]) == 1})


async def run_sweeps(
    bench: Bench, grid: Grid, tolerance: float, journal: Journal, tell: Callable[[Measured], None]
) -> dict[Point, Reading]:
    """Measure what the journal does not have yet; return every point's latency and power.

    Args:
        tolerance: within which neighbours must foretell a point for those around it to be skipped.
        tell: hears each new measurement, when it is safe in the journal.
    """
    readings: dict[Point, Reading] = {}
    for phase in (PREFILL, DECODE):
        sweep = Sweep(grid, phase, tolerance)
        for entry in journal.entries:
            sweep.record(entry.point, entry.latency_ms, entry.power_w)
        while (point := sweep.next()) is not None:
            entry = await bench.measure(point)
            journal.append(entry)
            sweep.record(point, entry.latency_ms, entry.power_w)
            tell(entry)
        for point in _odd_points(journal, phase):
            entry = min(journal.of(point), await bench.measure(point), key=lambda found: found.latency_ms)
            journal.append(entry)
            tell(entry)
        readings |= sweep.readings()
    newest = {entry.point: entry for entry in journal.entries}
    readings |= {point: (entry.latency_ms, entry.power_w) for point, entry in newest.items()}
    decodes = [(p, e.context_tokens, e.latency_ms) for p, e in newest.items() if e.phase == DECODE]
    for point, ms in at_nominal(decodes).items():
        readings[point] = (ms, readings[point][1])
    return readings
