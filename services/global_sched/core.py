"""The global scheduler: places each request on a GPU, or says why it cannot (3.3).

It holds nothing that the bus does not bring again within a heartbeat, except the requests that wait for their
model; those the gateway asks for again. Any number of replicas may run.
"""

import math
from collections.abc import Callable

from services.global_sched.asks import Ask, Refusal, Sent
from services.global_sched.fleet import Fleet
from services.global_sched.placing import Placing
from services.global_sched.predict import LearntRead, OutputPredictor, Predict
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import GpuView
from shared import events as ev
from shared.lut import Lut, lut_for, unpack
from shared.model import GpuSummary, ModelSpec
from shared.subjects import learnt_key


class GlobalSchedCore:
    """Core of one replica; see `step`.

    Args:
        scheduler: id of this replica, which GPUs name in `admitted_through` and in their refusals.
        luts: makes the look-up table of a model that has none in the store, on a GPU type; raises
            ConfigError for an unknown type. Pure.
        predict: predicts output lengths instead of what this scheduler learns itself, in experiments.
    """

    def __init__(
        self,
        scheduler: str,
        settings: GlobalSettings,
        luts: Callable[[str, ModelSpec], Lut] = lut_for,
        predict: Predict | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._predictor = OutputPredictor(
            settings.output_quantile, settings.margin, settings.prediction_window
        )
        self._unsaved: set[str] = set()  # models that something was learnt about
        self._save_ms = 0.0  # when they are to be stored
        self._fleet = Fleet(scheduler, settings, luts)
        self._view = self._fleet.view
        self._placing = Placing(scheduler, settings, self._fleet, predict or self._predictor.of_request)
        self._waiting, self._sent = self._placing.waiting, self._placing.sent
        self._scale_outs = self._placing.scale_outs

    @property
    def waiting(self) -> int:
        """Attempts that wait for their model."""
        return len(self._waiting)

    @property
    def reserved(self) -> tuple[int, int]:
        """Dispatches that no summary has counted yet, and their memory in bytes."""
        return self._view.reserved

    @property
    def wake_ms(self) -> float | None:
        """When a wait ends or a scale-out request is due again; None: nothing waits, or the bus is lost."""
        times = [self._save_ms] if self._unsaved else []
        oldest = self._waiting.oldest()
        if oldest is not None and not self._view.bus_lost:
            times.append(oldest[0] + self._settings.model_wait_ms)
            times += map(self._scale_outs.next_ms, self._waiting.models())
        return min(times, default=None)

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event at `now_ms` and return what is to be done about it."""
        match event:
            case ev.Dispatch():
                return self._dispatch(now_ms, event)
            case ev.Inquire():
                return self._inquire(now_ms, event)
            case ev.Refused():
                return self._refused(now_ms, event)
            case ev.SummaryChanged(summary=summary):
                return self._summary(now_ms, summary)
            case ev.RequestEnded():
                if event.model in self._fleet.models:  # else it is gone, and so is what was learnt of it
                    self._ended(now_ms, event)
                return []
            case ev.LutRead(packed=packed):
                lut = unpack(packed)
                unusable = self._fleet.put_lut(lut)
                labels = {"model": lut.model.name, "gpu_type": lut.device.name, "why": unusable}
                return [ev.Count(name="luts_read", labels=labels)]
            case LearntRead(learnt=learnt):
                self._predictor.restore(learnt)
                return []
            case ev.PlacementChanged(placement=placement):
                self._fleet.place(placement)
                return []
            case ev.HostWeights():
                self._fleet.caches.hear(now_ms, event)
                return []
            case ev.ModelRegistered(model=model):
                self._fleet.register(model)
                return []
            case ev.ModelRemoved(model=name):
                return self._removed(now_ms, name)
            case ev.BusLost():
                self._view.bus_lost = True
                return []
            case ev.BusRestored():
                self._fleet.restore(now_ms)
                self._scale_outs.restart(now_ms)
                return self._tick(now_ms)
            case ev.Tick():
                return [*self._save(now_ms), *self._tick(now_ms)]
            case _:
                raise AssertionError(f"the global scheduler does not listen to {type(event).__name__}")

    def _dispatch(self, now_ms: float, event: ev.Dispatch) -> list[ev.Action]:
        request = event.request
        waiting, sent = self._waiting.get(request.request_id), self._sent.get(request.request_id)
        known = waiting or (sent.ask if sent else None)
        newest = max(known.request.attempt if known else 0, self._placing.rejected.get(request.request_id, 0))
        if request.attempt < newest:
            return []
        if known is not None and request.attempt == known.request.attempt:
            return self._answer(now_ms, waiting, sent)
        if waiting is not None:
            self._waiting.leave(waiting)
        self._sent.pop(request.request_id)
        return self._placing.place(now_ms, Ask(request, event.excluded, heard_ms=now_ms, span_ms=now_ms))

    def _inquire(self, now_ms: float, event: ev.Inquire) -> list[ev.Action]:
        """Answer for an attempt that waits here or has been sent; any other is somebody else's."""
        waiting, sent = self._waiting.get(event.request_id), self._sent.get(event.request_id)
        ask = waiting or (sent.ask if sent else None)
        if ask is None or ask.request.attempt != event.attempt:
            return []
        answer = self._answer(now_ms, waiting, sent)
        if sent is None or self._view.get(sent.gpu, now_ms) is None:
            return answer
        placed = ev.Placed(request_id=event.request_id, attempt=event.attempt, gpu=sent.gpu)
        return [*answer, ev.Send(to=ask.request.gateway, message=placed)]

    def _answer(self, now_ms: float, waiting: Ask | None, sent: Sent | None) -> list[ev.Action]:
        """See to an attempt that is known: say that it waits, or send it again."""
        if waiting is not None:
            return [waiting.deferred(self._scheduler)]
        assert sent is not None
        return self._placing.again(now_ms, sent)

    def _refused(self, now_ms: float, event: ev.Refused) -> list[ev.Action]:
        sent = self._sent.get(event.request_id)
        if sent is None or sent.gpu != event.gpu or sent.ask.request.attempt != event.attempt:
            return []
        self._sent.pop(event.request_id)
        self._fleet.release(sent.gpu, sent.submit.dispatch_seq)
        sent.ask.refused[event.gpu] = Refusal(event, now_ms)
        count = ev.Count(name="refusals", labels={"model": sent.ask.request.model, "gpu": event.gpu})
        return [count, *self._placing.place(now_ms, sent.ask)]

    def _summary(self, now_ms: float, summary: GpuSummary) -> list[ev.Action]:
        view = self._fleet.hear(now_ms, summary)
        if view is None:
            return []
        actions: list[ev.Action] = []
        for engine in summary.engines if self._waiting else ():
            if engine.state != "ready":
                continue
            for ask in self._waiting.of(engine.model):
                if not self._may_try(now_ms, ask, view):
                    continue
                ask.refused.pop(summary.gpu, None)
                placed = self._placing.place(now_ms, ask)
                if not placed and not ask.refused:
                    break  # nobody has room for the next one either
                actions += placed
        return actions

    def _may_try(self, now_ms: float, ask: Ask, view: GpuView) -> bool:
        """Say whether a GPU may take an attempt, for all that it has refused it: what it said may be over."""
        refusal = ask.refused.get(view.gpu)
        if refusal is None:
            return True
        if now_ms - refusal.at_ms < self._settings.retry_refused_ms:
            return False
        model = ask.request.model
        if not refusal.message.never or view.ready_ms[model] > refusal.at_ms:
            return True
        lut = self._fleet.lut(view.summary.gpu_type, model)
        needed_bytes = lut.request_bytes(ask.request.context_tokens + 1) if lut else math.inf
        return view.engines[model].free_kv_bytes >= needed_bytes

    def _ended(self, now_ms: float, event: ev.RequestEnded) -> None:
        if event.output_tokens:
            self._placing.served(now_ms, event.model)
        if event.outcome == "stop":  # it ended of itself, so its length says something
            self._predictor.observe(event.model, event.input_tokens, event.output_tokens)
            if not self._unsaved:
                self._save_ms = now_ms + self._settings.prediction_save_ms
            self._unsaved.add(event.model)

    def _removed(self, now_ms: float, name: str) -> list[ev.Action]:
        self._fleet.remove(name)
        self._predictor.forget(name)
        self._unsaved.discard(name)
        actions: list[ev.Action] = [ev.Delete(key=learnt_key(self._scheduler, name))]
        actions += [action for ask in self._waiting.of(name) for action in self._placing.place(now_ms, ask)]
        self._placing.forget(name)
        return actions

    def _tick(self, now_ms: float) -> list[ev.Action]:
        if self._view.bus_lost:
            return []
        actions: list[ev.Action] = []
        while (oldest := self._waiting.oldest()) is not None:
            since_ms, ask = oldest
            if now_ms < since_ms + self._settings.model_wait_ms:
                break
            actions += self._placing.timed_out(now_ms, ask)
        for model in self._waiting.models():
            actions += self._placing.scale_out(now_ms, model, "requests_waiting")
        return actions

    def _save(self, now_ms: float) -> list[ev.Action]:
        """Store what was learnt since the last time."""
        if not self._unsaved or now_ms < self._save_ms:
            return []
        learnt = [self._predictor.learnt(self._scheduler, model) for model in sorted(self._unsaved)]
        self._unsaved.clear()
        ttl_ms = self._settings.prediction_ttl_ms
        return [ev.Put(key=learnt_key(self._scheduler, x.model), value=x, ttl_ms=ttl_ms) for x in learnt]
