"""How a GPU is run under the name of each system: its policy's own settings, where they differ."""

from typing import Any

from shared.systems import system_for

_PLAIN: dict[str, Any] = {"pacing": "off", "slack_headroom": 0.0}
_FCFS: dict[str, Any] = {"bypass_max_ms": 0.0}  # then nobody is let past anybody, and all have waited enough

PRESETS: dict[str, dict[str, Any]] = {
    "joint-sweep": {},
    # 3.4 word by word: least shares, every saving taken at once, Eq. 4, and clocks by deadlines alone
    "joint-sweep-literal": {
        "widening": False,
        "memory_pressure": False,
        "turns": "score",
        "clock_dwell_ms": 0.0,
        "clock_min_gain": 0.0,
        **_PLAIN,
    },
    "ungoverned": {"clock": "default", "shares": "all", "turns": "score", **_PLAIN},
    "affinity": {"clock": "affinity", "shares": "all", "turns": "score", **_PLAIN},
    "static-shares": {"clock": "default", "shares": "static", **_FCFS, **_PLAIN},
    "shares-by-demand": {
        "clock": "default",
        "shares": "demand",
        "fixed_chunk_tokens": 8192,
        **_FCFS,
        **_PLAIN,
    },
    "ecofreq": {"clock": "ecofreq", "shares": "all", **_FCFS, **_PLAIN},
    "greenllm": {"clock": "greenllm", "shares": "all", **_PLAIN},
    "class-clocks": {"clock": "dynamollm", "shares": "all", **_FCFS, **_PLAIN},
}


def preset(system: str) -> dict[str, Any]:
    """Return the settings by which a system runs a GPU. Raises ConfigError for one that is not known."""
    return PRESETS[system_for(system).runtime]
