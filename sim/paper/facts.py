"""What the paper says that needs no grid: Fig. 7, Tables 1 and 3, Appendices C and H."""

import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from services.consolidator.preference import prefer
from services.consolidator.window import Load
from services.global_sched.predict_standin import MEASURED, PAPER, Errors
from shared.catalog import entries, pool_models
from shared.devices import device_for
from shared.lut import lut_for
from shared.model import ModelSpec
from shared.silicon import load_ms, transfer_ms
from shared.slo import objectives_for
from shared.systems import SYSTEMS
from sim.lengths import SHAREGPT
from sim.page import Section, Sheet, drawing, svg
from sim.paper.entry import Results, Scale, claim, claims

GPU = "h100-80gb"
BENCH = Path("build/bench.json")
ERRORS = (-0.10, -0.05, -0.025, 0.025, 0.05, 0.10)  # Fig. 7's ranges
DRAWS = 20_000
WITHIN = 98.0  # % of predictions less than 5 % off
TABLE_3 = {
    "dispatch.p50_ms": {100: 0.011, 1_000: 0.103, 5_000: 0.509, 10_000: 0.988},
    "local.p50_ms": {10: 0.0544, 25: 0.0612, 50: 0.0768, 100: 0.0942},
}
MOVED = {"Llama-2-13B-chat": (10.67, 108.0), "Qwen3-32B": (40.76, 413.0)}  # J, ms of idle power
MOVED_TOKENS = 4096  # of KV
SAVED_KJ = 29.6  # by a GPU that is off for five minutes
WASTE = (10.0, 16.0)  # % of energy, of mismatched neighbours


def show_predictor(results: Results, scale: Scale) -> Section:
    """Fig. 7: how far off predictions of the output length are."""
    true = SHAREGPT.output_tokens.lengths((np.arange(DRAWS) + 0.5) / DRAWS)
    rng = np.random.default_rng(0)
    found = {
        name: _errors(errors, true, rng.random(DRAWS))
        for name, errors in (("as published", PAPER), ("measured", MEASURED))
    }
    within = {name: 100 * float(np.mean(np.abs(errors) <= 0.05)) for name, errors in found.items()}
    names = ("< -10 %", *(f"{a:.1%} to {b:.1%}" for a, b in pairwise(ERRORS)), "> +10 %")
    figure, axes = drawing(1, 1, width=9.0, height=3.0)
    parts = {
        name: np.histogram(errors, [-np.inf, *ERRORS, np.inf])[0] / DRAWS for name, errors in found.items()
    }
    for place, (name, part) in enumerate(parts.items()):
        axes[0][0].bar(np.arange(len(part)) + 0.4 * place, 100 * part, 0.38, label=name)
    axes[0][0].set_xticks(np.arange(len(names)) + 0.2, names, fontsize="small")
    axes[0][0].set(ylabel="predictions (%)")
    axes[0][0].legend()
    lines = tuple(
        (name, *(f"{parts[kind][place]:.1%}" for kind in parts)) for place, name in enumerate(names)
    )
    return Section(
        name="fig7",
        title="Fig. 7: error of predicted output lengths",
        pictures=(svg(figure),),
        sheets=(
            claims([claim("predictions within 5 %", WITHIN, within["measured"], " %", within=2.0)]),
            Sheet(("error", *parts), lines),
        ),
        notes=(
            "Measured: a published BERT classifier's predictions of 85,482 chats, as fitted in"
            " `services/global_sched/predict_standin.py`, drawn for ShareGPT's output lengths;"
            " `python docs/evaluate_predictor.py FOLDER` measures it from the data"
            " (docs/predictor.md). Festina"
            " itself uses running quantiles.",
        ),
    )


def _errors(errors: Errors, true: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Return the relative errors of predictions, one for each true length."""
    found = np.empty(len(true))
    shorter = np.full(len(true), True)
    for longest, ratios in errors:
        mine = shorter & (true <= longest)
        at, values = zip(*ratios, strict=True)
        found[mine] = np.interp(uniform[mine], at, values) - 1
        shorter &= ~mine
    return found


def show_systems(results: Results, scale: Scale) -> Section:
    """Table 1: what each system does."""
    lines = tuple(
        (name, one.about, one.spatial_sharing, one.reconfigures, one.energy_aware, one.phase_aware)
        for name, one in SYSTEMS.items()
    )
    header = ("system", "", "spatial sharing", "dynamic reconfiguration", "energy aware", "phase aware")
    return Section("table1", "Table 1: the systems that can be compared", sheets=(Sheet(header, lines),))


def show_overheads(results: Results, scale: Scale) -> Section:
    """Table 3: how long decisions take."""
    try:
        measured = json.loads(BENCH.read_text())
    except FileNotFoundError:
        note = f'{BENCH} is not there; `make bench ONLY="dispatch local"` makes it.'
        return Section("table3", "Table 3: time of a decision", notes=(note,))
    lines = []
    for figure, sizes in TABLE_3.items():
        for size, paper_ms in sizes.items():
            ms = measured.get(f"{figure}.{size}")
            plain = measured.get(f"interpreted.{figure}.{size}")
            lines.append(
                (
                    f"{figure.partition('.')[0]}, {size:,}",
                    f"{paper_ms:g}",
                    *("-" if value is None else f"{value:.4f}" for value in (ms, plain)),
                    "-" if ms is None else f"{ms / paper_ms:.2g}x",
                )
            )
    header = ("GPUs, or tasks", "paper, ms", "here, ms (compiled)", "interpreted", "here / paper")
    note = f"Medians of {BENCH}, as `make bench` wrote it, on another machine than the paper's."
    return Section(
        "table3", "Table 3: time of a decision", sheets=(Sheet(header, tuple(lines)),), notes=(note,)
    )


def show_mismatch(results: Results, scale: Scale) -> Section:
    """Appendix C: what models waste at the clock of a neighbour."""
    lines: list[tuple[str, ...]] = []
    wastes: list[float] = []
    models = pool_models(16)
    for rps in (0.2, 1.0, 4.0):
        load = Load(rps, SHAREGPT.input_tokens.mean, SHAREGPT.output_tokens.mean, 0.0)
        found = []
        clocks = []
        for model in models:
            lut = lut_for(GPU, model)
            wants = prefer(lut, load, objectives_for(int(load.input_tokens)))
            above_w = np.array(wants.watts) + wants.busy * lut.device.static_w * wants.sm_share_pct / 100
            found.append((wants.sm_clock_mhz, lut.clocks_mhz, above_w))
            clocks.append(wants.sm_clock_mhz)
        mine = []
        for one, other in combinations(found, 2):
            clock = max(one[0], other[0])
            own = sum(float(np.interp(each[0], each[1], each[2])) for each in (one, other))
            mine.append(
                100 * (sum(float(np.interp(clock, each[1], each[2])) for each in (one, other)) / own - 1)
            )
        wastes += mine
        lines.append(
            (
                f"{rps:g}",
                f"{min(clocks):.0f} to {max(clocks):.0f}",
                f"{np.median(mine):.1f} %",
                f"{max(mine):.1f} %",
            )
        )
    told = [
        claim(
            "energy wasted by mismatched pairs, at least",
            WASTE[0],
            float(np.median(wastes)),
            " %",
            within=2.0,
        ),
        claim("energy wasted by mismatched pairs, at most", WASTE[1], max(wastes), " %", within=2.0),
    ]
    header = ("requests/s per model", "preferred clocks, MHz", "waste, median of pairs", "most")
    return Section(
        name="appendix-c",
        title="Appendix C: energy wasted by frequency mismatch",
        sheets=(claims(told), Sheet(header, tuple(lines))),
        notes=(
            "All pairs of 16 models, each at the clock it prefers or both at the higher (Eq. 5's"
            " F_g); power above"
            " static from the look-up tables. The device model's voltage knee gives almost all"
            " models one best"
            " clock; a measured table may differ.",
        ),
    )


def show_migration(results: Results, scale: Scale) -> Section:
    """Appendix H: what moving a model with its KV takes."""
    device = device_for(GPU)
    known = {entry.name: entry.spec() for entry in entries()}
    told, lines = [], []
    for name, (paper_j, paper_ms) in MOVED.items():
        memory_j, ms, sent = _moved(known[name])
        told.append(
            claim(f"moving {name} with {MOVED_TOKENS} tokens of KV", paper_j, memory_j, " J", within=0.2)
        )
        for saving, watts in (
            ("off", device.context_idle_w),
            ("cold", device.context_idle_w - device.static_w),
        ):
            lines.append(
                (
                    name,
                    f"{sent / 1e9:.1f} GB",
                    f"{ms:.0f} ms",
                    f"{memory_j:.2f} J",
                    saving,
                    f"{memory_j / watts * 1000:.0f} ms",
                    f"{paper_ms:.0f} ms",
                )
            )
    saved = device.context_idle_w * 300 / 1000
    loaded_ms = load_ms(device, known["Llama-2-13B-chat"].weight_bytes)
    told.append(claim("saved by a GPU that is off for 5 minutes", SAVED_KJ, saved, " kJ", within=0.15))
    header = ("model", "sent", "over NVLink", "memory traffic", "a freed GPU is", "regained after", "paper")
    return Section(
        name="appendix-h",
        title="Appendix H: energy of a migration",
        sheets=(claims(told), Sheet(header, tuple(lines))),
        notes=(
            "Here: every byte is read on one GPU and written on the other, at the device model's"
            " energy of a byte"
            f" ({device.w_per_tb_per_s:g} J/TB); weights and KV over NVLink. The paper's two figures"
            f" and its 29.6 kJ"
            f" are one constant, 98.7 W; an idle H100 with a context draws {device.context_idle_w:g}"
            f" W here. From host memory in place of NVLink, loading 13B takes {loaded_ms:.0f} ms.",
        ),
    )


def _moved(model: ModelSpec) -> tuple[float, float, float]:
    """Return (J of memory traffic, ms, bytes) of moving a model's weights and KV."""
    device = device_for(GPU)
    sent = model.weight_bytes + MOVED_TOKENS * model.kv_bytes_per_token
    return 2 * sent * device.w_per_tb_per_s / 1e12, transfer_ms(device, sent, "nvlink"), sent
