"""Which GPUs serve which model (3.3): what summaries, placements, registrations and tables say together.

Of a model with many GPUs a `Pool` is kept, made at its first dispatch and from then on changed with each of
its GPUs; a few are looked at one by one.
"""

from collections.abc import Callable

from services.global_sched.pools import Pool
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView, GpuView, Reservation
from shared.errors import ConfigError
from shared.lut import Lut
from shared.model import GpuSummary, ModelSpec, Placement, is_outdated
from shared.shelf import Shelf

FEW = 8
"""So many GPUs are looked at one by one: that takes no longer than a search, and nothing need be kept."""


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
        self.models: dict[str, ModelSpec] = {}
        self._placement = Placement(version=0)
        self._placed: dict[str, set[str]] = {}
        self._max_queued = settings.max_queued
        self._shelf = Shelf(luts)
        self._luts: dict[tuple[str, str], Lut | None] = {}
        self._pools: dict[str, Pool] = {}
        self._largest_bytes = 0  # of any request in a pool

    # ---- what changes

    def register(self, model: ModelSpec) -> None:
        """A model exists, or exists otherwise than before."""
        if self.models.get(model.name) != model:
            self.models[model.name] = model
            self._start_over()

    def remove(self, name: str) -> None:
        """A model exists no longer."""
        self.models.pop(name, None)
        self._start_over()

    def place(self, placement: Placement) -> None:
        """Take a placement; an older one than that known changes nothing."""
        if placement.version >= self._placement.version:
            changed = placement.drained != self._placement.drained
            self._placement = placement
            self._placed = {}
            for instance in placement.instances:
                self._placed.setdefault(instance.model, set()).update(instance.gpus)
            if changed:
                self._pools.clear()

    def put_lut(self, lut: Lut) -> str:
        """Take a stored table; returns why it is of no use, or an empty string."""
        unusable = self._shelf.put(lut)
        self._start_over()
        return unusable

    def restore(self, now_ms: float) -> None:
        """The bus is back."""
        self.view.restore(now_ms)
        self._pools.clear()

    def _start_over(self) -> None:
        self._luts.clear()
        self._pools.clear()
        self.view.forget_stances()

    def hear(self, now_ms: float, summary: GpuSummary) -> GpuView | None:
        """Take a summary in; None if a newer one of that GPU is known."""
        view = self.view.hear(now_ms, summary)
        if view is not None:
            for name, pool in self._pools.items():
                if name not in view.engines:
                    pool.remove(view.gpu)
            self._changed(view)
        return view

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
        if not self._pools:
            return
        for name in view.engines if model is None else (model,):
            pool = self._pools.get(name)
            if pool is None:
                continue
            lut = self.lut(view.summary.gpu_type, name)
            if lut is not None and not lut.device.has_meter:
                del self._pools[name]
            elif self._serves(view, self.models[name]):
                pool.put(view)
            else:
                pool.remove(view.gpu)

    # ---- what is so

    def serving(self, now_ms: float, spec: ModelSpec) -> list[GpuView]:
        """Return the GPUs that have the model ready and take new work, by looking at each.

        One that is to give it up is used only until another that is to have it is ready.
        """
        views = [view for view in self.view.with_model(spec.name, now_ms) if self._serves(view, spec)]
        placed = self._placed.get(spec.name, ())
        return [view for view in views if view.gpu in placed] or views

    def pool(self, now_ms: float, spec: ModelSpec) -> Pool | None:
        """Return the pool of a model; None if its GPUs are few, or of a kind whose energy is not known."""
        if self.view.count(spec.name) <= FEW:
            self._pools.pop(spec.name, None)
            return None
        pool = self._pools.get(spec.name)
        if pool is not None:
            return pool
        views = self.serving(now_ms, spec)
        luts = [lut for view in views if (lut := self.lut(view.summary.gpu_type, spec.name)) is not None]
        if not all(lut.device.has_meter for lut in luts):
            return None
        largest = [lut.request_bytes(spec.context_tokens) for lut in set(luts)]
        self._largest_bytes = max(self._largest_bytes, *largest, 0)
        pool = self._pools[spec.name] = Pool(spec, self.lut, self.view.is_stale, self._max_queued)
        for view in views:
            pool.put(view)
        return pool

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
        key = (gpu_type, model)
        if key not in self._luts:
            spec = self.models.get(model)
            try:
                self._luts[key] = None if spec is None else self._shelf.get(gpu_type, spec)
            except ConfigError:
                self._luts[key] = None
        return self._luts[key]
