"""Which models belong on which GPUs (3.5): the placement, and what changes it.

The core keeps the desired state and compares it with what the GPUs' summaries show; `orders.py` turns the
difference into orders. An order to unload says how idle the engine looked: a GPU that has used it since keeps
it, and the model takes its place in the placement again, so a request that races an unload is served.
"""

from msgspec.structs import replace

from services.consolidator.cluster import DRAINING, Cluster
from services.consolidator.consolidate import Consolidation, Luts
from services.consolidator.election import Election
from services.consolidator.orders import Orders
from services.consolidator.settings import ConsolidatorSettings
from services.consolidator.upkeep import Upkeep
from shared import events as ev
from shared.lut import lut_for, unpack
from shared.model import GpuSummary, ModelSpec, Placement
from shared.subjects import PLACEMENT_KEY


class ConsolidatorCore:
    """The one writer of the placement, where it leads; else it only follows what the leader decides.

    Args:
        consolidator: this replica's id.
        settings: see `ConsolidatorSettings`.
        placement, models: what is stored, as far as it is known before the first step.
        luts: makes the look-up table of a model that has none in the store, on a GPU type. Pure.
    """

    def __init__(
        self,
        consolidator: str,
        settings: ConsolidatorSettings,
        placement: Placement | None = None,
        models: tuple[ModelSpec, ...] = (),
        luts: Luts = lut_for,
    ) -> None:
        self._id = consolidator
        self._set = settings
        self._cluster = Cluster(settings, models)
        self._placement = placement or Placement(version=0)
        self._cluster.follow(self._placement)
        self._seen_ms: dict[str, float] = {}
        self._consolidation = Consolidation(settings, self._cluster, luts)
        self._upkeep = Upkeep(settings, self._cluster, self._consolidation)
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
        self._go_on_ms = 0.0

    @property
    def wake_ms(self) -> float | None:
        """When to look again, or to go on with a look at the whole; None while the bus is lost."""
        if self._bus_lost:
            return None
        return min(self._next_tick_ms, self._go_on_ms) if self._consolidation.at_work else self._next_tick_ms

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
        # Summaries of known GPUs come many a second: only what they change for that GPU is looked at. So do
        # ends of requests and news of hosts: what they change is looked at with the next tick.
        only_gpu = ""
        if isinstance(event, ev.SummaryChanged) and event.summary.gpu in self._cluster.summaries:
            only_gpu = event.summary.gpu
        goes_on = isinstance(event, ev.Tick) and self._consolidation.at_work and now_ms < self._next_tick_ms
        if isinstance(event, ev.Tick):
            self._schedule(now_ms, goes_on)
        self._absorb(now_ms, event, orders)
        if self._bus_lost:
            return []
        actions: list[ev.Action] = []
        if isinstance(event, ev.Tick) and not goes_on:
            alive = ev.ConsolidatorAlive(consolidator=self._id, placement_version=self._placement.version)
            actions.append(ev.Send(to=self._id, message=alive))
        if isinstance(event, ev.ConsolidatorAlive) and event.placement_version < self._placement.version:
            actions.append(self._announcement())
        if now_ms < self._settled_ms or not self._leads(now_ms):
            return actions
        if only_gpu and self._planned:
            return orders.for_gpu(now_ms, only_gpu, self._placement.version)
        if isinstance(event, ev.RequestEnded | ev.HostWeights) and self._planned:
            return []
        if isinstance(event, ev.ScaleOut):
            actions += self._upkeep.scale_out(now_ms, event)
        return actions + self._decide(now_ms, goes_on, orders)

    def _decide(self, now_ms: float, goes_on: bool, orders: Orders) -> list[ev.Action]:
        """Bring the placement in step with what is known, tell it if it has changed, and give orders.

        Args:
            goes_on: only a look at the whole goes on; while it does, nothing else is looked at.
        """
        if goes_on:
            actions = self._consolidation.go_on(now_ms)
            if self._consolidation.at_work:
                return actions
        else:
            self._planned = True
            self._upkeep.look(now_ms, self._gone(orders))
            actions = self._consolidation.look(now_ms)
        actions += self._publish()
        for gpu in self._cluster.gpus():
            actions += orders.for_gpu(now_ms, gpu, self._placement.version)
        return actions

    def _start(self, now_ms: float) -> Orders:
        self._settled_ms = self._next_tick_ms = now_ms + self._set.settle_ms
        self._heard_since_ms = now_ms
        self._consolidation.windows.listen(now_ms)
        self._orders = Orders(self._set, self._cluster, prefix=f"{self._id}.{int(now_ms)}")
        return self._orders

    def _schedule(self, now_ms: float, goes_on: bool) -> None:
        """Set when the next ticks are due; one with which a look goes on is not one of the regular ones."""
        self._go_on_ms = now_ms + self._set.survey_gap_ms
        if not goes_on:
            next_ms = now_ms + self._set.tick_ms
            settled = now_ms >= self._settled_ms
            self._next_tick_ms = next_ms if settled else min(next_ms, self._settled_ms)

    def _leads(self, now_ms: float) -> bool:
        """Say whether this replica leads; when it begins to, its placement gets a version above all others.

        No version is above the time, so it is also above what the store has lost or a peer still writes.
        """
        leads = self._election.leads(self._heard_until_ms)
        if leads and not self._leading:
            version = max(self._placement.version + 1, int(now_ms))
            self._placement = replace(self._placement, version=version)
            self._announce, self._planned = True, False
            self._consolidation.take_over()
        elif not leads:
            self._consolidation.stop()
        self._leading = leads
        return leads

    # ---- what is heard

    def _absorb(self, now_ms: float, event: ev.Message | ev.Event, orders: Orders) -> None:
        cluster = self._cluster
        if isinstance(event, ev.Message):
            # Not a word from anybody, our own heartbeat included: it is us who stood still or were cut off.
            if now_ms - self._heard_until_ms >= self._set.gpu_gone_ms / 2:
                self._excuse(now_ms)
            self._heard_until_ms = now_ms
        match event:
            case ev.SummaryChanged(summary=summary):
                self._hear(now_ms, summary, orders)
            case ev.ModelRegistered(model=model):
                self._upkeep.registered(now_ms, model)
            case ev.ModelRemoved(model=name) if name in cluster.models:
                self._upkeep.removed(name)
                self._consolidation.windows.forget(name)
            case ev.ScaleOut(model=name) if name in cluster.models and not cluster.healthy(name):
                self._upkeep.asked_for(now_ms, name)
            case ev.RequestEnded(model=name) if name in cluster.models:
                self._consolidation.windows.note(now_ms, event)
            case ev.HostWeights():
                cluster.caches.hear(now_ms, event)
            case ev.LutRead(packed=packed):
                self._consolidation.shelf.put(unpack(packed))
            case ev.Drain(gpu=gpu, on=on):
                self._announce = True  # whoever asks repeats it until it sees the answer
                if on:
                    cluster.drained.add(gpu)
                elif gpu in cluster.drained:
                    cluster.drained.discard(gpu)
                    self._upkeep.fill_up()
            case ev.PlacementChanged(placement=placement) if placement.version > self._placement.version:
                self._follow(placement)
            case ev.PlacementChanged(placement=placement) if placement.version < self._placement.version:
                self._announce = True  # a peer that stood still has stored what is out of date
            case ev.ConsolidatorAlive(consolidator=peer):
                self._election.hear(now_ms, peer)
            case ev.MoveEnded(move_id=move_id):
                orders.move_ended(now_ms, move_id)
            case ev.BusLost():
                self._bus_lost = True
            case ev.BusRestored():
                self._bus_lost, self._announce = False, True
                self._excuse(now_ms)
                self._consolidation.windows.restart(now_ms)
                self._next_tick_ms = max(now_ms, self._settled_ms)

    def _excuse(self, now_ms: float) -> None:
        """Start all silences anew: what was sent meanwhile is lost or unread."""
        self._heard_since_ms = now_ms
        self._election.excuse(now_ms)

    def _hear(self, now_ms: float, summary: GpuSummary, orders: Orders) -> None:
        known = self._cluster.summaries.get(summary.gpu)
        if known and (summary.started_ms, summary.seq) <= (known.started_ms, known.seq):
            return
        reopened = known is not None and known.state == DRAINING != summary.state
        if known is None or reopened:
            self._upkeep.fill_up()
        if known is not None and summary.started_ms != known.started_ms:
            orders.forget(summary.gpu)
        self._cluster.summaries[summary.gpu] = summary
        self._seen_ms[summary.gpu] = now_ms

    def _follow(self, placement: Placement) -> None:
        """Take over a peer's newer placement; what it has not placed yet is still to be, should we lead."""
        self._placement = placement
        self._cluster.follow(placement)
        self._upkeep.fill_up()
        self._announce = True  # if it leads, the store must have it too: the peer's word may not get there

    def _gone(self, orders: Orders) -> set[str]:
        """Forget GPUs that have been silent for too long, and return them."""
        gone = set()
        for gpu in self._cluster.gpus():
            last_ms = max(self._seen_ms.get(gpu, 0.0), self._heard_since_ms)
            if self._heard_until_ms - last_ms >= self._set.gpu_gone_ms:
                gone.add(gpu)
                self._cluster.summaries.pop(gpu, None)
                self._seen_ms.pop(gpu, None)
                orders.forget(gpu)
        return gone

    # ---- what is told

    def _publish(self) -> list[ev.Action]:
        """Store and announce the placement if it has changed; announce it as well when it may be unheard."""
        version = self._placement.version
        wanted = self._cluster.placement(version)
        actions: list[ev.Action] = []
        if wanted != self._placement:
            self._placement = replace(wanted, version=version + 1)
            actions.append(ev.Count(name="placements"))
        if actions or self._announce:
            self._announce = False
            actions.append(ev.Put(key=PLACEMENT_KEY, value=self._placement))
            actions.append(self._announcement())
        return actions

    def _announcement(self) -> ev.Send:
        return ev.Send(to="current", message=ev.PlacementChanged(placement=self._placement))
