"""One move under way: which step it is at, and how much of a running request's KV has been copied."""

from dataclasses import dataclass, field
from hashlib import blake2b

from shared import events as ev
from shared.model import Request, slug

RELEASE, RESERVE, ADOPT, COMMIT = "release", "reserve", "adopt", "commit"
PREPARE, OPEN, CREDIT, STAGE, SEND = "prepare", "open", "credit", "stage", "send"
FREEZE, LAST = "freeze", "last"
WAITING, TOKENS, KV = "waiting", "tokens", "kv"  # how a request moves

EACH, ALL = "*", "**"  # as request id of a move: each waiting request of the model; the running ones as well


@dataclass(slots=True)
class Passed:
    """Time and bytes that a move has spent at one step."""

    start_ms: float
    end_ms: float
    n_bytes: int = 0
    times: int = 1


@dataclass(slots=True)
class Run:
    """One move under way. A series (`EACH`, `ALL`) is one run that takes one request after the other.

    Args:
        step_id: move id that both GPUs know this request's move by.
        stage: the step whose answer is awaited, until `due_ms`.
        tries: how often the order of this step has been sent.
        mode: how the present request moves.
        moved, missed: requests of this series that have been moved, and that have gone meanwhile.
        begun: requests that it has taken ids for.
        runs: no request of the series waits any more: those that run are taken.
        prepared: what the source said of a running request.
        credit_blocks, staged_blocks, total_blocks: KV blocks that the destination has granted memory for,
            that the stage has, and that the request has.
        staging: whether KV is copied; no more after that has failed.
        has_stage: whether a stage was opened for that; an engine that only pretends to copy needs none.
        kv_tokens: of its context, that the stage covers in the end.
        frozen_ms: when it was ordered to be held.
        copied_j: what the copies out of the source took, as far as that was told.
        passed: the steps it has been through.
    """

    move: ev.Transfer
    step_id: str = ""
    stage: str = RELEASE
    started_ms: float = 0.0
    due_ms: float = 0.0
    tries: int = 1
    mode: str = WAITING
    request: Request | None = None
    predicted_output_tokens: int = 0
    energy_j: float | None = 0.0
    moved: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)
    begun: int = 0
    runs: bool = False
    prepared: ev.Prepared | None = None
    credit_blocks: int = 0
    staged_blocks: int = 0
    total_blocks: int = 0
    staging: bool = False
    has_stage: bool = False
    kv_tokens: int = 0
    frozen_ms: float = 0.0
    copied_j: float = 0.0
    passed: dict[str, Passed] = field(default_factory=dict)

    @property
    def is_series(self) -> bool:
        """Whether it moves several requests."""
        return self.move.request_id in (EACH, ALL)

    @property
    def request_id(self) -> str:
        """The request that is being moved, or was to be."""
        if self.request is not None:
            return self.request.request_id
        return self.prepared.request_id if self.prepared else self.move.request_id

    @property
    def traceparent(self) -> str:
        """The trace that the request belongs to; empty if it is not traced, or not known yet."""
        if self.request is not None:
            return self.request.traceparent
        return self.prepared.traceparent if self.prepared else ""

    @property
    def stage_name(self) -> str:
        """Name of the stage: one for every move, whatever characters its id has."""
        return f"{slug(self.step_id)[:40]}-{blake2b(self.step_id.encode(), digest_size=6).hexdigest()}"

    @property
    def commit(self) -> ev.CommitMove:
        """The word that its request has changed hands, for either side."""
        assert self.request is not None, "a request is released before it is handed over"
        return ev.CommitMove(move_id=self.step_id, moves=self.request.moves)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        assert self.prepared is not None
        return self.prepared.kv_bytes // max(1, blocks_of(self.prepared))

    @property
    def n_bytes(self) -> int:
        """Bytes of KV copied so far."""
        return sum(passed.n_bytes for passed in self.passed.values())

    def begin(self, now_ms: float) -> None:
        """Forget the request before, and take a new id."""
        self.begun += 1
        self.step_id = f"{self.move.move_id}.{self.begun}" if self.is_series else self.move.move_id
        self.started_ms, self.frozen_ms, self.copied_j = now_ms, 0.0, 0.0
        self.request, self.prepared, self.mode = None, None, WAITING
        self.credit_blocks = self.staged_blocks = self.total_blocks = self.kv_tokens = 0
        self.staging, self.has_stage, self.passed = False, False, {}

    def enter(self, now_ms: float, stage: str) -> None:
        """Go on to the next step, or to one that it has been at before."""
        if self.stage in self.passed:
            self.passed[self.stage].end_ms = now_ms
        self.stage, self.tries = stage, 1
        if stage in self.passed:
            self.passed[stage].times += 1
        else:
            self.passed[stage] = Passed(now_ms, now_ms)

    def take_state(self, released: ev.Released) -> None:
        """Note what the source has handed out."""
        self.request, self.predicted_output_tokens = released.request, released.predicted_output_tokens
        self.energy_j, self.kv_tokens = released.energy_j, released.kv_tokens

    def take_copy(self, staged: ev.KvStaged) -> None:
        """Note what the source has copied into the stage."""
        self.staged_blocks = staged.first_block + staged.blocks
        self.total_blocks = max(staged.total_blocks, self.staged_blocks)
        self.passed[self.stage].n_bytes += staged.n_bytes
        self.copied_j += staged.energy_j or 0.0


def blocks_of(prepared: ev.Prepared) -> int:
    """Return how many KV blocks a request had when it was prepared."""
    return -(-prepared.context_tokens // prepared.block_tokens)
