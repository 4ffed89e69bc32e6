"""When the placement is changed as a whole, and whether that pays (3.5.2, when to trigger).

A look follows the end of a keep-alive, and a slow period. It is done in steps, for which the core is called
again and again. GPUs that a change has emptied rest: other work goes there last. If the load comes back, the
models of a crowded GPU are spread onto a resting one.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from services.consolidator.capacity import Capacity
from services.consolidator.cluster import Cluster
from services.consolidator.course import Course, stages_of
from services.consolidator.demand import Demand
from services.consolidator.moves import Held
from services.consolidator.place import usable_bytes
from services.consolidator.plan import Outlook, Plan, assigned, expected, groupings, planned, sent_ms
from services.consolidator.relief import Relief
from services.consolidator.settings import ConsolidatorSettings
from services.consolidator.survey import Need, Survey, demands_of
from services.consolidator.window import Windows
from shared import events as ev
from shared.devices import Device, device_for
from shared.errors import ConfigError
from shared.lut import Lut
from shared.model import ModelSpec
from shared.shelf import Kept, Shelf
from shared.silicon import idle_power_w

Luts = Callable[[str, ModelSpec], Lut]
Steps = Generator[None, None, list[ev.Action]]
TRIES = 3  # at a plan, if GPUs are given or lose models while it is made


class Consolidation:
    """Looks at all GPUs of one kind together, and changes the cluster's instances where that pays.

    Args:
        cluster: whose instances it changes, and whose `resting` GPUs it keeps.
        luts: makes the look-up table of a model that has none in the store.
    """

    def __init__(self, settings: ConsolidatorSettings, cluster: Cluster, luts: Luts) -> None:
        self._set = settings
        self._cluster = cluster
        self.shelf = Shelf(Kept(luts))
        self.windows = Windows(settings.window_ms)
        self._relief = Relief(settings, cluster)
        self._course = Course(cluster)
        self._steps: Steps | None = None
        self._now_ms = 0.0  # of the present step
        self._next_ms = 0.0
        self._triggered = False  # since the last look began
        self._looked_ms = float("-inf")
        self._not_before_ms = 0.0
        self._tried: tuple[float, float] | None = None  # the fullest GPU's SM percent, requests/s: as planned
        self._too_little = False  # since then
        self._learnt_pct = 100.0  # what has proved too much, less a part
        self._learnt_ms = float("-inf")

    def trigger(self, now_ms: float) -> None:
        """A keep-alive has ended: look soon."""
        self._triggered = True
        self._next_ms = min(self._next_ms, max(now_ms, self._looked_ms + self._set.trigger_gap_ms))

    def disturbed(self, now_ms: float) -> None:
        """There was too little of something: consolidate no more for a time."""
        self._too_little = True
        self._course.give_up()
        self._not_before_ms = max(self._not_before_ms, now_ms + self._set.dwell_ms)

    @property
    def at_work(self) -> bool:
        """Whether a look has begun and not ended: it is to go on soon."""
        return self._steps is not None

    def stop(self) -> None:
        """Leave a look that has begun, and a plan that is under way."""
        self._steps = None
        self._course.give_up()

    def take_over(self) -> None:
        """This replica leads from here on: what the placement leaves empty rests, as for who led before."""
        if self._set.consolidation != "none" and self._cluster.instances():
            self._cluster.rest_empty()

    def look(self, now_ms: float) -> list[ev.Action]:
        """Relieve crowded GPUs, and see whether to consolidate if that is due."""
        if self._set.consolidation == "none":
            return []
        cluster = self._cluster
        cluster.resting = {gpu for gpu in cluster.resting if not cluster.on_gpu(gpu)}
        self._course.go_on(self._is_settled)
        crowded = self._relief.crowded(now_ms)
        actions: list[ev.Action] = [ev.Count(name="spreads") for gpu in crowded if self.spread(now_ms, gpu)]
        known_ms = now_ms - self.windows.heard_ms(now_ms) + self._set.observe_ms
        allowed_ms = max(self._not_before_ms, known_ms)
        due_ms = max(self._next_ms, allowed_ms)
        if now_ms < (due_ms if self._steps is None else allowed_ms):
            self._steps = None
            return actions
        if self._steps is None:
            kinds = list(self._kinds())
            waits = now_ms < due_ms + self._set.trigger_gap_ms
            if waits and not all(map(self._is_settled, (gpu for gpus in kinds for gpu in gpus))):
                return actions
            self._learn(now_ms)
            self._triggered = False
            self._steps = self._consolidate_all(kinds)
        return actions + self.go_on(now_ms)

    def go_on(self, now_ms: float) -> list[ev.Action]:
        """Take the next step of a look that has begun."""
        assert self._steps is not None
        self._now_ms = now_ms
        try:
            next(self._steps)
        except StopIteration as end:
            self._steps = None
            self._looked_ms = now_ms
            soon = self._triggered  # while it looked
            self._next_ms = now_ms + (self._set.trigger_gap_ms if soon else self._set.consolidate_ms)
            actions: list[ev.Action] = end.value
            return actions
        return []

    def _learn(self, now_ms: float) -> None:
        """See whether the last change proved too tight: there was too little, and not because the load rose.

        If so the next ones fill GPUs less, so that a constant load does not go back and forth.
        """
        if not self._too_little:
            return
        self._too_little = False
        if self._tried is None:
            return
        planned_pct, planned_per_s = self._tried
        if self._rate_per_s(now_ms) <= (1.0 + self._set.caution) * planned_per_s:
            self._learnt_pct = (1.0 - self._set.caution) * min(self._learnt_pct, planned_pct)
            self._learnt_ms = now_ms
        self._tried = None

    def _rate_per_s(self, now_ms: float) -> float:
        loads = (self.windows.load(now_ms, model) for model in self._cluster.models)
        return sum(load.rate_per_s for load in loads if load)

    # ---- fewer GPUs

    def _kinds(self) -> Iterator[list[str]]:
        """Yield the working GPUs of each kind that has a meter: without, nothing says what would be saved."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for gpu in self._cluster.working_gpus():
            summary = self._cluster.summaries[gpu]
            kinds.setdefault((summary.engine, summary.gpu_type), []).append(gpu)
        for (_, gpu_type), gpus in kinds.items():
            try:
                has_meter = device_for(gpu_type).has_meter
            except ConfigError:  # a type that this version does not know
                has_meter = False
            if has_meter:
                yield gpus

    def _is_settled(self, gpu: str) -> bool:
        """Say whether a GPU has just what it is to have, each instance on one GPU."""
        engines = self._cluster.summaries[gpu].engines
        ready = {engine.model for engine in engines if engine.state == "ready"}
        alone = all(len(instance.gpus) == 1 for instance in self._cluster.on_gpu(gpu))
        return alone and len(ready) == len(engines) and ready == set(self._cluster.placed_on(gpu))

    def _consolidate_all(self, kinds: Sequence[Sequence[str]]) -> Steps:
        """Plan for the GPUs of each kind, and apply plans that pay. What is unsettled then is left out."""
        actions: list[ev.Action] = []
        for gpus in kinds:
            actions += yield from self._consolidate([gpu for gpu in gpus if gpu in self._cluster.summaries])
        return actions

    def _consolidate(self, gpus: Sequence[str]) -> Steps:
        if not gpus:
            return []
        capacity = self._capacity(self._now_ms, gpus)
        survey = Survey(self._set, self._cluster, self.shelf, self.windows, gpus, capacity)
        for _ in range(TRIES):
            holds = self._holds(gpus)
            while (needs := survey.needs(self._now_ms, holds)) is None:
                yield
                holds = self._holds(gpus)
            if not needs:
                break
            device = device_for(self._cluster.summaries[next(iter(holds))].gpu_type)
            as_it_is = self._expected(holds, needs, device)
            least_served = min(self._set.least_served, as_it_is.served_share)
            demands = [demand for need in needs.values() for demand in need.demands]
            if self._set.consolidation == "demand":  # then no clock is closer than another
                demands = [replace(demand, clock_mhz=device.f_max_mhz) for demand in demands]
            groups: list[list[Demand]] | None = None
            for found in groupings(demands, len(holds), capacity, least_served):
                groups = found
                yield
            if groups is None:
                break
            if self._holds(list(holds)) != holds:
                continue
            load_ms = self._cluster.loads_ms(self._now_ms, holds, [need.spec for need in needs.values()])
            wake_ms = {gpu: self._cluster.wake_ms(gpu) for gpu in holds}
            as_is = {(d.model, d.copy): d for need in needs.values() for d in need.demands}
            groups = [[as_is[d.model, d.copy] for d in group] for group in groups]
            plan = planned(assigned(groups, holds, load_ms, wake_ms), device, self._empty_w(device))
            if not self._pays(as_it_is, plan, sent_ms([holds, plan.on_gpu], load_ms, wake_ms), device):
                break
            way = stages_of(self._cluster, holds, needs, plan)
            whole = bool(way) and way[-1] == plan.on_gpu
            if way and not whole:
                plan = planned(demands_of(way[-1], needs), device, self._empty_w(device))
                whole = plan.fits(capacity) and plan.outlook.served_share >= least_served
            if not whole or not self._pays(as_it_is, plan, sent_ms([holds, *way], load_ms, wake_ms), device):
                return [ev.Count(name="consolidations_refused")]
            self._apply(self._now_ms, way, plan)
            return _told(as_it_is, plan.outlook)
        return []

    def _holds(self, gpus: Sequence[str]) -> dict[str, list[str]]:
        """Return what the settled ones of these GPUs have."""
        working = set(self._cluster.working_gpus())
        settled = (gpu for gpu in gpus if gpu in working and self._is_settled(gpu))
        return {gpu: self._cluster.placed_on(gpu) for gpu in settled}

    def _capacity(self, now_ms: float, gpus: Sequence[str]) -> Capacity:
        """Return SM_eff and M_eff (3.5.2), and no more SMs than have proved enough."""
        if now_ms - self._learnt_ms >= self._set.forget_ms:
            self._learnt_pct = 100.0
        margin = self._set.safety_margin
        total_bytes = min(self._cluster.summaries[gpu].total_bytes for gpu in gpus)
        return Capacity(min(100.0 * (1.0 - margin), self._learnt_pct), usable_bytes(total_bytes, margin))

    def _empty_w(self, device: Device) -> float:
        return idle_power_w(device, self._set.empty_state)

    def _expected(
        self, holds: Mapping[str, Sequence[str]], needs: Mapping[str, Need], device: Device
    ) -> Outlook:
        """Return what is to be expected if all stays as it is."""
        groups = [[needs[model].now for model in held] for held in holds.values()]
        return expected(groups, device, len(holds), self._empty_w(device))

    def _pays(self, as_it_is: Outlook, plan: Plan, sent_ms: float, device: Device) -> bool:
        """Say whether a plan, which keeps the objectives, is worth its moves."""
        then = plan.outlook
        saved_w = as_it_is.power_w - then.power_w
        if then.used > as_it_is.used:
            return False
        if then.used == as_it_is.used and saved_w < self._set.least_saving * as_it_is.power_w:
            return False
        moved_j = sent_ms / 1000.0 * device.context_idle_w
        return saved_w * self._set.window_ms / 1000.0 > moved_j

    def _apply(self, now_ms: float, way: Sequence[Held], plan: Plan) -> None:
        self._course.begin(way)
        self._tried, self._too_little = (plan.fullest_pct, self._rate_per_s(now_ms)), False
        self._not_before_ms = now_ms + self._set.dwell_ms

    # ---- more GPUs

    def spread(self, now_ms: float, gpu: str) -> bool:
        """Move some models of a GPU to a resting one; says if it did. It consolidates no more for a time."""
        spread = self._relief.spread(gpu)
        if spread:
            self.disturbed(now_ms)
        return spread


def _told(before: Outlook, then: Outlook) -> list[ev.Action]:
    """Return what is told of a plan that is applied: the paper's objective, and the power by the tables."""
    why = "fewer_gpus" if then.used < before.used else "less_energy"
    actions: list[ev.Action] = [ev.Count(name="consolidations", labels={"reason": why})]
    for placement, outlook in (("left", before), ("planned", then)):
        labels = {"placement": placement}
        actions.append(ev.Count(name="consolidation_ewr", labels=labels, value=outlook.ewr))
        actions.append(ev.Count(name="consolidation_power_w", labels=labels, value=outlook.power_w))
    return actions
