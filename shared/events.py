"""Every message on the bus, and the few events and actions that all cores share.

One struct per subject (`shared/subjects.py` has the map). Commands are imperative, events in the past
tense. Receivers are idempotent: a repeat of any message changes nothing, so nothing here carries an id of
its own; (request, attempt), move id, placement version and sequence numbers do that work.
"""

from typing import Any, Protocol

import msgspec

from shared.model import GpuSummary, ModelSpec, Placement, Request, RequestEnd, Struct


class Message(Struct, tag=True):
    """Base of all that travels on the bus; its tag tells the types apart in a recording."""


# ---- requests: gateway -> global_sched -> local_sched -> gateway


class Dispatch(Message):
    """Gateway asks any global scheduler to place an attempt. `excluded`: GPUs not to be tried."""

    request: Request
    excluded: tuple[str, ...] = ()


class Inquire(Message):
    """Gateway asks all global schedulers who has an attempt that nobody has answered for.

    Whoever has it sees to it, and answers; another `Dispatch` might reach one that does not know of it, and
    would place it a second time.
    """

    request_id: str
    attempt: int


class Submit(Message):
    """Global scheduler hands an attempt to a GPU. `dispatch_seq` grows by one per scheduler and GPU.

    After its first token it is to go on at `decode_gpu`, on `decode_host`; empty: it stays.
    """

    request: Request
    scheduler: str
    dispatch_seq: int
    predicted_output_tokens: int
    reason: str = ""
    decode_gpu: str = ""
    decode_host: str = ""


class Refused(Message):
    """A GPU will not take an attempt; the scheduler that sent it tries the next one.

    `full`: it serves the model but its queue is full. `never`: it serves the model, but has no room for this
    request even when it is idle. Otherwise it does not serve the model now.
    """

    request_id: str
    attempt: int
    gpu: str
    reason: str
    full: bool = False
    never: bool = False


class Admitted(Message):
    """A GPU has taken an attempt into its queue; from here on it answers for it."""

    request_id: str
    attempt: int
    gpu: str


class Deferred(Message):
    """A global scheduler keeps an attempt until its model is loaded; no need to ask again soon."""

    request_id: str
    attempt: int
    scheduler: str
    reason: str


class Placed(Message):
    """Answer to `Inquire`: this attempt has been handed to a GPU, which is alive but has not answered yet."""

    request_id: str
    attempt: int
    gpu: str


MODEL_NOT_FOUND = "model_not_found"  # code of a `Rejected` by a scheduler that knows no such model


class Rejected(Message):
    """A global scheduler cannot place an attempt: the answer the client gets, in HTTP's terms."""

    request_id: str
    attempt: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class TokenDelta(Struct, array_like=True):
    """Tokens of one attempt from index `first_seq` of its whole output on; `end` with the last.

    `moved_from` is the GPU that the attempt came from by a move, until the gateway has acknowledged a token.
    """

    request_id: str
    attempt: int
    first_seq: int
    token_ids: tuple[int, ...]
    end: RequestEnd | None = None
    moved_from: str = ""


class Tokens(Message):
    """What one engine step made for one gateway's requests: one message per step and gateway.

    Where it tells of several steps, `ages_ms` says how long ago each was done, the first of them first; the
    tokens of a delta are those of the last steps.
    """

    gpu: str
    deltas: tuple[TokenDelta, ...]
    ages_ms: tuple[float, ...] = ()


class AckedThrough(Struct, array_like=True):
    """The gateway has all tokens before `next_seq`, and the end if `ended`."""

    request_id: str
    attempt: int
    next_seq: int
    ended: bool


class Ack(Message):
    """Gateway to GPU: what has arrived, so that no more than that need be kept to send again."""

    gateway: str
    acks: tuple[AckedThrough, ...]


STOPPED = "stop"  # reason of an `Abort` after a stop string: the request has ended well


class Abort(Message):
    """The owner wants this attempt, and every lower one, stopped on this GPU within a second.

    With the reason `STOPPED` the GPU answers by the request's end, which says what it took.
    """

    request_id: str
    attempt: int
    reason: str


class RequestEnded(Message):
    """A gateway tells what became of a request, for predictors and statistics.

    `outcome` is the finish reason, ``cancelled``, or the code of a failure; times are 0 without a token.
    """

    request_id: str
    model: str
    tenant: str
    outcome: str
    input_tokens: int
    output_tokens: int
    ttft_ms: float = 0.0
    mean_tbt_ms: float = 0.0
    energy_j: float | None = None


class GatewayAlive(Message):
    """Heartbeat of a gateway; a GPU ends the work of one that is silent for longer than its lease."""

    gateway: str


# ---- GPUs and placement


class SummaryChanged(Message):
    """A GPU's state, on change and once per heartbeat."""

    summary: GpuSummary


class ScaleOut(Message):
    """Global scheduler asks for a (further) instance of a model; repeats are one request."""

    model: str
    scheduler: str
    reason: str


class Load(Message):
    """Consolidator orders a GPU to load a model. An order older than one already seen is dropped."""

    model: ModelSpec
    placement_version: int


class Unload(Message):
    """Consolidator orders a GPU to unload a model once nothing runs or waits on it.

    With `if_idle_ms`, a GPU whose engine was used more recently than that keeps it, and says so in its next
    summary: a request that raced the order is served.
    """

    model: str
    placement_version: int
    if_idle_ms: float = 0.0


class Drain(Message):
    """Admin asks for a GPU to take no new work (`on`), or to take work again."""

    gpu: str
    on: bool


class PlacementChanged(Message):
    """The placement in force; a lower version than one seen is ignored."""

    placement: Placement


class ConsolidatorAlive(Message):
    """Heartbeat of a consolidator; of all that are heard, the one whose id comes first leads.

    Whoever knows a newer placement than the sender says so by `PlacementChanged`.
    """

    consolidator: str
    placement_version: int


class ModelRegistered(Message):
    """Admin has added a model or changed it."""

    model: ModelSpec


class ModelRemoved(Message):
    """Admin has removed a model."""

    model: str


class WeightsUsed(Message):
    """A GPU has loaded a model; its weights came through the memory of its host, which may keep them."""

    model: ModelSpec


class HostWeights(Message):
    """Whose weights a host has in memory, each by its specification's `digest`; on change, and regularly."""

    host: str
    specs: tuple[str, ...]


class LutStored(Message):
    """The command line has put a look-up table into the store; who decides by it reads it from there."""

    gpu_type: str
    model: str
    content_hash: str


# ---- moves: consolidator, or a GPU -> migrator of the source's host -> both GPUs


class Transfer(Struct):
    """What a migrator has to know of a move, whoever wants it.

    `destination_host` is empty where both GPUs are on the migrator's own host.
    """

    move_id: str
    request_id: str
    model: str
    source: str
    destination: str
    destination_host: str = ""


class Move(Transfer, Message):
    """Consolidator wants a request moved from one GPU to another, whether it waits or runs (3.5, F).

    `request_id` ``*`` means each waiting request of the model in turn, whichever the source gives out; ``**``
    the waiting ones first, and then those that run and whose move pays.
    """


class HandOff(Transfer, Message):
    """A GPU that has computed a prompt wants its request moved to where it is to decode.

    Nobody asks again: if this is lost, or the move fails, the request goes on where it is.
    """


class Prepare(Message):
    """Migrator asks the source whether the move of a running request pays, and what should travel.

    `request_id` ``*`` means the running request of `model` whose move pays most. KV would travel at
    `bandwidth_bytes_s`; 0: it cannot.
    """

    move_id: str
    request_id: str
    migrator: str
    model: str
    bandwidth_bytes_s: float = 0.0


class Prepared(Message):
    """The source's answer: how the request had better move; `reason` says why it stays.

    `mode` is ``stay``, ``tokens`` (its context is computed again) or ``kv``. The request has KV of
    `context_tokens` tokens, `kv_bytes` in blocks of `block_tokens`. Of its stage, its engine needs
    `block_stage_bytes` for each block; 0 where it only pretends to copy.
    """

    move_id: str
    request_id: str
    mode: str
    context_tokens: int = 0
    kv_bytes: int = 0
    block_tokens: int = 1
    block_stage_bytes: int = 0
    traceparent: str = ""
    reason: str = ""


class Reserve(Message):
    """Migrator asks the destination to keep memory for a request that may come; again with more tokens: more.

    `partial`: it may grant less than that, even nothing yet, and more as memory frees, without being asked.
    """

    move_id: str
    request_id: str
    model: str
    migrator: str
    context_tokens: int
    partial: bool = False


class Granted(Message):
    """The destination has reserved `credit_bytes` in all; 0 with a `reason` means it will not."""

    move_id: str
    credit_bytes: int
    reason: str = ""


class StageKv(Message):
    """Migrator asks the source to copy KV blocks of a prepared request into its stage; the request goes on.

    `blocks` is as many as there is credit for; only full ones are copied.
    """

    move_id: str
    request_id: str
    first_block: int
    blocks: int
    stage: str


class KvStaged(Message):
    """What a `StageKv`, or the freeze, has copied: `blocks` from `first_block` on, of `total_blocks`.

    `reason` says why the move cannot go on.
    """

    move_id: str
    first_block: int = 0
    blocks: int = 0
    total_blocks: int = 0
    n_bytes: int = 0
    checksum: int = 0
    took_ms: float = 0.0
    energy_j: float | None = None
    reason: str = ""


class Release(Message):
    """Migrator asks the source to hold a waiting request still and hand out its state.

    `request_id` ``*`` means any waiting request of `model` that is not held already. With `freeze` it is a
    prepared request that runs: it is held in its engine, which keeps its KV, and what is not in the stage
    yet, at most `blocks` from `first_block` on, is copied there; without a `stage`, nothing is.
    """

    move_id: str
    request_id: str
    migrator: str
    model: str = ""
    freeze: bool = False
    first_block: int = 0
    blocks: int = 0
    stage: str = ""


class Released(Message):
    """The source's answer; `request` is None if it has started, ended or is not there.

    `running`: it runs, and could be prepared. `energy_j` is what it has taken so far; None without a meter.
    The stage of a frozen request covers the first `kv_tokens` tokens of its context; `staged` is what was
    copied last.
    """

    move_id: str
    request: Request | None
    predicted_output_tokens: int = 0
    energy_j: float | None = 0.0
    running: bool = False
    kv_tokens: int = 0
    staged: KvStaged | None = None


class Adopt(Message):
    """Migrator gives the destination the state of a request of GPU `source`, to be held until commit.

    The KV of the first `kv_tokens` tokens of its context is in `stage`; 0: it is to be computed again.
    """

    move_id: str
    request: Request
    predicted_output_tokens: int
    migrator: str
    source: str = ""
    energy_j: float | None = 0.0
    stage: str = ""
    kv_tokens: int = 0


class Adopted(Message):
    """The destination holds the request's state and can start it; `started`: it has, after `CommitMove`."""

    move_id: str
    started: bool = False


class CommitMove(Message):
    """The destination may start the request, and then says so by `Adopted`; the source must forget it.

    The source hears it only after that: were the destination's lost, no one would have the request. It had
    moved `moves` times when the source handed it out: one that has moved since, and come back, is not what is
    to be forgotten.
    """

    move_id: str
    moves: int = 0


class KvLoaded(Message):
    """The destination needs the stage of a move no more: it took `tokens` from it, or none for `reason`."""

    move_id: str
    tokens: int = 0
    took_ms: float = 0.0
    reason: str = ""


class AbortMove(Message):
    """Both sides return to what was before: credits back, the request goes on at the source."""

    move_id: str
    reason: str


class Moved(Message):
    """The destination has started a moved request; its gateway now listens to it, not to the source.

    `next_seq` is the first token that the destination will make. A gateway that has a later one already
    heard it from the source, which went on after its hold had expired, and tells the destination to stop.
    """

    request_id: str
    attempt: int
    source: str
    destination: str
    next_seq: int = 0


class MoveEnded(Message):
    """Migrator reports how a move ended: ``committed`` or ``aborted``."""

    move_id: str
    request_id: str
    outcome: str
    reason: str = ""


# ---- what every core hears and does


class Event(Struct, tag=True):
    """Base of what a core hears from its own shell rather than from the bus."""


class Tick(Event):
    """The time a core asked to be woken at (`Core.wake_ms`) has come."""


class LutRead(Event):
    """The shell has read a look-up table from the store, and it is whole: `shared.lut.unpack` takes it."""

    packed: bytes


class BusLost(Event):
    """This service's own connection to the bus is down: nobody else's silence means anything now."""


class BusRestored(Event):
    """The bus is back; what was sent meanwhile may be lost."""


class Leaving(Event):
    """This service has been told to stop: take no new work; with `at_once`, give up what still runs."""

    at_once: bool = False


class Action(Struct):
    """Base of what a core orders its shell to do."""


class Send(Action):
    """Publish `message`; `to` fills the id in its subject (a GPU, gateway, scheduler, host or model)."""

    to: str
    message: Message


class Put(Action):
    """Write a value to the store under a key of this service; expires after `ttl_ms` unless 0."""

    key: str
    value: msgspec.Struct
    ttl_ms: float = 0.0


class Delete(Action):
    """Remove a key of this service from the store."""

    key: str


class Span(Action):
    """A finished span of a traced request, below the trace context `traceparent`.

    Attributes may be tuples of structs, too: the thread that exports them makes JSON of them. A decision is
    told by ``festina.decision.phase`` and ``.reason``; ``.candidates`` is what it chose from, and ``.chosen``
    the index there of what it took. `span_id` (16 hexadecimal digits) is set where other spans are below it.
    """

    name: str
    traceparent: str
    start_ms: float
    end_ms: float
    attributes: dict[str, Any] = {}
    error: str = ""
    span_id: str = ""


class Count(Action):
    """Add to a counter of the service's metrics."""

    name: str
    labels: dict[str, str] = {}
    value: float = 1.0


class Core(Protocol):
    """The one contract: a pure state machine. A service is a core and a shell."""

    @property
    def wake_ms(self) -> float | None:
        """When the core next wants a `Tick`, or None; read after every step."""

    def step(self, now_ms: float, event: Message | Event) -> list[Action]:
        """Take one event at `now_ms` and return what is to be done about it."""
