"""Which models belong on which GPUs (3.5): the placement, and what changes it.

The core keeps the desired state and compares it with what the GPUs' summaries show; `orders.py` turns the
difference into orders. An order to unload says how idle the engine looked: a GPU that has used it since keeps
it, and the model takes its place in the placement again, so a request that races an unload is served.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from services.consolidator.cluster import DRAINING, Cluster
from services.consolidator.election import Election
from services.consolidator.orders import Orders, is_busy
from services.consolidator.place import IdleModel, Room, evict, place
from services.consolidator.settings import ConsolidatorSettings
from shared import events as ev
from shared.model import GpuSummary, Instance, ModelSpec, Placement
from shared.subjects import PLACEMENT_KEY


class ConsolidatorCore:
    """The one writer of the placement, where it leads; else it only follows what the leader decides.

    Args:
        consolidator: this replica's id.
        settings: see `ConsolidatorSettings`.
        placement: the stored placement; None if there is none.
        models: the registered models.
    """

    def __init__(
        self,
        consolidator: str,
        settings: ConsolidatorSettings,
        placement: Placement | None,
        models: tuple[ModelSpec, ...],
    ) -> None:
        self._id = consolidator
        self._set = settings
        self._cluster = Cluster(settings, models)
        self._placement = placement or Placement(version=0)
        self._cluster.replace(self._placement.instances)
        self._cluster.drained = set(self._placement.drained)
        self._seen_ms: dict[str, float] = {}
        self._to_place = set(self._cluster.models)  # to be placed at the next look, if they fit
        self._gather_until_ms = 0.0  # but not before this: more of them may be on their way
        self._parked: set[str] = set()  # unloaded for want of use: only a request brings them back
        self._wanted: dict[str, float] = {}  # asked for and not placed yet; forgotten at that time
        self._scaled_ms: dict[str, float] = {}
        self._orders: Orders | None = None
        self._settled_ms = 0.0
        self._election = Election(consolidator, settings.peer_silent_ms)
        self._leading = False
        self._heard_since_ms = 0.0  # the silence of a GPU counts from here on at the earliest
        self._heard_until_ms = 0.0  # and no longer than to here: later, we may be the ones who are deaf
        self._bus_lost = False
        self._announce = True
        self._planned = False
        self._next_tick_ms = 0.0

    @property
    def wake_ms(self) -> float | None:
        """When to look again; None while the bus is lost."""
        return None if self._bus_lost else self._next_tick_ms

    @property
    def leading(self) -> bool:
        """Whether this replica decides."""
        return self._leading

    @property
    def placement(self) -> Placement:
        """The placement in force."""
        return self._placement

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event and return the orders that follow."""
        orders = self._orders or self._start(now_ms)
        # Summaries of known GPUs come many a second: only what they change for that GPU is looked at.
        only_gpu = ""
        if isinstance(event, ev.SummaryChanged) and event.summary.gpu in self._cluster.summaries:
            only_gpu = event.summary.gpu
        if isinstance(event, ev.Tick):
            settled = now_ms >= self._settled_ms
            next_ms = now_ms + self._set.tick_ms
            self._next_tick_ms = next_ms if settled else min(next_ms, self._settled_ms)
        self._absorb(now_ms, event, orders)
        if self._bus_lost:
            return []
        actions: list[ev.Action] = []
        if isinstance(event, ev.Tick):
            alive = ev.ConsolidatorAlive(consolidator=self._id, placement_version=self._placement.version)
            actions.append(ev.Send(to=self._id, message=alive))
        if isinstance(event, ev.ConsolidatorAlive) and event.placement_version < self._placement.version:
            actions.append(self._announcement())
        if now_ms < self._settled_ms or not self._leads(now_ms):
            return actions
        if only_gpu and self._planned:
            return orders.for_gpu(now_ms, only_gpu, self._placement.version)
        if isinstance(event, ev.ScaleOut):
            actions += self._scale_out(now_ms, event)
        self._plan(now_ms, orders)
        actions += self._publish()
        for gpu in self._cluster.gpus():
            actions += orders.for_gpu(now_ms, gpu, self._placement.version)
        return actions

    def _start(self, now_ms: float) -> Orders:
        self._settled_ms = self._next_tick_ms = now_ms + self._set.settle_ms
        self._heard_since_ms = now_ms
        self._orders = Orders(self._set, self._cluster, prefix=f"{self._id}.{int(now_ms)}")
        return self._orders

    def _leads(self, now_ms: float) -> bool:
        """Say whether this replica leads; when it begins to, its placement gets a version above all others.

        No version is above the time, so it is also above what the store has lost or a peer still writes.
        """
        leads = self._election.leads(self._heard_until_ms)
        if leads and not self._leading:
            version = max(self._placement.version + 1, int(now_ms))
            self._placement = replace(self._placement, version=version)
            self._announce, self._planned = True, False
        self._leading = leads
        return leads

    # ---- what is heard

    def _absorb(self, now_ms: float, event: ev.Message | ev.Event, orders: Orders) -> None:
        cluster = self._cluster
        if isinstance(event, ev.Message):
            self._heard_until_ms = now_ms
        match event:
            case ev.SummaryChanged(summary=summary):
                self._hear(now_ms, summary, orders)
            case ev.ModelRegistered(model=model):
                if model.name not in cluster.models:
                    self._to_place.add(model.name)
                    self._gather_until_ms = now_ms + self._set.gather_ms
                cluster.models[model.name] = model
                cluster.removed.pop(model.name, None)
            case ev.ModelRemoved(model=name) if name in cluster.models:
                cluster.removed[name] = cluster.models.pop(name)
                self._parked.discard(name)
                self._wanted.pop(name, None)
                self._scaled_ms.pop(name, None)
            case ev.ScaleOut(model=name) if name in cluster.models and not cluster.healthy(name):
                self._wanted[name] = now_ms + self._set.wanted_ms
            case ev.Drain(gpu=gpu, on=on):
                self._announce = True  # whoever asks repeats it until it sees the answer
                if on:
                    cluster.drained.add(gpu)
                elif gpu in cluster.drained:
                    cluster.drained.discard(gpu)
                    self._fill_up()
            case ev.PlacementChanged(placement=placement) if placement.version > self._placement.version:
                self._follow(placement)
            case ev.ConsolidatorAlive(consolidator=peer):
                self._election.hear(now_ms, peer)
            case ev.MoveEnded(move_id=move_id):
                orders.move_ended(now_ms, move_id)
            case ev.BusLost():
                self._bus_lost = True
            case ev.BusRestored():
                self._bus_lost, self._announce = False, True
                self._heard_since_ms = now_ms
                self._election.excuse(now_ms)
                self._next_tick_ms = max(now_ms, self._settled_ms)

    def _hear(self, now_ms: float, summary: GpuSummary, orders: Orders) -> None:
        known = self._cluster.summaries.get(summary.gpu)
        if known and (summary.started_ms, summary.seq) <= (known.started_ms, known.seq):
            return
        reopened = known is not None and known.state == DRAINING != summary.state
        if known is None or reopened:
            self._fill_up()
        if known is not None and summary.started_ms != known.started_ms:
            orders.forget(summary.gpu)
        self._cluster.summaries[summary.gpu] = summary
        self._seen_ms[summary.gpu] = now_ms

    def _fill_up(self) -> None:
        """There is more room than before: try again the models that had none."""
        self._to_place |= self._cluster.models.keys() - self._parked

    def _follow(self, placement: Placement) -> None:
        """Take over a peer's newer placement; what it let go stays unloaded here as well."""
        before = {instance.model for instance in self._placement.instances}
        after = {instance.model for instance in placement.instances}
        self._placement = placement
        self._cluster.replace(placement.instances)
        self._cluster.drained = set(placement.drained)
        self._parked = (self._parked | (before - after)) - after
        self._to_place -= self._parked | after
        self._announce = True  # if it leads, the store must have it too: the peer's word may not get there

    # ---- what the placement is to be

    def _plan(self, now_ms: float, orders: Orders) -> None:
        self._planned = True
        self._clear_gpus(now_ms, orders)
        self._forget_removed()
        self._expire_idle()
        self._keep_used(now_ms)
        self._place_wanted(now_ms)
        if now_ms < self._gather_until_ms:
            return
        models = self._cluster.models
        absent = [models[m] for m in self._to_place & models.keys() if not self._cluster.of_model(m)]
        for name, gpu in place(absent, self._cluster.rooms()).items():
            self._add(name, gpu)
        self._to_place.clear()

    def _add(self, model: str, gpu: str) -> None:
        self._cluster.add(Instance(model=model, gpus=(gpu,)))
        self._parked.discard(model)

    def _park(self, instance: Instance) -> None:
        self._cluster.remove(instance)
        if not self._cluster.of_model(instance.model):
            self._parked.add(instance.model)

    def _clear_gpus(self, now_ms: float, orders: Orders) -> None:
        """Take all models off GPUs that are gone or drained; those that are nowhere else are placed again."""
        cluster = self._cluster
        for gpu in cluster.gpus():
            last_ms = max(self._seen_ms.get(gpu, 0.0), self._heard_since_ms)
            gone = self._heard_until_ms - last_ms >= self._set.gpu_gone_ms
            if gone:
                cluster.summaries.pop(gpu, None)
                self._seen_ms.pop(gpu, None)
                orders.forget(gpu)
            if gone or cluster.is_closed(gpu):
                for instance in cluster.on_gpu(gpu):
                    cluster.remove(instance)
                    self._to_place.add(instance.model)

    def _forget_removed(self) -> None:
        cluster = self._cluster
        for instance in cluster.instances():
            if instance.model not in cluster.models:
                cluster.remove(instance)
        if cluster.removed:
            loaded = {engine.model for summary in cluster.summaries.values() for engine in summary.engines}
            cluster.removed = {name: model for name, model in cluster.removed.items() if name in loaded}

    def _expire_idle(self) -> None:
        """Let go every instance whose keep-alive has ended (3.5.2, when to trigger)."""
        cluster = self._cluster
        for instance in cluster.instances():
            keep_alive_ms = cluster.models[instance.model].keep_alive_ms
            if keep_alive_ms is None:
                keep_alive_ms = self._set.replica_keep_alive_ms
            engines = [cluster.engine(gpu, instance.model) for gpu in instance.gpus]
            ended = all(
                e
                and e.state == "ready"
                and not is_busy(e)
                and not cluster.is_outdated(e)
                and e.idle_ms >= keep_alive_ms
                for e in engines
            )
            if ended and instance.model not in self._wanted and not self._is_pinned(instance):
                self._park(instance)

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
            overfull = self._cluster.free_bytes(gpu, self._cluster.placed_on(gpu)) < 0
            engine = self._cluster.engine(gpu, instance.model)
            if overfull and (engine is None or engine.state == "failed"):
                self._cluster.remove(instance)
                self._wanted[instance.model] = now_ms + self._set.wanted_ms

    def _place_wanted(self, now_ms: float) -> None:
        """Find room for the models that requests wait for, by unloading idle ones where it takes that."""
        for name, until_ms in list(self._wanted.items()):
            if not self._cluster.healthy(name) and now_ms < until_ms:
                model, failed = self._cluster.models[name], self._cluster.of_model(name)
                rooms = [room for room in self._cluster.rooms(without=name) if room.engine == model.engine]
                chosen = place([model], rooms)
                if chosen:
                    for instance in failed:
                        self._cluster.remove(instance)
                    self._add(name, chosen[name])
                elif not failed:  # nothing is unloaded for a model that does not load
                    self._evict_for(model, rooms)
            if self._cluster.healthy(name) or now_ms >= until_ms:
                del self._wanted[name]

    def _evict_for(self, model: ModelSpec, rooms: list[Room]) -> None:
        idle = {room.gpu: tuple(self._evictable(room.gpu)) for room in rooms}
        found = evict(model, rooms, idle)
        if found is not None:
            gpu, victims = found
            for instance in self._cluster.on_gpu(gpu):
                if instance.model in victims:
                    self._park(instance)
            self._add(model.name, gpu)

    def _evictable(self, gpu: str) -> Iterator[IdleModel]:
        for engine in self._cluster.summaries[gpu].engines:
            placed = [i for i in self._cluster.on_gpu(gpu) if i.model == engine.model]
            pinned = engine.model in self._wanted or any(map(self._is_pinned, placed))
            idle = (
                engine.state == "ready" and not is_busy(engine) and engine.idle_ms >= self._set.evict_idle_ms
            )
            if idle and not pinned:
                yield IdleModel(engine.model, engine.idle_ms, self._cluster.need_bytes(gpu, engine.model))

    def _scale_out(self, now_ms: float, event: ev.ScaleOut) -> list[ev.Action]:
        """Add an instance to a model whose instances are all ready and too slow (reason: a ``deficit``)."""
        name = event.model
        engines = [self._cluster.engine(gpu, name) for gpu in self._cluster.healthy(name)]
        rested_ms = now_ms - self._scaled_ms.get(name, float("-inf"))
        if "deficit" not in event.reason or rested_ms < self._set.scale_out_dwell_ms:
            return []
        if not engines or not all(engine and engine.state == "ready" for engine in engines):
            return []
        chosen = place([self._cluster.models[name]], self._cluster.rooms(without=name))
        if chosen:
            self._scaled_ms[name] = now_ms
            self._add(name, chosen[name])
        return [ev.Count(name="scale_outs", labels={"outcome": "added" if chosen else "no_room"})]

    def _publish(self) -> list[ev.Action]:
        """Store and announce the placement if it has changed; announce it as well when it may be unheard."""
        instances, drained = self._cluster.instances(), tuple(sorted(self._cluster.drained))
        actions: list[ev.Action] = []
        if (instances, drained) != (self._placement.instances, self._placement.drained):
            version = self._placement.version + 1
            self._placement = Placement(version=version, instances=instances, drained=drained)
            actions.append(ev.Count(name="placements"))
        if actions or self._announce:
            self._announce = False
            actions.append(ev.Put(key=PLACEMENT_KEY, value=self._placement))
            actions.append(self._announcement())
        return actions

    def _announcement(self) -> ev.Send:
        return ev.Send(to="current", message=ev.PlacementChanged(placement=self._placement))
