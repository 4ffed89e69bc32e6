"""When the placement is changed as a whole, and whether that pays (3.5.2, when to trigger).

A look follows the end of a keep-alive, and a slow period. GPUs that a change has emptied rest: other work
goes there last. If the load comes back, the models of a crowded GPU are spread onto a resting one.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from services.consolidator.capacity import Capacity
from services.consolidator.cluster import Cluster
from services.consolidator.demand import Demand, Wanted
from services.consolidator.place import usable_bytes
from services.consolidator.plan import Outlook, Plan, expected, make_plan
from services.consolidator.settings import ConsolidatorSettings
from services.consolidator.window import Windows
from shared import events as ev
from shared.devices import Device, device_for
from shared.errors import ConfigError
from shared.lut import Lut, build
from shared.model import EngineSummary, Instance, ModelSpec
from shared.shelf import Shelf
from shared.silicon import idle_power_w
from shared.slo import objectives_for

Luts = Callable[[str, ModelSpec], Lut]


@lru_cache(maxsize=4096)
def modelled(gpu_type: str, model: ModelSpec) -> Lut:
    """Return the look-up table of a model that nobody has profiled. Raises ConfigError for unknown types."""
    return build(device_for(gpu_type), model)


class Consolidation:
    """Looks at all GPUs of one kind together, and changes the cluster's instances where that pays.

    Args:
        cluster: whose instances it changes, and whose `resting` GPUs it keeps.
        luts: makes the look-up table of a model that has none in the store.
    """

    def __init__(self, settings: ConsolidatorSettings, cluster: Cluster, luts: Luts) -> None:
        self._set = settings
        self._cluster = cluster
        self.shelf = Shelf(luts)
        self.windows = Windows(settings.window_ms)
        self._next_ms = 0.0
        self._looked_ms = float("-inf")
        self._not_before_ms = 0.0
        self._tried: tuple[float, float] | None = (
            None  # SM percent of the fullest GPU and requests/s, as planned
        )
        self._too_little = False  # since then
        self._learnt_pct = 100.0  # what has proved too much, less a part
        self._learnt_ms = float("-inf")
        self._crowded_ms: dict[str, float] = {}  # by GPU, since when

    def trigger(self, now_ms: float) -> None:
        """A keep-alive has ended: look soon."""
        self._next_ms = min(self._next_ms, max(now_ms, self._looked_ms + self._set.trigger_gap_ms))

    def disturbed(self, now_ms: float) -> None:
        """There was too little of something: consolidate no more for a time."""
        self._too_little = True
        self._not_before_ms = max(self._not_before_ms, now_ms + self._set.dwell_ms)

    def look(self, now_ms: float) -> list[ev.Action]:
        """Relieve crowded GPUs, and consolidate if that is due and pays."""
        if self._set.consolidation == "none":
            return []
        self.windows.listen(now_ms)
        self._cluster.resting -= {gpu for i in self._cluster.instances() for gpu in i.gpus}
        actions = self._relieve(now_ms)
        early = self.windows.heard_ms(now_ms) < self._set.observe_ms
        if early or now_ms < max(self._next_ms, self._not_before_ms):
            return actions
        self._learn(now_ms)
        for gpus in self._kinds():
            if self._is_settled(gpus):
                actions += self._consolidate(now_ms, gpus)
        self._looked_ms = now_ms
        self._next_ms = now_ms + self._set.consolidate_ms
        return actions

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

    def _is_settled(self, gpus: list[str]) -> bool:
        """Say whether these GPUs have just what they are to have, each instance on one GPU."""
        for gpu in gpus:
            engines = self._cluster.summaries[gpu].engines
            ready = {engine.model for engine in engines if engine.state == "ready"}
            if len(ready) < len(engines) or ready != set(self._cluster.placed_on(gpu)):
                return False
            if any(len(instance.gpus) > 1 for instance in self._cluster.on_gpu(gpu)):
                return False
        return True

    def _consolidate(self, now_ms: float, gpus: list[str]) -> list[ev.Action]:
        """Plan for GPUs of one kind, and apply the plan if it pays."""
        holds = {gpu: self._cluster.placed_on(gpu) for gpu in gpus}
        wanted = {
            model: self._wanted(now_ms, gpus[0], model)
            for model in sorted({model for held in holds.values() for model in held})
        }
        if not wanted:
            return []
        capacity = self._capacity(now_ms, gpus)
        demands: list[Demand] = []
        for each in wanted.values():
            copies = each.fewest_copies(capacity)
            if copies is None:
                return []
            demands += copies
        device = next(iter(wanted.values())).lut.device
        empty_w = idle_power_w(device, self._set.empty_state)
        bytes_of = {model: each.lut.model.weight_bytes for model, each in wanted.items()}
        as_it_is = expected(list(_groups(wanted, holds)), device, len(gpus), empty_w)
        least_served = min(self._set.least_served, as_it_is.served_share)
        plan = make_plan(demands, holds, capacity, bytes_of, device, empty_w, least_served)
        if plan is None or not self._pays(as_it_is, plan, device):
            return []
        self._apply(now_ms, gpus, plan)
        why = "fewer_gpus" if plan.outlook.used < as_it_is.used else "less_energy"
        return [ev.Count(name="consolidations", labels={"reason": why})]

    def _capacity(self, now_ms: float, gpus: list[str]) -> Capacity:
        """Return SM_eff and M_eff (3.5.2), and no more SMs than have proved enough."""
        if now_ms - self._learnt_ms >= self._set.forget_ms:
            self._learnt_pct = 100.0
        margin = self._set.safety_margin
        total_bytes = min(self._cluster.summaries[gpu].total_bytes for gpu in gpus)
        return Capacity(min(100.0 * (1.0 - margin), self._learnt_pct), usable_bytes(total_bytes, margin))

    def _wanted(self, now_ms: float, gpu: str, model: str) -> Wanted:
        spec, load = self._cluster.models[model], self.windows.load(now_ms, model)
        lut = self.shelf.get(self._cluster.summaries[gpu].gpu_type, spec)
        objectives = spec.objectives or objectives_for(round(load.input_tokens) if load else 0)
        return Wanted(lut, load, objectives, self._cluster.kv_bytes(gpu), self._set.burst_sigmas)

    def _pays(self, as_it_is: Outlook, plan: Plan, device: Device) -> bool:
        """Say whether a plan, which keeps the objectives, is worth its moves."""
        then = plan.outlook
        saved_w = as_it_is.power_w - then.power_w
        if then.used > as_it_is.used:
            return False
        if then.used == as_it_is.used and saved_w < self._set.least_saving * as_it_is.power_w:
            return False
        moved_j = plan.sent_ms / 1000.0 * device.context_idle_w
        return saved_w * self._set.window_ms / 1000.0 > moved_j

    def _apply(self, now_ms: float, gpus: list[str], plan: Plan) -> None:
        cluster = self._cluster
        kept = [instance for instance in cluster.instances() if not set(instance.gpus) & set(gpus)]
        fresh = [
            Instance(model=model, gpus=(gpu,)) for gpu in gpus for model in sorted(plan.on_gpu.get(gpu, ()))
        ]
        cluster.replace([*kept, *fresh])
        cluster.resting = {gpu for gpu in cluster.working_gpus() if not cluster.on_gpu(gpu)}
        self._tried, self._too_little = (plan.fullest_pct, self._rate_per_s(now_ms)), False
        self._not_before_ms = now_ms + self._set.dwell_ms

    # ---- more GPUs

    def _relieve(self, now_ms: float) -> list[ev.Action]:
        """Spread the models of GPUs that have been crowded for some time, while others rest."""
        full_pct = 100.0 * (1.0 - self._set.safety_margin)
        actions: list[ev.Action] = []
        for gpu in self._cluster.working_gpus() if self._cluster.resting else ():
            if sum(engine.sm_share_pct for engine in self._running(gpu)) <= full_pct:
                self._crowded_ms.pop(gpu, None)
                continue
            lasts_ms = now_ms - self._crowded_ms.setdefault(gpu, now_ms)
            if lasts_ms >= self._set.crowded_ms and self.spread(now_ms, gpu):
                actions.append(ev.Count(name="spreads"))
        return actions

    def spread(self, now_ms: float, gpu: str) -> bool:
        """Move some models of a GPU to a resting one of its kind, halving what is needed; says if it did."""
        cluster = self._cluster
        mine = cluster.summaries[gpu]
        resting = (cluster.summaries[each] for each in sorted(cluster.resting & cluster.summaries.keys()))
        room = next((s.gpu for s in resting if (s.engine, s.gpu_type) == (mine.engine, mine.gpu_type)), None)
        instances = [instance for instance in cluster.on_gpu(gpu) if len(instance.gpus) == 1]
        if room is None or len(instances) < 2:
            return False
        needs_pct = {engine.model: 1 + engine.sm_share_pct for engine in self._running(gpu)}
        free_bytes = cluster.free_bytes(room, sorted(cluster.loaded_on(room)))
        stays_pct = goes_pct = 0
        for instance in sorted(instances, key=lambda i: (-needs_pct.get(i.model, 1), i.model)):
            pct, need_bytes = needs_pct.get(instance.model, 1), cluster.need_bytes(room, instance.model)
            if stays_pct <= goes_pct or need_bytes > free_bytes:
                stays_pct += pct
                continue
            cluster.remove(instance)
            cluster.add(Instance(model=instance.model, gpus=(room,)))
            goes_pct += pct
            free_bytes -= need_bytes
        cluster.resting.discard(room)
        self._crowded_ms.pop(gpu, None)
        self.disturbed(now_ms)
        return True

    def _running(self, gpu: str) -> list[EngineSummary]:
        """Return the engines with work on a GPU, without those that are about to leave it."""
        placed = self._cluster.placed_on(gpu)
        return [e for e in self._cluster.summaries[gpu].engines if e.running and e.model in placed]


def _groups(wanted: dict[str, Wanted], holds: dict[str, list[str]]) -> Iterator[list[Demand]]:
    """Yield the demands on each GPU as they are placed now; instances share a model's load evenly."""
    count = {model: sum(model in held for held in holds.values()) for model in wanted}
    one_of = {model: each.copies(count[model])[0] for model, each in wanted.items()}
    for held in holds.values():
        yield [one_of[model] for model in held]
