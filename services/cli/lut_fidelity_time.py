"""Times of the device model against measured ones: kernels, steps of an engine end to end, shares of the SMs.

The Aegaeon profiles are the only end-to-end check of the H100's times that no number was fitted to.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.cli.lut_fidelity import (
    CATALOG_NAMES,
    H100,
    Check,
    Row,
    Rows,
    check_of,
    decode_work,
    number,
    prefill_work,
)
from shared import silicon
from shared.devices import Device, device_for
from shared.model import ModelSpec

A100 = device_for("a100-80gb")
SATURATED_TOKENS = 4096  # that engine's most tokens in a step: beyond, prompts wait and decodes wait for them


def kernels(rows: Rows, models: dict[str, ModelSpec], device: Device, gpu: str) -> list[Check]:
    """Composed kernel latencies (AIConfigurator tables), to which the rates were fitted; no host overhead."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        measured_ms = number(row["kernel_ms"])
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
        if number(measured) > 0:
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
            measured_ms, whole_ms = number(row[f"{phase}_ms"]), number(whole[f"{phase}_ms"])
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
