"""What the schedulers ask of a look-up table (3.2): latency, power, energy, memory, and the least shares.

Grids over (SM clock, SM share, input tokens) for prefill and (SM clock, SM share, batch, mean context tokens)
for decode, linear between their points. They hold for an engine that has the device to itself; side by side
engines slow each other as `silicon.contention` says. MHz, percent of the SMs, ms, W (whole device), J.
"""

import math
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shared import lut_table, silicon
from shared.devices import Device
from shared.errors import LutMiss
from shared.lut_grid import Grid
from shared.lut_table import Axes, Provenance, Regression, Stored
from shared.model import ModelSpec

CLOCK_FLOOR_MHZ = 795  # lowest clock worth choosing: below it the voltage falls no further (3.2.1)
PROFILED_TOKENS = 8192  # longest input of the sweep of 3.2.1; longer ones are extrapolated


class Lut:
    """Latency, power, memory and load time of one model on one GPU type.

    Every query takes numbers, or numpy arrays that broadcast. A share below the device's smallest cannot run:
    its times are inf. Without a meter, powers and energies are nan. A measured table answers only between the
    clocks and shares that were measured: a time elsewhere raises LutMiss, and in arrays is inf.

    Attributes:
        clocks_mhz: the clocks to choose from, ascending, up to the device's F_max; a modelled table answers
            at any other clock the device offers as well.
        shares_pct: the shares that can be given, ascending.
        provenance, prefill_fit, decode_fit: where the numbers come from; error of the polynomials between
            measured lengths, None where modelled.
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
        like: "Lut | None" = None,
    ) -> None:
        """Take the numbers as `lut_table` lays them out; what a table `like` it has worked out is shared."""
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
        if like is None:
            grids = axes.grids(block)
            prefill_axes = (axes.clocks_mhz, axes.shares_pct, axes.input_tokens)
            decode_axes = (axes.clocks_mhz, axes.shares_pct, axes.batches, axes.context_tokens)
            self._prefill_ms = Grid(grids[0], prefill_axes, is_open=True)
            self._prefill_w = Grid(grids[1], prefill_axes, is_open=False)
            self._decode_ms = Grid(grids[2], decode_axes, is_open=True)
            self._decode_w = Grid(grids[3], decode_axes, is_open=False)
        else:
            self._prefill_ms, self._prefill_w = like._prefill_ms, like._prefill_w
            self._decode_ms, self._decode_w = like._decode_ms, like._decode_w

    def of(self, model: ModelSpec) -> "Lut":
        """Return this table as that of a model of the same shape under another name; numbers are shared."""
        if model == self.model:
            return self
        return self._twin(self.device, model, self.shares_pct)

    def on(self, device: Device) -> "Lut":
        """Return this table for a device of its type whose engines can be given other SM shares."""
        if device.sm_sizes_pct == self.device.sm_sizes_pct:
            return self
        sizes_pct = device.sm_sizes_pct
        return self._twin(self.device.with_sm_sizes(sizes_pct), self.model, np.array(sizes_pct))

    def _twin(self, device: Device, model: ModelSpec, shares_pct: NDArray[Any]) -> "Lut":
        fits = (self.prefill_fit, self.decode_fit)
        twin = Lut(device, model, self.axes, self.block, self.provenance, fits, like=self)
        twin.shares_pct = shares_pct
        return twin

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

    def _row_if_runnable(
        self, clocks_mhz: tuple[int, ...], sm_share_pct: int, row_ms: list[float]
    ) -> list[float]:
        """The same for a row of times."""
        if not self._measured and sm_share_pct >= self.device.sm_size_min_pct:
            return row_ms
        return [
            ms if self._runs_at(clock_mhz, sm_share_pct) else math.inf
            for clock_mhz, ms in zip(clocks_mhz, row_ms, strict=True)
        ]

    def _curve_if_runnable(self, sm_clock_mhz: int, sm_share_pct: int, ms: list[float]) -> list[float]:
        """The same for times at one clock."""
        return ms if self._runs_at(sm_clock_mhz, sm_share_pct) else [math.inf] * len(ms)

    def _runs_at(self, sm_clock_mhz: int, sm_share_pct: int) -> bool:
        if sm_share_pct < self.device.sm_size_min_pct:
            return False
        return not self._measured or bool(self._covers(sm_clock_mhz, sm_share_pct))

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

    def ttft_row_ms(self, clocks_mhz: tuple[int, ...], sm_share_pct: int, input_tokens: float) -> list[float]:
        """`ttft_ms` at several clocks, in plain floats: for few, faster than arrays. Inf if not measured."""
        row = self._prefill_ms.row(clocks_mhz, sm_share_pct, input_tokens)
        return self._row_if_runnable(clocks_mhz, sm_share_pct, row)

    def tbt_row_ms(
        self, clocks_mhz: tuple[int, ...], sm_share_pct: int, batch: float, mean_context_tokens: float
    ) -> list[float]:
        """`tbt_ms` at several clocks, likewise."""
        row = self._decode_ms.row(clocks_mhz, sm_share_pct, batch, mean_context_tokens)
        return self._row_if_runnable(clocks_mhz, sm_share_pct, row)

    def prefill_row_w(
        self, clocks_mhz: tuple[int, ...], sm_share_pct: int, input_tokens: float
    ) -> list[float]:
        """`prefill_power_w` at several clocks, likewise."""
        return self._prefill_w.row(clocks_mhz, sm_share_pct, input_tokens)

    def decode_row_w(
        self, clocks_mhz: tuple[int, ...], sm_share_pct: int, batch: float, mean_context_tokens: float
    ) -> list[float]:
        """`decode_power_w` at several clocks, likewise."""
        return self._decode_w.row(clocks_mhz, sm_share_pct, batch, mean_context_tokens)

    def prefill_curves(self, sm_clock_mhz: int, sm_share_pct: int) -> tuple[list[float], list[float]]:
        """`ttft_ms` and `prefill_power_w` at each input length of the table. Inf if not measured."""
        ms = self._prefill_ms.along(sm_clock_mhz, sm_share_pct)
        ms = self._curve_if_runnable(sm_clock_mhz, sm_share_pct, ms)
        return ms, self._prefill_w.along(sm_clock_mhz, sm_share_pct)

    def decode_curves(
        self, sm_clock_mhz: int, sm_share_pct: int, batch: float
    ) -> tuple[list[float], list[float]]:
        """`tbt_ms` and `decode_power_w` at each mean context of the table, likewise."""
        ms = self._decode_ms.along(sm_clock_mhz, sm_share_pct, batch)
        ms = self._curve_if_runnable(sm_clock_mhz, sm_share_pct, ms)
        return ms, self._decode_w.along(sm_clock_mhz, sm_share_pct, batch)

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
        for share_pct in map(int, self.shares_pct):
            if self._decode_ms(sm_clock_mhz, share_pct, batch, mean_context_tokens) <= deadline_ms:
                return share_pct
        return None

    def least_prefill_share_pct(
        self, sm_clock_mhz: float, input_tokens: float, deadline_ms: float
    ) -> int | None:
        """The smallest share on which the prefill meets the deadline; None if there is none (3.4)."""
        for share_pct in map(int, self.shares_pct):
            if self._prefill_ms(sm_clock_mhz, share_pct, input_tokens) <= deadline_ms:
                return share_pct
        return None

    @property
    def stored(self) -> Stored:
        """The table as it is stored, its hash not set."""
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
        return lut_table.content_hash(self.stored)


def _ends(points: tuple[int, ...]) -> str:
    return str(points[0]) if len(points) == 1 else f"{points[0]}-{points[-1]}"
