"""The numbers of each device type, with where each comes from.

A number was ``measured``, ``fitted`` (to what its source names) or ``assumed``; an assumed number that
matters has the band it may lie in. Times in ms, clocks in MHz, powers in W, rates in bytes or FLOP per ms.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One number of a device.

    Args:
        status: ``measured`` (or printed by its maker), ``fitted`` to what `source` names, or ``assumed``.
        band: for an assumed number, the ends between which it may lie, where that was thought about.
    """

    value: float
    source: str
    status: str
    band: tuple[float, float] | None = None


def _rows(status: str, source: str, **values: float) -> dict[str, Parameter]:
    """Make the rows of a table that share one source."""
    return {name: Parameter(value, source, status) for name, value in values.items()}


def _assumed(source: str, band: tuple[float, float], **value: float) -> dict[str, Parameter]:
    """Make the row of one assumed number and the band it may lie in."""
    return {name: Parameter(number, source, "assumed", band) for name, number in value.items()}


_SHEET = "data sheet"
_CLOCKS = "clocks the driver offers"
_GRID = "the paper's grid (3.2.1)"
_KERNELS = "composed kernel latencies, H100 SXM, 9 models of 3B-32B, n = 511, MAPE 4.4 %"
_KERNELS_H200 = "composed kernel latencies, H200 SXM, 9 models of 3B-32B, n = 511, MAPE 4.3 %"
_SERVED_A100 = "served steps of 8 models of 6B-13B on A100, an older engine's overhead taken off, MAPE 4.8 %"
_SERVING_W = "ML.ENERGY serving power, H100, dense models below the power cap, n = 44, MAPE 6.9 %"
_SMOLLM2 = "SmolLM2-135M in vLLM on two cores: 19 token/s alone, 143 token/s for 8, context taken as 64"
_AS_H100 = "as on the H100"
_NO_CHOICE = "no clock and no partition to choose"
_GRANTED = "least SMs of a part that the driver makes, by its manual: 8 from Hopper on, 4 on Ampere and Ada"
_NO_METER = "no power meter, so no power is modelled"
_NAN = float("nan")

_COMMON: dict[str, Parameter] = {  # to every GPU
    **_rows("assumed", "the engine's default", block_tokens=16),
    **_rows("assumed", _GRID, sm_size_min_pct=10, sm_size_step_pct=10),
    **_rows("measured", "the driver's energy counter", has_meter=1),
    **_rows("fitted", _KERNELS, overlap_exponent=2.2, layer_overhead_ms=0.027),
    **_assumed("launches and sampling, not in kernels", (0.5, 2.0), step_overhead_ms=1.0),
    **_rows("fitted", "MuxServe decode steps, A100, batch <= 128, MAPE 3.2 %", bandwidth_share_rate=4.1),
    **_rows("fitted", "MuxServe prefills, A100, n = 576, MAPE 5.3 %", compute_share_exponent=0.76),
    **_assumed("no data", (0.5, 1.0), bandwidth_knee_exponent=0.75),
    **_rows("assumed", "one NVMe drive, 6 GB/s", disk_bytes_per_ms=6e6),
    **_rows("assumed", "a 100 Gbit/s network, 11 of 12.5 GB/s", tcp_bytes_per_ms=11e6),
    **_assumed("handles and buffers exchanged before the first byte", (0.1, 10), link_setup_ms=1.0),
    **_assumed("a model put into an engine process that stands ready", (50, 1000), activation_ms=200),
    **_assumed("a CUDA context and an engine process made", (1000, 20_000), context_start_ms=3000),
    **_assumed("a device that was powered down", (5000, 120_000), power_on_ms=30_000),
}
_HOPPER: dict[str, Parameter] = {
    **_COMMON,
    **_rows("measured", _SHEET, sm_count=132),
    **_rows("measured", _GRANTED, sm_group=8),
    **_rows("measured", _CLOCKS, clock_min_mhz=345, clock_max_mhz=1980, clock_step_mhz=15),
    **_rows("assumed", "the paper's F_max, the clock sustained at the power limit (3.2.1)", f_max_mhz=1635),
    **_rows("measured", "default boost clock", default_clock_mhz=1980),
    **_assumed("no data; a knee at 700-1400 MHz is possible", (700, 1400), bandwidth_knee_mhz=1100),
    **_rows("fitted", "H100 power at 15 locked clocks", voltage_knee_mhz=1005, voltage_slope_per_ghz=0.67),
    **_assumed("just under the power limit of 700 W", (650, 700), power_cap_w=690),
    **_assumed("an idle H100 that holds a CUDA context", (90, 130), context_idle_w=110),
    **_rows("assumed", "PCIe 5.0 x16, 55 of 64 GB/s", host_bytes_per_ms=55e6),
    **_rows("assumed", "NVLink 4, 400 of 450 GB/s each way", peer_bytes_per_ms=400e6, has_nvlink=1),
}

PARAMETERS: dict[str, dict[str, Parameter]] = {
    "h100-80gb": {
        **_HOPPER,
        **_rows("assumed", "nominal memory; contexts and activations take what is above", total_bytes=80e9),
        **_rows("fitted", _KERNELS, compute_reference_mhz=1830),
        **_rows("fitted", _KERNELS, weight_bytes_per_ms=2.82e9, kv_bytes_per_ms=2.85e9),
        **_rows("fitted", f"{_KERNELS}; causal attention", matmul_flop_per_ms=824e9, attn_flop_per_ms=365e9),
        **_rows("fitted", _SERVING_W, static_w=70, w_per_tb_per_s=55.5, w_per_tflop_per_s=1.14),
        **_rows(
            "fitted", f"{_SERVING_W}; linear in the SM share: assumed", sm_w=268, power_reference_mhz=1980
        ),
    },
    "h200-141gb": {
        **_HOPPER,
        **_rows("assumed", "nominal memory; contexts and activations take what is above", total_bytes=141e9),
        **_rows("assumed", _AS_H100, compute_reference_mhz=1830),
        **_rows("fitted", _KERNELS_H200, weight_bytes_per_ms=3.80e9, kv_bytes_per_ms=4.01e9),
        **_rows("fitted", _KERNELS_H200, matmul_flop_per_ms=825e9, attn_flop_per_ms=311e9),
        **_rows("assumed", f"{_AS_H100}; the same chip", static_w=70, w_per_tflop_per_s=1.14, sm_w=268),
        **_assumed(f"{_AS_H100}; kernels at 4 TB/s drew up to 690 W", (55.5, 86), w_per_tb_per_s=55.5),
        **_rows("assumed", _AS_H100, power_reference_mhz=1980),
    },
    "a100-80gb": {
        **_COMMON,
        **_rows("measured", _SHEET, sm_count=108),
        **_rows("measured", _GRANTED, sm_group=4),
        **_rows("assumed", "nominal memory; contexts and activations take what is above", total_bytes=80e9),
        **_rows("measured", _CLOCKS, clock_min_mhz=210, clock_max_mhz=1410, clock_step_mhz=15),
        **_rows("measured", "default boost clock", f_max_mhz=1410, default_clock_mhz=1410),
        **_rows("measured", f"{_SHEET}: the boost clock", compute_reference_mhz=1410),
        **_rows("fitted", _SERVED_A100, weight_bytes_per_ms=1.46e9, matmul_flop_per_ms=215e9),
        **_rows("assumed", "as weights are read", kv_bytes_per_ms=1.46e9),
        **_rows("assumed", "part of the rate of products, as on the H100", attn_flop_per_ms=95e9),
        **_assumed(
            "the H100's knee, at the same part of the highest clock", (500, 1000), bandwidth_knee_mhz=785
        ),
        **_assumed(
            "the H100's knee, at the same part of the highest clock", (600, 1000), voltage_knee_mhz=715
        ),
        **_assumed("the H100's rise to its highest clock", (0.67, 0.94), voltage_slope_per_ghz=0.94),
        **_assumed("an idle card, no context", (45, 60), static_w=50),
        **_assumed("an idle card that holds a context", (60, 85), context_idle_w=70),
        **_assumed("the H100's, by what lies between idle and cap", (100, 200), sm_w=151),
        **_assumed("energy of a byte as on the H100", (40, 70), w_per_tb_per_s=55.5),
        **_assumed("so that products at full rate draw the power limit", (0.5, 1.1), w_per_tflop_per_s=0.8),
        **_rows("measured", f"{_SHEET}: the power limit", power_cap_w=400),
        **_rows("assumed", "the boost clock", power_reference_mhz=1410),
        **_rows("assumed", "PCIe 4.0 x16, 27 of 32 GB/s", host_bytes_per_ms=27e6),
        **_rows("assumed", "NVLink 3, 260 of 300 GB/s each way", peer_bytes_per_ms=260e6, has_nvlink=1),
    },
    "l40s-48gb": {
        **_COMMON,
        **_rows("measured", _SHEET, sm_count=142),
        **_rows("measured", _GRANTED, sm_group=4),
        **_rows("assumed", "nominal memory; contexts and activations take what is above", total_bytes=48e9),
        **_rows("assumed", _CLOCKS, clock_min_mhz=210, clock_max_mhz=2520, clock_step_mhz=15),
        **_rows("measured", f"{_SHEET}: the boost clock", f_max_mhz=2520, default_clock_mhz=2520),
        **_rows("measured", f"{_SHEET}: the boost clock", compute_reference_mhz=2520),
        **_assumed(
            "84 % of the data sheet's 864 GB/s, as on the H100", (0.6e9, 0.8e9), weight_bytes_per_ms=0.726e9
        ),
        **_assumed("as weights are read", (0.6e9, 0.8e9), kv_bytes_per_ms=0.726e9),
        **_assumed(
            "83 % of the data sheet's 362 TFLOP/s, as on the H100", (180e9, 320e9), matmul_flop_per_ms=300e9
        ),
        **_rows("assumed", "part of the rate of products, as on the H100", attn_flop_per_ms=133e9),
        **_assumed(
            "the H100's knee, at the same part of the highest clock", (900, 1800), bandwidth_knee_mhz=1400
        ),
        **_assumed(
            "the H100's knee, at the same part of the highest clock", (900, 1600), voltage_knee_mhz=1280
        ),
        **_assumed("the H100's rise to its highest clock", (0.4, 0.67), voltage_slope_per_ghz=0.53),
        **_assumed("an idle card, no context", (25, 40), static_w=33),
        **_assumed("an idle card that holds a context", (60, 100), context_idle_w=80),
        **_assumed("the H100's, by what lies between idle and cap", (90, 180), sm_w=137),
        **_assumed("GDDR6, about three times HBM's energy of a byte", (60, 180), w_per_tb_per_s=120),
        **_assumed("the H100's, by what lies between idle and cap", (0.4, 0.8), w_per_tflop_per_s=0.58),
        **_rows("measured", f"{_SHEET}: the power limit", power_cap_w=350),
        **_rows("assumed", "the boost clock", power_reference_mhz=2520),
        **_rows("assumed", "PCIe 4.0 x16, 27 of 32 GB/s", host_bytes_per_ms=27e6),
        **_rows("assumed", "no NVLink; peers over PCIe 4.0", peer_bytes_per_ms=22e6, has_nvlink=0),
    },
    "cpu": {
        **_rows("assumed", "budget for weights and KV, not the host's memory", total_bytes=4 * 2**30),
        **_rows("assumed", "the engine's KV block", block_tokens=32),
        **_rows("assumed", _NO_CHOICE, clock_min_mhz=0, clock_max_mhz=0, clock_step_mhz=1),
        **_rows("assumed", _NO_CHOICE, f_max_mhz=0, default_clock_mhz=0, compute_reference_mhz=1),
        **_rows("assumed", _NO_CHOICE, sm_size_min_pct=100, sm_size_step_pct=100, sm_count=0, sm_group=0),
        **_rows("assumed", _NO_CHOICE, bandwidth_knee_mhz=1, bandwidth_knee_exponent=0),
        **_rows("measured", _NO_METER, has_meter=0),
        **_rows("assumed", "reads and products do not overlap", overlap_exponent=1),
        **_rows("assumed", "20 GB/s for two cores", weight_bytes_per_ms=20e6, kv_bytes_per_ms=20e6),
        **_rows("fitted", _SMOLLM2, matmul_flop_per_ms=0.675e9, layer_overhead_ms=1.257),
        **_rows("assumed", "half the rate of matrix products", attn_flop_per_ms=0.3375e9),
        **_rows("assumed", _AS_H100, step_overhead_ms=1.0, bandwidth_share_rate=4.1),
        **_rows("assumed", "time slices of whole cores", compute_share_exponent=1),
        **_rows("assumed", _NO_METER, static_w=_NAN, context_idle_w=_NAN, sm_w=_NAN, power_cap_w=_NAN),
        **_rows("assumed", _NO_METER, w_per_tb_per_s=_NAN, w_per_tflop_per_s=_NAN, power_reference_mhz=1),
        **_rows("assumed", _NO_METER, voltage_knee_mhz=0, voltage_slope_per_ghz=0),
        **_rows("assumed", "a shared disk, 1 GB/s", disk_bytes_per_ms=1e6),
        **_rows("assumed", "a copy in memory, 5 GB/s", host_bytes_per_ms=5e6, peer_bytes_per_ms=5e6),
        **_rows("assumed", "a 10 Gbit/s network", tcp_bytes_per_ms=1e6, has_nvlink=0, link_setup_ms=1.0),
        **_rows("measured", "start of a vLLM process on two cores, 17-29 s", activation_ms=23_000),
        **_rows("assumed", "part of the engine's start", context_start_ms=0, power_on_ms=0),
    },
}
