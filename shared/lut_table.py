"""What a look-up table (3.2) consists of: axes, one block of numbers, where they come from, and its bytes.

A table is one float32 block with four grids one after another: prefill ms, prefill W, decode ms, decode W.
The first two are over (clock, share, input tokens), the others over (clock, share, batch, context tokens).
"""

import hashlib
import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import LutRefused
from shared.model import ModelSpec, Struct

SCHEMA = 1  # of the stored form; a table of another is refused, never guessed at


class Axes(Struct):
    """Grid points of a table, ascending along each axis."""

    clocks_mhz: tuple[int, ...]
    shares_pct: tuple[int, ...]
    input_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    context_tokens: tuple[int, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each of the four grids, in the order they lie in the block."""
        point = (len(self.clocks_mhz), len(self.shares_pct))
        prefill = (*point, len(self.input_tokens))
        decode = (*point, len(self.batches), len(self.context_tokens))
        return (prefill, prefill, decode, decode)

    def grids(self, block: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Cut a block into its four grids, without copying."""
        sizes = [math.prod(shape) for shape in self.shapes]
        ends = np.cumsum(sizes)
        return [
            block[end - size : end].reshape(shape)
            for size, end, shape in zip(sizes, ends, self.shapes, strict=True)
        ]


class Provenance(Struct):
    """Where the numbers of a table come from.

    Args:
        kind: ``measured``, or ``modelled`` where no device was asked.
        device: the device as its driver names it, or the row of the device table.
        driver, engine_version: of the driver and the engine that were measured; empty when modelled.
        date: day of the measurement, ISO 8601.
        parameters_digest: `Device.digest` of the numbers a modelled table was made with.
        note: what else a reader should know, such as dimensions that could not be moved.
    """

    kind: str
    device: str
    driver: str = ""
    engine_version: str = ""
    date: str = ""
    parameters_digest: str = ""
    note: str = ""


class Regression(Struct):
    """How well the polynomials between measured lengths fit, each length left out in turn (3.2.1).

    Args:
        degree: the largest degree used.
        mean_pct, worst_pct: error of the latency at the length left out.
    """

    degree: int
    mean_pct: float
    worst_pct: float


class Stored(Struct):
    """A table as it is stored; `sha256` is over all the rest."""

    schema: int
    sha256: str
    gpu_type: str
    model: ModelSpec
    axes: Axes
    provenance: Provenance
    prefill_fit: Regression | None
    decode_fit: Regression | None
    block: bytes


class _Version(msgspec.Struct):
    schema: int


def content_hash(stored: Stored) -> str:
    """Return the sha256 of a table's content, in hex."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(stored, sha256=""))).hexdigest()


def encode(stored: Stored) -> bytes:
    """Return the bytes of a table (msgpack), its hash set."""
    return msgspec.msgpack.encode(msgspec.structs.replace(stored, sha256=content_hash(stored)))


def decode(data: bytes) -> Stored:
    """Return the table that `data` holds.

    Raises LutRefused where it is no table, is damaged, or is of another schema version.
    """
    again = "profile or build it again"
    try:
        schema = msgspec.msgpack.decode(data, type=_Version).schema
    except msgspec.DecodeError as error:
        raise LutRefused(f"not a stored look-up table, or a damaged one ({error}); {again}") from None
    if schema != SCHEMA:
        raise LutRefused(f"the look-up table has schema {schema}, this version reads {SCHEMA}; {again}")
    try:
        stored = msgspec.msgpack.decode(data, type=Stored)
    except msgspec.DecodeError as error:
        raise LutRefused(f"the look-up table is damaged ({error}); {again}") from None
    name = f"the look-up table of {stored.model.name} on {stored.gpu_type}"
    if content_hash(stored) != stored.sha256:
        raise LutRefused(f"{name} is damaged: its content does not have the hash stored with it; {again}")
    if len(stored.block) != 4 * sum(map(math.prod, stored.axes.shapes)):
        raise LutRefused(f"{name} is damaged: {len(stored.block)} bytes do not fill its axes; {again}")
    return stored
