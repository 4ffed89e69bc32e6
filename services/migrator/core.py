"""Moves of waiting requests from one GPU to another (3.5, F): release, reserve, adopt, commit, or abort.

The source holds the request still and hands out its state; the destination promises memory and takes the
state; then the destination is told to start it and, once it says it has, the source is told to forget it.
Release comes before reserve because only the source knows which request is next and how long its context is.
A waiting request has no KV yet, so its tokens are all that travels.

Why a request is never lost, and never answered twice, whatever messages are lost, late or repeated:
- The source forgets a request only when the destination is known to run it, or when the gateway has said so;
  in every other case it takes the request back, at an abort or when its time to live is over.
- The destination drops a request only while it has not been told to start it.
- So at any time at least one of them has the request. Both do if the word that the destination started it is
  lost. The gateway decides then: it listens to one GPU per attempt (`Admitted`, `Moved`, or whichever sends
  the first token) and aborts the other, so the client sees each token once.
"""

from collections import deque
from dataclasses import dataclass, field

from services.migrator.settings import MigratorSettings
from shared import events as ev
from shared.model import Request

RELEASE, RESERVE, ADOPT, COMMIT = "release", "reserve", "adopt", "commit"
EACH = "*"  # as request id of a move: each waiting request of the model in turn


@dataclass(slots=True)
class _Run:
    """One move under way. A series (`EACH`) is one run that takes one request after the other.

    Args:
        step_id: move id that both GPUs know this request's move by.
        stage: the step whose answer is awaited, until `due_ms`.
        tries: how often the order of this step has been sent.
        moved: requests of this series that have been moved.
    """

    move: ev.Move
    step_id: str = ""
    stage: str = RELEASE
    started_ms: float = 0.0
    due_ms: float = 0.0
    tries: int = 1
    request: Request | None = None
    predicted_output_tokens: int = 0
    energy_j: float | None = 0.0
    moved: set[str] = field(default_factory=set)

    @property
    def is_series(self) -> bool:
        """Whether it moves each waiting request."""
        return self.move.request_id == EACH

    @property
    def request_id(self) -> str:
        """The request that is being moved, or was to be."""
        return self.request.request_id if self.request else self.move.request_id


class MigratorCore:
    """Carries out the moves off the GPUs of one host.

    Args:
        migrator: id of the host.
        settings: see `MigratorSettings`.
    """

    def __init__(self, migrator: str, settings: MigratorSettings) -> None:
        self._id = migrator
        self._set = settings
        self._runs: dict[str, _Run] = {}  # by step id
        self._waiting: deque[ev.Move] = deque()
        self._known: dict[str, None] = {}  # ids of moves taken, oldest first
        self._bus_lost = False

    @property
    def wake_ms(self) -> float | None:
        """When the next step has gone unanswered for too long."""
        if self._bus_lost:
            return None
        return min((run.due_ms for run in self._runs.values()), default=None)

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event and return the messages that follow."""
        actions: list[ev.Action] = []
        match event:
            case ev.Move():
                actions = self._take(event)
            case ev.Released(move_id=step_id):
                if run := self._awaiting(step_id, RELEASE):
                    actions = self._released(now_ms, run, event)
            case ev.Granted(move_id=step_id):
                if run := self._awaiting(step_id, RESERVE):
                    actions = self._granted(now_ms, run, event)
            case ev.Adopted(move_id=step_id, started=False):
                if run := self._awaiting(step_id, ADOPT):
                    actions = self._advance(now_ms, run, COMMIT, ev.CommitMove(move_id=step_id))
            case ev.Adopted(move_id=step_id, started=True):
                if run := self._awaiting(step_id, COMMIT):
                    actions = self._committed(now_ms, run)
            case ev.Tick() if not self._bus_lost:
                actions = self._expire(now_ms)
            case ev.BusLost():
                self._bus_lost = True
            case ev.BusRestored():
                self._bus_lost = False
                for run in list(self._runs.values()):  # the answers may be lost, and holds be over
                    actions += self._abort(now_ms, run, "the bus was lost")
        return actions + self._start_waiting(now_ms)

    # ---- taking orders

    def _take(self, move: ev.Move) -> list[ev.Action]:
        if move.move_id in self._known:
            return []
        self._known[move.move_id] = None
        if len(self._known) > self._set.max_remembered + self._set.max_moves + self._set.max_waiting:
            del self._known[next(iter(self._known))]
        if len(self._waiting) >= self._set.max_waiting:
            reason = f"{len(self._waiting)} moves wait already"
            return self._report(move.move_id, move.request_id, "aborted", RELEASE, reason)
        self._waiting.append(move)
        return []

    def _start_waiting(self, now_ms: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        while self._waiting and len(self._runs) < self._set.max_moves and not self._bus_lost:
            actions += self._release(now_ms, _Run(self._waiting.popleft()))
        return actions

    # ---- the steps

    def _awaiting(self, step_id: str, stage: str) -> _Run | None:
        """Return the run that awaits this answer; a late or repeated one finds none."""
        run = self._runs.get(step_id)
        return run if run and run.stage == stage else None

    def _release(self, now_ms: float, run: _Run) -> list[ev.Action]:
        move = run.move
        run.step_id = f"{move.move_id}.{len(run.moved) + 1}" if run.is_series else move.move_id
        run.started_ms, run.request = now_ms, None
        self._runs[run.step_id] = run
        order = ev.Release(
            move_id=run.step_id, request_id=move.request_id, migrator=self._id, model=move.model
        )
        return self._advance(now_ms, run, RELEASE, order)

    def _advance(self, now_ms: float, run: _Run, stage: str, order: ev.Message) -> list[ev.Action]:
        """Send the order of a step to the GPU it is for, and wait for the answer."""
        run.stage, run.tries = stage, 1
        run.due_ms = now_ms + self._set.step_timeout_ms
        return [ev.Send(to=run.move.source if stage == RELEASE else run.move.destination, message=order)]

    def _released(self, now_ms: float, run: _Run, event: ev.Released) -> list[ev.Action]:
        if event.request is None:
            del self._runs[run.step_id]
            outcome = "committed" if run.is_series else "aborted"
            reason = f"{len(run.moved)} moved" if run.is_series else "started or gone"
            return self._report(run.move.move_id, run.move.request_id, outcome, RELEASE, reason)
        if event.request.request_id in run.moved:
            return self._abort(now_ms, run, f"the source gave out {event.request.request_id} twice")
        run.request, run.predicted_output_tokens = event.request, event.predicted_output_tokens
        run.energy_j = event.energy_j
        order = ev.Reserve(
            move_id=run.step_id,
            request_id=run.request.request_id,
            model=run.move.model,
            migrator=self._id,
            context_tokens=run.request.context_tokens,
        )
        return self._advance(now_ms, run, RESERVE, order)

    def _granted(self, now_ms: float, run: _Run, event: ev.Granted) -> list[ev.Action]:
        assert run.request is not None, "a request is released before memory is reserved for it"
        if event.credit_bytes <= 0:
            return self._abort(now_ms, run, event.reason or "the destination has no memory for it")
        order = ev.Adopt(
            move_id=run.step_id,
            request=run.request,
            predicted_output_tokens=run.predicted_output_tokens,
            migrator=self._id,
            source=run.move.source,
            energy_j=run.energy_j,
        )
        return self._advance(now_ms, run, ADOPT, order)

    def _committed(self, now_ms: float, run: _Run) -> list[ev.Action]:
        """The destination runs the request: the source forgets it, and a series goes on."""
        del self._runs[run.step_id]
        actions: list[ev.Action] = [
            ev.Send(to=run.move.source, message=ev.CommitMove(move_id=run.step_id)),
            *self._span(now_ms, run, ""),
            *self._report(run.step_id, run.request_id, "committed", COMMIT, ""),
        ]
        if run.is_series:
            run.moved.add(run.request_id)
            actions += self._release(now_ms, run)
        return actions

    # ---- endings

    def _expire(self, now_ms: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for run in [run for run in self._runs.values() if run.due_ms <= now_ms]:
            if run.stage == COMMIT and run.tries < self._set.commit_tries:
                run.tries += 1
                run.due_ms = now_ms + self._set.step_timeout_ms
                actions.append(ev.Send(to=run.move.destination, message=ev.CommitMove(move_id=run.step_id)))
            else:
                actions += self._abort(now_ms, run, f"no answer to {run.stage}")
        return actions

    def _abort(self, now_ms: float, run: _Run, reason: str) -> list[ev.Action]:
        """Return both sides to what was before; a destination that has started the request keeps it."""
        del self._runs[run.step_id]
        order = ev.AbortMove(move_id=run.step_id, reason=reason)
        actions: list[ev.Action] = [ev.Send(to=run.move.destination, message=order)]
        actions.append(ev.Send(to=run.move.source, message=order))
        actions += self._span(now_ms, run, reason)
        if run.is_series:
            actions += self._report(run.step_id, run.request_id, "aborted", run.stage, reason)
        return actions + self._report(run.move.move_id, run.move.request_id, "aborted", run.stage, reason)

    def _report(
        self, move_id: str, request_id: str, outcome: str, stage: str, reason: str
    ) -> list[ev.Action]:
        ended = ev.MoveEnded(move_id=move_id, request_id=request_id, outcome=outcome, reason=reason)
        return [
            ev.Send(to=self._id, message=ended),
            ev.Count(name="moves_ended", labels={"outcome": outcome, "stage": stage}),
        ]

    def _span(self, now_ms: float, run: _Run, error: str) -> list[ev.Action]:
        if run.request is None or not run.request.traceparent:
            return []
        attributes = {
            "festina.source": run.move.source,
            "festina.destination": run.move.destination,
            "festina.bytes": 0,
            "festina.stage": run.stage,
        }
        span = ev.Span(
            name="migrate",
            traceparent=run.request.traceparent,
            start_ms=run.started_ms,
            end_ms=now_ms,
            attributes=attributes,
            error=error,
        )
        return [span]
