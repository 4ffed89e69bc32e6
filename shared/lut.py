"""The look-up table (3.2): latency, power and memory of one model on one GPU type.

Tables are dense float32 grids over (SM clock, SM share, input tokens) for prefill and (SM clock, SM share,
batch, mean context tokens) for decode; queries interpolate linearly between grid points. `build` fills them
from the device model, `from_samples` from measurements; `Lut.provenance` says which. They hold for an engine
that has the device to itself: engines side by side slow each other where `silicon.contention` says so.

Clocks in MHz, shares in percent of the SMs, times in ms, powers in W (of the whole device), energies in J.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shared import lut_samples, lut_table, silicon
from shared.devices import Device, device_for
from shared.errors import ConfigError, LutMiss, LutRefused
from shared.lut_samples import Sample
from shared.lut_table import Axes, Provenance, Regression, Stored, Table
from shared.model import ModelSpec, Objectives

CLOCK_FLOOR_MHZ = 795  # lowest clock worth choosing: below it the voltage falls no further (3.2.1)
CLOCK_STRIDE_MHZ = 90
PROFILED_TOKENS = 8192  # longest input of the sweep of 3.2.1; longer ones are extrapolated
# 3.2.1 sweeps 256-8192 tokens; the rest keeps short and very long prompts from being extrapolated further.
INPUT_TOKENS = (
    *(1, 32, 64, 128, 192),
    *(256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 24576, 32768),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
CONTEXT_TOKENS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Lut:
    """Latency, power, memory and load time of one model on one GPU type.

    Every query takes numbers, or numpy arrays that broadcast. A share below the device's smallest cannot run:
    its times are inf. Without a meter, powers and energies are nan. A measured table answers only between the
    clocks and shares that were measured: a time elsewhere raises LutMiss, and in arrays is inf.

    Attributes:
        clocks_mhz: the clocks to choose from, ascending, up to the device's F_max; a modelled table answers
            at any other clock the device offers as well.
        shares_pct: the shares that can be given, ascending.
        provenance: where the numbers come from.
        prefill_fit, decode_fit: error of the polynomials between measured lengths; None where modelled.
        block: all numbers, in the order that `lut_table` tells.
    """

    def __init__(
        self,
        device: Device,
        model: ModelSpec,
        axes: Axes,
        block: NDArray[np.float32],
        provenance: Provenance,
        fits: tuple[Regression | None, Regression | None] = (None, None),
    ) -> None:
        """Take the numbers as `lut_table` lays them out."""
        self.device = device
        self.model = model
        self.axes = axes
        self.block = block
        self.provenance = provenance
        self.prefill_fit, self.decode_fit = fits
        floor_mhz = min(CLOCK_FLOOR_MHZ, device.f_max_mhz)
        choices = [clock for clock in axes.clocks_mhz if floor_mhz <= clock <= device.f_max_mhz]
        self.clocks_mhz = np.array(choices or axes.clocks_mhz)
        self.shares_pct = np.array(axes.shares_pct)
        self._measured = provenance.kind == "measured"
        grids = axes.grids(block)
        prefill_axes = (axes.clocks_mhz, axes.shares_pct, axes.input_tokens)
        decode_axes = (axes.clocks_mhz, axes.shares_pct, axes.batches, axes.context_tokens)
        self._prefill_ms = Table(grids[0], prefill_axes, (False, False, True))
        self._prefill_w = Table(grids[1], prefill_axes, (False, False, False))
        self._decode_ms = Table(grids[2], decode_axes, (False, False, True, True))
        self._decode_w = Table(grids[3], decode_axes, (False, False, False, False))

    def extrapolates(self, input_tokens: float = 0, batch: float = 1, mean_context_tokens: float = 0) -> bool:
        """Whether a query goes past what was profiled: inputs over 8,192 tokens, or past the table's end."""
        axes = self.axes
        return bool(
            input_tokens > min(PROFILED_TOKENS, axes.input_tokens[-1])
            or batch > axes.batches[-1]
            or mean_context_tokens > axes.context_tokens[-1]
        )

    def _if_runnable(self, sm_clock_mhz: Any, sm_share_pct: Any, ms: Any) -> Any:
        """Return the time, or inf where the share is below the device's smallest, or was not measured."""
        smallest = self.device.sm_size_min_pct
        if isinstance(ms, np.ndarray):
            runs = np.asarray(sm_share_pct) >= smallest
            if self._measured:
                runs = runs & self._covers(np.asarray(sm_clock_mhz), np.asarray(sm_share_pct))
            return ms if runs.all() else np.where(runs, ms, np.inf)
        if sm_share_pct < smallest:
            return float("inf") + ms
        if self._measured and not self._covers(sm_clock_mhz, sm_share_pct):
            name = f"{self.model.name} on {self.device.name}"
            measured = f"{_ends(self.axes.clocks_mhz)} MHz and {_ends(self.axes.shares_pct)} % of the SMs"
            raise LutMiss(
                f"{name} was measured at {measured}, not at {sm_clock_mhz} MHz and {sm_share_pct} %;"
                " profile there"
            )
        return ms

    def _covers(self, sm_clock_mhz: Any, sm_share_pct: Any) -> Any:
        clocks, shares = self.axes.clocks_mhz, self.axes.shares_pct
        return (
            (clocks[0] <= sm_clock_mhz)
            & (sm_clock_mhz <= clocks[-1])
            & (shares[0] <= sm_share_pct)
            & (sm_share_pct <= shares[-1])
        )

    @overload
    def ttft_ms(self, sm_clock_mhz: float, sm_share_pct: float, input_tokens: float) -> float: ...
    @overload
    def ttft_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any) -> Any: ...
    def ttft_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any) -> Any:
        """Time to prefill a whole prompt in one step of its own, without any wait before it."""
        return self._if_runnable(
            sm_clock_mhz, sm_share_pct, self._prefill_ms(sm_clock_mhz, sm_share_pct, input_tokens)
        )

    @overload
    def tbt_ms(
        self, sm_clock_mhz: float, sm_share_pct: float, batch: float, mean_context_tokens: float
    ) -> float: ...
    @overload
    def tbt_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, batch: Any, mean_context_tokens: Any) -> Any: ...
    def tbt_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, batch: Any, mean_context_tokens: Any) -> Any:
        """Time of one decode step of `batch` requests, each with this many tokens of context on average."""
        ms = self._decode_ms(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens)
        return self._if_runnable(sm_clock_mhz, sm_share_pct, ms)

    @overload
    def prefill_power_w(self, sm_clock_mhz: float, sm_share_pct: float, input_tokens: float) -> float: ...
    @overload
    def prefill_power_w(self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any) -> Any: ...
    def prefill_power_w(self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any) -> Any:
        """Power of the device while it prefills one prompt and nothing else."""
        return self._prefill_w(sm_clock_mhz, sm_share_pct, input_tokens)

    @overload
    def decode_power_w(
        self, sm_clock_mhz: float, sm_share_pct: float, batch: float, mean_context_tokens: float
    ) -> float: ...
    @overload
    def decode_power_w(
        self, sm_clock_mhz: Any, sm_share_pct: Any, batch: Any, mean_context_tokens: Any
    ) -> Any: ...
    def decode_power_w(
        self, sm_clock_mhz: Any, sm_share_pct: Any, batch: Any, mean_context_tokens: Any
    ) -> Any:
        """Power of the device while it decodes this batch and nothing else."""
        return self._decode_w(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens)

    @overload
    def request_latency_ms(
        self,
        sm_clock_mhz: float,
        sm_share_pct: float,
        input_tokens: float,
        output_tokens: float,
        batch: float = 1,
    ) -> float: ...
    @overload
    def request_latency_ms(
        self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any, output_tokens: Any, batch: Any = 1
    ) -> Any: ...
    def request_latency_ms(
        self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any, output_tokens: Any, batch: Any = 1
    ) -> Any:
        """Time from the start of a request's prefill to its last token, decoded in a batch of `batch`."""
        mean_context_tokens = input_tokens + output_tokens / 2
        return self.ttft_ms(sm_clock_mhz, sm_share_pct, input_tokens) + (output_tokens - 1) * self.tbt_ms(
            sm_clock_mhz, sm_share_pct, batch, mean_context_tokens
        )

    @overload
    def request_energy_j(
        self,
        sm_clock_mhz: float,
        sm_share_pct: float,
        input_tokens: float,
        output_tokens: float,
        batch: float = 1,
        published: bool = False,
    ) -> float: ...
    @overload
    def request_energy_j(
        self,
        sm_clock_mhz: Any,
        sm_share_pct: Any,
        input_tokens: Any,
        output_tokens: Any,
        batch: Any = 1,
        published: bool = False,
    ) -> Any: ...
    def request_energy_j(
        self,
        sm_clock_mhz: Any,
        sm_share_pct: Any,
        input_tokens: Any,
        output_tokens: Any,
        batch: Any = 1,
        published: bool = False,
    ) -> Any:
        """Energy of a request (Eq. 2): its prefill, and its part of the decode steps of a batch of `batch`.

        The batch shares the power of its step, and static power falls on what runs in proportion to its SM
        share. `published` is the paper's own form, which charges each request the whole device's power.
        """
        mean_context_tokens = input_tokens + output_tokens / 2
        prefill_w = self.prefill_power_w(sm_clock_mhz, sm_share_pct, input_tokens)
        decode_w = self.decode_power_w(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens)
        if not published:
            not_ours_w = self.device.static_w * (1.0 - sm_share_pct / 100.0)
            prefill_w, decode_w = prefill_w - not_ours_w, (decode_w - not_ours_w) / batch
        prefill_ms = self.ttft_ms(sm_clock_mhz, sm_share_pct, input_tokens)
        step_ms = self.tbt_ms(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens)
        return (prefill_w * prefill_ms + (output_tokens - 1) * decode_w * step_ms) / 1000.0

    def request_bytes(self, tokens: int) -> int:
        """KV bytes of a request that holds this many tokens, in whole blocks."""
        blocks = -(-tokens // self.device.block_tokens)
        return blocks * self.device.block_tokens * self.model.kv_bytes_per_token

    def load_ms(self, source: str = "host") -> float:
        """Time to load the model from ``disk``, ``host`` or ``peer``."""
        return silicon.load_ms(self.device, self.model.weight_bytes, source)

    def least_decode_share_pct(
        self, sm_clock_mhz: float, batch: float, mean_context_tokens: float, deadline_ms: float
    ) -> int | None:
        """The smallest share on which a decode step meets the deadline; None if there is none (3.4)."""
        for share_pct in self.axes.shares_pct:
            if self._decode_ms(sm_clock_mhz, share_pct, batch, mean_context_tokens) <= deadline_ms:
                return share_pct
        return None

    def least_prefill_share_pct(
        self, sm_clock_mhz: float, input_tokens: float, deadline_ms: float
    ) -> int | None:
        """The smallest share on which the prefill meets the deadline; None if there is none (3.4)."""
        for share_pct in self.axes.shares_pct:
            if self._prefill_ms(sm_clock_mhz, share_pct, input_tokens) <= deadline_ms:
                return share_pct
        return None

    def best_point(
        self, input_tokens: float, output_tokens: float, objectives: Objectives, batch: float = 1
    ) -> tuple[int, int] | None:
        """The (clock, share) of least energy per request that meets both objectives; None if there is none.

        Of equal points the lowest clock, then the smallest share. Without a meter, the one of least latency.
        """
        clocks, shares = self.clocks_mhz[:, None], self.shares_pct[None, :]
        meets = self._meets(input_tokens, output_tokens, objectives, batch)
        if not meets.any():
            return None
        cost_of = self.request_energy_j if self.device.has_meter else self.request_latency_ms
        costs = np.where(meets, cost_of(clocks, shares, input_tokens, output_tokens, batch), np.inf)
        clock, share = np.unravel_index(int(np.argmin(costs)), costs.shape)
        return int(self.clocks_mhz[clock]), int(self.shares_pct[share])

    def least_point(
        self, input_tokens: float, output_tokens: float, objectives: Objectives, batch: float = 1
    ) -> tuple[int, int] | None:
        """The lowest clock at which some share meets both objectives, and the smallest such share."""
        meets = self._meets(input_tokens, output_tokens, objectives, batch)
        if not meets.any():
            return None
        clock = int(np.argmax(meets.any(axis=1)))
        return int(self.clocks_mhz[clock]), int(self.shares_pct[np.argmax(meets[clock])])

    def _meets(
        self, input_tokens: float, output_tokens: float, objectives: Objectives, batch: float
    ) -> NDArray[np.bool_]:
        """Whether each (clock, share) that can be chosen meets both objectives."""
        clocks, shares = self.clocks_mhz[:, None], self.shares_pct[None, :]
        tbt_ms = self.tbt_ms(clocks, shares, batch, input_tokens + output_tokens / 2)
        on_time = self.ttft_ms(clocks, shares, input_tokens) <= objectives.ttft_ms
        return np.asarray(on_time & (tbt_ms <= objectives.tbt_ms))

    @property
    def _stored(self) -> Stored:
        return Stored(
            schema=lut_table.SCHEMA,
            sha256="",
            gpu_type=self.device.name,
            model=self.model,
            axes=self.axes,
            provenance=self.provenance,
            prefill_fit=self.prefill_fit,
            decode_fit=self.decode_fit,
            block=self.block.astype("<f4").tobytes(),
        )

    @property
    def sha256(self) -> str:
        """Hash of the whole content, in hex; equal for equal tables."""
        return lut_table.content_hash(self._stored)


def _ends(points: tuple[int, ...]) -> str:
    return str(points[0]) if len(points) == 1 else f"{points[0]}-{points[-1]}"


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
    return lut_table.encode(lut._stored)


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
