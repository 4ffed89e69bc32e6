"""The look-up table of one model on one GPU type (3.2): where it comes from, and how it is kept.

`build` fills it from the device model, `from_samples` from measurements; `Lut.provenance` says which. What it
answers: `shared/lut_query.py`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared import lut_samples, lut_table, silicon
from shared.devices import Device, device_for
from shared.errors import ConfigError, LutRefused
from shared.lut_query import CLOCK_FLOOR_MHZ, Lut
from shared.lut_samples import Sample
from shared.lut_table import Axes, Provenance
from shared.model import ModelSpec

__all__ = [
    "CLOCK_FLOOR_MHZ",
    "CLOCK_STRIDE_MHZ",
    "Lut",
    "build",
    "from_samples",
    "lut_for",
    "pack",
    "unpack",
]

CLOCK_STRIDE_MHZ = 90
# 3.2.1 sweeps 256-8192 tokens; the rest keeps short and very long prompts from being extrapolated further.
INPUT_TOKENS = (
    *(1, 32, 64, 128, 192),
    *(256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 24576, 32768),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
CONTEXT_TOKENS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def _clocks_mhz(device: Device) -> list[int]:
    """The clock axis: the paper's grid carried on to both ends of what the device offers, and its F_max."""
    lowest, highest = device.clocks_mhz[0], device.clocks_mhz[-1]
    grid = range(CLOCK_FLOOR_MHZ % CLOCK_STRIDE_MHZ, highest, CLOCK_STRIDE_MHZ)
    snapped = {min(device.clocks_mhz, key=lambda offered: abs(offered - clock)) for clock in grid}
    return sorted(snapped | {lowest, highest, device.f_max_mhz})


def build(device: Device, model: ModelSpec) -> Lut:
    """Return the table of a model as the device model has it, each entry within the power cap."""
    axes = Axes(
        clocks_mhz=tuple(_clocks_mhz(device)),
        shares_pct=device.sm_sizes_pct,
        input_tokens=INPUT_TOKENS,
        batches=BATCHES,
        context_tokens=CONTEXT_TOKENS,
    )
    clocks, shares = np.array(axes.clocks_mhz), np.array(axes.shares_pct) / 100.0
    tokens = np.array(INPUT_TOKENS)
    batches, contexts = np.array(BATCHES)[:, None], np.array(CONTEXT_TOKENS)
    prefill = silicon.step_work(device, model, decode_batch=0, decode_context_tokens=0, prefill_tokens=tokens)
    decode = silicon.step_work(device, model, decode_batch=batches, decode_context_tokens=batches * contexts)
    prefill_ms, prefill_w, _ = silicon.step_alone(device, prefill, clocks[:, None, None], shares[:, None])
    decode_ms, decode_w, _ = silicon.step_alone(
        device, decode, clocks[:, None, None, None], shares[:, None, None]
    )
    provenance = Provenance(kind="modelled", device=device.name, parameters_digest=device.digest)
    return Lut(device, model, axes, _block(axes, [prefill_ms, prefill_w, decode_ms, decode_w]), provenance)


def _block(axes: Axes, values: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Lay four grids out in one block; times of a device without clocks have no clock axis of their own."""
    grids = [np.broadcast_to(grid, shape) for grid, shape in zip(values, axes.shapes, strict=True)]
    return np.concatenate([grid.ravel() for grid in grids]).astype(np.float32)


@lru_cache(maxsize=64)
def lut_for(gpu_type: str, model: ModelSpec) -> Lut:
    """Return the modelled table of a model on a GPU type; services keep those of their models.

    Raises ConfigError for a type that is not known.
    """
    return build(device_for(gpu_type), model)


def from_samples(device: Device, model: ModelSpec, samples: Sequence[Sample], provenance: Provenance) -> Lut:
    """Return the table that measured samples give, with polynomials between the lengths (3.2.1).

    A dimension that the profiler could not move has one value; queries at others raise LutMiss. So does this
    where samples are missing, naming what to profile.
    """
    name = f"{model.name} on {device.name}"
    axes, values, *fits = lut_samples.grids(name, samples, INPUT_TOKENS, CONTEXT_TOKENS)
    return Lut(device, model, axes, _block(axes, values), provenance, (fits[0], fits[1]))


def pack(lut: Lut) -> bytes:
    """Return a table as bytes for a file or the store; `unpack` reads them."""
    return lut_table.encode(lut.stored)


def unpack(data: bytes) -> Lut:
    """Return the table that `pack` wrote.

    Raises LutRefused, naming what is wrong, for damaged bytes, another schema version, a GPU type that is not
    known, or a modelled table whose device has other parameters by now.
    """
    stored = lut_table.decode(data)
    name = f"the look-up table of {stored.model.name} on {stored.gpu_type}"
    try:
        device = device_for(stored.gpu_type)
    except ConfigError as error:
        raise LutRefused(f"{name} cannot be used: {error}") from None
    if stored.provenance.kind == "modelled" and stored.provenance.parameters_digest != device.digest:
        raise LutRefused(f"{name} was made with other parameters of the device model; build it again")
    block = np.frombuffer(stored.block, "<f4").astype(np.float32)
    fits = (stored.prefill_fit, stored.decode_fit)
    return Lut(device, stored.model, stored.axes, block, stored.provenance, fits)
