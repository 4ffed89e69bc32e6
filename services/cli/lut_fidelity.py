"""How far the device model and its tables are from measured data: what the checks of `festina lut` share.

Each check takes rows of a CSV file as published and gives errors (modelled / measured - 1): of times in
`lut_fidelity_time`, of power in `lut_fidelity_power`, of the tables in `lut_fidelity_tables`. Which numbers
were fitted to which data says `shared/device_table.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shared import silicon
from shared.devices import Device, device_for
from shared.model import ModelSpec, Struct

Row = dict[str, str]
Rows = Sequence[Row]

H100 = device_for("h100-80gb")
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


def number(text: str) -> float:
    """Return the number in a cell of a CSV file, nan where there is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
