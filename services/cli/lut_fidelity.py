"""How far the device model and its tables are from measured data: the checks of `festina lut check`.

Each check takes rows of a CSV file as published and gives errors (modelled / measured - 1). Which numbers
were fitted to which data says `shared/devices.py`; the Aegaeon profiles are the only end-to-end check of the
H100 that no number was fitted to.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared import lut, silicon
from shared.devices import Device, device_for
from shared.lut_samples import Sample
from shared.lut_table import Provenance
from shared.model import ModelSpec, Struct

Row = dict[str, str]
Rows = Sequence[Row]

H100 = device_for("h100-80gb")
A100 = device_for("a100-80gb")
CATALOG_NAMES = {  # as the data names models -> the catalog's name of the same shape
    "Qwen2.5-3B": "Qwen2.5-3B-Instruct",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct",
    "Llama-3.1-8B": "Llama-3.1-8B-Instruct",
    "Mistral-Nemo-12B": "Mistral-Nemo-12B-Instruct",
    "Llama-2-13B": "Llama-2-13B-chat",
    "Mistral-Small-24B": "Mistral-Small-3.1-24B",
    "llama2_13b_chat": "Llama-2-13B-chat",
    "qwen2_5_7b": "Qwen2.5-7B-Instruct",
    "yi1_5_9b_chat": "Yi-1.5-9B-Chat",
    "llama-7b": "Llama-2-7B-chat",
    "llama-13b": "Llama-2-13B-chat",
    "Qwen/Qwen3-8B": "Qwen3-8B",
    "Qwen/Qwen3-14B": "Qwen3-14B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B-Instruct",
}


def _gemma3(
    name: str, params: int, layers: int, hidden: int, heads: int, kv_heads: int, dim: int
) -> ModelSpec:
    return ModelSpec(
        name=name,
        engine="emulated",
        params=params,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        weight_bytes=2 * params,
        kv_bytes_per_token=4 * layers * kv_heads * dim,
        vocab_tokens=262_208,
        tied_embeddings=True,
    )


# Measured by ML.ENERGY and not in the catalog; text only, contexts within the sliding window.
GEMMA3 = {
    "google/gemma-3-12b-it": _gemma3("gemma-3-12b-it", 11_766_034_176, 48, 3840, 16, 8, 256),
    "google/gemma-3-27b-it": _gemma3("gemma-3-27b-it", 27_009_002_240, 62, 5376, 32, 16, 128),
}


class Check(Struct):
    """One line of the report: errors in percent over `n` measured points.

    Args:
        check: which comparison; `subject`: of what.
        bound_pct: the most that `mean_pct` may be; None where the line is only reported.
        worst_bound_pct: the same for `worst_pct`.
        skipped: why nothing was compared; empty where it was.
    """

    check: str
    subject: str
    n: int = 0
    mean_pct: float = 0.0
    bias_pct: float = 0.0
    p95_pct: float = 0.0
    worst_pct: float = 0.0
    bound_pct: float | None = None
    worst_bound_pct: float | None = None
    skipped: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """``skipped``, ``reported`` (no bound), ``within`` or ``over``."""
        if self.skipped:
            return "skipped"
        if self.bound_pct is None:
            return "reported"
        over_worst = self.worst_bound_pct is not None and self.worst_pct > self.worst_bound_pct
        return "over" if self.mean_pct > self.bound_pct or over_worst else "within"


def check_of(
    check: str,
    subject: str,
    errors: Iterable[float],
    bound_pct: float | None = None,
    worst_bound_pct: float | None = None,
    note: str = "",
) -> Check:
    """Sum up errors (modelled / measured - 1) in one line."""
    e = 100 * np.asarray(list(errors), dtype=float)
    size = np.abs(e)
    return Check(
        check=check,
        subject=subject,
        n=len(e),
        mean_pct=round(float(size.mean()), 2),
        bias_pct=round(float(e.mean()), 2),
        p95_pct=round(float(np.percentile(size, 95)), 2),
        worst_pct=round(float(size.max()), 2),
        bound_pct=bound_pct,
        worst_bound_pct=worst_bound_pct,
        note=note,
    )


def prefill_work(device: Device, model: ModelSpec, input_tokens: Any, prompts: Any = 1) -> silicon.StepWork:
    """Work of a step that prefills several prompts of one length, each attending to itself alone."""
    one = silicon.step_work(
        device, model, decode_batch=0, decode_context_tokens=0, prefill_tokens=input_tokens
    )
    return silicon.StepWork(
        one.weight_bytes, one.matmul_flops * prompts, one.kv_bytes, one.attn_flops * prompts, one.overhead_ms
    )


def decode_work(device: Device, model: ModelSpec, batch: Any, context_tokens: Any) -> silicon.StepWork:
    """Work of a decode step, each request with this many tokens of context."""
    return silicon.step_work(device, model, decode_batch=batch, decode_context_tokens=batch * context_tokens)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


# ---- against kernels


def kernels(rows: Rows, models: dict[str, ModelSpec], device: Device, gpu: str) -> list[Check]:
    """Composed kernel latencies (AIConfigurator tables), to which the rates were fitted; no host overhead."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        measured_ms = _number(row["kernel_ms"])
        model = models[CATALOG_NAMES.get(row["model"], row["model"])]
        if row["gpu"] != gpu or np.isnan(measured_ms):
            continue
        batch, tokens = int(row["batch"]), int(row["ctx_or_tokens"])
        decode = row["phase"] == "decode"
        work = (
            decode_work(device, model, batch, tokens)
            if decode
            else prefill_work(device, model, tokens, batch)
        )
        ms = silicon.step_ms(device, work, device.compute_reference_mhz, 1.0) - device.step_overhead_ms
        for subject in ("all", row["phase"], f"{row['model']}, {row['phase']}"):
            errors[subject].append(ms / measured_ms - 1)
    check = f"kernels on {gpu}, composed"
    if not errors:
        return [Check(check=check, subject="all", skipped=f"the file has no rows of {gpu}")]
    ordered = ["all", "decode", "prefill", *sorted(set(errors) - {"all", "decode", "prefill"})]
    return [check_of(check, s, errors[s], 6.0 if s == "all" else None) for s in ordered]


# ---- against an engine, end to end

SATURATED_TOKENS = 4096  # that engine's most tokens in a step: beyond, prompts wait and decodes wait for them


@dataclass(frozen=True)
class _Profile:
    model: str
    phase: str
    layers: int
    sequences: int
    measured_ms: float
    literal_ms: float
    capped_ms: float


def aegaeon(rows: Rows, models: dict[str, ModelSpec]) -> list[Check]:
    """Steps of an older vLLM on H100, end to end; no number of the device model was fitted to them.

    Models of time: at 1980 MHz as asked; within the power cap, as the tables have it; and that plus an
    overhead of that engine version, fitted here (so many ms a layer, and a sequence), and for comparison
    fitted to the other models only.
    """
    profiles = [p for row in rows if row["gpu"] == "H100" for p in _profiles(row, models)]
    names = sorted({p.model for p in profiles})
    checks = []
    overhead = _engine_overhead(profiles)
    others = {name: _engine_overhead([p for p in profiles if p.model != name]) for name in names}
    fitted_note = f"fitted: {overhead[0]:.3f} ms a layer + {overhead[1]:.3f} ms a sequence"
    variants: list[tuple[str, Callable[[_Profile], float], str]] = [
        ("at 1980 MHz, unfitted", lambda p: p.literal_ms, ""),
        ("power cap, unfitted", lambda p: p.capped_ms, ""),
        ("power cap, engine overhead", lambda p: _with(p, overhead), fitted_note),
        (
            "power cap, overhead of the others",
            lambda p: _with(p, others[p.model]),
            "fitted to the other models",
        ),
    ]
    for variant, modelled, note in variants:
        for name in names:
            for phase in ("prefill", "decode"):
                mine = [p for p in profiles if (p.model, p.phase) == (name, phase)]
                errors = [modelled(p) / p.measured_ms - 1 for p in mine]
                checks.append(check_of(f"Aegaeon H100, {variant}", f"{name}, {phase}", errors, note=note))
    return checks


def _profiles(row: Row, models: dict[str, ModelSpec]) -> Iterable[_Profile]:
    batch, tokens = int(row["batch"]), int(row["input_tokens"])
    model = models.get(CATALOG_NAMES.get(row["model"], ""))
    if model is None or batch * tokens > SATURATED_TOKENS:
        return
    works = {
        "prefill": (prefill_work(H100, model, tokens, batch), row["prefill_ms_p50"]),
        "decode": (decode_work(H100, model, batch, tokens), row["decode_step_ms_p50"]),
    }
    for phase, (work, measured) in works.items():
        if _number(measured) > 0:
            literal_ms = float(silicon.step_ms(H100, work, H100.default_clock_mhz, 1.0))
            capped_ms = float(silicon.step_alone(H100, work, H100.default_clock_mhz, 1.0)[0])
            yield _Profile(row["model"], phase, model.layers, batch, float(measured), literal_ms, capped_ms)


def _engine_overhead(profiles: Sequence[_Profile]) -> NDArray[Any]:
    """(ms a layer, ms a sequence) that make the capped model fit best: least squares of relative errors."""
    measured = np.array([p.measured_ms for p in profiles])
    design = np.array([(p.layers, p.sequences) for p in profiles]) / measured[:, None]
    missing = 1.0 - np.array([p.capped_ms for p in profiles]) / measured
    return np.asarray(np.linalg.lstsq(design, missing, rcond=None)[0])


def _with(profile: _Profile, overhead: NDArray[Any]) -> float:
    return float(profile.capped_ms + overhead[0] * profile.layers + overhead[1] * profile.sequences)


# ---- against SM shares


def muxserve(rows: Rows, models: dict[str, ModelSpec]) -> list[Check]:
    """Slow-down on part of the SMs against all of them, one A100 under MPS (MuxServe's example profile).

    Rows under 1 ms are failed measurements. A share is modelled by the step of the A100 row of the table.
    """
    points = {
        (row["model"], int(row["sm_pct"]), int(row["batch"]), int(row["seqlen"])): row
        for row in rows
        if row["num_gpus"] == "1"
    }
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (name, share_pct, batch, tokens), row in points.items():
        whole = points.get((name, 100, batch, tokens))
        if share_pct == 100 or whole is None:
            continue
        model = models[CATALOG_NAMES[name]]
        for phase in ("decode", "prefill"):
            measured_ms, whole_ms = _number(row[f"{phase}_ms"]), _number(whole[f"{phase}_ms"])
            if min(measured_ms, whole_ms) < 1.0:
                continue
            work = (decode_work if phase == "decode" else _prefill_of)(A100, model, batch, tokens)
            slower = silicon.step_ms(A100, work, 1410, share_pct / 100) / silicon.step_ms(
                A100, work, 1410, 1.0
            )
            size = "batch <= 128" if batch <= 128 else "batch >= 256"
            errors[phase, size].append(slower / (measured_ms / whole_ms) - 1)
            errors[phase, f"{size}, {share_pct} % of the SMs"].append(slower / (measured_ms / whole_ms) - 1)
    return [
        check_of(
            "MuxServe A100, SM share", f"{phase}, {size}", found, 6.0 if size == "batch <= 128" else None
        )
        for (phase, size), found in sorted(errors.items())
    ]


def _prefill_of(device: Device, model: ModelSpec, prompts: int, tokens: int) -> silicon.StepWork:
    return prefill_work(device, model, tokens, prompts)


# ---- against power

PROMPT_TOKENS = 200  # of the benchmark's chats, which its data does not tell
POWER_LIMIT_W = 685  # rows at or above ran into the power limit: their clock is not known


def mlenergy(rows: Rows, models: dict[str, ModelSpec]) -> list[Check]:
    """Steady serving power of one H100 at default clocks (ML.ENERGY), dense models in bf16, text tasks.

    First the power formula at the measured rate of steps, to which its factors were fitted; then power as a
    table has it, at the rate the model itself predicts for a pure decode of that batch.
    """
    shapes = models | GEMMA3
    formula, table = [], []
    for row in rows:
        model = shapes.get(CATALOG_NAMES.get(row["model"], row["model"]))
        wanted = (row["gpu"], row["num_gpus"], row["precision"]) == ("H100", "1", "bfloat16")
        measured_w = _number(row["power_w_total"])
        if model is None or not wanted or row["task"] not in ("lm-arena-chat", "gpqa"):
            continue
        if measured_w >= POWER_LIMIT_W:
            continue
        batch, out = float(row["avg_batch"]), float(row["avg_out"])
        context = batch * (PROMPT_TOKENS + out / 2)
        step_ms = 1000.0 * batch / float(row["tok_s"])
        mixed = silicon.step_work(
            H100,
            model,
            decode_batch=batch,
            decode_context_tokens=context,
            prefill_tokens=batch * PROMPT_TOKENS / out,  # that arrive in a step
        )
        watts = silicon.power_w(H100, H100.default_clock_mhz, 1.0, *silicon.rates(mixed, step_ms))
        formula.append(float(watts) / measured_w - 1)
        work = silicon.step_work(H100, model, decode_batch=batch, decode_context_tokens=context)
        _, watts, _ = silicon.step_alone(H100, work, H100.default_clock_mhz, 1.0)
        table.append(float(watts) / measured_w - 1)
    note = "prompts taken as 200 tokens; rows at the power limit left out"
    return [
        check_of("ML.ENERGY H100, power", "formula at the measured rate", formula, 8.0, note=note),
        check_of(
            "ML.ENERGY H100, power", "as a table has it", table, 8.0, note="the model's own rate of steps"
        ),
    ]


def voltage(rows: Rows) -> list[Check]:
    """Power of one compute kernel at locked clocks (H100 94 GB): the voltage curve fitted to it."""
    clock = np.array([float(row["sm_clock_mhz"]) for row in rows])
    watts = np.array([float(row["power_w"]) for row in rows])
    flat = clock <= H100.voltage_knee_mhz
    per_mhz, at_zero_w = np.polyfit(clock[flat], watts[flat], 1)
    measured = np.sqrt((watts - at_zero_w) / (per_mhz * clock))
    modelled = np.sqrt(H100.psi(clock) / H100.psi(H100.voltage_knee_mhz))
    return [
        check_of(
            "H100 power at locked clocks", "voltage against that below the knee", modelled / measured - 1
        )
    ]


# ---- of the tables against the model they come from

SWEEP_TOKENS = (256, 512, 1024, 2048, 4096, 8192)  # lengths of the regression's samples


def interpolation(models: Sequence[ModelSpec]) -> list[Check]:
    """Tables at lengths outside the grid (257-8,192), at its clocks and shares, against the model itself.

    `built` are the tables as served; `regression` those that samples at six lengths give, as if profiled.
    """
    between = np.arange(257, 8192, 61)
    clocks, shares = [795, 975, 1155, 1335, 1515, 1635], [10, 30, 50, 80, 100]
    errors: dict[str, list[float]] = defaultdict(list)
    for model in models:
        built = lut.build(H100, model)
        sampled = lut.from_samples(
            H100, model, _samples(model, clocks, shares), Provenance(kind="measured", device="the model")
        )
        for clock in clocks:
            for share in shares:
                prefill = silicon.step_alone(H100, prefill_work(H100, model, between), clock, share / 100)
                decode = silicon.step_alone(H100, decode_work(H100, model, 32, between), clock, share / 100)
                for kind, table in (("built", built), ("regression", sampled)):
                    for subject, got, exact in (
                        ("TTFT", table.ttft_ms(clock, share, between), prefill[0]),
                        ("prefill power", table.prefill_power_w(clock, share, between), prefill[1]),
                        ("TBT", table.tbt_ms(clock, share, 32, between), decode[0]),
                        ("decode power", table.decode_power_w(clock, share, 32, between), decode[1]),
                    ):
                        errors[f"{subject}, {kind}"].extend((got / exact - 1).tolist())
    return [
        check_of("interpolation between lengths", subject, found, 1.0, 5.0)
        for subject, found in errors.items()
    ]


def _samples(model: ModelSpec, clocks: Sequence[int], shares: Sequence[int]) -> list[Sample]:
    samples = []
    for clock in clocks:
        for share in shares:
            for tokens in SWEEP_TOKENS:
                work = prefill_work(H100, model, tokens)
                ms, watts, _ = silicon.step_alone(H100, work, clock, share / 100)
                samples.append(Sample("prefill", clock, share, float(ms), float(watts), input_tokens=tokens))
                work = decode_work(H100, model, 32, tokens)
                ms, watts, _ = silicon.step_alone(H100, work, clock, share / 100)
                samples.append(
                    Sample("decode", clock, share, float(ms), float(watts), batch=32, context_tokens=tokens)
                )
    return samples
