"""What keeps the placement in step with events: GPUs come and go, models are asked for, keep-alives end.

It changes as little as each event takes, by memory alone; `consolidate.py` looks at the whole.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from services.consolidator import apart
from services.consolidator.cluster import Cluster
from services.consolidator.consolidate import Consolidation
from services.consolidator.orders import is_busy
from services.consolidator.place import IdleModel, Order, Room, evict, place
from services.consolidator.pressure import pressure
from services.consolidator.settings import ConsolidatorSettings
from shared import events as ev
from shared.model import Instance, ModelSpec


@dataclass(slots=True)
class _Wanted:
    """A model that requests wait for and that is not placed yet: since when; forgotten at `until_ms`."""

    since_ms: float
    until_ms: float


class Upkeep:
    """What is to be placed, and what has been let go.

    Args:
        cluster: whose instances it changes.
    """

    def __init__(
        self, settings: ConsolidatorSettings, cluster: Cluster, consolidation: Consolidation
    ) -> None:
        self._set = settings
        self._cluster = cluster
        self._consolidation = consolidation
        self._to_place: set[str] = set()  # to be placed at the next look, if they fit
        self._gather_until_ms = 0.0  # but not before this: more of them may be on their way
        self._wanted: dict[str, _Wanted] = {}  # the one that waits longest first
        self._scaled_ms: dict[str, float] = {}
        self._passed_over_ms = float("-inf")  # when a model was last waiting for room for long
        self.fill_up()

    # ---- what happens

    def fill_up(self) -> None:
        """There is more room than before, or a peer's placement in force: try again what has no place."""
        self._to_place = self._cluster.models.keys() - self._cluster.parked

    def registered(self, now_ms: float, model: ModelSpec) -> None:
        """A model is new or has changed."""
        if model.name not in self._cluster.models:
            if model.name not in self._cluster.parked:
                self._to_place.add(model.name)
            self._gather_until_ms = now_ms + self._set.gather_ms
        self._cluster.models[model.name] = model
        self._cluster.removed.pop(model.name, None)

    def removed(self, model: str) -> None:
        """A model is no longer registered."""
        self._cluster.removed[model] = self._cluster.models.pop(model)
        self._cluster.parked.discard(model)
        self._wanted.pop(model, None)
        self._scaled_ms.pop(model, None)

    def asked_for(self, now_ms: float, model: str) -> None:
        """A request waits for a model that no GPU is to have."""
        self._wanted.setdefault(model, _Wanted(now_ms, now_ms)).until_ms = now_ms + self._set.wanted_ms

    # ---- what the placement is to be

    def look(self, now_ms: float, gone: Collection[str]) -> None:
        """Bring the placement in step; `gone` are GPUs that are there no more."""
        self._forget_removed()
        self._clear_gpus(now_ms, gone)
        if self._set.prefill_part:
            self._cluster.prefill = apart.prefill_gpus(
                self._cluster.prefill, self._cluster.working_gpus(), self._set.prefill_part
            )
        self._assign_all()
        self._expire_idle(now_ms)
        self._keep_used(now_ms)
        self._place_wanted(now_ms)
        if now_ms < self._gather_until_ms:
            return
        models = self._cluster.models
        absent = [models[m] for m in self._to_place & models.keys() if not self._cluster.of_model(m)]
        for name, gpu in self._place(absent, self._cluster.rooms(), self._order(now_ms)).items():
            self._add(name, gpu)
        self._to_place.clear()
        if self._set.prefill_part:
            for name, gpu in apart.partners(self._cluster).items():
                self._add(name, gpu)

    def _assign_all(self) -> None:
        """Give every model to all GPUs of its kind on which models take turns."""
        for gpu in self._cluster.working_gpus():
            if self._cluster.switches(gpu):
                kind, there = self._cluster.summaries[gpu].engine, set(self._cluster.placed_on(gpu))
                for name, model in self._cluster.models.items():
                    if name not in there and model.engine == kind:
                        self._add(name, gpu)

    def scale_out(self, now_ms: float, event: ev.ScaleOut) -> list[ev.Action]:
        """Help a model whose instances are all ready and too slow (reason: a ``deficit``).

        If consolidation has crowded its GPU, that is undone; else the model gets another instance.
        """
        name = event.model
        if name not in self._cluster.models:
            return []
        gpus = self._cluster.healthy(name)
        engines = [self._cluster.engine(gpu, name) for gpu in gpus]
        rested_ms = now_ms - self._scaled_ms.get(name, float("-inf"))
        if "deficit" not in event.reason or rested_ms < self._set.scale_out_dwell_ms:
            return []
        if not engines or not all(engine and engine.state == "ready" for engine in engines):
            return []
        self._consolidation.disturbed(now_ms)
        if any(self._consolidation.spread(now_ms, gpu) for gpu in gpus):
            self._scaled_ms[name] = now_ms
            return [ev.Count(name="scale_outs", labels={"outcome": "spread"})]
        chosen = place([self._cluster.models[name]], self._cluster.rooms(without=name), self._order(now_ms))
        if chosen:
            self._scaled_ms[name] = now_ms
            self._add(name, chosen[name])
        return [ev.Count(name="scale_outs", labels={"outcome": "added" if chosen else "no_room"})]

    def _order(self, now_ms: float, awaited: bool = False) -> Order:
        """Return which GPUs come first for a model: by how soon it is there, or the pressure on their KV."""
        if self._set.placement == "kv_pressure":
            windows = self._consolidation.windows
            return partial(pressure, self._cluster, lambda name: windows.load(now_ms, name))
        return partial(self._cluster.start_ms if awaited else self._cluster.near, now_ms)

    def _place(self, models: Iterable[ModelSpec], rooms: Collection[Room], order: Order) -> dict[str, str]:
        """Find GPUs for models: used ones first, those that consolidation has emptied last."""
        wanted = list(models)
        chosen = place(wanted, [room for room in rooms if room.gpu not in self._cluster.resting], order)
        left = [model for model in wanted if model.name not in chosen]
        return chosen | place(left, [room for room in rooms if room.gpu in self._cluster.resting], order)

    def _add(self, model: str, gpu: str) -> None:
        self._cluster.add(Instance(model=model, gpus=(gpu,)))

    def _park(self, instance: Instance) -> None:
        self._cluster.remove(instance)
        if not self._cluster.of_model(instance.model):
            self._cluster.parked.add(instance.model)
            self._to_place.discard(instance.model)

    def _clear_gpus(self, now_ms: float, gone: Collection[str]) -> None:
        """Take all models off GPUs that are gone or drained; those that are nowhere else are placed again.

        Requests that wait or run on a drained one are to go on elsewhere: room is made for their models.
        """
        for gpu in self._cluster.gpus():
            if gpu in gone or self._cluster.is_closed(gpu):
                for instance in self._cluster.on_gpu(gpu):
                    self._cluster.remove(instance)
                    self._to_place.add(instance.model)
                    engine = self._cluster.engine(gpu, instance.model)
                    if gpu not in gone and engine and is_busy(engine):
                        self.asked_for(now_ms, instance.model)

    def _forget_removed(self) -> None:
        cluster = self._cluster
        cluster.parked &= cluster.models.keys()
        for instance in cluster.instances():
            if instance.model not in cluster.models:
                cluster.remove(instance)
        if cluster.removed:
            loaded = {engine.model for summary in cluster.summaries.values() for engine in summary.engines}
            cluster.removed = {name: model for name, model in cluster.removed.items() if name in loaded}

    def _expire_idle(self, now_ms: float) -> None:
        """Let go every instance whose keep-alive has ended, and see then what can be consolidated (3.5.2)."""
        for instance in self._cluster.instances():
            if instance.model in self._wanted or not self._has_expired(instance):
                continue
            if any(map(self._cluster.switches, instance.gpus)):
                continue  # whether it takes memory there is for that GPU to say
            if not self._is_pinned(instance):
                self._park(instance)
                self._consolidation.trigger(now_ms)

    def _has_expired(self, instance: Instance) -> bool:
        cluster = self._cluster
        keep_alive_ms = cluster.models[instance.model].keep_alive_ms
        if keep_alive_ms is None:
            keep_alive_ms = self._set.replica_keep_alive_ms
        engines = [cluster.engine(gpu, instance.model) for gpu in instance.gpus]
        return all(
            engine
            and engine.state == "ready"
            and not is_busy(engine)
            and not cluster.is_outdated(engine)
            and engine.idle_ms >= keep_alive_ms
            for engine in engines
        )

    def _is_pinned(self, instance: Instance) -> bool:
        """Say whether an instance is the last that can serve a model which is to stay loaded."""
        spec = self._cluster.models.get(instance.model)
        pinned = spec is not None and spec.keep_alive_ms is None
        return pinned and not self._cluster.ready_beside(instance)

    def _keep_used(self, now_ms: float) -> None:
        """Place models where they are loaded: a request raced an unload, or the placement was lost."""
        for gpu in self._cluster.working_gpus():
            for engine in self._cluster.summaries[gpu].engines:
                name = engine.model
                loaded = engine.state in ("loading", "ready") and name in self._cluster.models
                called_for = is_busy(engine) or name in self._wanted or name in self._to_place
                if loaded and called_for and not self._cluster.of_model(name):
                    self._add(name, gpu)
                    self._make_fit(now_ms, gpu)

    def _make_fit(self, now_ms: float, gpu: str) -> None:
        """Take off a GPU what was to be loaded into memory that has turned out to be still in use."""
        for instance in self._cluster.on_gpu(gpu):
            placed = self._cluster.placed_on(gpu)
            overfull = not self._cluster.switches(gpu) and self._cluster.free_bytes(gpu, placed) < 0
            engine = self._cluster.engine(gpu, instance.model)
            if overfull and (engine is None or engine.state == "failed"):
                self._cluster.remove(instance)
                self.asked_for(now_ms, instance.model)

    def _place_wanted(self, now_ms: float) -> None:
        """Find room for the models that requests wait for, by unloading idle ones where it takes that.

        Where one has waited long, nothing is unloaded for those after it; nor for one that fails to load.
        """
        passed_over = False
        for name, wanted in list(self._wanted.items()):
            if not self._cluster.healthy(name) and now_ms < wanted.until_ms:
                model, failed = self._cluster.models[name], self._cluster.of_model(name)
                rooms = [room for room in self._cluster.rooms(without=name) if room.engine == model.engine]
                chosen = self._place([model], rooms, self._order(now_ms, awaited=True))
                if chosen:
                    for instance in failed:
                        self._cluster.remove(instance)
                    self._add(name, chosen[name])
                elif not failed and (passed_over or not self._evict_for(now_ms, model, rooms)):
                    passed_over = passed_over or now_ms - wanted.since_ms >= self._set.passed_over_ms
            if self._cluster.healthy(name) or now_ms >= wanted.until_ms:
                del self._wanted[name]
        if passed_over:
            self._passed_over_ms = now_ms
        self._cluster.room_short = now_ms - self._passed_over_ms < self._set.room_short_ms

    def _evict_for(self, now_ms: float, model: ModelSpec, rooms: list[Room]) -> bool:
        """Unload idle models where that makes room for `model`; says if it does."""
        idle = {room.gpu: tuple(self._evictable(now_ms, room.gpu)) for room in rooms}
        found = evict(model, rooms, idle, partial(self._cluster.start_ms, now_ms))
        if found is not None:
            gpu, victims = found
            for instance in self._cluster.on_gpu(gpu):
                if instance.model in victims:
                    self._park(instance)
            self._add(model.name, gpu)
        return found is not None

    def _evictable(self, now_ms: float, gpu: str) -> Iterator[IdleModel]:
        for engine in self._cluster.summaries[gpu].engines:
            name = engine.model
            placed = [i for i in self._cluster.on_gpu(gpu) if i.model == name]
            pinned = name in self._wanted or any(map(self._is_pinned, placed))
            idle = (
                engine.state == "ready" and not is_busy(engine) and engine.idle_ms >= self._set.evict_idle_ms
            )
            if idle and not pinned:
                load = self._consolidation.windows.load(now_ms, name)
                need_bytes = self._cluster.need_bytes(gpu, name)
                yield IdleModel(name, engine.idle_ms, need_bytes, load.rate_per_s if load else 0.0)
