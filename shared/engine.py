"""What a local scheduler orders of its GPU and engines, and what it hears back.

An engine serves one model on one GPU. Orders are actions of the local scheduler's core, reports are its
events; the emulated and the vLLM engine take and give the same ones, so the core cannot tell them apart.
They also cross the socket to the process that holds vLLM, hence the tags.
"""

from shared.events import Action, Event
from shared.model import ModelSpec, Plan, Request, Struct


class Order(Action, tag=True):
    """Base of the orders."""


class LoadEngine(Order):
    """Load a model. `kv_pool_bytes` fixes its KV pool; 0 leaves it elastic (emulated engines only).

    `source` says where its weights are: in an engine that is ``asleep``, in the memory of the ``host``, or on
    its ``disk``. A vLLM engine that is started reads files; those in the page cache come from host memory.
    """

    model: ModelSpec
    kv_pool_bytes: int = 0
    source: str = "host"


class UnloadEngine(Order):
    """Unload a model; whatever still runs in it is dropped without a report.

    `at_once`: it does not answer any more, and is not given time to end by itself.
    """

    model: str
    at_once: bool = False


class SleepEngine(Order):
    """Give device memory back, and keep the process, so that the engine is soon awake again.

    `level` 1 gives up the KV pool, and keeps the weights in host memory; 2 gives up the weights as well. An
    engine with requests does not sleep. `EngineAsleep` tells what came of it.
    """

    model: str
    level: int = 1


class WakeEngine(Order):
    """Let the engine of `model` serve `serve` from now on: the same, or another model of its architecture.

    It need not be asleep: then only the weights are exchanged. `EngineReady` tells that it serves, under the
    name of `serve`, and how long that took; `EngineAsleep` that it does not, and then it is as before.
    """

    model: str
    serve: ModelSpec


class RunRequest(Order):
    """Give the engine a request; it runs when the plan in force lets it.

    Here, and wherever scheduler and engine name a request, `request_id` is that of the run: a request that is
    evicted and comes back has another one, so a late report on its earlier run is not taken for it.

    With a `stage`, the KV of the first `kv_tokens` tokens of its context is taken from there; `KvImported`
    says how that went. `own_stage`: it is one that the engine keeps itself (`ExportKv`), and is gone then.
    """

    model: str
    request: Request
    stage: str = ""
    kv_tokens: int = 0
    own_stage: bool = False


class StopRequest(Order):
    """Take a request out of the engine and free its memory; from then on nothing is reported about it."""

    model: str
    request_id: str


class SetPlan(Order):
    """Replace the engine's standing plan."""

    model: str
    plan: Plan


class SetClock(Order):
    """Ask the device for an SM clock; `ClockApplied` tells what came of it."""

    sm_clock_mhz: int


class RestDevice(Order):
    """Let a device without engines rest deeper, to draw less and wake later; with engines, nothing happens.

    `state` is ``cold`` (the process that holds the context ends) or ``off`` (its power is cut). The next load
    wakes it, and takes so much longer.
    """

    state: str


class EngineReady(Event):
    """A model is loaded and can run requests. KV is allocated in blocks of `block_tokens` tokens."""

    model: str
    kv_pool_bytes: int
    block_tokens: int
    load_ms: float


class EngineAsleep(Event):
    """The sleep level that an engine is at, 0 if it is awake, and if that is not what was asked for, why."""

    model: str
    level: int
    freed_bytes: int = 0
    took_ms: float = 0.0
    reason: str = ""


class EngineEnded(Event):
    """An engine is gone: unloaded as ordered (`reason` empty), or dead, with everything it held."""

    model: str
    reason: str = ""


class StepOutput(Struct, array_like=True):
    """What the steps of a report did for one request.

    `prefilled_tokens` counts prompt tokens computed in them. `finish_reason` is ``stop``, ``length`` or
    ``error``, with the last output. `energy_j` is this request's part of the step, None without a meter.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    prefilled_tokens: int = 0
    finish_reason: str = ""
    energy_j: float | None = None
    error: str = ""


class StepDone(Event):
    """An engine has finished a step under the plan `plan_id`, or several since its last report.

    `steps` is how many, 0 where only tokens of earlier ones are told; `duration_ms` that of all of them.
    `ages_ms` says how long ago each ended, the first of them first; empty if it was one. The tokens of an
    output are those of the last steps. `aborted_j` is what requests took that were stopped before it was
    told. `untold` is how many requests have decoded in them whose tokens are told of later; with those
    tokens, `ages_ms` goes back further than the `steps`.
    """

    model: str
    plan_id: int
    duration_ms: float
    outputs: tuple[StepOutput, ...]
    ages_ms: tuple[float, ...] = ()
    aborted_j: float = 0.0
    steps: int = 1
    untold: int = 0


class OutOfMemory(Event):
    """The device had no memory for a request's next token; the request waits in its engine."""

    model: str
    request_id: str


class ClockApplied(Event):
    """The clock that the device runs at now, after `SetClock` or when it changes, and why if it is another.

    `limited` is ``capped`` while power or heat allow no higher one, ``refused`` where the device keeps its
    own whatever is asked, and empty where the clock is the device's to give.
    """

    asked_mhz: int
    applied_mhz: int
    reason: str = ""
    limited: str = ""


class DeviceSampled(Event):
    """Periodic reading of the device. `state` is as in `silicon.wake_ms`; None: unknown.

    `energy_source` says where the joules come from: ``counter``, ``integrated`` power, ``modelled``, or
    ``unknown``. `meter_faults` counts what was wrong with the meter so far, by kind.

    `unheard_ms` is for how long nothing was heard of the process of an engine that is loaded, by model.
    `asleep`: models that are not loaded, whose engines wait here with their weights in host memory.
    """

    state: str
    used_bytes: int
    power_w: float | None
    energy_j: float | None
    energy_source: str = "unknown"
    meter_faults: dict[str, int] = {}
    unheard_ms: dict[str, float] = {}
    asleep: tuple[str, ...] = ()


class ExportKv(Order):
    """Copy KV blocks of a request into the stage of its move; it keeps them, and goes on if the plan lets it.

    A block that is not full yet is copied only while the plan holds the request: else it would still change.

    With `room_blocks` the stage is the engine's own, made by it in host memory with room for so many blocks
    and kept until a `RunRequest` takes it or `FreeStage` drops it; it ends with the engine. The request is
    evicted (there is no move, and `move_id` is empty): the order that stops it follows at once, and its
    memory on the device is free when the copy is done.
    """

    model: str
    request_id: str
    move_id: str
    first_block: int
    blocks: int
    stage: str
    room_blocks: int = 0


class FreeStage(Order):
    """Drop a stage that the engine keeps itself; nothing happens if it has none of this name."""

    model: str
    stage: str


class KvExported(Event):
    """What an `ExportKv` has copied: `blocks` from `first_block` on, of `total_blocks` that the request has.

    The stage now covers the first `tokens` tokens of the context. No step of the request that began before
    the copy is reported after this. `reason` says why nothing could be copied.
    """

    model: str
    request_id: str
    move_id: str
    first_block: int
    blocks: int
    total_blocks: int
    n_bytes: int
    checksum: int
    took_ms: float
    tokens: int = 0
    reason: str = ""
    energy_j: float | None = None


class KvImported(Event):
    """How the KV of a `RunRequest` was taken from its stage, told before the run's first step.

    `tokens` of its context need not be computed. 0: all of it is, for the `reason` given. `own_stage` is as
    in that order.
    """

    model: str
    request_id: str
    tokens: int
    took_ms: float
    reason: str = ""
    energy_j: float | None = None
    own_stage: bool = False
