"""SLO classes and attainment (Table 2 of the paper, after DynamoLLM)."""

from shared.model import Objectives

TBT_MS = 100.0
CLASSES = (  # (name, input tokens below, TTFT in ms); Table 2
    ("S", 256, 250.0),
    ("M", 1024, 400.0),
    ("L", 8193, 2000.0),
)


def class_of(input_tokens: int) -> str:
    """Return the SLO class, ``S``, ``M`` or ``L``, which the input length alone decides."""
    return next((name for name, below, _ in CLASSES if input_tokens < below), "L")


def objectives_for(input_tokens: int) -> Objectives:
    """Return the objectives of a request with this many input tokens (Table 2).

    Inputs longer than 8192 tokens, which the paper leaves out, are class L with TTFT scaled by length.
    """
    for _, below, ttft_ms in CLASSES:
        if input_tokens < below:
            return Objectives(ttft_ms=ttft_ms, tbt_ms=TBT_MS)
    return Objectives(ttft_ms=2000.0 * input_tokens / 8192, tbt_ms=TBT_MS)


def met(objectives: Objectives, ttft_ms: float, mean_tbt_ms: float) -> bool:
    """Say whether a request met both objectives, counted per request (TTFT, and mean TBT)."""
    return ttft_ms <= objectives.ttft_ms and mean_tbt_ms <= objectives.tbt_ms
