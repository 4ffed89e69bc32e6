"""What one global scheduler knows of the GPUs: their newest summaries, less its own dispatches since (3.3).

The paper polls every local scheduler per request; here summaries arrive by themselves and a request only
looks them up. Between two summaries the scheduler's own reservations keep a burst from piling up on one GPU.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.model import EngineSummary, GpuSummary, StairStep

if TYPE_CHECKING:
    from services.global_sched.estimate import Stance


class Reservation:
    """One dispatch that the GPU's summaries do not count yet: its memory, and its prompt, due at `due_ms`."""

    def __init__(self, model: str, kv_bytes: int, input_tokens: int, due_ms: float, sent_ms: float) -> None:
        self.model, self.kv_bytes, self.input_tokens = model, kv_bytes, input_tokens
        self.due_ms, self.sent_ms = due_ms, sent_ms


@dataclass(slots=True)
class GpuView:
    """One GPU: the newest summary, when it came, and the reservations on top of it.

    Another `started_ms` in the summary is another process, with nothing of what was sent to the one before.
    `ready_ms` is since when each engine has been ready without a break, as far as summaries tell.
    `reserved_bytes` is the memory of all dispatches that are not in the summary yet. `stances` and `beside`
    keep what `estimate` has made of the state; what stands beside a model is the same after a reservation.
    """

    summary: GpuSummary
    heard_ms: float
    engines: dict[str, EngineSummary] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    reserved_requests: dict[str, int] = field(default_factory=dict)  # by model
    reserved_bytes_of: dict[str, int] = field(default_factory=dict)  # by model
    ready_ms: dict[str, float] = field(default_factory=dict)
    stances: "dict[str, dict[tuple[int, bool], Stance]]" = field(default_factory=dict)
    beside: dict[tuple[str, int, int], tuple[float, float, bool]] = field(default_factory=dict)
    reserved_bytes: int = 0
    last_seq: int = 0

    @property
    def gpu(self) -> str:
        """Id of the GPU."""
        return self.summary.gpu

    @property
    def free_bytes(self) -> int:
        """Memory free now, in bytes."""
        return self.summary.free_bytes - self.reserved_bytes

    def queued(self, model: str) -> int:
        """Requests that wait for a model's engine, dispatches not yet in its summary included."""
        return self.engines[model].queued + self.reserved_requests.get(model, 0)

    def available(self, model: str, kv_bytes: int, now_ms: float) -> tuple[float, int]:
        """Return (T_avail in ms from now, SM share in percent that the model's engine can use then).

        T_avail is when `kv_bytes` are expected to be free; infinite if the staircase never frees them. Where
        no SM share is free at that moment, it is the next moment at which there is.
        """
        engine = self.engines[model]
        # A request joins its model's engine: it uses the share that this holds besides what is free.
        own_share = engine.sm_share_pct if engine.running else 0
        needed_bytes = kv_bytes + self._reserved_beside(engine)
        for step in engine.staircase or self._staircase():
            share_pct = self._share_pct(step, own_share)
            if step.free_bytes >= needed_bytes and share_pct > 0:
                return max(0.0, self.heard_ms + step.after_ms - now_ms), share_pct
        return float("inf"), 0

    def shares(self, model: str) -> dict[int, tuple[float, int]]:
        """Return the SM shares that a model's engine will find free, in the order in which it does.

        With each goes the time from which it is free (absolute, in ms), and the most memory free with it.
        """
        engine = self.engines[model]
        own_share = engine.sm_share_pct if engine.running else 0
        reserved_bytes = self._reserved_beside(engine)
        found: dict[int, tuple[float, int]] = {}
        for step in engine.staircase or self._staircase():
            share_pct = self._share_pct(step, own_share)
            if share_pct > 0:
                from_ms, most_bytes = found.get(share_pct, (self.heard_ms + step.after_ms, -1))
                found[share_pct] = from_ms, max(most_bytes, step.free_bytes - reserved_bytes)
        return found

    def _share_pct(self, step: StairStep, own_share: int) -> int:
        """Return the SM share that an engine can use from a step of the staircase on."""
        return self.summary.fixed_share_pct or min(100, step.free_sm_share_pct + own_share)

    def _reserved_beside(self, engine: EngineSummary) -> int:
        """Return the bytes reserved in the memory an engine draws from: its own pool, or the device's."""
        if engine.staircase:
            return self.reserved_bytes_of.get(engine.model, 0)
        reserved_bytes = self.reserved_bytes
        if reserved_bytes:
            for name, other in self.engines.items():
                if other.staircase:  # a pool of its own
                    reserved_bytes -= self.reserved_bytes_of.get(name, 0)
        return reserved_bytes

    def prefills(self, model: str) -> list[tuple[float, float, int, int]]:
        """Return what a model's engine has to prefill, dispatches not yet in its summary included.

        Each is (due, told, count, tokens), both times absolute in ms; the earliest due comes first.
        """
        heard_ms = self.heard_ms
        waiting = [(heard_ms + p.due_ms, heard_ms, p.count, p.tokens) for p in self.engines[model].prefills]
        if self.reserved_requests.get(model):
            mine = (r for r in self.reservations.values() if r.model == model)
            waiting += [(r.due_ms, r.sent_ms, 1, r.input_tokens) for r in mine]
        waiting.sort()
        return waiting

    def _staircase(self) -> tuple[StairStep, ...]:
        if self.summary.staircase:
            return self.summary.staircase
        used_pct = sum(e.sm_share_pct for e in self.engines.values() if e.running)
        free_pct = max(0, 100 - used_pct)
        return (StairStep(after_ms=0.0, free_bytes=self.summary.free_bytes, free_sm_share_pct=free_pct),)

    def reserve(self, reservation: Reservation) -> int:
        """Count a dispatch until the summary does; returns its number, from 1 on."""
        self.last_seq += 1
        self.reservations[self.last_seq] = reservation
        self._count(reservation.model, 1, reservation.kv_bytes)
        return self.last_seq

    def drop(self, seqs: list[int]) -> None:
        """Stop counting these dispatches."""
        for seq in seqs:
            gone = self.reservations.pop(seq)
            self._count(gone.model, -1, -gone.kv_bytes)
        if not self.reservations:
            self.reserved_requests.clear()
            self.reserved_bytes_of.clear()

    def _count(self, model: str, requests: int, kv_bytes: int) -> None:
        """So many more are reserved; how it stands for the model's next request is to be found anew."""
        self.reserved_requests[model] = self.reserved_requests.get(model, 0) + requests
        self.reserved_bytes_of[model] = self.reserved_bytes_of.get(model, 0) + kv_bytes
        self.reserved_bytes += kv_bytes
        self.stances.pop(model, None)

    def forget_stances(self) -> None:
        """Its state, or something else that they were made from, has changed."""
        self.stances.clear()
        self.beside.clear()

    def expire(self, now_ms: float, ttl_ms: float) -> None:
        """Stop counting the dispatches that the GPU has not confirmed in time."""
        if self.reservations:
            self.drop([s for s, r in self.reservations.items() if now_ms - r.sent_ms >= ttl_ms])


class ClusterView:
    """All GPUs, with an index from model to the GPUs that have an engine for it.

    Args:
        scheduler: this scheduler's id, under which GPUs confirm its dispatches.
    """

    def __init__(
        self, scheduler: str, stale_after_ms: float, forget_after_ms: float, reservation_ttl_ms: float
    ) -> None:
        self._scheduler = scheduler
        self._stale_after_ms = stale_after_ms
        self._forget_after_ms = forget_after_ms
        self._ttl_ms = reservation_ttl_ms
        self._forget_ms = 0.0
        self._gpus: dict[str, GpuView] = {}
        self._by_model: dict[str, dict[str, GpuView]] = {}
        self.bus_lost = False

    def __len__(self) -> int:
        return len(self._gpus)

    @property
    def reserved(self) -> tuple[int, int]:
        """Dispatches that no summary counts yet, and their memory in bytes."""
        views = self._gpus.values()
        return sum(len(view.reservations) for view in views), sum(view.reserved_bytes for view in views)

    def hear(self, now_ms: float, summary: GpuSummary) -> GpuView | None:
        """Take a summary in; None if a newer one of that GPU is known."""
        view = self._gpus.get(summary.gpu)
        if view is None:
            view = self._gpus[summary.gpu] = GpuView(summary, now_ms)
        else:
            old = view.summary
            if (summary.started_ms, summary.seq) <= (old.started_ms, old.seq):
                return None
            if summary.started_ms != old.started_ms:
                view.drop(list(view.reservations))
                view.ready_ms = {}
        view.summary, view.heard_ms = summary, now_ms
        engines = {engine.model: engine for engine in summary.engines}
        for model in view.engines.keys() - engines.keys():
            self._unindex(model, summary.gpu)
        for model in engines:
            self._by_model.setdefault(model, {})[summary.gpu] = view
        view.engines = engines
        view.forget_stances()
        view.ready_ms = {
            model: view.ready_ms.get(model, now_ms)
            for model, engine in engines.items()
            if engine.state == "ready"
        }
        counted = summary.admitted_through.get(self._scheduler, 0)
        view.drop([seq for seq in view.reservations if seq <= counted])
        view.expire(now_ms, self._ttl_ms)
        view.last_seq = max(view.last_seq, counted)  # numbers go on where an earlier run of this id ended
        return view

    def known(self, gpu: str) -> GpuView | None:
        """Return a GPU, stale or not; None if it has not been heard of, or is forgotten."""
        return self._gpus.get(gpu)

    def get(self, gpu: str, now_ms: float) -> GpuView | None:
        """Return a GPU that is not stale, or None."""
        view = self._gpus.get(gpu)
        return None if view is None or self.is_stale(view, now_ms) else view

    def with_model(self, model: str, now_ms: float) -> list[GpuView]:
        """Return the GPUs, not stale, that have an engine for the model in whatever state.

        Cost: linear in the GPUs that have the model.
        """
        return [view for view in self.having(model) if not self.is_stale(view, now_ms)]

    def having(self, model: str) -> list[GpuView]:
        """Return the GPUs, silent ones among them, that have an engine for the model in whatever state."""
        return list(self._by_model.get(model, {}).values())

    def count(self, model: str) -> int:
        """Return how many GPUs, silent ones among them, have an engine for the model."""
        return len(self._by_model.get(model, ()))

    def heard(self, now_ms: float) -> list[GpuView]:
        """Return all GPUs that are not stale."""
        return [view for view in self._gpus.values() if not self.is_stale(view, now_ms)]

    def release(self, gpu: str, seq: int) -> GpuView | None:
        """Drop a reservation, because the GPU has refused the request; None if it is not known any more."""
        view = self._gpus.get(gpu)
        if view is None or seq not in view.reservations:
            return None
        view.drop([seq])
        return view

    def restore(self, now_ms: float) -> None:
        """The bus is back: every GPU gets a fresh period in which to be heard."""
        self.bus_lost = False
        for view in self._gpus.values():
            view.heard_ms = now_ms
            view.forget_stances()

    def forget(self, now_ms: float) -> list[GpuView]:
        """Remove and return GPUs that have been silent for very long: ids that are gone must not add up.

        They are looked for only from time to time.
        """
        if self.bus_lost or now_ms < self._forget_ms:
            return []
        self._forget_ms = now_ms + self._forget_after_ms / 10
        gone = [view for view in self._gpus.values() if now_ms - view.heard_ms >= self._forget_after_ms]
        for view in gone:
            for model in view.engines:
                self._unindex(model, view.gpu)
            del self._gpus[view.gpu]
        return gone

    def _unindex(self, model: str, gpu: str) -> None:
        gpus = self._by_model[model]
        del gpus[gpu]
        if not gpus:
            del self._by_model[model]

    def is_stale(self, view: GpuView, now_ms: float) -> bool:
        """Say whether a GPU has been silent for too long to be used."""
        return not self.bus_lost and now_ms - view.heard_ms >= self._stale_after_ms
