"""How requests are dispatched under the name of each system: its policy's own settings, where they differ."""

import math
from typing import Any

from shared.systems import system_for

PRESETS: dict[str, dict[str, Any]] = {
    "least-energy": {},
    # Eqs. 2 and 3 word by word (docs/decisions.md, 16)
    "least-energy-literal": {"charge": "device"},
    "in-time": {"choice": "in_time"},
    "least-loaded": {"choice": "least_loaded"},
    # placed offline: no further instance is ever asked for
    "static": {"choice": "least_loaded", "deficit_requests": math.inf},
    "eco-route": {"choice": "eco_route"},
    # all GPUs have all models: there is no further instance to ask for
    "where-loaded": {"choice": "where_loaded", "deficit_requests": math.inf},
    "joins-group": {"choice": "joins_group", "deficit_requests": math.inf},
}


def preset(system: str) -> dict[str, Any]:
    """Return the settings by which a system dispatches. Raises ConfigError for one that is not known."""
    return PRESETS[system_for(system).dispatch]
