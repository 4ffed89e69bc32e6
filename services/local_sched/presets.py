"""How a GPU is run under the name of each system: its policy's own settings, where they differ."""

import math
from typing import Any

from shared.systems import system_for

_PLAIN: dict[str, Any] = {"pacing": "off", "slack_headroom": 0.0, "offload_bytes": 0}
_TURNS: dict[str, Any] = {"shares": "all", "cold_after_ms": math.inf}  # a process stands ready all the time
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
    # Prism: prompts so that as many as possible are in time (`turns`), KV memory for whoever needs it
    "slack-first": {"clock": "default", "shares": "all", **_PLAIN},
    "until-done": {"clock": "default", "switching": "request", **_TURNS, **_FCFS, **_PLAIN},
    "while-they-fit": {"clock": "default", "switching": "shared", **_TURNS, **_FCFS, **_PLAIN},
    "tokens": {
        "clock": "default",
        "switching": "token",
        "fixed_chunk_tokens": 8192,
        **_TURNS,
        **_FCFS,
        **_PLAIN,
    },
    "tokens-ecofreq": {
        "clock": "ecofreq",
        "switching": "token",
        "fixed_chunk_tokens": 8192,
        **_TURNS,
        **_FCFS,
        **_PLAIN,
    },
    "class-clocks": {"clock": "dynamollm", "shares": "all", **_FCFS, **_PLAIN},
}


def preset(system: str) -> dict[str, Any]:
    """Return the settings by which a system runs a GPU. Raises ConfigError for one that is not known."""
    return PRESETS[system_for(system).runtime]


def patience(engine_kind: str, gpu_type: str) -> dict[str, Any]:
    """Return the settings by which engines are taken for hanging, where they differ by what they run on.

    A CPU's cores and disks are everybody's: vLLM that waits for them is not to be given up for that.
    """
    on_cpu = (engine_kind, gpu_type) == ("vllm", "cpu")
    return {"stall_ms": 10_000.0, "silence_ms": 10_000.0} if on_cpu else {}
