"""Where an attempt goes (3.3): to a GPU, into the waiting room, or back with the reason why not."""

import math

import msgspec

from services.global_sched import dispatch, reasons
from services.global_sched.asks import Ask, Sent, SentBook, WaitingRoom
from services.global_sched.choices import CHOICES
from services.global_sched.dispatch import Decision
from services.global_sched.estimate import Work
from services.global_sched.fleet import Fleet
from services.global_sched.predict import Predict
from services.global_sched.scale_out import ScaleOuts
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import GpuView, Reservation
from shared import events as ev
from shared.model import ModelSpec, Request
from shared.overload import NEWCOMERS_PART, DrainRate, ahead


class Placing:
    """Places attempts; owns those that wait, those sent and those turned away.

    Args:
        scheduler: id of this replica.
        predict: predicts output lengths.
    """

    def __init__(self, scheduler: str, settings: GlobalSettings, fleet: Fleet, predict: Predict) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._fleet = fleet
        self._predict = predict
        self.waiting = WaitingRoom()
        self.sent = SentBook(settings.remember_ms, settings.max_remembered)
        self.rejected: dict[str, int] = {}  # by request, the highest attempt that was turned away
        self.scale_outs = ScaleOuts(scheduler, settings)
        self._drains: dict[str, DrainRate] = {}
        self._choose = CHOICES[settings.choice]

    def served(self, now_ms: float, model: str) -> None:
        """A request of the model has had its answer."""
        self._drain(model).note(now_ms)

    def forget(self, model: str) -> None:
        """Drop what is kept for a model that is gone."""
        self.scale_outs.forget(model)
        self._drains.pop(model, None)

    def _drain(self, model: str) -> DrainRate:
        return self._drains.setdefault(model, DrainRate(self._settings.drain_window_ms))

    def place(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        """Submit, reject, or keep an attempt; one that goes on waiting yields nothing."""
        request = ask.request
        spec = self._fleet.models.get(request.model)
        if spec is None:
            text = f"The model {request.model!r} does not exist here."
            return self._reject(now_ms, ask, 404, ev.MODEL_NOT_FOUND, text)
        if request.context_tokens >= spec.context_tokens:
            text = (
                f"The prompt has {request.context_tokens} tokens, which leaves no room for output in the "
                f"context of {spec.context_tokens} tokens of {spec.name}. Shorten the prompt."
            )
            return self._reject(now_ms, ask, 400, "context_length_exceeded", text)
        pool = self._fleet.pool(now_ms, spec)
        # as if all that wait in the pool were before it
        if pool is not None and pool.queued <= self._most_before(now_ms, spec.name):
            work = self._work(now_ms, ask, spec)
            skipped = {*ask.refused, *ask.excluded}
            traced = bool(request.traceparent)
            decision = pool.decide(work, now_ms, skipped, self._settings.tie, traced)
            if decision is not None:
                return self._decided(now_ms, ask, work, decision, len(pool))
        return self._place_among(now_ms, ask, spec)

    def _place_among(self, now_ms: float, ask: Ask, spec: ModelSpec) -> list[ev.Action]:
        """Place an attempt by looking at all GPUs that serve its model: few, or short of everything."""
        serving = self._fleet.serving(now_ms, spec)
        untried = [view for view in serving if view.gpu not in ask.refused]
        if not untried:
            refusals = [ask.refused[view.gpu].message for view in serving]
            if serving and all(refusal.never for refusal in refusals):
                text = f"No GPU that serves {spec.name} has room for this request: {refusals[0].reason}."
                return self._reject(now_ms, ask, 400, "context_length_exceeded", text)
            if not serving or not all(refusal.full or refusal.never for refusal in refusals):
                return self._wait(now_ms, ask, spec)
        roomy = [view for view in untried if view.queued(spec.name) < self._settings.max_queued]
        if not roomy:
            queued = sum(view.queued(spec.name) for view in serving)
            return self._overload(now_ms, ask, queued / NEWCOMERS_PART)
        excess = self._excess(now_ms, ask, roomy)
        if excess > 0:
            return self._overload(now_ms, ask, excess)
        views = [view for view in roomy if view.gpu not in ask.excluded] or roomy
        work = self._work(now_ms, ask, spec)
        decision = self._choose(views, work, self._fleet.curves, now_ms, self._settings.tie)
        return self._decided(now_ms, ask, work, decision, len(views))

    def _decided(
        self, now_ms: float, ask: Ask, work: Work, decision: Decision, candidates: int
    ) -> list[ev.Action]:
        """Carry out a decision, or refuse what would be late where the settings say so."""
        actions = self._note(now_ms, work.model, dispatch.lacks_capacity(decision, work))
        if decision.reason == "best_effort" and not self._settings.best_effort:
            text = f"No GPU can serve {work.model} within the objectives now. Try again later."
            attributes = reasons.refused(decision, work, text) if ask.request.traceparent else {}
            rejected = self._reject(now_ms, ask, 503, "objectives_infeasible", text, attributes=attributes)
            return [*actions, *rejected]
        view = self._fleet.view.get(decision.candidate.gpu, now_ms)
        assert view is not None, "only GPUs that are heard of are chosen"
        return [*actions, *self._submit(now_ms, ask, view, work, decision, candidates)]

    def _submit(
        self, now_ms: float, ask: Ask, view: GpuView, work: Work, decision: Decision, candidates: int
    ) -> list[ev.Action]:
        request = ask.request
        lut = self._fleet.lut(view.summary.gpu_type, request.model)
        assert lut is not None
        kv_bytes = lut.request_bytes(work.input_tokens + work.output_tokens)
        decoder = self._fleet.decoder(now_ms, self._fleet.models[request.model], view)
        reservation = Reservation(request.model, kv_bytes, work.input_tokens, now_ms + work.left_ms, now_ms)
        submit = ev.Submit(
            request=ask.request_as_of(now_ms),
            scheduler=self._scheduler,
            dispatch_seq=self._fleet.reserve(view, reservation),
            predicted_output_tokens=len(request.output_tokens) + work.output_tokens,
            reason=decision.reason,
            decode_gpu=decoder.gpu if decoder else "",
            decode_host=decoder.summary.host if decoder else "",
        )
        self.waiting.leave(ask)
        self.sent.put(Sent(ask, view.gpu, submit, now_ms))
        labels = {"model": request.model, "gpu": view.gpu, "reason": decision.reason}
        actions = [ev.Send(to=view.gpu, message=submit), ev.Count(name="dispatches", labels=labels)]
        if request.traceparent:
            attributes = {
                "festina.gpu": view.gpu,
                "festina.reason": decision.reason,
                "festina.candidates": candidates,
                "festina.predicted_output_tokens": submit.predicted_output_tokens,
                **reasons.chosen(decision, work),
            }
            actions += ask.span(now_ms, attributes)
        return actions

    def again(self, now_ms: float, sent: Sent) -> list[ev.Action]:
        """A sent attempt is asked for again: the GPU's answer, or the Submit, may have been lost."""
        if self._fleet.view.get(sent.gpu, now_ms) is None:  # nobody there to answer
            self.sent.pop(sent.ask.request.request_id)
            return self.place(now_ms, sent.ask)
        if now_ms - sent.sent_ms < self._settings.resend_after_ms:
            return []
        sent.sent_ms = now_ms
        sent.submit = msgspec.structs.replace(sent.submit, request=sent.ask.request_as_of(now_ms))
        self.sent.put(sent)
        return [
            ev.Send(to=sent.gpu, message=sent.submit),
            ev.Count(name="submits_repeated", labels={"model": sent.ask.request.model}),
        ]

    # ---- too little of something

    def _wait(self, now_ms: float, ask: Ask, spec: ModelSpec) -> list[ev.Action]:
        """Keep an attempt until a GPU has its model ready, and see to it that one will."""
        if ask.since_ms is not None:
            return []
        model = spec.name
        if now_ms - ask.heard_ms >= self._settings.model_wait_ms:  # it has waited, and was refused again
            return self.timed_out(now_ms, ask)
        if not self.waiting.has_room(ask.request, self._settings.max_pending):
            text = f"{model} is being loaded and too many requests wait already. Try again later."
            return self._reject(now_ms, ask, 503, "overloaded", text)
        self.waiting.enter(now_ms, ask)
        actions = [*self.scale_out(now_ms, model, "no_instance"), ask.deferred(self._scheduler)]
        if ask.request.traceparent:
            work, starts = self._work(now_ms, ask, spec), self._fleet.starts(now_ms, spec)
            actions += ask.span(now_ms, reasons.activation(work, starts))
        return actions

    def _most_before(self, now_ms: float, model: str) -> float:
        """Return how many may be before a request that is to start in time; inf: no pace is known."""
        rate_per_s = self._drain(model).per_s(now_ms)
        return math.inf if rate_per_s is None else rate_per_s * self._settings.max_start_ms / 1000.0

    def _excess(self, now_ms: float, ask: Ask, views: list[GpuView]) -> float:
        """Return how many requests too many are before a new one for it to start in time; at most 0 if none.

        Of the queues only that part counts which goes before it where tenants take turns, and of the pace
        what was served lately; where that is not known, nobody is turned away. Nor is one that has begun
        elsewhere.
        """
        request = ask.request
        most = self._most_before(now_ms, request.model)
        if math.isinf(most) or request.attempt > 1 or ask.since_ms is not None:
            return 0.0
        queues = (view.engines[request.model].queued_of for view in views)
        before = sum(ahead(queue, request.tenant, request.tenant_weight) for queue in queues)
        return before - most

    def _overload(self, now_ms: float, ask: Ask, excess: float) -> list[ev.Action]:
        """No room, or none in time: an attempt that waits goes on, a new one is turned away.

        `excess` requests must be served before trying again makes sense.
        """
        if ask.since_ms is not None:
            return []
        model = ask.request.model
        text = f"Every queue for {model} is full, or too long to start soon. Try again later."
        return [*self._note(now_ms, model, True), *self._reject(now_ms, ask, 429, "overloaded", text, excess)]

    def timed_out(self, now_ms: float, ask: Ask) -> list[ev.Action]:
        """No GPU has come to serve the attempt's model in time."""
        model = ask.request.model
        engines = (view.engines[model] for view in self._fleet.view.with_model(model, now_ms))
        why = [engine.reason for engine in engines if engine.state == "failed"]
        why += [refusal.message.reason for refusal in ask.refused.values()]
        because = next((f" ({reason})" for reason in why if reason), "")
        waited_s = self._settings.model_wait_ms / 1000
        text = f"{model} was not ready within {waited_s:g} s{because}. Try again later."
        return self._reject(now_ms, ask, 503, "model_loading", text)

    def _reject(
        self,
        now_ms: float,
        ask: Ask,
        status: int,
        code: str,
        message: str,
        excess: float = 0.0,
        attributes: dict[str, object] | None = None,
    ) -> list[ev.Action]:
        self.waiting.leave(ask)
        self._remember_rejected(ask.request)
        retry_after_s = self._settings.retry_after_s
        if excess > 0:
            retry_after_s = self._drain(ask.request.model).retry_after_s(now_ms, excess, retry_after_s)
        why = attributes or reasons.turned_away(message)
        return ask.rejected(now_ms, status, code, message, retry_after_s, why)

    def _remember_rejected(self, request: Request) -> None:
        """Keep in mind that no lower attempt is wanted: a late one must not be placed."""
        self.rejected.pop(request.request_id, None)
        self.rejected[request.request_id] = request.attempt
        if len(self.rejected) > self._settings.max_remembered:
            del self.rejected[next(iter(self.rejected))]

    def _note(self, now_ms: float, model: str, late: bool) -> list[ev.Action]:
        """Count a dispatch, and ask for a further instance if the deficit is sustained."""
        if self.scale_outs.note(now_ms, model, late):
            return self.scale_out(now_ms, model, "sustained_deficit")
        return []

    def scale_out(self, now_ms: float, model: str, reason: str) -> list[ev.Action]:
        """Ask for an instance of a model, unless one is being loaded or it was asked for a moment ago."""
        if now_ms < self.scale_outs.next_ms(model):
            return []
        engines = (view.engines[model] for view in self._fleet.view.with_model(model, now_ms))
        loading = any(engine.state == "loading" for engine in engines)
        return self.scale_outs.ask(now_ms, model, reason, loading)

    def _work(self, now_ms: float, ask: Ask, spec: ModelSpec) -> Work:
        request = ask.request
        given = len(request.output_tokens)
        predicted = self._predict(request, spec.context_tokens)
        return Work(
            spec.name, request.context_tokens, predicted - given, ask.waited_ms(now_ms), request.objectives
        )
