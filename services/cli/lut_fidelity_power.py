"""Power of the device model against measured power: an engine that serves; a kernel at locked clocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.cli.lut_fidelity import (
    CATALOG_NAMES,
    GEMMA3,
    H100,
    Check,
    Row,
    Rows,
    check_of,
    number,
    prefill_work,
)
from shared import silicon
from shared.model import ModelSpec

PROMPT_TOKENS = 200  # of the benchmark's chats, which its data does not tell
POWER_LIMIT_W = 685  # rows at or above ran into the power limit: their clock is not known
CLOCK_MHZ = H100.default_clock_mhz


@dataclass(frozen=True)
class _Served:
    """One steady state: a batch that is always full, each request replaced by the next when it ends."""

    model: ModelSpec
    batch: float
    output_tokens: float
    step_ms: float  # mean, from the tokens per second
    itl_ms: float  # median between two tokens of a request
    power_w: float

    @property
    def logits(self) -> float:
        """Logits to choose from in a decode step."""
        return self.batch * self.model.vocab_tokens

    def work(self, prefill_tokens: float = 0.0) -> silicon.StepWork:
        """Work of a decode step, with so many prompt tokens beside."""
        return silicon.step_work(
            H100,
            self.model,
            decode_batch=self.batch,
            decode_context_tokens=self.batch * (PROMPT_TOKENS + self.output_tokens / 2),
            prefill_tokens=prefill_tokens,
        )

    def formula_w(self) -> float:
        """Power by the formula at the measured rate of steps, with the prompt tokens that arrive in one."""
        mixed = self.work(prefill_tokens=self.batch * PROMPT_TOKENS / self.output_tokens)
        return float(silicon.power_w(H100, CLOCK_MHZ, 1.0, *silicon.rates(mixed, self.step_ms)))

    def decode(self, sampling_ms: float = 0.0) -> tuple[float, float]:
        """(ms, W) of a decode step as a table has it, with the time that choosing tokens takes added."""
        work = self.work()
        work = replace(work, overhead_ms=work.overhead_ms + sampling_ms)
        ms, watts, _ = silicon.step_alone(H100, work, CLOCK_MHZ, 1.0)
        return float(ms), float(watts)

    def request_w(self, sampling_ms: float = 0.0) -> float:
        """Mean power of requests: each a prefill of its own, and its part of the decode steps."""
        prefill_ms, prefill_w, _ = silicon.step_alone(
            H100, prefill_work(H100, self.model, PROMPT_TOKENS), CLOCK_MHZ, 1.0
        )
        step_ms, step_w = self.decode(sampling_ms)
        decode_ms = (self.output_tokens - 1) * step_ms / self.batch
        return float((prefill_ms * prefill_w + decode_ms * step_w) / (prefill_ms + decode_ms))


def mlenergy(rows: Rows, models: dict[str, ModelSpec]) -> list[Check]:
    """Steady serving power of one H100 at default clocks (ML.ENERGY), dense models in bf16, text tasks.

    First the power formula at the measured rate of steps, to which its factors were fitted: the error of
    power alone, and what the bound is on. Then, errors of time included, power as a table has it, at the rate
    that the model itself predicts for a pure decode of that batch. Beside it the same with the sampling of
    that engine: so many logits a ms, fitted to the inter-token latencies of the other models, never to power.
    No table has it: this product's engine chooses its tokens otherwise.
    """
    shapes = models | GEMMA3
    found = [served for row in rows if (served := _served(row, shapes)) and served.power_w < POWER_LIMIT_W]
    names = {s.model.name for s in found}
    others = {name: _ms_per_logit([s for s in found if s.model.name != name]) for name in names}

    def sampling_ms(served: _Served) -> float:
        return others[served.model.name] * served.logits

    def errors(modelled: Callable[[_Served], float], measured: Callable[[_Served], float]) -> list[float]:
        return [modelled(s) / measured(s) - 1 for s in found]

    def power(
        subject: str, modelled: Callable[[_Served], float], note: str, bound: float | None = None
    ) -> Check:
        return check_of(
            "ML.ENERGY H100, power", subject, errors(modelled, lambda s: s.power_w), bound, note=note
        )

    fitted = f"fitted to the others' latencies; to all: {1e-6 / _ms_per_logit(found):.2f} million logits a ms"
    assumed = "prompts taken as 200 tokens; rows at the power limit left out"
    latency = "ML.ENERGY H100, inter-token latency"
    return [
        power("formula at the measured rate", _Served.formula_w, assumed, 8.0),
        power("as a table has it", lambda s: s.decode()[1], "the model's own rate of steps"),
        power("as a table has it, and that engine's sampling", lambda s: s.decode(sampling_ms(s))[1], fitted),
        power("prefills and decodes of a table", _Served.request_w, "as energy of requests is counted"),
        power("prefills and decodes of a table, and sampling", lambda s: s.request_w(sampling_ms(s)), fitted),
        check_of(latency, "unfitted", errors(lambda s: s.decode()[0], lambda s: s.itl_ms)),
        check_of(
            latency,
            "and that engine's sampling",
            errors(lambda s: s.decode(sampling_ms(s))[0], lambda s: s.itl_ms),
            note=fitted,
        ),
    ]


def _served(row: Row, shapes: dict[str, ModelSpec]) -> _Served | None:
    """Return what a row says; None where the device or the model is another."""
    model = shapes.get(CATALOG_NAMES.get(row["model"], row["model"]))
    wanted = (row["gpu"], row["num_gpus"], row["precision"]) == ("H100", "1", "bfloat16")
    if model is None or not wanted or row["task"] not in ("lm-arena-chat", "gpqa"):
        return None
    batch = float(row["avg_batch"])
    return _Served(
        model=model,
        batch=batch,
        output_tokens=float(row["avg_out"]),
        step_ms=1000.0 * batch / float(row["tok_s"]),
        itl_ms=float(row["itl_p50_ms"]),
        power_w=number(row["power_w_total"]),
    )


def _ms_per_logit(found: Sequence[_Served]) -> float:
    """The time per logit that fits the inter-token latencies best: least squares of relative errors."""
    per_ms = np.array([s.logits / s.itl_ms for s in found])
    missing = np.array([1.0 - s.decode()[0] / s.itl_ms for s in found])
    return float(per_ms @ missing / (per_ms @ per_ms))


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
