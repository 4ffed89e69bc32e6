"""The gateway's core: it owns every request from its arrival to its one end (architecture.md, section 4).

Per request it holds the attempt, the GPU that runs it and what the client has. Only this core starts another
attempt, and it believes only the current attempt on the current GPU; whoever else speaks is told to stop.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Any

from msgspec.structs import replace

from services.gateway.drains import Drains
from services.gateway.events import (
    STOPPED,
    AddModel,
    Arrived,
    ClientGone,
    Deliver,
    DrainGpu,
    Fail,
    RemoveModel,
    SetTenant,
)
from services.gateway.inflight import Owned, note_energy, with_earlier
from services.gateway.liveness import Liveness
from services.gateway.registry import Registry
from services.gateway.settings import GatewaySettings
from shared import events as ev
from shared import slo
from shared.errors import InvalidRequest
from shared.model import Request, RequestEnd
from shared.overload import NEWCOMERS_PART, DrainRate, has_room
from shared.resumable import resumable
from shared.subjects import model_key, tenant_key

__all__ = [
    "STOPPED",
    "AddModel",
    "Arrived",
    "ClientGone",
    "Deliver",
    "DrainGpu",
    "Fail",
    "GatewayCore",
    "RemoveModel",
    "SetTenant",
]

NO_REPORT = "stopped by a stop string, and its GPU did not report in time"


class GatewayCore:
    """State machine of one gateway; see the module's docstring.

    Args:
        gateway: this gateway's id.
        settings: its numbers.
    """

    def __init__(self, gateway: str, settings: GatewaySettings) -> None:
        self.gateway = gateway
        self.settings = settings
        self.registry = Registry()
        self.bus_up = True
        self._inflight: dict[str, Owned] = {}
        self._liveness = Liveness(settings.gpu_silent_ms, settings.check_interval_ms)
        self.registry.silent = self._liveness.silent
        self._acks: dict[str, dict[str, ev.AckedThrough]] = {}
        self._ack_due_ms = 0.0
        self._alive_due_ms = 0.0
        self._held: Counter[str] = Counter()  # requests in flight, by tenant
        self._weights: dict[str, float] = {}
        self._drain = DrainRate()
        self._drains = Drains(settings.drain_repeat_ms, settings.drain_give_up_ms)
        self._asks: list[tuple[float, int, str]] = []
        self._stops: deque[tuple[float, str]] = deque()  # (due, request) of those that wait for a report
        self._order = count()
        self._now_ms = 0.0
        self._ages_ms: tuple[float, ...] = ()  # of the tokens that are being taken
        self._actions: list[ev.Action] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrived,
            ClientGone: self._client_gone,
            ev.Admitted: self._admitted,
            ev.Deferred: self._deferred,
            ev.Placed: self._placed,
            ev.Rejected: self._rejected,
            ev.Tokens: self._tokens,
            ev.Moved: self._moved,
            ev.SummaryChanged: self._summary_changed,
            ev.ModelRegistered: lambda event: self.registry.add(event.model),
            ev.ModelRemoved: lambda event: self.registry.remove(event.model),
            ev.PlacementChanged: self._placement_changed,
            ev.GatewayAlive: lambda event: None,  # heard for what it says of our own bus
            ev.Tick: self._tick,
            ev.BusLost: self._bus_lost,
            ev.BusRestored: self._bus_restored,
            AddModel: self._add_model,
            RemoveModel: self._remove_model,
            SetTenant: lambda event: self._do(ev.Put(tenant_key(event.tenant.name), event.tenant)),
            DrainGpu: self._drain_gpu,
        }

    @property
    def inflight(self) -> int:
        """Requests without an end so far."""
        return len(self._inflight)

    @property
    def wake_ms(self) -> float | None:
        """When the core next wants a `Tick`."""
        due_ms = min(self._alive_due_ms, self._liveness.due_ms, self._drains.due_ms)
        if self._asks:
            due_ms = min(due_ms, self._asks[0][0])
        if self._stops:
            due_ms = min(due_ms, self._stops[0][0])
        return min(due_ms, self._ack_due_ms) if self._acks and self.bus_up else due_ms

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event and return what is to be done about it."""
        self._now_ms = now_ms
        self._actions = []
        if isinstance(event, ev.Message):
            self._liveness.hear_bus(now_ms)
        self._handlers[type(event)](event)
        while self._asks and not self._is_unanswered(self._asks[0]):  # nobody need be woken for it
            heapq.heappop(self._asks)
        return self._actions

    def no_room(self, tenant: str, weight: float) -> InvalidRequest | None:
        """Return the 429 for one more request of `tenant`; None if there is room for it."""
        most = self.settings.max_inflight
        if has_room(self._held, self._weights, tenant, weight, most):
            return None
        if self.inflight >= most:
            message = f"this gateway holds {most} requests already; try again soon"
        else:
            message = f"tenant {tenant!r} has its share of this gateway's {most} requests; try again soon"
        ahead = self.inflight - (most - most // NEWCOMERS_PART) + 1
        retry_after_s = self._drain.retry_after_s(self._now_ms, ahead, self.settings.retry_after_s)
        return InvalidRequest(429, "too_many_requests", message, retry_after_s=retry_after_s)

    # ---- clients

    def _arrived(self, event: Arrived) -> None:
        request = event.request
        if request.request_id in self._inflight:
            return
        full = self.no_room(request.tenant, request.tenant_weight)
        if full is not None:
            self._do(Fail(request.request_id, full.status, full.code, full.message, full.retry_after_s))
            self._count_end(request, full.code)
            return
        self._held[request.tenant] += 1
        self._weights[request.tenant] = request.tenant_weight
        owned = Owned(request, arrived_ms=self._now_ms, output=list(request.output_tokens))
        owned.attempt_start = len(owned.output)
        self._inflight[request.request_id] = owned
        self._begin(owned)

    def _client_gone(self, event: ClientGone) -> None:
        owned = self._inflight.get(event.request_id)
        if owned is None:
            return
        if owned.gpu:
            self._abort(owned.gpu, owned, event.reason)
        # without a GPU yet: whoever admits it later finds it unknown here and is told to stop
        if event.reason != STOPPED:
            self._ended(owned, "cancelled", owned.energy_j)
        elif not owned.stopping:
            self._stopping(owned)

    def _stopping(self, owned: Owned) -> None:
        """Wait for the report of a request whose text is complete, if there is a GPU to send one."""
        owned.stopping = True
        if owned.gpu:
            self._stops.append((self._now_ms + self.settings.stop_report_ms, owned.request.request_id))
        else:
            self._finish_unreported(owned)

    def _finish_unreported(self, owned: Owned) -> None:
        self._finish(owned, (), RequestEnd(finish_reason=STOPPED, energy_source=NO_REPORT))

    # ---- answers to a dispatch

    def _admitted(self, event: ev.Admitted) -> None:
        self._liveness.hear(event.gpu, self._now_ms)
        owned = self._inflight.get(event.request_id)
        if owned is None or event.attempt != owned.attempt:
            self._stop(event.gpu, event.request_id, event.attempt, "not wanted any more")
        elif not owned.gpu:
            self._take(owned, event.gpu)
        elif owned.gpu != event.gpu:
            self._abort(event.gpu, owned, f"runs on {owned.gpu}")

    def _deferred(self, event: ev.Deferred) -> None:
        owned = self._asking(event.request_id, event.attempt)
        if owned is not None:
            owned.deferred, owned.asked = event.reason, True
            self._ask_at(owned, self._now_ms + self.settings.deferred_ask_ms)

    def _placed(self, event: ev.Placed) -> None:
        """A scheduler has handed the attempt to a GPU: ask no other one, unless that goes on for long."""
        owned = self._asking(event.request_id, event.attempt)
        if owned is not None:
            owned.deferred, owned.asked = f"{event.gpu} has not answered", True
            self._ask_at(owned, self._now_ms + self.settings.ask_again_ms)

    def _rejected(self, event: ev.Rejected) -> None:
        owned = self._asking(event.request_id, event.attempt)
        if owned is None:
            return
        if event.code == ev.MODEL_NOT_FOUND and owned.request.model in self.registry.models:
            # a scheduler that was cut off when the model was added; it will have read of it by and by
            owned.deferred, owned.asked = "no scheduler knows its model yet", False
            self._ask_at(owned, self._now_ms + self.settings.ask_again_ms)
            return
        self._fail(owned, event.status, event.code, event.message, event.retry_after_s)

    def _asking(self, request_id: str, attempt: int) -> Owned | None:
        owned = self._inflight.get(request_id)
        waits = owned is not None and owned.attempt == attempt and not owned.gpu
        return owned if waits else None

    # ---- tokens

    def _tokens(self, event: ev.Tokens) -> None:
        self._liveness.hear(event.gpu, self._now_ms)
        self._ages_ms = event.ages_ms
        for delta in event.deltas:
            owned = self._inflight.get(delta.request_id)
            if owned is None or delta.attempt != owned.attempt:
                self._not_wanted(event.gpu, delta)
            elif owned.gpu not in ("", event.gpu) and delta.moved_from == owned.gpu:
                self._take_moved(owned, event.gpu, delta)
            elif self._is_from(owned, event.gpu, delta):
                self._take_delta(owned, delta)
            else:
                self._not_wanted(event.gpu, delta)

    def _take_moved(self, owned: Owned, gpu: str, delta: ev.TokenDelta) -> None:
        """Follow an attempt to the GPU it has moved to, unless the source went on with it meanwhile."""
        have = len(owned.output)
        if delta.first_seq <= have <= delta.first_seq + len(delta.token_ids):
            self._take(owned, gpu, moved=True)
            self._take_delta(owned, delta)
        elif have > delta.first_seq:
            self._not_wanted(gpu, delta)
        # else a gap, and nothing is acknowledged: what comes before is sent again

    def _is_from(self, owned: Owned, gpu: str, delta: ev.TokenDelta) -> bool:
        """Say whether `gpu` is the one that runs the current attempt.

        Until the attempt's first token that is whoever sends it: the message that said so (`Admitted`) may be
        late or lost. Once it has moved it is the one that said so: what the source sent may be late.
        """
        if owned.gpu == gpu:
            return True
        if owned.gpu and (owned.moved or owned.has_progressed or not delta.token_ids):
            return False
        if owned.gpu:
            self._abort(owned.gpu, owned, f"runs on {gpu}")
        self._take(owned, gpu)
        return True

    def _not_wanted(self, gpu: str, delta: ev.TokenDelta) -> None:
        if delta.end is None:
            self._stop(gpu, delta.request_id, delta.attempt, "not wanted any more")
        else:  # it has stopped on its own; let the GPU forget it
            next_seq = delta.first_seq + len(delta.token_ids)
            self._ack(gpu, ev.AckedThrough(delta.request_id, delta.attempt, next_seq, True))

    def _take_delta(self, owned: Owned, delta: ev.TokenDelta) -> None:
        if owned.stopping:
            self._take_report(owned, delta)
            return
        known = len(owned.output) - delta.first_seq
        if known < 0:  # a gap: not acknowledged, so the GPU sends what is missing again
            return
        fresh = delta.token_ids[known:]
        if fresh:
            if owned.first_token_ms is None:
                owned.first_token_ms = self._now_ms
            owned.last_token_ms = owned.progress_ms = self._now_ms
            owned.output.extend(fresh)
        end = delta.end
        self._ack(
            owned.gpu,
            ev.AckedThrough(owned.request.request_id, owned.attempt, len(owned.output), end is not None),
        )
        if end is not None and end.finish_reason != "error":
            self._finish(owned, fresh, end)
            return
        if fresh:
            self._deliver(owned, fresh, None)
        if end is not None:
            self._next_attempt(owned, f"its engine on {owned.gpu} failed: {end.error}", end)

    def _take_report(self, owned: Owned, delta: ev.TokenDelta) -> None:
        """Take the end of a request that was stopped; its further tokens are nobody's."""
        if delta.end is not None:
            next_seq = delta.first_seq + len(delta.token_ids)
            self._ack(owned.gpu, ev.AckedThrough(delta.request_id, delta.attempt, next_seq, True))
            self._finish(owned, (), replace(delta.end, finish_reason=STOPPED, error=""))

    def _moved(self, event: ev.Moved) -> None:
        owned = self._inflight.get(event.request_id)
        if owned is None or event.attempt != owned.attempt:
            self._stop(event.destination, event.request_id, event.attempt, "not wanted any more")
        elif owned.gpu in (event.source, "") and len(owned.output) <= event.next_seq:
            self._take(owned, event.destination, moved=True)
        elif owned.gpu != event.destination:
            self._abort(event.destination, owned, f"runs on {owned.gpu or event.source}")

    # ---- GPUs

    def _summary_changed(self, event: ev.SummaryChanged) -> None:
        new = event.summary
        old = self.registry.gpus.get(new.gpu)
        if old is not None and (new.started_ms, new.seq) <= (old.started_ms, old.seq):
            return
        self.registry.gpus[new.gpu] = new
        self._liveness.hear(new.gpu, self._now_ms)
        if old is not None and new.started_ms > old.started_ms:
            self._lose(new.gpu, "was started again")

    def _lose(self, gpu: str, reason: str) -> None:
        for owned in [each for each in self._inflight.values() if each.gpu == gpu]:
            self._abort(gpu, owned, reason)
            self._next_attempt(owned, f"{gpu} {reason}")

    # ---- attempts

    def _begin(self, owned: Owned) -> None:
        owned.gpu = ""
        owned.deferred = ""
        owned.asked = False
        owned.give_up_ms = self._now_ms + self.settings.dispatch_timeout_ms
        self._ask(owned)

    def _ask(self, owned: Owned) -> None:
        """Have the attempt placed; one that was asked for before perhaps is, so first ask who has it."""
        if not self.bus_up:
            pass  # all are asked for when it is back
        elif owned.asked:
            owned.asked = False
            self._send("any", ev.Inquire(request_id=owned.request.request_id, attempt=owned.attempt))
        else:
            owned.asked = True
            self._send("any", self._dispatch(owned))
        self._ask_at(owned, self._now_ms + self.settings.ask_again_ms / 2)

    def _dispatch(self, owned: Owned) -> ev.Dispatch:
        return ev.Dispatch(
            request=replace(
                owned.request,
                attempt=owned.attempt,
                output_tokens=tuple(owned.output),
                waited_ms=owned.request.waited_ms + self._now_ms - owned.arrived_ms,
            ),
            excluded=self._excluded(owned),
        )

    def _ask_at(self, owned: Owned, at_ms: float) -> None:
        owned.ask_at_ms = min(at_ms, owned.give_up_ms)
        heapq.heappush(self._asks, (owned.ask_at_ms, next(self._order), owned.request.request_id))

    def _is_unanswered(self, ask: tuple[float, int, str]) -> bool:
        """Say whether a request still waits to be asked for then."""
        owned = self._inflight.get(ask[2])
        return owned is not None and not owned.gpu and owned.ask_at_ms == ask[0]

    def _excluded(self, owned: Owned) -> tuple[str, ...]:
        """Return the GPU the last attempt was lost on, unless it has been started again since."""
        if not owned.lost_gpu or self._started_ms(owned.lost_gpu) != owned.lost_started_ms:
            return ()
        return (owned.lost_gpu,)

    def _started_ms(self, gpu: str) -> float | None:
        summary = self.registry.gpus.get(gpu)
        return None if summary is None else summary.started_ms

    def _take(self, owned: Owned, gpu: str, moved: bool = False) -> None:
        owned.gpu, owned.moved = gpu, moved
        owned.gpu_started_ms = self._started_ms(gpu)
        owned.progress_ms = self._now_ms

    def _next_attempt(self, owned: Owned, reason: str, end: RequestEnd | None = None) -> None:
        """Start again elsewhere, or fail; `end` is the report of the attempt that is over, if any."""
        if owned.stopping:
            self._finish_unreported(owned)
            return
        note_energy(owned, end)
        request = owned.request
        model = self.registry.models.get(request.model)
        emulated = model is not None and model.engine == "emulated"
        if len(owned.output) >= request.max_tokens:
            self._finish(owned, (), RequestEnd(finish_reason="length"))
        elif owned.attempt >= self.settings.max_attempts:
            self._fail(owned, 502, "engine_error", f"{reason}; that was attempt {owned.attempt}, the last")
        elif owned.output and not resumable(request.sampling, emulated):
            self._fail(
                owned,
                502,
                "not_resumable",
                f"{reason}, and its sampling cannot be resumed exactly after {len(owned.output)} tokens",
            )
        else:
            owned.lost_gpu, owned.lost_started_ms = owned.gpu, owned.gpu_started_ms
            owned.attempt += 1
            owned.attempt_start = len(owned.output)
            self._count("gateway_attempts_lost", request)
            self._begin(owned)

    # ---- ends

    def _finish(self, owned: Owned, fresh: tuple[int, ...], end: RequestEnd) -> None:
        end = with_earlier(owned, end)
        self._deliver(owned, fresh, end)
        self._ended(owned, end.finish_reason, end.energy_j)
        in_time = slo.met(owned.request.objectives, *self._times(owned))
        labels = {"model": owned.request.model, "tenant": owned.request.tenant}
        self._do(ev.Count("gateway_answers", {**labels, "objectives": "met" if in_time else "missed"}))

    def _fail(
        self, owned: Owned, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self._do(Fail(owned.request.request_id, status, code, message, retry_after_s))
        self._ended(owned, code, owned.energy_j)

    def _ended(self, owned: Owned, outcome: str, energy_j: float | None = None) -> None:
        request = owned.request
        del self._inflight[request.request_id]
        self._held[request.tenant] -= 1
        if not self._held[request.tenant]:
            del self._held[request.tenant], self._weights[request.tenant]
        self._drain.note(self._now_ms)
        self._count_end(request, outcome)
        if energy_j is not None:
            self._count("gateway_energy_joules", request, energy_j)
        ttft_ms, mean_tbt_ms = self._times(owned)
        ended = ev.RequestEnded(
            request_id=request.request_id,
            model=request.model,
            tenant=request.tenant,
            outcome=outcome,
            input_tokens=len(request.prompt_tokens),
            output_tokens=len(owned.output),
            ttft_ms=ttft_ms if owned.output else 0.0,
            mean_tbt_ms=mean_tbt_ms,
            energy_j=energy_j,
        )
        self._send(request.model, ended)
        if owned.output:
            self._count("gateway_output_tokens", owned.request, len(owned.output))

    def _deliver(self, owned: Owned, fresh: tuple[int, ...], end: RequestEnd | None) -> None:
        ttft_ms, mean_tbt_ms = self._times(owned)
        request_id = owned.request.request_id
        ages_ms = self._ages_ms if fresh else ()
        self._do(Deliver(request_id, fresh, end, owned.gpu, owned.attempt, ttft_ms, mean_tbt_ms, ages_ms))

    def _times(self, owned: Owned) -> tuple[float, float]:
        """Return time to first token and mean time between tokens so far, in ms."""
        gaps = len(owned.output) - 1
        first_ms = self._now_ms if owned.first_token_ms is None else owned.first_token_ms
        mean_tbt_ms = (owned.last_token_ms - first_ms) / gaps if gaps > 0 else 0.0
        return owned.request.waited_ms + first_ms - owned.arrived_ms, mean_tbt_ms

    # ---- time and the bus

    def _tick(self, _: ev.Tick) -> None:
        if self._now_ms >= self._liveness.due_ms:
            self._check()
        while self._asks and self._asks[0][0] <= self._now_ms:
            ask = heapq.heappop(self._asks)
            if self._is_unanswered(ask):
                self._ask_or_give_up(self._inflight[ask[2]])
        while self._stops and self._stops[0][0] <= self._now_ms:
            owned = self._inflight.get(self._stops.popleft()[1])
            if owned is not None and owned.stopping:
                self._finish_unreported(owned)
        if self._acks and self._now_ms >= self._ack_due_ms and self.bus_up:
            for gpu, acks in self._acks.items():
                self._send(gpu, ev.Ack(gateway=self.gateway, acks=tuple(acks.values())))
            self._acks.clear()
        drains = self._drains.due(self._now_ms)
        for drain in drains if self.bus_up else ():
            self._send(drain.gpu, drain)
        if self._now_ms >= self._alive_due_ms:
            self._be_alive()

    def _be_alive(self) -> None:
        self._alive_due_ms = self._now_ms + self.settings.alive_interval_ms
        if self.bus_up:
            self._send(self.gateway, ev.GatewayAlive(gateway=self.gateway))

    def _ask_or_give_up(self, owned: Owned) -> None:
        if self._now_ms < owned.give_up_ms:
            self._ask(owned)
            return
        waited_s = self.settings.dispatch_timeout_ms / 1000.0
        why = owned.deferred or ("no scheduler answered" if self.bus_up else "the bus is down")
        message = f"no GPU took the request within {waited_s:g} s: {why}"
        self._fail(owned, 503, "dispatch_timeout", message, self.settings.retry_after_s)

    def _check(self) -> None:
        """Look for GPUs that have fallen silent, and requests that get no tokens from one that has not."""
        for gpu in self._liveness.newly_silent(self._now_ms, self.bus_up):
            self._lose(gpu, "is silent")
        stall_ms = self.settings.stall_timeout_ms
        for owned in list(self._inflight.values()):
            if owned.gpu and self.bus_up and self._now_ms - owned.progress_ms >= stall_ms:
                self._abort(owned.gpu, owned, "stalled")
                self._next_attempt(owned, f"{owned.gpu} made no token for {stall_ms / 1000.0:g} s")

    def _bus_lost(self, _: ev.BusLost) -> None:
        self.bus_up = False

    def _bus_restored(self, _: ev.BusRestored) -> None:
        self.bus_up = True
        self._liveness.excuse(self._now_ms + self.settings.bus_grace_ms)
        self._be_alive()
        for owned in [owned for owned in self._inflight.values() if not owned.gpu]:
            self._ask(owned)

    # ---- admin

    def _drain_gpu(self, event: DrainGpu) -> None:
        drain = ev.Drain(gpu=event.gpu, on=event.on)
        self._drains.ask(self._now_ms, drain)
        self._send(drain.gpu, drain)

    def _placement_changed(self, event: ev.PlacementChanged) -> None:
        self._drains.shown(event.placement)

    def _add_model(self, event: AddModel) -> None:
        self.registry.add(event.model)
        self._do(ev.Put(model_key(event.model.name), event.model))
        self._send(event.model.name, ev.ModelRegistered(model=event.model))

    def _remove_model(self, event: RemoveModel) -> None:
        self.registry.remove(event.name)
        self._do(ev.Delete(model_key(event.name)))
        self._send(event.name, ev.ModelRemoved(model=event.name))

    # ---- small words

    def _do(self, action: ev.Action) -> None:
        self._actions.append(action)

    def _send(self, to: str, message: ev.Message) -> None:
        self._actions.append(ev.Send(to=to, message=message))

    def _stop(self, gpu: str, request_id: str, attempt: int, reason: str) -> None:
        self._send(gpu, ev.Abort(request_id=request_id, attempt=attempt, reason=reason))

    def _abort(self, gpu: str, owned: Owned, reason: str) -> None:
        self._stop(gpu, owned.request.request_id, owned.attempt, reason)

    def _ack(self, gpu: str, acked: ev.AckedThrough) -> None:
        if not self._acks:
            self._ack_due_ms = self._now_ms + self.settings.ack_interval_ms
        self._acks.setdefault(gpu, {})[acked.request_id] = acked

    def _count_end(self, request: Request, outcome: str) -> None:
        labels = {"model": request.model, "tenant": request.tenant, "outcome": outcome}
        self._do(ev.Count("gateway_requests", labels))

    def _count(self, name: str, request: Request, value: float = 1.0) -> None:
        self._do(ev.Count(name, {"model": request.model, "tenant": request.tenant}, value))
