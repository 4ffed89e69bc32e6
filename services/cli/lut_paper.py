"""The paper's own points computed on the device model, beside what the paper prints.

They are Figs. 3 and 4 and Appendix H, and no targets: no number of the device model was fitted to them. The
paper does not say the batch of its decode figure, nor which memory its migration moved.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.cli.lut_fidelity import decode_work, prefill_work
from shared import silicon
from shared.devices import PARAMETERS, Device, device_for
from shared.model import ModelSpec, Struct
from shared.slo import objectives_for

H100 = device_for("h100-80gb")
TDP_MHZ = 1635  # the clock that the paper compares with
FIGURE_MODELS = ("Qwen2.5-7B-Instruct", "Llama-2-13B-chat", "Mistral-Small-3.1-24B")
DECODE_BATCH = 32


class Point(Struct):
    """One figure of the paper beside ours.

    Args:
        paper: what the paper prints; `ours`: what the device model gives; `why`: where they differ, why.
        meets: whether ours is at least the paper's "at least"; None where nothing is claimed.
    """

    figure: str
    subject: str
    paper: str
    ours: str
    meets: bool | None = None
    why: str = ""


# ---- Fig. 3: energy against clock


class Sweep(Struct):
    """Energy of one phase against clock, normalised to its least, on the whole device."""

    clocks_mhz: tuple[int, ...]
    energy: tuple[float, ...]
    best_mhz: int
    saving: float  # against 1635 MHz
    slower: float  # at the best clock, against 1635 MHz
    is_u: bool


def sweep(device: Device, work: silicon.StepWork) -> Sweep:
    """Return the energy of a step at every clock the device offers, within its power cap."""
    clocks = np.array(device.clocks_mhz)
    ms, watts, _ = silicon.step_alone(device, work, clocks, 1.0)
    energy = ms * watts
    best = int(np.argmin(energy))
    tdp = device.clocks_mhz.index(min(device.clocks_mhz, key=lambda clock: abs(clock - TDP_MHZ)))
    rises = np.diff(energy / energy[best])
    # Under the cap several clocks asked give one clock run; a step of a thousandth is no second dip.
    is_u = 0 < best < len(clocks) - 1 and bool((rises[:best] < 2e-3).all() and (rises[best:] > -2e-3).all())
    return Sweep(
        clocks_mhz=device.clocks_mhz,
        energy=tuple((energy / energy[best]).tolist()),
        best_mhz=int(clocks[best]),
        saving=float(1 - energy[best] / energy[tdp]),
        slower=float(ms[best] / ms[tdp] - 1),
        is_u=is_u,
    )


def figure_3(models: Sequence[ModelSpec], device: Device = H100) -> list[tuple[str, str, Sweep]]:
    """Return (model, workload, sweep) of the figure's panels."""
    return [
        (model.name, workload, sweep(device, work))
        for model in models
        for workload, work in (
            ("prefill, 128 x 128 tokens", prefill_work(device, model, 128, 128)),
            ("prefill, 128 x 512 tokens", prefill_work(device, model, 512, 128)),
            (
                f"decode, 1024 in 128 out, batch {DECODE_BATCH}",
                decode_work(device, model, DECODE_BATCH, 1088),
            ),
            (
                f"decode, 4096 in 128 out, batch {DECODE_BATCH}",
                decode_work(device, model, DECODE_BATCH, 4160),
            ),
        )
    ]


def figure_3_points(models: Sequence[ModelSpec]) -> list[Point]:
    """Fig. 3 beside ours: the U, the saving at its lowest point, and what it costs in time."""
    points = []
    for model, workload, found in figure_3(models):
        least = 0.27 if workload.startswith("decode") else 0.16
        shape = "U-shaped" if found.is_u else "not U-shaped"
        points.append(
            Point(
                figure="Fig. 3",
                subject=f"{model}, {workload}",
                paper=f"U-shaped; saves at least {least:.0%} against 1635 MHz",
                ours=f"{shape}; least at {found.best_mhz} MHz, saves {found.saving:.1%},"
                f" {found.slower:.0%} slower",
                meets=found.is_u and found.saving >= least,
                why="best clock at the voltage knee for every model and length"
                if found.best_mhz == H100.voltage_knee_mhz
                else "",
            )
        )
    return points


# ---- Fig. 4: partition and clock


class Setting(Struct):
    """One of S1-S3: shares of the SMs by model, the clock, and energy of one round of requests in joules."""

    shares_pct: tuple[int, ...]
    clock_mhz: int
    energy_j: float
    round_ms: float


def figure_4(
    models: Sequence[ModelSpec],
    input_tokens: int,
    output_tokens: int,
    default_mhz: int,
    device: Device = H100,
) -> list[Setting]:
    """Return S1 (fastest partition, default clock), S2 (its best clock) and S3 (both chosen together).

    Each model serves one request after another on its share, all at the same time; a round is one request of
    each, its time the slowest's, its energy static power for the round and each one's own for its request.
    S2 and S3 keep the objectives of the input length (Table 2).
    """
    shares = [mix for mix in product(device.sm_sizes_pct, repeat=len(models)) if sum(mix) <= 100]
    clocks = [*range(device.clock_min_mhz, default_mhz, device.clock_step_mhz), default_mhz]
    device = replace(device, context_idle_w=0.0)  # a floor of the whole device, not of each engine
    rounds = {
        mix: _round(device, models, input_tokens, output_tokens, mix, np.array(clocks)) for mix in shares
    }
    fastest = min(shares, key=lambda mix: float(rounds[mix][1][-1]))

    def best(mixes: Sequence[tuple[int, ...]]) -> Setting:
        found = [
            (float(energy[at]), mix, at)
            for mix in mixes
            for energy, _, on_time in [rounds[mix]]
            for at in np.flatnonzero(on_time)
        ]
        energy_j, mix, at = min(found)
        return Setting(mix, clocks[at], energy_j, float(rounds[mix][1][at]))

    energy, ms, _ = rounds[fastest]
    return [Setting(fastest, default_mhz, float(energy[-1]), float(ms[-1])), best([fastest]), best(shares)]


def _round(
    device: Device,
    models: Sequence[ModelSpec],
    input_tokens: int,
    output_tokens: int,
    shares_pct: tuple[int, ...],
    clocks: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return (J, ms, whether all objectives are met) of a round at each clock, on one partition."""
    bandwidth, compute = silicon.contention(device, [share / 100 for share in shares_pct])
    objectives = objectives_for(input_tokens)
    longest, dynamic_j, on_time = (
        np.zeros(len(clocks)),
        np.zeros(len(clocks)),
        np.ones(len(clocks), dtype=bool),
    )
    for model, share_pct in zip(models, shares_pct, strict=True):
        share, took = share_pct / 100, np.zeros(len(clocks))
        for work, steps, objective_ms in (
            (prefill_work(device, model, input_tokens), 1, objectives.ttft_ms),
            (
                decode_work(device, model, 1, input_tokens + output_tokens / 2),
                output_tokens - 1,
                objectives.tbt_ms,
            ),
        ):
            ms = silicon.step_ms(device, work, clocks, share, bandwidth, compute)
            watts = silicon.power_w(device, clocks, share, *silicon.rates(work, ms))
            took += steps * ms
            dynamic_j += steps * ms * (watts - device.static_w) / 1000
            on_time &= ms <= objective_ms
        longest = np.maximum(longest, took)
    return dynamic_j + device.static_w * longest / 1000, longest, on_time


def figure_4_points(models: Sequence[ModelSpec]) -> list[Point]:
    """Fig. 4 beside ours, for both default clocks that the baselines may have run at."""
    points = []
    for default_mhz in (TDP_MHZ, H100.default_clock_mhz):
        for tokens in ((512, 128), (1024, 128), (4096, 512)):
            s1, s2, s3 = figure_4(models, *tokens, default_mhz)
            clock_saves, mix_saves = 1 - s2.energy_j / s1.energy_j, 1 - s3.energy_j / s2.energy_j
            points.append(
                Point(
                    figure="Fig. 4",
                    subject=f"{tokens[0]} in, {tokens[1]} out, default clock {default_mhz} MHz",
                    paper="S2 saves 17 % on S1, S3 another 8 %",
                    ours=f"S1 {_setting(s1)}; S2 {_setting(s2)} saves {clock_saves:.1%};"
                    f" S3 {_setting(s3)} another {mix_saves:.1%}",
                )
            )
    return points


def _setting(setting: Setting) -> str:
    return f"{'-'.join(map(str, setting.shares_pct))} % at {setting.clock_mhz} MHz"


# ---- Appendix H: energy of a migration

PAPER_IDLE_W = 98.7  # 10.67 J / 108 ms = 40.76 J / 413 ms = 29.6 kJ / 300 s


def appendix_h_points(models: dict[str, ModelSpec]) -> list[Point]:
    """Energy of moving a model by either link beside the paper's, and how long an idle device draws as much.

    Two devices move bytes at the link's rate: the energy above idle is that of their memory traffic, which is
    what `move_energy_j` counts; in all, it is what both draw meanwhile if they serve nothing else. What the
    host draws is not in it.
    """
    points = []
    for name, printed in (("Llama-2-13B-chat", "10.67 J, 108 ms"), ("Qwen3-32B", "40.76 J, 413 ms")):
        model = models[name]
        for what, sent in (
            ("KV of 4,096 tokens", 4096 * model.kv_bytes_per_token),
            ("weights and KV of 4,096 tokens", model.weight_bytes + 4096 * model.kv_bytes_per_token),
        ):
            points += [
                Point(
                    figure="App. H",
                    subject=f"{name}, {what}, {shown}",
                    paper=printed if link == "nvlink" else "",
                    ours=_cost_of_sending(sent, link),
                )
                for link, shown in (("nvlink", "NVLink"), ("pcie", "PCIe"))
            ]
    idle_w, cold_w = H100.context_idle_w, H100.static_w
    points.append(
        Point(
            figure="App. H",
            subject="one GPU disabled for 5 minutes",
            paper=f"29.6 kJ ({PAPER_IDLE_W} W)",
            ours=f"off {0.3 * idle_w:.1f} kJ ({idle_w:.0f} W); context ended, still powered"
            f" {0.3 * (idle_w - cold_w):.1f} kJ ({idle_w - cold_w:.0f} W)",
            why="only powering a device off saves what the paper counts",
        )
    )
    return points


def _cost_of_sending(sent_bytes: int, link: str) -> str:
    ms = float(silicon.transfer_ms(H100, sent_bytes, link))
    traffic_w = H100.w_per_tb_per_s * sent_bytes / ms / 1e9
    above_j, whole_j = (2 * watts * ms / 1000 for watts in (traffic_w, H100.context_idle_w + traffic_w))
    return (
        f"{sent_bytes / 1e9:.1f} GB in {ms:.0f} ms; {above_j:.2f} J above idle, {whole_j:.2f} J in all,"
        f" drawn by an idle device in {1000 * whole_j / H100.context_idle_w:.0f} ms"
    )


# ---- bands of what is assumed


def bands(model: ModelSpec, device: Device = H100) -> list[Point]:
    """How Fig. 3's results for one model move when an assumed number takes either end of its band.

    Numbers that move nothing by a percentage point are left out.
    """

    def outcome(moved: Device) -> str:
        prefill = sweep(moved, prefill_work(moved, model, 512, 128))
        decode = sweep(moved, decode_work(moved, model, DECODE_BATCH, 1088))
        return (
            f"prefill {prefill.best_mhz} MHz saves {prefill.saving:.0%},"
            f" decode {decode.best_mhz} MHz saves {decode.saving:.0%}"
        )

    points = [Point(figure="Band", subject="as the table has it", paper="", ours=outcome(device))]
    for name, parameter in PARAMETERS[device.name].items():
        ends = parameter.band or ()
        outcomes = [outcome(replace(device, **{name: type(getattr(device, name))(end)})) for end in ends]
        if set(outcomes) - {points[0].ours}:
            at_ends = "; ".join(f"{end:g}: {found}" for end, found in zip(ends, outcomes, strict=True))
            points.append(
                Point(
                    figure="Band",
                    subject=f"{name}, {parameter.value:g}",
                    paper="",
                    ours=at_ends,
                    why=parameter.source,
                )
            )
    return points
