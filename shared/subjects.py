"""THE map: which message travels on which subject, who writes it and who reads it; and the store's keys.

``{id}`` is the recipient for commands (or the noun they are about) and the owner or recipient for events.
"""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from shared import events as ev
from shared.model import slug


class Reads(Enum):
    """How a reader subscribes."""

    ALL = "every id"
    OWN = "only its own id"
    QUEUE = "one replica of the reader, by queue group"


@dataclass(frozen=True)
class Route:
    """One row of the map."""

    subject: str
    writer: str
    readers: dict[str, Reads]


GATEWAY, GLOBAL, LOCAL, CONSOLIDATOR, MIGRATOR = (
    "gateway",
    "global_sched",
    "local_sched",
    "consolidator",
    "migrator",
)
COMMAND_LINE = "command_line"  # no service: it writes, and listens to nothing
SERVICES = (GATEWAY, GLOBAL, LOCAL, CONSOLIDATOR, MIGRATOR)
ALL, OWN, QUEUE = Reads.ALL, Reads.OWN, Reads.QUEUE

ROUTES: dict[type[ev.Message], Route] = {
    # requests; {id} is the reader's own id
    ev.Dispatch: Route("festina.v1.cmd.request.any.dispatch", GATEWAY, {GLOBAL: QUEUE}),
    ev.Inquire: Route("festina.v1.cmd.request.any.inquire", GATEWAY, {GLOBAL: ALL}),
    ev.Submit: Route("festina.v1.cmd.gpu.{id}.submit", GLOBAL, {LOCAL: OWN}),
    ev.Refused: Route("festina.v1.evt.scheduler.{id}.refused", LOCAL, {GLOBAL: OWN}),
    ev.Admitted: Route("festina.v1.evt.gateway.{id}.admitted", LOCAL, {GATEWAY: OWN}),
    ev.Deferred: Route("festina.v1.evt.gateway.{id}.deferred", GLOBAL, {GATEWAY: OWN}),
    ev.Placed: Route("festina.v1.evt.gateway.{id}.placed", GLOBAL, {GATEWAY: OWN}),
    ev.Rejected: Route("festina.v1.evt.gateway.{id}.rejected", GLOBAL, {GATEWAY: OWN}),
    ev.Tokens: Route("festina.v1.evt.gateway.{id}.tokens", LOCAL, {GATEWAY: OWN}),
    ev.Ack: Route("festina.v1.cmd.gpu.{id}.ack", GATEWAY, {LOCAL: OWN}),
    ev.Abort: Route("festina.v1.cmd.gpu.{id}.abort", GATEWAY, {LOCAL: OWN}),
    ev.GatewayAlive: Route("festina.v1.evt.gateway.{id}.alive", GATEWAY, {LOCAL: ALL, GATEWAY: ALL}),
    ev.RequestEnded: Route("festina.v1.evt.model.{id}.served", GATEWAY, {GLOBAL: ALL, CONSOLIDATOR: ALL}),
    # GPUs, models, placement; {id} is what the message is about
    ev.SummaryChanged: Route(
        "festina.v1.evt.gpu.{id}.changed", LOCAL, {GATEWAY: ALL, GLOBAL: ALL, CONSOLIDATOR: ALL}
    ),
    ev.ScaleOut: Route("festina.v1.cmd.model.{id}.scale_out", GLOBAL, {CONSOLIDATOR: ALL}),
    ev.Load: Route("festina.v1.cmd.gpu.{id}.load", CONSOLIDATOR, {LOCAL: OWN}),
    ev.Unload: Route("festina.v1.cmd.gpu.{id}.unload", CONSOLIDATOR, {LOCAL: OWN}),
    ev.Drain: Route("festina.v1.cmd.gpu.{id}.drain", GATEWAY, {CONSOLIDATOR: ALL}),
    ev.PlacementChanged: Route(
        "festina.v1.evt.placement.current.changed",
        CONSOLIDATOR,
        {GATEWAY: ALL, GLOBAL: ALL, LOCAL: ALL, CONSOLIDATOR: ALL},
    ),
    ev.ConsolidatorAlive: Route("festina.v1.evt.consolidator.{id}.alive", CONSOLIDATOR, {CONSOLIDATOR: ALL}),
    ev.ModelRegistered: Route(
        "festina.v1.evt.model.{id}.registered",
        GATEWAY,
        {GATEWAY: ALL, GLOBAL: ALL, LOCAL: ALL, CONSOLIDATOR: ALL},
    ),
    ev.ModelRemoved: Route(
        "festina.v1.evt.model.{id}.removed",
        GATEWAY,
        {GATEWAY: ALL, GLOBAL: ALL, LOCAL: ALL, CONSOLIDATOR: ALL},
    ),
    ev.LutStored: Route(
        "festina.v1.evt.lut.{id}.stored", COMMAND_LINE, {GLOBAL: ALL, LOCAL: ALL, CONSOLIDATOR: ALL}
    ),
    ev.WeightsUsed: Route("festina.v1.cmd.migrator.{id}.weights_used", LOCAL, {MIGRATOR: OWN}),
    ev.HostWeights: Route(
        "festina.v1.evt.host.{id}.weights", MIGRATOR, {GLOBAL: ALL, LOCAL: ALL, CONSOLIDATOR: ALL}
    ),
    # moves; {id} is the reader's own id: a host for a migrator, a GPU for a local scheduler
    ev.Move: Route("festina.v1.cmd.migrator.{id}.move", CONSOLIDATOR, {MIGRATOR: OWN}),
    ev.HandOff: Route("festina.v1.cmd.migrator.{id}.hand_off", LOCAL, {MIGRATOR: OWN}),
    ev.Prepare: Route("festina.v1.cmd.gpu.{id}.prepare", MIGRATOR, {LOCAL: OWN}),
    ev.Prepared: Route("festina.v1.evt.migrator.{id}.prepared", LOCAL, {MIGRATOR: OWN}),
    ev.StageKv: Route("festina.v1.cmd.gpu.{id}.stage_kv", MIGRATOR, {LOCAL: OWN}),
    ev.KvStaged: Route("festina.v1.evt.migrator.{id}.kv_staged", LOCAL, {MIGRATOR: OWN}),
    ev.KvLoaded: Route("festina.v1.evt.migrator.{id}.kv_loaded", LOCAL, {MIGRATOR: OWN}),
    ev.Reserve: Route("festina.v1.cmd.gpu.{id}.reserve", MIGRATOR, {LOCAL: OWN}),
    ev.Granted: Route("festina.v1.evt.migrator.{id}.granted", LOCAL, {MIGRATOR: OWN}),
    ev.Release: Route("festina.v1.cmd.gpu.{id}.release", MIGRATOR, {LOCAL: OWN}),
    ev.Released: Route("festina.v1.evt.migrator.{id}.released", LOCAL, {MIGRATOR: OWN}),
    ev.Adopt: Route("festina.v1.cmd.gpu.{id}.adopt", MIGRATOR, {LOCAL: OWN}),
    ev.Adopted: Route("festina.v1.evt.migrator.{id}.adopted", LOCAL, {MIGRATOR: OWN}),
    ev.CommitMove: Route("festina.v1.cmd.gpu.{id}.commit_move", MIGRATOR, {LOCAL: OWN}),
    ev.AbortMove: Route("festina.v1.cmd.gpu.{id}.abort_move", MIGRATOR, {LOCAL: OWN}),
    ev.Moved: Route("festina.v1.evt.gateway.{id}.moved", LOCAL, {GATEWAY: OWN}),
    ev.MoveEnded: Route("festina.v1.evt.migrator.{id}.ended", MIGRATOR, {CONSOLIDATOR: ALL}),
}


@lru_cache(maxsize=4096)
def subject_of(message_type: type[ev.Message], to: str) -> str:
    """Return the subject on which a message of this type reaches (or is about) `to`."""
    return ROUTES[message_type].subject.format(id=slug(to))


def subscriptions(service: str, own_id: str) -> list[tuple[str, str, type[ev.Message]]]:
    """Return (subject, queue group or "", message type) for all that `service` with id `own_id` reads."""
    found = []
    for message_type, route in ROUTES.items():
        reads = route.readers.get(service)
        if reads is None:
            continue
        wildcard = slug(own_id) if reads is OWN else "*"
        queue = service if reads is QUEUE else ""
        found.append((route.subject.format(id=wildcard), queue, message_type))
    return found


# Keys of the store, each with its one writer.
PLACEMENT_KEY = "festina:v1:placement"  # Placement; consolidator
MODEL_KEYS = "festina:v1:model:"  # + slug: ModelSpec; gateway (admin)
GPU_KEYS = "festina:v1:gpu:"  # + slug: GpuSummary, expires after 3 heartbeats; local_sched
HOST_KEYS = "festina:v1:host:"  # + slug: HostAddress, expires after 3 heartbeats; its migrator
LEARNT_KEYS = "festina:v1:learnt:"  # + scheduler slug: + model slug: Learnt; global_sched, each its own
LUT_KEYS = "festina:v1:lut:"  # + GPU type: + model slug: a packed look-up table; command line
API_KEYS = "festina:v1:api_key:"  # + SHA-256 of the key in hex: tenant name; command line
TENANT_KEYS = "festina:v1:tenant:"  # + slug: Tenant; gateway (admin)
LIMIT_KEYS = "festina:v1:limit:"  # + {slug}: and what is counted; all gateways, by one atomic script
GATEWAYS_KEY = "festina:v1:gateways"  # sorted set: gateway, last seen; all gateways


def model_key(name: str) -> str:
    """Key of a model's registration."""
    return MODEL_KEYS + slug(name)


def learnt_key(scheduler: str, model: str) -> str:
    """Key of what a scheduler has learnt about a model's outputs."""
    return f"{LEARNT_KEYS}{slug(scheduler)}:{slug(model)}"


def lut_key(gpu_type: str, model: str) -> str:
    """Key of the stored look-up table of a model on a GPU type."""
    return f"{LUT_KEYS}{slug(gpu_type)}:{slug(model)}"


def gpu_key(gpu: str) -> str:
    """Key of a GPU's summary."""
    return GPU_KEYS + slug(gpu)


def host_key(host: str) -> str:
    """Key of where a host's migrator listens."""
    return HOST_KEYS + slug(host)


def tenant_key(name: str) -> str:
    """Key of a tenant's limits."""
    return TENANT_KEYS + slug(name)


def limit_key(name: str, counted: str) -> str:
    """Key of what is counted of a tenant; the braces keep its keys on one shard of a clustered store."""
    return f"{LIMIT_KEYS}{{{slug(name)}}}:{counted}"
