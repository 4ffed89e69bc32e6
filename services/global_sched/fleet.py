"""Which GPUs serve which model (3.3): what summaries, placements, registrations and tables say together.

Of a model with many GPUs pools are kept, made at its first dispatch and from then on changed with each of its
GPUs; a few are looked at one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.global_sched.choices import shortest_rounds
from services.global_sched.curves import Curves
from services.global_sched.pools import Pool
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView, GpuView, Reservation
from shared.errors import ConfigError
from shared.lut import Lut
from shared.model import GpuSummary, ModelSpec, Placement, is_outdated
from shared.shelf import Shelf
from shared.silicon import wake_ms
from shared.weights import HostCaches

FEW = 8
"""So many GPUs are looked at one by one: that takes no longer than a search, and nothing need be kept."""


@dataclass(frozen=True, slots=True)
class _Serving:
    """The GPUs that serve one model.

    Args:
        placed: those that are to have it.
        others: those that are to give it up, used while none of the former is heard of.
        unmetered: those whose energy is not known; while there are any, all are looked at one by one.
    """

    placed: Pool
    others: Pool
    unmetered: set[str] = field(default_factory=set)

    def remove(self, gpu: str) -> None:
        self.placed.remove(gpu)
        self.others.remove(gpu)
        self.unmetered.discard(gpu)


class Start(NamedTuple):
    """How a model could be loaded: on a GPU in that state, its weights from ``host`` memory or ``disk``."""

    lut: Lut
    state: str
    source: str
    after_ms: float


class Fleet:
    """The GPUs, models and tables that one scheduler knows of.

    Args:
        scheduler: its id, under which GPUs confirm its dispatches.
        luts: makes the look-up table of a model that has none in the store.
    """

    def __init__(
        self, scheduler: str, settings: GlobalSettings, luts: Callable[[str, ModelSpec], Lut]
    ) -> None:
        self.view = ClusterView(
            scheduler, settings.stale_after_ms, settings.forget_after_ms, settings.reservation_ttl_ms
        )
        self.caches = HostCaches()
        self.models: dict[str, ModelSpec] = {}
        self._placement = Placement(version=0)
        self._placed: dict[str, set[str]] = {}
        self._prefill: frozenset[str] = frozenset()
        self._max_queued = settings.max_queued
        self._whole = settings.charge == "device"
        self._pooled = settings.choice == "least_energy"
        self._shelf = Shelf(luts)
        self._curves: dict[str, dict[str, Curves | None]] = {}  # by model and GPU type
        self._pools: dict[str, _Serving] = {}  # by model
        self._handed: dict[str, tuple[str, float]] = {}  # by model, where one is to decode, told until when
        self._handed_for_ms = settings.reservation_ttl_ms
        self._largest_bytes = 0  # of any request in a pool

    # ---- what changes

    def register(self, model: ModelSpec) -> None:
        """A model exists, or exists otherwise than before."""
        if self.models.get(model.name) != model:
            self.models[model.name] = model
            self._start_over(model.name)

    def remove(self, name: str) -> None:
        """A model exists no longer."""
        self.models.pop(name, None)
        self._handed.pop(name, None)
        self._start_over(name)

    def place(self, placement: Placement) -> None:
        """Take a placement; an older one than that known changes nothing."""
        if placement.version < self._placement.version:
            return
        drained, placed = set(self._placement.drained), self._placed
        self._placement, self._placed = placement, {}
        self._prefill = frozenset(placement.prefill)
        for instance in placement.instances:
            self._placed.setdefault(instance.model, set()).update(instance.gpus)
        drained ^= set(placement.drained)
        for name in self._pools:
            for gpu in sorted(drained | placed.get(name, set()) ^ self._placed.get(name, set())):
                view = self.view.known(gpu)
                if view is not None and name in view.engines:
                    self._changed(view, name)

    def put_lut(self, lut: Lut) -> str:
        """Take a stored table; returns why it is of no use, or an empty string."""
        unusable = self._shelf.put(lut)
        self._start_over(lut.model.name)
        return unusable

    def restore(self, now_ms: float) -> None:
        """The bus is back."""
        self.view.restore(now_ms)
        self._pools.clear()

    def _start_over(self, name: str) -> None:
        """A model or its table is not what it was: drop what was made of it, and what stands beside it."""
        self._curves.pop(name, None)
        self._pools.pop(name, None)
        for view in self.view.having(name):
            view.forget_stances()
            self._changed(view)

    def hear(self, now_ms: float, summary: GpuSummary) -> GpuView | None:
        """Take a summary in; None if a newer one of that GPU is known."""
        for gone in self.view.forget(now_ms):
            self._left(gone.gpu, set(gone.engines))
        known = self.view.known(summary.gpu)
        had = set(known.engines) if known else set()
        view = self.view.hear(now_ms, summary)
        if view is not None:
            self._left(view.gpu, had - view.engines.keys())
            self._changed(view)
        return view

    def _left(self, gpu: str, models: set[str]) -> None:
        """A GPU has these models no longer."""
        for name in models & self._pools.keys():
            self._pools[name].remove(gpu)

    def reserve(self, view: GpuView, reservation: Reservation) -> int:
        """Count a dispatch on a GPU; returns its number."""
        seq = view.reserve(reservation)
        if self._pools:
            # the other models' members put themselves right when met, unless memory is so short that the
            # time from which it is free may have changed as well
            short = view.free_bytes < self._largest_bytes
            self._changed(view, None if short else reservation.model)
        return seq

    def release(self, gpu: str, seq: int) -> None:
        """A GPU has refused a dispatch."""
        view = self.view.release(gpu, seq)
        if view is not None:
            self._changed(view)

    def _changed(self, view: GpuView, model: str | None = None) -> None:
        """Put a GPU right in the pools of all its models, or of one."""
        for name in view.engines if model is None else (model,):
            serving = self._pools.get(name)
            if serving is None:
                continue
            serving.remove(view.gpu)
            spec = self.models[name]
            lut = self.lut(view.summary.gpu_type, name)
            if lut is None or not self._serves(view, spec):
                continue
            if not lut.device.has_meter:
                serving.unmetered.add(view.gpu)
                continue
            is_placed = view.gpu in self._placed.get(name, ())
            (serving.placed if is_placed else serving.others).put(view)
            self._largest_bytes = max(self._largest_bytes, lut.request_bytes(spec.context_tokens))

    # ---- what is so

    def serving(self, now_ms: float, spec: ModelSpec) -> list[GpuView]:
        """Return the GPUs that have the model ready and take new work, by looking at each.

        One that is to give it up is used only until another that is to have it is ready. Where prefill and
        decode are apart, those for prompts.
        """
        views = self._ready(now_ms, spec)
        return [view for view in views if view.gpu in self._prefill] or views

    def decoder(self, now_ms: float, spec: ModelSpec, view: GpuView) -> GpuView | None:
        """Return where a request is to decode whose prompt a GPU computes: of those for it, the roomiest.

        Where models take turns, the one whose rounds are shortest. None: it decodes there as well, because
        nothing is apart, or no other GPU has its model.
        """
        if view.gpu not in self._prefill:
            return None
        others = [other for other in self._ready(now_ms, spec) if other.gpu not in self._prefill]
        if others and all(other.summary.switches for other in others):
            lasting = [(gpu, name) for name, (gpu, until_ms) in self._handed.items() if now_ms < until_ms]
            promised = {gpu: {name for at, name in lasting if at == gpu} for gpu, _ in lasting}
            chosen = shortest_rounds(others, spec.name, promised)
            self._handed[spec.name] = chosen.gpu, now_ms + self._handed_for_ms
            return chosen
        return min(others, key=lambda other: (-other.free_bytes, other.gpu), default=None)

    def _ready(self, now_ms: float, spec: ModelSpec) -> list[GpuView]:
        views = [view for view in self.view.with_model(spec.name, now_ms) if self._serves(view, spec)]
        placed = self._placed.get(spec.name, ())
        return [view for view in views if view.gpu in placed] or views

    def pool(self, now_ms: float, spec: ModelSpec) -> Pool | None:
        """Return the pool of those GPUs; None if they are few, or looked at in another way than by energy."""
        name = spec.name
        if not self._pooled or self._prefill or self.view.count(name) <= FEW:
            self._pools.pop(name, None)
            return None
        serving = self._pools.get(name)
        if serving is None:
            placed, others = [Pool(spec, self.curves, self.view.is_stale, self._max_queued) for _ in range(2)]
            serving = self._pools[name] = _Serving(placed, others)
            for view in self.view.having(name):
                self._changed(view, name)
        if serving.unmetered:
            return None
        return serving.placed if serving.placed.is_heard(now_ms) else serving.others

    def starts(self, now_ms: float, spec: ModelSpec) -> list[Start]:
        """Return how soon a model could be loaded on a GPU of each type, the soonest one; memory aside.

        Cost: linear in all GPUs.
        """
        near = self.caches.hosts(now_ms, spec)
        soonest: dict[str, Start] = {}
        for view in self.view.heard(now_ms):
            summary = view.summary
            lut = self.lut(summary.gpu_type, spec.name)
            if lut is None or summary.engine != spec.engine or summary.state == "draining":
                continue
            source = "host" if summary.host in near else "disk"
            if spec.name in summary.asleep:
                source = "asleep"
            after_ms = wake_ms(lut.device, summary.state) + lut.load_ms(source)
            known = soonest.get(summary.gpu_type)
            if known is None or after_ms < known.after_ms:
                soonest[summary.gpu_type] = Start(lut, summary.state, source, after_ms)
        return list(soonest.values())

    def _serves(self, view: GpuView, spec: ModelSpec) -> bool:
        engine, summary = view.engines[spec.name], view.summary
        return (
            engine.state == "ready"
            and summary.state != "draining"
            and summary.engine == spec.engine
            and view.gpu not in self._placement.drained
            and not is_outdated(engine, spec)
            and self.lut(summary.gpu_type, spec.name) is not None
        )

    def lut(self, gpu_type: str, model: str) -> Lut | None:
        """Return a model's table; None for a model or a GPU type that is not known."""
        curves = self.curves(gpu_type, model)
        return None if curves is None else curves.lut

    def curves(self, gpu_type: str, model: str) -> Curves | None:
        """Return the curves of that table, made once as long as the model stays as it is."""
        spec = self.models.get(model)
        if spec is None:
            return None
        known = self._curves.setdefault(model, {})
        if gpu_type not in known:
            try:
                known[gpu_type] = Curves(self._shelf.get(gpu_type, spec), self._whole)
            except ConfigError:
                known[gpu_type] = None
        return known[gpu_type]
