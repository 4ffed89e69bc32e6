"""The nouns that every service speaks: models, requests, GPUs, placements.

Units stand last in every name. Times that cross a machine are relative (``waited_ms``, ``after_ms``), so
no two machines need agree on the time of day.
"""

import hashlib
import re
from functools import lru_cache
from typing import Any, dataclass_transform

import msgspec
from msgspec.structs import replace


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _FrozenMeta(msgspec.StructMeta):
    """Tells type checkers what msgspec does at run time: subclasses of a frozen struct are frozen."""


class Struct(msgspec.Struct, metaclass=_FrozenMeta, frozen=True, omit_defaults=True):
    """Base of every value that may travel: immutable, and a field left at its default is not sent."""


class Objectives(Struct):
    """Latency objectives of one request: time to first token, and mean time between tokens (Table 2)."""

    ttft_ms: float
    tbt_ms: float


class ModelSpec(Struct, cache_hash=True):
    """One servable model: its shape, where its weights and tokenizer are, and how it is to be served.

    Args:
        name: the name clients use, case-sensitive.
        engine: kind of engine that serves it, ``emulated`` or ``vllm``.
        params: number of parameters.
        layers, hidden, heads, kv_heads, head_dim: shape of the transformer.
        weight_bytes: bytes of weights in device memory.
        kv_bytes_per_token: bytes of KV cache per token, all layers.
        context_tokens: most tokens of prompt and output together.
        tokenizer: ``standin`` or a folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        weights: folder that the engine loads; empty for an emulated model.
        objectives: overrides the SLO class of the input length, where set.
        keep_alive_ms: unloaded after this long without a request; None keeps it loaded.
        tenants: who may use it; empty means everyone.
        vocab_tokens: size of the vocabulary; 0 if not known, then all parameters count as multiplied.
        tied_embeddings: whether input embedding and output head are one table.
    """

    name: str
    engine: str
    params: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: int
    kv_bytes_per_token: int
    context_tokens: int = 8192
    tokenizer: str = "standin"
    weights: str = ""
    objectives: Objectives | None = None
    keep_alive_ms: float | None = 60_000.0
    tenants: tuple[str, ...] = ()
    vocab_tokens: int = 0
    tied_embeddings: bool = False


@lru_cache(maxsize=4096)
def digest(model: ModelSpec) -> str:
    """Return what stands for all of a specification that an engine is loaded by.

    Objectives, keep-alive and tenants are not part of it: they may change while it runs.
    """
    loaded_by = replace(model, objectives=None, keep_alive_ms=None, tenants=())
    return hashlib.sha256(msgspec.msgpack.encode(loaded_by)).hexdigest()[:16]


class Tenant(Struct):
    """What one tenant may use; None means without limit. All gateways together hold to it.

    Args:
        name: as API keys name it, case-sensitive.
        requests_per_minute: calls taken in any 60 s.
        tokens_per_minute: tokens of prompts and answers in any 60 s.
        max_concurrent: calls being served at one time.
        weight: its part, beside the others' weights, of whatever is short: places in queues, turns on a GPU.
    """

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    weight: float = 1.0


@lru_cache(maxsize=4096)
def slug(name: str) -> str:
    """Return `name` as one NATS token: lower case, every run of other characters a single ``-``.

    A dot would split a subject (``Llama-3.1``). Two names with one slug are refused at registration.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Request(Struct):
    """One unit of work: one choice of one client call. Owned by the gateway that took it.

    Args:
        request_id: unique for ever; a choice of ``n`` > 1 has its own.
        attempt: 1 for the first; only the owning gateway starts another.
        gateway: id of the owner, to whom tokens go.
        prompt_tokens: the prompt as token ids.
        output_tokens: tokens that earlier attempts gave the client already.
        max_tokens: most output tokens in all, `output_tokens` included.
        sampling: what the engine's sampler takes, by vLLM's names.
        waited_ms: how long ago the request reached its gateway, when this message was sent.
        moves: how often this attempt has moved to another GPU; of two states of it, the one that has moved
            more often is the newer.
        traceparent: W3C trace context; empty when not traced.
        tenant_weight: how much of a contested room its tenant is due, beside the others' weights.
    """

    request_id: str
    attempt: int
    gateway: str
    model: str
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    objectives: Objectives
    tenant: str = "default"
    priority: int = 0
    output_tokens: tuple[int, ...] = ()
    sampling: dict[str, Any] = {}
    waited_ms: float = 0.0
    moves: int = 0
    traceparent: str = ""
    tenant_weight: float = 1.0

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV must be computed before the next token can be sampled."""
        return len(self.prompt_tokens) + len(self.output_tokens)


class RequestEnd(Struct):
    """How a request ended on its GPU, with what it took (``energy_j`` None: no meter; the reason says so).

    ``finish_reason`` is ``stop``, ``length``, or ``error`` (then `error` says why). ``dispatch`` is the rule
    by which its GPU was chosen, as in `Submit.reason`; empty where it came by a move.
    """

    finish_reason: str
    error: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    energy_j: float | None = None
    energy_source: str = ""
    sm_clock_mhz: int = 0
    sm_share_pct: int = 0
    dispatch: str = ""


class StairStep(Struct):
    """From ``after_ms`` on, this much memory and SM share is expected to be free (3.3, T_avail)."""

    after_ms: float
    free_bytes: int
    free_sm_share_pct: int


class Prefills(Struct, array_like=True):
    """Prompts that wait to be computed: `count` of them with `tokens` in all, due in `due_ms` from now."""

    due_ms: float
    count: int
    tokens: int


class EngineSummary(Struct):
    """One engine (one model on one GPU) as its local scheduler sees it.

    Args:
        state: ``loading``, ``ready``, ``unloading`` or ``failed``.
        sm_share_pct: the least share on which it meets its deadlines; what it has beyond that it yields.
        queued_of: `queued` by tenant.
        prefills: what it has still to prefill, in the order in which it is due.
        staircase: as that of its GPU, for an engine with a KV pool of its own; else empty.
        spec: `digest` of the specification that it was loaded by; empty if it does not tell.
    """

    model: str
    state: str
    running: int = 0
    queued: int = 0
    context_tokens: int = 0
    free_kv_bytes: int = 0
    sm_share_pct: int = 0
    idle_ms: float = 0.0
    tightest_tbt_ms: float = 0.0
    reason: str = ""
    queued_of: dict[str, int] = {}
    prefills: tuple[Prefills, ...] = ()
    staircase: tuple[StairStep, ...] = ()
    spec: str = ""


def is_outdated(engine: EngineSummary, model: ModelSpec) -> bool:
    """Say whether an engine was loaded by another specification of its model than this."""
    return engine.spec not in ("", digest(model))


class GpuSummary(Struct):
    """What a GPU's local scheduler tells the others about it: on change, and once per heartbeat.

    Args:
        seq: grows with every summary of this GPU since `started_ms`; the larger pair is the newer.
        gpu_type: row of the device table in `shared/devices.py`.
        engine: kind of engine it runs, ``emulated`` or ``vllm``.
        state: ``active``, ``warm``, ``sleeping``, ``cold``, ``off`` or ``draining``.
        staircase: first step has ``after_ms`` 0; memory and SM share free from each step on. Memory is that
            of all engines without a KV pool of their own.
        admitted_through: by scheduler id, the last dispatch number this summary has counted.
        energy_j: joules since start; None without a meter.
        kv_pool_bytes: KV pool that each further engine takes at once; 0 if KV memory is shared.
        asleep: models whose engines wait here, unloaded, with their weights in host memory.
        fixed_share_pct: the SM share that every engine has, whatever runs beside it; 0: shares are planned.
        switches: its models take turns, so that it can be given more than its memory holds.
    """

    gpu: str
    host: str
    gpu_type: str
    engine: str
    started_ms: float
    seq: int
    state: str
    sm_clock_mhz: int
    total_bytes: int
    free_bytes: int
    engines: tuple[EngineSummary, ...] = ()
    staircase: tuple[StairStep, ...] = ()
    admitted_through: dict[str, int] = {}
    power_w: float | None = None
    energy_j: float | None = None
    kv_pool_bytes: int = 0
    asleep: tuple[str, ...] = ()
    fixed_share_pct: int = 0
    switches: bool = False


class HostAddress(Struct):
    """Where the migrator of a GPU host takes in KV from others (``host:port``)."""

    host: str
    address: str


class Instance(Struct):
    """One copy of a model; `gpus` has one element unless the model spans several by tensor parallelism."""

    model: str
    gpus: tuple[str, ...]


class Placement(Struct):
    """Which models belong on which GPUs; written by the consolidator alone, versioned (3.5).

    Args:
        drained: GPUs that are to take no new work.
        prefill: where prefill and decode are apart, the GPUs that compute prompts; all others decode.
        room_short: requests wait for models that find no room, or did lately, since those that are loaded are
            in use: GPUs had better be done soon with what they have.
        parked: models let go for want of use: only a request for one has it placed again. A model that is
            neither here nor among the instances is still to be placed, or has found no room.
    """

    version: int
    instances: tuple[Instance, ...] = ()
    drained: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    room_short: bool = False
    parked: tuple[str, ...] = ()


class Plan(Struct):
    """A standing order to one engine, in force until replaced; each finished step echoes `plan_id` (3.4).

    Args:
        held: requests that must not run; all others the engine has may.
        order: the prefills, the most urgent first; those it does not name come after, as they came.
        chunk_tokens: most prefill tokens in one step.
        sm_share_pct: share of the SMs the engine may use.
        step_interval_ms: least time between the starts of two steps, where the second only decodes.
    """

    plan_id: int
    held: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()
    chunk_tokens: int = 8192
    sm_share_pct: int = 100
    step_interval_ms: float = 0.0
