"""Moves of requests from one GPU to another (3.5, F): release, reserve, adopt, commit, or abort.

The source holds the request still and hands out its state; the destination promises memory and takes the
state; then the destination is told to start it and, once it says it has, the source is told to forget it.
Where a request waits, release comes before reserve, because only the source knows which is next and how long
its context is. It has no KV yet, so its tokens are all that travels.

One that runs is prepared first: the source says whether its move pays, and whether its KV is to travel. Then
memory is reserved. KV is copied into a stage, chunk by chunk, no more than the destination has granted memory
for, while the request decodes on. When little is left the request is released, which freezes it in its
engine: the rest is copied, and all goes on as with one that waits. The destination's engine takes the KV out
of the stage, or computes it again if it cannot.

Why a request is never lost, and never answered twice, whatever messages are lost, late or repeated:
- The source forgets a request only when the destination is known to run it, or when the gateway has said so;
  in every other case it takes the request back, at an abort or when its time to live is over. A frozen one
  has left nothing: its engine has all its KV, so that taking it back is to let it go on.
- The source never goes on with a request whose move it still takes part in: it leaves the move first, and a
  commit that comes after that finds none. So it forgets no token that the destination does not know of.
- Of a request that has moved on and come back, a GPU may still hold what it handed out before. What comes has
  moved more often (`Request.moves`), and takes its place. A source forgets nothing that has moved more often
  than what the commit speaks of, so that the late commit of an earlier move is void.
- The destination drops a request only while it has not been told to start it.
- So at any time at least one of them has the request. Both do if the word that the destination started it is
  lost. The gateway decides then: it listens to one GPU per attempt (`Admitted`, `Moved`, or whichever sends
  the first token), follows a move only if the destination goes on from where it has heard, and aborts the
  other, so the client sees each token once.
- Memory that was granted is held by the move at the destination, and by nobody else: it becomes the request's
  at the commit, and is given back at an abort, at the request's end, or when nothing is heard for too long.
- A stage is nobody's state: whoever finds it gone computes. It is closed at an abort, when the destination
  has read it, or some time after the commit.
"""

from collections import deque

from services.migrator import live
from services.migrator.actions import ChunkSent, CloseStage, StageOpened
from services.migrator.host import Host
from services.migrator.report import counts, ended, spans
from services.migrator.run import (
    ADOPT,
    ALL,
    COMMIT,
    CREDIT,
    FREEZE,
    KV,
    LAST,
    OPEN,
    PREPARE,
    RELEASE,
    RESERVE,
    SEND,
    STAGE,
    WAITING,
    Run,
)
from services.migrator.settings import MigratorSettings
from services.migrator.weights import Weights
from shared import events as ev

ANY = "*"  # as request id of a step: whichever the source gives out


class MigratorCore:
    """Carries out the moves off the GPUs of one host, and knows whose weights are in its memory.

    Args:
        migrator: id of the host.
        settings: see `MigratorSettings`.
    """

    def __init__(self, migrator: str, settings: MigratorSettings) -> None:
        self._host = Host(migrator, settings)
        self._runs: dict[str, Run] = {}  # by step id
        self._waiting: deque[ev.Transfer] = deque()
        self._known: dict[str, None] = {}  # ids of moves taken, oldest first
        self._read: dict[str, tuple[float, CloseStage]] = {}  # by step id: stages that a destination reads
        self._bus_lost = False
        self.weights = Weights(migrator, settings.weight_cache_bytes)

    @property
    def moving(self) -> bool:
        """Whether a move is under way, or a stage is still read."""
        return bool(self._runs or self._waiting or self._read)

    @property
    def wake_ms(self) -> float | None:
        """When the next step has gone unanswered for too long, or a stage unread, or news are due."""
        due_ms = [due_ms for due_ms, _ in self._read.values()]
        if not self._bus_lost:
            due_ms += [run.due_ms for run in self._runs.values()]
            if (beat_ms := self.weights.wake_ms) is not None:
                due_ms.append(beat_ms)
        return min(due_ms, default=None)

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event and return the messages that follow."""
        actions: list[ev.Action] = []
        match event:
            case ev.Move() | ev.HandOff():
                actions = self._take(event)
            case ev.Released(move_id=step_id):
                if run := self._runs.get(step_id):
                    actions = self._answered_release(now_ms, run, event)
            case ev.Prepared(move_id=step_id):
                if run := self._awaiting(step_id, PREPARE):
                    actions = self._prepared(now_ms, run, event)
            case ev.Granted(move_id=step_id):
                if run := self._awaiting(step_id, RESERVE, CREDIT, STAGE, SEND):
                    actions = self._granted(now_ms, run, event)
            case StageOpened(move_id=step_id):
                if run := self._awaiting(step_id, OPEN):
                    actions = live.opened(self._host, now_ms, run, event)
            case ev.KvStaged(move_id=step_id):
                if run := self._awaiting(step_id, STAGE):
                    actions = live.staged(self._host, now_ms, run, event)
            case ChunkSent(move_id=step_id):
                if run := self._awaiting(step_id, SEND, LAST):
                    arrived = live.sent(self._host, now_ms, run, event)
                    actions = arrived if arrived is not None else self._adopt(now_ms, run)
            case ev.Adopted(move_id=step_id, started=False):
                if run := self._awaiting(step_id, ADOPT):
                    actions = self._host.advance(now_ms, run, COMMIT, run.commit)
            case ev.Adopted(move_id=step_id, started=True):
                if run := self._awaiting(step_id, COMMIT):
                    actions = self._committed(now_ms, run)
            case ev.KvLoaded(move_id=step_id) if step_id in self._read:
                actions = [self._read.pop(step_id)[1]]
            case ev.WeightsUsed(model=model):
                actions = self.weights.used(now_ms, model)
            case ev.Tick():
                actions = self._expire(now_ms)
            case ev.BusLost():
                self._bus_lost = True
            case ev.BusRestored():
                self._bus_lost = False
                for run in list(self._runs.values()):  # the answers may be lost, and holds be over
                    actions += self._abort(now_ms, run, "the bus was lost")
        return actions + self._start_waiting(now_ms)

    # ---- taking orders

    def _take(self, move: ev.Transfer) -> list[ev.Action]:
        if move.move_id in self._known:
            return []
        settings = self._host.settings
        self._known[move.move_id] = None
        if len(self._known) > settings.max_remembered + settings.max_moves + settings.max_waiting:
            del self._known[next(iter(self._known))]
        if len(self._waiting) >= settings.max_waiting:
            reason = f"{len(self._waiting)} moves wait already"
            return ended(self._host.ident, move.move_id, move.request_id, "aborted", RELEASE, reason)
        self._waiting.append(move)
        return []

    def _start_waiting(self, now_ms: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        while self._waiting and len(self._runs) < self._host.settings.max_moves and not self._bus_lost:
            actions += self._release(now_ms, Run(self._waiting.popleft()))
        return actions

    # ---- the steps

    def _awaiting(self, step_id: str, *stages: str) -> Run | None:
        """Return the run that awaits this answer; a late or repeated one finds none."""
        run = self._runs.get(step_id)
        return run if run and run.stage in stages else None

    def _release(self, now_ms: float, run: Run) -> list[ev.Action]:
        """Ask for a request that waits, or, where none does any more, for one that runs."""
        move = run.move
        run.begin(now_ms)
        self._runs[run.step_id] = run
        request_id = ANY if run.is_series else move.request_id
        if run.runs:
            return live.prepare(self._host, now_ms, run, request_id)
        order = ev.Release(
            move_id=run.step_id, request_id=request_id, migrator=self._host.ident, model=move.model
        )
        return self._host.advance(now_ms, run, RELEASE, order)

    def _answered_release(self, now_ms: float, run: Run, event: ev.Released) -> list[ev.Action]:
        if event.request is not None:
            if run.stage == RELEASE:
                return self._released(now_ms, run, event)
            if run.stage != FREEZE:
                return []
            sending = live.frozen(self._host, now_ms, run, event)
            return sending or self._adopt(now_ms, run)
        if run.stage != RELEASE:
            return [] if event.running or run.stage == COMMIT else self._gone(now_ms, run)
        if event.running:
            run.runs = True
            return live.prepare(self._host, now_ms, run, run.move.request_id)
        if run.move.request_id == ALL:
            del self._runs[run.step_id]
            run.runs = True
            return self._release(now_ms, run)
        return self._nothing_left(run, "started or gone")

    def _nothing_left(self, run: Run, reason: str) -> list[ev.Action]:
        """Report the end of a series that has nothing more to move, or of a move that moved nothing."""
        del self._runs[run.step_id]
        outcome = "committed" if run.is_series else "aborted"
        reason = f"{len(run.moved)} moved" if run.is_series else reason
        return ended(self._host.ident, run.move.move_id, run.move.request_id, outcome, run.stage, reason)

    def _released(self, now_ms: float, run: Run, event: ev.Released) -> list[ev.Action]:
        assert event.request is not None
        if event.request.request_id in run.moved:
            return self._abort(now_ms, run, f"the source gave out {event.request.request_id} twice")
        run.take_state(event)
        return live.reserve(self._host, now_ms, run, event.request.context_tokens)

    def _prepared(self, now_ms: float, run: Run, event: ev.Prepared) -> list[ev.Action]:
        if event.mode == "stay" or event.request_id in run.moved | run.missed:
            return self._nothing_left(run, event.reason)
        return live.prepared(self._host, now_ms, run, event)

    def _granted(self, now_ms: float, run: Run, event: ev.Granted) -> list[ev.Action]:
        if event.reason or (event.credit_bytes <= 0 and run.mode != KV):
            return self._abort(now_ms, run, event.reason or "the destination has no memory for it")
        if run.mode == WAITING:
            return self._adopt(now_ms, run)
        return live.granted(self._host, now_ms, run, event)

    def _adopt(self, now_ms: float, run: Run) -> list[ev.Action]:
        assert run.request is not None, "a request is released before it is adopted"
        order = ev.Adopt(
            move_id=run.step_id,
            request=run.request,
            predicted_output_tokens=run.predicted_output_tokens,
            migrator=self._host.ident,
            source=run.move.source,
            energy_j=run.energy_j,
            stage=run.stage_name if run.kv_tokens else "",
            kv_tokens=run.kv_tokens,
        )
        return self._host.advance(now_ms, run, ADOPT, order)

    # ---- endings

    def _committed(self, now_ms: float, run: Run) -> list[ev.Action]:
        """The destination runs the request: the source forgets it, and a series goes on."""
        del self._runs[run.step_id]
        actions: list[ev.Action] = [
            ev.Send(to=run.move.source, message=run.commit),
            *self._close_when_read(now_ms, run),
            *spans(now_ms, run, ""),
            *counts(now_ms, run),
            *ended(self._host.ident, run.step_id, run.request_id, "committed", COMMIT, ""),
        ]
        if run.is_series:
            run.moved.add(run.request_id)
            actions += self._release(now_ms, run)
        return actions

    def _gone(self, now_ms: float, run: Run) -> list[ev.Action]:
        """The request has ended at the source, or goes on there otherwise: a series takes the next one."""
        if not run.is_series:
            return self._abort(now_ms, run, "ended or gone")
        actions = self._undo(now_ms, run, "ended or gone")
        run.missed.add(run.request_id)
        return [*actions, *self._release(now_ms, run)]

    def _expire(self, now_ms: float) -> list[ev.Action]:
        unread = [step_id for step_id, (due_ms, _) in self._read.items() if due_ms <= now_ms]
        actions: list[ev.Action] = [self._read.pop(step_id)[1] for step_id in unread]
        if self._bus_lost:
            return actions
        actions += self.weights.beat(now_ms)
        for run in [run for run in self._runs.values() if run.due_ms <= now_ms]:
            if run.stage == COMMIT and run.tries < self._host.settings.commit_tries:
                run.tries += 1
                run.due_ms = now_ms + self._host.settings.step_timeout_ms
                actions.append(ev.Send(to=run.move.destination, message=run.commit))
            elif run.stage == CREDIT and run.tries < self._host.settings.credit_tries:
                actions += live.ask_again(self._host, now_ms, run)
            else:
                actions += self._abort(now_ms, run, f"no answer to {run.stage}")
        return actions

    def _abort(self, now_ms: float, run: Run, reason: str) -> list[ev.Action]:
        """Return both sides to what was before; a destination that has started the request keeps it."""
        actions = self._undo(now_ms, run, reason)
        if run.is_series:
            actions += ended(self._host.ident, run.step_id, run.request_id, "aborted", run.stage, reason)
        move = run.move
        return actions + ended(self._host.ident, move.move_id, move.request_id, "aborted", run.stage, reason)

    def _undo(self, now_ms: float, run: Run, reason: str) -> list[ev.Action]:
        del self._runs[run.step_id]
        order = ev.AbortMove(move_id=run.step_id, reason=reason)
        return [
            ev.Send(to=run.move.destination, message=order),
            ev.Send(to=run.move.source, message=order),
            *_closing(run),
            *spans(now_ms, run, reason),
        ]

    def _close_when_read(self, now_ms: float, run: Run) -> list[ev.Action]:
        if not run.kv_tokens:
            return [*_closing(run)]
        for closing in _closing(run):
            self._read[run.step_id] = (now_ms + self._host.settings.import_timeout_ms, closing)
        return []


def _closing(run: Run) -> list[CloseStage]:
    return [CloseStage(run.stage_name, run.move.destination_host)] if run.has_stage else []
