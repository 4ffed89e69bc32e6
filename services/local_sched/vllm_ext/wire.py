"""How orders and reports cross the socket between a local scheduler and the process that holds vLLM.

A frame is a length of four bytes, big-endian, and that many bytes of MessagePack: one tagged struct of
`shared/engine.py`. Both ends are of one installation, so there is no version in it.
"""

import struct
from typing import TypeAlias

import msgspec

from shared.engine import (
    EngineAsleep,
    EngineEnded,
    EngineReady,
    ExportKv,
    FreeStage,
    KvExported,
    KvImported,
    LoadEngine,
    OutOfMemory,
    RunRequest,
    SetPlan,
    SleepEngine,
    StepDone,
    StopRequest,
    WakeEngine,
)
from shared.model import Struct


class Alive(Struct, tag=True):
    """Sent every `BEAT_S` once the model is loaded, by a thread that does nothing else."""


BEAT_S = 0.1


class UseSms(Struct, tag=True):
    """Go on, from the next step, in the part of the SMs that has so many units from the unit `first` on."""

    first: int
    units: int


class SmCut(Struct):
    """How the SMs of the engine's GPU are cut, told when its process starts; as in `partition.Cut`.

    `parts` are (first unit, units), without the whole.
    """

    sm_count: int
    group_sms: int
    unit_groups: int
    units: int
    parts: tuple[tuple[int, int], ...]


EngineOrder: TypeAlias = (
    LoadEngine | RunRequest | StopRequest | SetPlan | ExportKv | FreeStage | SleepEngine | WakeEngine | UseSms
)
EngineReport: TypeAlias = (
    EngineReady | EngineAsleep | StepDone | OutOfMemory | KvExported | KvImported | EngineEnded | Alive
)

HEADER = struct.Struct(">I")

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[EngineOrder] = msgspec.msgpack.Decoder(EngineOrder)
_report_decoder: msgspec.msgpack.Decoder[EngineReport] = msgspec.msgpack.Decoder(EngineReport)


def frame(message: EngineOrder | EngineReport) -> bytes:
    """Return `message` as one frame."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_order(body: bytes) -> EngineOrder:
    """Return the order in a frame's body; raises msgspec.DecodeError if it holds none."""
    return _order_decoder.decode(body)


def decode_report(body: bytes) -> EngineReport:
    """Return the report in a frame's body; raises msgspec.DecodeError if it holds none."""
    return _report_decoder.decode(body)
