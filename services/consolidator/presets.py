"""How models are placed and moved under the name of each system: its policy's settings, where they differ."""

from typing import Any

from shared.systems import system_for

_LITERAL: dict[str, Any] = {"least_saving": 1.0, "burst_sigmas": 0.0, "caution": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "ewr": {},
    # 3.5.2 word by word: only for fewer GPUs, memory by Little's law alone, and nothing learnt of a failure
    "ewr-literal": _LITERAL,
    # the same without clocks (4.3, stage 4)
    "demand-literal": {**_LITERAL, "consolidation": "demand"},
    "apart": {"consolidation": "none", "prefill_part": 0.5},
    # Aegaeon's own testbed: 6 of 16 GPUs for prompts
    "apart-in-turns": {"consolidation": "none", "prefill_part": 0.375},
    "kv-pressure": {"consolidation": "none", "placement": "kv_pressure"},
    "none": {"consolidation": "none"},
}


def preset(system: str) -> dict[str, Any]:
    """Return the settings by which a system places models. Raises ConfigError for one that is not known."""
    return PRESETS[system_for(system).consolidation]
