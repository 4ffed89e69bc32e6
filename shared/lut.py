"""The look-up table (3.2): latency, power and memory of one model on one GPU type.

Tables are dense float32 grids over (SM clock, SM share, input tokens) for prefill and (SM clock, SM share,
batch, mean context tokens) for decode; queries interpolate linearly between grid points. `build` fills them
from the device model, so they are modelled, not measured, and hold for an engine that has the device to
itself: engines side by side slow each other where `silicon.contention` says so.

Clocks in MHz, shares in percent of the SMs, times in ms, powers in W (of the whole device), energies in J.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shared import silicon
from shared.model import ModelSpec, Objectives
from shared.silicon import Device

CLOCK_FLOOR_MHZ = 795  # lowest clock worth choosing: below it the voltage falls no further (3.2.1)
CLOCK_STRIDE_MHZ = 90
# 3.2.1 sweeps 256-8192 tokens; the rest keeps short and very long prompts from being extrapolated.
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


class _Table:
    """Values on a grid, interpolated linearly; outside it the nearest edge; on open-ended axes its slope.

    The first two axes are clock and share, closed, and nearly always asked at grid points.
    """

    def __init__(self, values: NDArray[Any], axes: tuple[Sequence[float], ...], open_ended: tuple[bool, ...]):
        assert values.shape == tuple(map(len, axes)), "one axis per dimension"
        strides = [math.prod(values.shape[axis + 1 :]) for axis in range(values.ndim)]
        # A closed axis ends with a cell of infinite width, over which nothing changes; the padding is what
        # such a cell reads, with weight 0, past the last value.
        self._flat = np.append(values, np.zeros(sum(strides))).astype(np.float32)
        self._read = self._flat.data  # numbers are read 3 times as fast from here
        self._axes = []  # (points, index of the last cell, stride)
        for points, stride, is_open in zip(axes, strides, open_ended, strict=True):
            ends = [] if is_open else [math.inf]
            self._axes.append(
                ([float(point) for point in points] + ends, len(points) + len(ends) - 2, stride)
            )
        self._at_point = {
            (clock, share): i * strides[0] + j * strides[1]
            for i, clock in enumerate(axes[0])
            for j, share in enumerate(axes[1])
        }

    def __call__(self, *point: Any) -> Any:
        """Return the value at a point of numbers, in microseconds, or the values at arrays that broadcast."""
        for coordinate in point:
            if isinstance(coordinate, np.ndarray):
                return self._many(point)
        known = self._at_point.get(point[:2])
        skipped = 0 if known is None else 2
        corners = [(known or 0, 1.0)]  # (place in memory, weight) of the grid points around the point
        for coordinate, (points, last_cell, stride) in zip(
            point[skipped:], self._axes[skipped:], strict=True
        ):
            cell = bisect_right(points, coordinate) - 1
            if cell > last_cell:
                cell = last_cell
            elif cell < 0:
                cell, coordinate = 0, points[0]
            low, at = points[cell], cell * stride
            weight = (coordinate - low) / (points[cell + 1] - low)
            if weight:
                corners = [
                    corner
                    for place, part in corners
                    for corner in ((place + at, part - part * weight), (place + at + stride, part * weight))
                ]
            else:
                corners = [(place + at, part) for place, part in corners]
        read = self._read
        return sum([read[place] * part for place, part in corners])

    def _many(self, point: tuple[Any, ...]) -> NDArray[Any]:
        """The same for arrays, all at once."""
        corners: list[tuple[Any, Any]] = [(0, 1.0)]
        for coordinate, (points, last_cell, stride) in zip(point, self._axes, strict=True):
            grid = np.array(points)
            cell = np.clip(np.searchsorted(grid, coordinate, side="right") - 1, 0, last_cell)
            at = cell * stride
            weight = np.maximum((coordinate - grid[cell]) / (grid[cell + 1] - grid[cell]), 0.0)
            if weight.any():
                corners = [
                    corner
                    for place, part in corners
                    for corner in ((place + at, part - part * weight), (place + at + stride, part * weight))
                ]
            else:
                corners = [(place + at, part) for place, part in corners]
        return np.asarray(sum(self._flat[place] * part for place, part in corners))


class Lut:
    """Latency, power, memory and load time of one model on one GPU type.

    Every query takes numbers, or numpy arrays that broadcast. A share below the device's smallest cannot run:
    its times are inf. Without a meter, powers and energies are nan.

    Attributes:
        clocks_mhz: the clocks to choose from, ascending, up to the device's F_max; queries at any other clock
            the device offers are answered as well.
        shares_pct: the shares that can be given, ascending.
    """

    def __init__(self, device: Device, model: ModelSpec, prefill: NDArray[Any], decode: NDArray[Any]) -> None:
        """Take ms and W by clock, share, and tokens (`prefill`) or batch and mean context (`decode`)."""
        self.device = device
        self.model = model
        clocks = _clocks_mhz(device)
        floor_mhz = min(CLOCK_FLOOR_MHZ, device.f_max_mhz)
        self.clocks_mhz = np.array([clock for clock in clocks if floor_mhz <= clock <= device.f_max_mhz])
        self.shares_pct = np.array(device.sm_sizes_pct)
        prefill_axes = (clocks, device.sm_sizes_pct, INPUT_TOKENS)
        decode_axes = (clocks, device.sm_sizes_pct, BATCHES, CONTEXT_TOKENS)
        self._prefill_ms = _Table(prefill[0], prefill_axes, (False, False, True))
        self._prefill_w = _Table(prefill[1], prefill_axes, (False, False, False))
        self._decode_ms = _Table(decode[0], decode_axes, (False, False, True, True))
        self._decode_w = _Table(decode[1], decode_axes, (False, False, False, False))

    def _if_runnable(self, sm_share_pct: Any, ms: Any) -> Any:
        """Return the time, or inf where the share is below the device's smallest."""
        smallest = self.device.sm_size_min_pct
        if isinstance(sm_share_pct, np.ndarray):
            return np.where(sm_share_pct < smallest, np.inf, ms)
        return float("inf") + ms if sm_share_pct < smallest else ms

    @overload
    def ttft_ms(self, sm_clock_mhz: float, sm_share_pct: float, input_tokens: float) -> float: ...
    @overload
    def ttft_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any) -> Any: ...
    def ttft_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any) -> Any:
        """Time to prefill a whole prompt in one step of its own, without any wait before it."""
        return self._if_runnable(sm_share_pct, self._prefill_ms(sm_clock_mhz, sm_share_pct, input_tokens))

    @overload
    def tbt_ms(
        self, sm_clock_mhz: float, sm_share_pct: float, batch: float, mean_context_tokens: float
    ) -> float: ...
    @overload
    def tbt_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, batch: Any, mean_context_tokens: Any) -> Any: ...
    def tbt_ms(self, sm_clock_mhz: Any, sm_share_pct: Any, batch: Any, mean_context_tokens: Any) -> Any:
        """Time of one decode step of `batch` requests, each with this many tokens of context on average."""
        ms = self._decode_ms(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens)
        return self._if_runnable(sm_share_pct, ms)

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
    ) -> float: ...
    @overload
    def request_energy_j(
        self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any, output_tokens: Any, batch: Any = 1
    ) -> Any: ...
    def request_energy_j(
        self, sm_clock_mhz: Any, sm_share_pct: Any, input_tokens: Any, output_tokens: Any, batch: Any = 1
    ) -> Any:
        """Energy of a request (Eq. 2): its prefill, and its part of the decode steps of a batch of `batch`.

        The published form charges each request the whole device. Here the batch shares the power of its step,
        and static power falls on what runs in proportion to its SM share.
        """
        mean_context_tokens = input_tokens + output_tokens / 2
        not_ours_w = self.device.static_w * (1.0 - sm_share_pct / 100.0)
        prefill_w = self.prefill_power_w(sm_clock_mhz, sm_share_pct, input_tokens) - not_ours_w
        decode_w = self.decode_power_w(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens) - not_ours_w
        prefill_ms = self.ttft_ms(sm_clock_mhz, sm_share_pct, input_tokens)
        step_ms = self.tbt_ms(sm_clock_mhz, sm_share_pct, batch, mean_context_tokens)
        return (prefill_w * prefill_ms + (output_tokens - 1) * decode_w / batch * step_ms) / 1000.0

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
        for share_pct in self.device.sm_sizes_pct:
            if self._decode_ms(sm_clock_mhz, share_pct, batch, mean_context_tokens) <= deadline_ms:
                return share_pct
        return None

    def least_prefill_share_pct(
        self, sm_clock_mhz: float, input_tokens: float, deadline_ms: float
    ) -> int | None:
        """The smallest share on which the prefill meets the deadline; None if there is none (3.4)."""
        for share_pct in self.device.sm_sizes_pct:
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
        tbt_ms = self.tbt_ms(clocks, shares, batch, input_tokens + output_tokens / 2)
        meets = self.ttft_ms(clocks, shares, input_tokens) <= objectives.ttft_ms
        meets &= tbt_ms <= objectives.tbt_ms
        if not meets.any():
            return None
        cost_of = self.request_energy_j if self.device.has_meter else self.request_latency_ms
        costs = np.where(meets, cost_of(clocks, shares, input_tokens, output_tokens, batch), np.inf)
        clock, share = np.unravel_index(int(np.argmin(costs)), costs.shape)
        return int(self.clocks_mhz[clock]), int(self.shares_pct[share])


def build(device: Device, model: ModelSpec) -> Lut:
    """Return the table of a model as the device model has it, each entry within the power cap."""
    clocks = np.array(_clocks_mhz(device))
    shares = np.array(device.sm_sizes_pct) / 100.0
    tokens = np.array(INPUT_TOKENS)
    batches, contexts = np.array(BATCHES)[:, None], np.array(CONTEXT_TOKENS)
    prefill = silicon.step_work(device, model, decode_batch=0, decode_context_tokens=0, prefill_tokens=tokens)
    decode = silicon.step_work(device, model, decode_batch=batches, decode_context_tokens=batches * contexts)
    prefill_ms, prefill_w, _ = silicon.step_alone(device, prefill, clocks[:, None, None], shares[:, None])
    decode_ms, decode_w, _ = silicon.step_alone(
        device, decode, clocks[:, None, None, None], shares[:, None, None]
    )
    # Times of a device without clocks have no clock axis of their own.
    prefill_both = np.stack(np.broadcast_arrays(prefill_ms, prefill_w))
    decode_both = np.stack(np.broadcast_arrays(decode_ms, decode_w))
    return Lut(device, model, prefill_both, decode_both)
