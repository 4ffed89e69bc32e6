"""The global scheduler: places each request on a GPU, or says why it cannot (3.3).

It holds nothing that the bus does not bring again within a heartbeat, except the requests that wait for their
model; those the gateway asks for again. Any number of replicas may run.
"""

from collections.abc import Callable

import msgspec

from services.global_sched import dispatch
from services.global_sched.asks import Ask, Sent, SentBook, WaitingRoom
from services.global_sched.predict import OutputPredictor
from services.global_sched.scale_out import ScaleOuts
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView, GpuView, Reservation, lut_for
from shared import events as ev
from shared.errors import ConfigError
from shared.lut import Lut
from shared.model import GpuSummary, ModelSpec, Placement


class GlobalSchedCore:
    """Core of one replica; see `step`.

    Args:
        scheduler: id of this replica, which GPUs name in `admitted_through` and in their refusals.
        luts: gives the look-up table of a model on a GPU type; raises ConfigError for an unknown type. Pure.
    """

    def __init__(
        self,
        scheduler: str,
        settings: GlobalSettings,
        luts: Callable[[str, ModelSpec], Lut] = lut_for,
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._luts = luts
        self._view = ClusterView(
            scheduler, settings.stale_after_ms, settings.forget_after_ms, settings.reservation_ttl_ms
        )
        self._predictor = OutputPredictor(
            settings.output_quantile, settings.margin, settings.prediction_window
        )
        self._models: dict[str, ModelSpec] = {}
        self._placement = Placement(version=0)
        self._waiting = WaitingRoom()
        self._sent = SentBook(settings.remember_ms, settings.max_remembered)
        self._scale_outs = ScaleOuts(scheduler, settings)

    @property
    def wake_ms(self) -> float | None:
        """When a wait ends or a scale-out request is due again; None: nothing waits, or the bus is lost."""
        oldest = self._waiting.oldest()
        if oldest is None or self._view.bus_lost:
            return None
        ends_ms = oldest[0] + self._settings.model_wait_ms
        return min(ends_ms, *map(self._scale_outs.next_ms, self._waiting.models()))

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event at `now_ms` and return what is to be done about it."""
        match event:
            case ev.Dispatch():
                return self._dispatch(now_ms, event)
            case ev.Refused():
                return self._refused(now_ms, event)
            case ev.SummaryChanged(summary=summary):
                return self._summary(now_ms, summary)
            case ev.RequestEnded():
                if event.outcome == "stop":  # it ended of itself, so its length says something
                    self._predictor.observe(event.model, event.input_tokens, event.output_tokens)
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
                return self._tick(now_ms)
            case _:
                raise AssertionError(f"the global scheduler does not listen to {type(event).__name__}")

    # ---- events

    def _dispatch(self, now_ms: float, event: ev.Dispatch) -> list[ev.Action]:
        request = event.request
        waiting, sent = self._waiting.get(request.request_id), self._sent.get(request.request_id)
        known = waiting or (sent.ask if sent else None)
        if known is not None and request.attempt < known.request.attempt:
            return []
        if known is not None and request.attempt == known.request.attempt:
            return [waiting.deferred(self._scheduler)] if waiting else self._again(now_ms, sent)
        if waiting is not None:
            self._waiting.leave(waiting)
        self._sent.pop(request.request_id)
        return self._place(now_ms, Ask(request, event.excluded, heard_ms=now_ms, span_ms=now_ms))

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
        sent.ask.refused[event.gpu] = event
        count = ev.Count(name="refusals", labels={"model": sent.ask.request.model, "gpu": event.gpu})
        return [count, *self._place(now_ms, sent.ask)]

    def _summary(self, now_ms: float, summary: GpuSummary) -> list[ev.Action]:
        if self._view.hear(now_ms, summary) is None:
            return []
        actions: list[ev.Action] = []
        for engine in summary.engines if self._waiting else ():
            if engine.state != "ready":
                continue
            for ask in self._waiting.of(engine.model):
                ask.refused.pop(summary.gpu, None)  # it speaks anew
                placed = self._place(now_ms, ask)
                if not placed and not ask.refused:
                    break  # nobody has room for the next one either
                actions += placed
        return actions

    def _removed(self, now_ms: float, name: str) -> list[ev.Action]:
        self._models.pop(name, None)
        self._predictor.forget(name)
        actions = [action for ask in self._waiting.of(name) for action in self._place(now_ms, ask)]
        self._scale_outs.forget(name)
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
        if not untried and not (serving and all(ask.refused[v.gpu].full for v in serving)):
            return self._wait(now_ms, ask)
        roomy = [view for view in untried if view.queued(spec.name) < settings.max_queued]
        if not roomy:
            return self._overload(now_ms, ask)
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
        reservation = Reservation(request.model, kv_bytes, decision.candidate.prefill_ms, now_ms)
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
        if len(self._waiting) >= self._settings.max_pending:
            text = f"{model} is being loaded and too many requests wait already. Try again later."
            return self._reject(now_ms, ask, 503, "overloaded", text)
        self._waiting.enter(now_ms, ask)
        return [*self._scale_out(now_ms, model, "no_instance"), ask.deferred(self._scheduler)]

    def _overload(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        """All who serve the model have no room: an attempt that waits goes on, a new one is turned away."""
        if ask.since_ms is not None:
            return []
        model = ask.request.model
        text = f"Every GPU that serves {model} has a full queue. Try again later."
        return [*self._note(now_ms, model, True), *self._reject(now_ms, ask, 429, "overloaded", text)]

    def _timed_out(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        model = ask.request.model
        engines = (view.engines[model] for view in self._view.with_model(model, now_ms))
        reasons = [engine.reason for engine in engines if engine.state == "failed"]
        reasons += [refusal.reason for refusal in ask.refused.values()]
        why = next((f" ({reason})" for reason in reasons if reason), "")
        waited_s = self._settings.model_wait_ms / 1000
        text = f"{model} was not ready within {waited_s:g} s{why}. Try again later."
        return self._reject(now_ms, ask, 503, "model_loading", text)

    def _reject(self, now_ms: float, ask: Ask, status: int, code: str, message: str) -> list[ev.Action]:
        self._waiting.leave(ask)
        return ask.rejected(now_ms, status, code, message, self._settings.retry_after_s)

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
            return self._luts(gpu_type, spec)
        except ConfigError:  # a GPU of a type this version does not know: it is not used
            return None

    def _work(self, now_ms: float, ask: Ask, spec: ModelSpec) -> dispatch.Work:
        request = ask.request
        given = len(request.output_tokens)
        predicted = self._predictor.predict(
            spec.name, len(request.prompt_tokens), request.max_tokens, spec.context_tokens, given
        )
        return dispatch.Work(
            spec.name,
            request.context_tokens,
            predicted - given,
            ask.waited_ms(now_ms),
            request.objectives,
        )
