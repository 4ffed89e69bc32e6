"""The global scheduler: places each request on a GPU, or says why it cannot (3.3).

It holds nothing that the bus does not bring again within a heartbeat, except the requests that wait for their
model; those the gateway asks for again. Any number of replicas may run.
"""

import math
from collections.abc import Callable

import msgspec

from services.global_sched import dispatch
from services.global_sched.asks import Ask, Refusal, Sent, SentBook, WaitingRoom
from services.global_sched.predict import LearntRead, OutputPredictor, Predict
from services.global_sched.scale_out import ScaleOuts
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView, GpuView, Reservation, lut_for
from shared import events as ev
from shared.errors import ConfigError
from shared.lut import Lut, unpack
from shared.model import GpuSummary, ModelSpec, Placement, Request, is_outdated
from shared.overload import NEWCOMERS_PART, DrainRate, ahead
from shared.shelf import Shelf
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
        self._shelf = Shelf(luts)
        self._view = ClusterView(
            scheduler, settings.stale_after_ms, settings.forget_after_ms, settings.reservation_ttl_ms
        )
        self._predictor = OutputPredictor(
            settings.output_quantile, settings.margin, settings.prediction_window
        )
        self._predict = predict or self._predictor.of_request
        self._unsaved: set[str] = set()  # models that something was learnt about
        self._save_ms = 0.0  # when they are to be stored
        self._models: dict[str, ModelSpec] = {}
        self._placement = Placement(version=0)
        self._waiting = WaitingRoom()
        self._sent = SentBook(settings.remember_ms, settings.max_remembered)
        self._rejected: dict[str, int] = {}  # by request, the highest attempt that was turned away
        self._scale_outs = ScaleOuts(scheduler, settings)
        self._drains: dict[str, DrainRate] = {}

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
                if event.output_tokens and event.model in self._models:
                    self._drain(event.model).note(now_ms)
                if event.outcome == "stop":  # it ended of itself, so its length says something
                    self._predictor.observe(event.model, event.input_tokens, event.output_tokens)
                    if not self._unsaved:
                        self._save_ms = now_ms + self._settings.prediction_save_ms
                    self._unsaved.add(event.model)
                return []
            case ev.LutRead(packed=packed):
                lut = unpack(packed)
                unusable = self._shelf.put(lut)
                labels = {"model": lut.model.name, "gpu_type": lut.device.name, "why": unusable}
                return [ev.Count(name="luts_read", labels=labels)]
            case LearntRead(learnt=learnt):
                self._predictor.restore(learnt)
                return []
            case ev.PlacementChanged(placement=placement):
                if placement.version >= self._placement.version:
                    self._placement = placement
                return []
            case ev.ModelRegistered(model=model):
                self._models[model.name] = model
                return []
            case ev.ModelRemoved(model=name):
                return self._removed(now_ms, name)
            case ev.BusLost():
                self._view.bus_lost = True
                return []
            case ev.BusRestored():
                self._view.restore(now_ms)
                self._scale_outs.restart(now_ms)
                return self._tick(now_ms)
            case ev.Tick():
                return [*self._save(now_ms), *self._tick(now_ms)]
            case _:
                raise AssertionError(f"the global scheduler does not listen to {type(event).__name__}")

    # ---- events

    def _dispatch(self, now_ms: float, event: ev.Dispatch) -> list[ev.Action]:
        request = event.request
        waiting, sent = self._waiting.get(request.request_id), self._sent.get(request.request_id)
        known = waiting or (sent.ask if sent else None)
        newest = max(known.request.attempt if known else 0, self._rejected.get(request.request_id, 0))
        if request.attempt < newest:
            return []
        if known is not None and request.attempt == known.request.attempt:
            return [waiting.deferred(self._scheduler)] if waiting else self._again(now_ms, sent)
        if waiting is not None:
            self._waiting.leave(waiting)
        self._sent.pop(request.request_id)
        return self._place(now_ms, Ask(request, event.excluded, heard_ms=now_ms, span_ms=now_ms))

    def _inquire(self, now_ms: float, event: ev.Inquire) -> list[ev.Action]:
        """Answer for an attempt that waits here or has been sent; any other is somebody else's."""
        waiting, sent = self._waiting.get(event.request_id), self._sent.get(event.request_id)
        ask = waiting or (sent.ask if sent else None)
        if ask is None or ask.request.attempt != event.attempt:
            return []
        if sent is None or self._view.get(sent.gpu, now_ms) is None:
            return [ask.deferred(self._scheduler)] if waiting else self._again(now_ms, sent)
        placed = ev.Placed(request_id=event.request_id, attempt=event.attempt, gpu=sent.gpu)
        return [*self._again(now_ms, sent), ev.Send(to=ask.request.gateway, message=placed)]

    def _again(self, now_ms: float, sent: Sent | None) -> list[ev.Action]:
        """A sent attempt is asked for again: the GPU's answer, or the Submit, may have been lost."""
        assert sent is not None
        if self._view.get(sent.gpu, now_ms) is None:  # nobody there to answer
            self._sent.pop(sent.ask.request.request_id)
            return self._place(now_ms, sent.ask)
        if now_ms - sent.sent_ms < self._settings.resend_after_ms:
            return []
        sent.sent_ms = now_ms
        sent.submit = msgspec.structs.replace(sent.submit, request=sent.ask.request_as_of(now_ms))
        self._sent.put(sent)
        return [
            ev.Send(to=sent.gpu, message=sent.submit),
            ev.Count(name="submits_repeated", labels={"model": sent.ask.request.model}),
        ]

    def _refused(self, now_ms: float, event: ev.Refused) -> list[ev.Action]:
        sent = self._sent.get(event.request_id)
        if sent is None or sent.gpu != event.gpu or sent.ask.request.attempt != event.attempt:
            return []
        self._sent.pop(event.request_id)
        self._view.release(sent.gpu, sent.submit.dispatch_seq)
        sent.ask.refused[event.gpu] = Refusal(event, now_ms)
        count = ev.Count(name="refusals", labels={"model": sent.ask.request.model, "gpu": event.gpu})
        return [count, *self._place(now_ms, sent.ask)]

    def _summary(self, now_ms: float, summary: GpuSummary) -> list[ev.Action]:
        view = self._view.hear(now_ms, summary)
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
                placed = self._place(now_ms, ask)
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
        lut = self._lut(view.summary.gpu_type, model)
        needed_bytes = lut.request_bytes(ask.request.context_tokens + 1) if lut else math.inf
        return view.engines[model].free_kv_bytes >= needed_bytes

    def _drain(self, model: str) -> DrainRate:
        return self._drains.setdefault(model, DrainRate(self._settings.drain_window_ms))

    def _removed(self, now_ms: float, name: str) -> list[ev.Action]:
        self._models.pop(name, None)
        self._predictor.forget(name)
        self._unsaved.discard(name)
        actions: list[ev.Action] = [ev.Delete(key=learnt_key(self._scheduler, name))]
        actions += [action for ask in self._waiting.of(name) for action in self._place(now_ms, ask)]
        self._scale_outs.forget(name)
        self._drains.pop(name, None)
        return actions

    def _tick(self, now_ms: float) -> list[ev.Action]:
        if self._view.bus_lost:
            return []
        actions: list[ev.Action] = []
        while (oldest := self._waiting.oldest()) is not None:
            since_ms, ask = oldest
            if now_ms < since_ms + self._settings.model_wait_ms:
                break
            actions += self._timed_out(now_ms, ask)
        for model in self._waiting.models():
            actions += self._scale_out(now_ms, model, "requests_waiting")
        return actions

    def _save(self, now_ms: float) -> list[ev.Action]:
        """Store what was learnt since the last time."""
        if not self._unsaved or now_ms < self._save_ms:
            return []
        learnt = [self._predictor.learnt(self._scheduler, model) for model in sorted(self._unsaved)]
        self._unsaved.clear()
        ttl_ms = self._settings.prediction_ttl_ms
        return [ev.Put(key=learnt_key(self._scheduler, x.model), value=x, ttl_ms=ttl_ms) for x in learnt]

    # ---- placing

    def _place(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        """Submit, reject, or keep an attempt; one that goes on waiting yields nothing."""
        request, settings = ask.request, self._settings
        spec = self._models.get(request.model)
        if spec is None:
            text = f"The model {request.model!r} does not exist here."
            return self._reject(now_ms, ask, 404, "model_not_found", text)
        if request.context_tokens >= spec.context_tokens:
            text = (
                f"The prompt has {request.context_tokens} tokens, which leaves no room for output in the "
                f"context of {spec.context_tokens} tokens of {spec.name}. Shorten the prompt."
            )
            return self._reject(now_ms, ask, 400, "context_length_exceeded", text)
        serving = self._serving(now_ms, spec)
        untried = [view for view in serving if view.gpu not in ask.refused]
        if not untried:
            refusals = [ask.refused[view.gpu].message for view in serving]
            if serving and all(refusal.never for refusal in refusals):
                text = f"No GPU that serves {spec.name} has room for this request: {refusals[0].reason}."
                return self._reject(now_ms, ask, 400, "context_length_exceeded", text)
            if not serving or not all(refusal.full or refusal.never for refusal in refusals):
                return self._wait(now_ms, ask)
        roomy = [view for view in untried if view.queued(spec.name) < settings.max_queued]
        if not roomy:
            return self._overload(
                now_ms, ask, sum(view.queued(spec.name) for view in serving) / NEWCOMERS_PART
            )
        excess = self._excess(now_ms, ask, roomy)
        if excess > 0:
            return self._overload(now_ms, ask, excess)
        views = [view for view in roomy if view.gpu not in ask.excluded] or roomy
        work = self._work(now_ms, ask, spec)
        decision = dispatch.decide(views, work, self._lut, now_ms, settings.tie)
        actions = self._note(now_ms, spec.name, dispatch.lacks_capacity(decision, work))
        if decision.reason == "best_effort" and not settings.best_effort:
            text = f"No GPU can serve {spec.name} within the objectives now. Try again later."
            return [*actions, *self._reject(now_ms, ask, 503, "objectives_infeasible", text)]
        view = next(view for view in views if view.gpu == decision.candidate.gpu)
        return [*actions, *self._submit(now_ms, ask, view, work, decision, len(views))]

    def _submit(
        self,
        now_ms: float,
        ask: Ask,
        view: GpuView,
        work: dispatch.Work,
        decision: dispatch.Decision,
        candidates: int,
    ) -> list[ev.Action]:
        request = ask.request
        lut = self._lut(view.summary.gpu_type, request.model)
        assert lut is not None
        kv_bytes = lut.request_bytes(work.input_tokens + work.output_tokens)
        due_ms = now_ms + work.objectives.ttft_ms - work.waited_ms
        reservation = Reservation(request.model, kv_bytes, work.input_tokens, due_ms, now_ms)
        submit = ev.Submit(
            request=ask.request_as_of(now_ms),
            scheduler=self._scheduler,
            dispatch_seq=self._view.reserve(view, reservation),
            predicted_output_tokens=len(request.output_tokens) + work.output_tokens,
            reason=decision.reason,
        )
        self._waiting.leave(ask)
        self._sent.put(Sent(ask, view.gpu, submit, now_ms))
        labels = {"model": request.model, "gpu": view.gpu, "reason": decision.reason}
        attributes = {
            "festina.gpu": view.gpu,
            "festina.reason": decision.reason,
            "festina.candidates": candidates,
            "festina.predicted_output_tokens": submit.predicted_output_tokens,
        }
        return [
            ev.Send(to=view.gpu, message=submit),
            ev.Count(name="dispatches", labels=labels),
            *ask.span(now_ms, attributes),
        ]

    def _wait(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        """Keep an attempt until a GPU has its model ready, and see to it that one will."""
        if ask.since_ms is not None:
            return []
        model = ask.request.model
        if now_ms - ask.heard_ms >= self._settings.model_wait_ms:  # it has waited, and was refused again
            return self._timed_out(now_ms, ask)
        if not self._waiting.has_room(ask.request, self._settings.max_pending):
            text = f"{model} is being loaded and too many requests wait already. Try again later."
            return self._reject(now_ms, ask, 503, "overloaded", text)
        self._waiting.enter(now_ms, ask)
        return [*self._scale_out(now_ms, model, "no_instance"), ask.deferred(self._scheduler)]

    def _excess(self, now_ms: float, ask: Ask, views: list[GpuView]) -> float:
        """Return how many requests too many are before a new one for it to start in time; at most 0 if none.

        Of the queues only that part counts which goes before it where tenants take turns, and of the pace
        what was served lately; where that is not known, nobody is turned away. Nor is one that has begun
        elsewhere.
        """
        request = ask.request
        rate_per_s = self._drain(request.model).per_s(now_ms)
        if rate_per_s is None or request.attempt > 1 or ask.since_ms is not None:
            return 0.0
        queues = (view.engines[request.model].queued_of for view in views)
        before = sum(ahead(queue, request.tenant, request.tenant_weight) for queue in queues)
        return before - rate_per_s * self._settings.max_start_ms / 1000.0

    def _overload(self, now_ms: float, ask: Ask, excess: float) -> list[ev.Action]:
        """No room, or none in time: an attempt that waits goes on, a new one is turned away.

        `excess` requests must be served before trying again makes sense.
        """
        if ask.since_ms is not None:
            return []
        model = ask.request.model
        text = f"Every queue for {model} is full, or too long to start soon. Try again later."
        return [*self._note(now_ms, model, True), *self._reject(now_ms, ask, 429, "overloaded", text, excess)]

    def _timed_out(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        model = ask.request.model
        engines = (view.engines[model] for view in self._view.with_model(model, now_ms))
        reasons = [engine.reason for engine in engines if engine.state == "failed"]
        reasons += [refusal.message.reason for refusal in ask.refused.values()]
        why = next((f" ({reason})" for reason in reasons if reason), "")
        waited_s = self._settings.model_wait_ms / 1000
        text = f"{model} was not ready within {waited_s:g} s{why}. Try again later."
        return self._reject(now_ms, ask, 503, "model_loading", text)

    def _reject(
        self, now_ms: float, ask: Ask, status: int, code: str, message: str, excess: float = 0.0
    ) -> list[ev.Action]:
        self._waiting.leave(ask)
        self._remember_rejected(ask.request)
        retry_after_s = self._settings.retry_after_s
        if excess > 0:
            retry_after_s = self._drain(ask.request.model).retry_after_s(now_ms, excess, retry_after_s)
        return ask.rejected(now_ms, status, code, message, retry_after_s)

    def _remember_rejected(self, request: Request) -> None:
        """Keep in mind that no lower attempt is wanted: a late one must not be placed."""
        self._rejected.pop(request.request_id, None)
        self._rejected[request.request_id] = request.attempt
        if len(self._rejected) > self._settings.max_remembered:
            del self._rejected[next(iter(self._rejected))]

    def _note(self, now_ms: float, model: str, late: bool) -> list[ev.Action]:
        """Count a dispatch, and ask for a further instance if the deficit is sustained."""
        if self._scale_outs.note(now_ms, model, late):
            return self._scale_out(now_ms, model, "sustained_deficit")
        return []

    def _scale_out(self, now_ms: float, model: str, reason: str) -> list[ev.Action]:
        engines = (view.engines[model] for view in self._view.with_model(model, now_ms))
        loading = any(engine.state == "loading" for engine in engines)
        return self._scale_outs.ask(now_ms, model, reason, loading)

    # ---- what is known

    def _serving(self, now_ms: float, spec: ModelSpec) -> list[GpuView]:
        """Return the GPUs that have the model ready and take new work."""
        return [
            view
            for view in self._view.with_model(spec.name, now_ms)
            if view.engines[spec.name].state == "ready"
            and not is_outdated(view.engines[spec.name], spec)
            and view.summary.engine == spec.engine
            and view.summary.state != "draining"
            and view.gpu not in self._placement.drained
            and self._lut(view.summary.gpu_type, spec.name) is not None
        ]

    def _lut(self, gpu_type: str, model: str) -> Lut | None:
        spec = self._models.get(model)
        if spec is None:
            return None
        try:
            return self._shelf.get(gpu_type, spec)
        except ConfigError:  # a GPU of a type this version does not know: it is not used
            return None

    def _work(self, now_ms: float, ask: Ask, spec: ModelSpec) -> dispatch.Work:
        request = ask.request
        given = len(request.output_tokens)
        predicted = self._predict(request, spec.context_tokens)
        return dispatch.Work(
            spec.name,
            request.context_tokens,
            predicted - given,
            ask.waited_ms(now_ms),
            request.objectives,
        )
