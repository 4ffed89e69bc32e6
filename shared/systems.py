"""The serving systems that can be compared, by name: which policy each tier follows under that name.

Names only; every service resolves the name of its own policy, in its `presets.py`. Four of the fields are the
columns of the paper's Table 1.
"""

from typing import Literal

from msgspec.structs import replace

from shared.errors import ConfigError
from shared.model import Struct

Has = Literal["yes", "partial", "no"]


class System(Struct):
    """One system.

    Args:
        about: what it is, in a line.
        dispatch: how the global scheduler places requests (3.3).
        runtime: how local schedulers batch, and choose clock and SM shares (3.4).
        consolidation: how models are placed and moved (3.5).
        spatial_sharing: models run beside one another on a GPU.
        reconfigures: what a model has of a GPU changes with its load.
        energy_aware: energy is among what decisions weigh.
        phase_aware: prefill and decode are decided on apart.
        idle: what becomes of a GPU without models: the accounting in which its energy is counted.
    """

    about: str
    dispatch: str
    runtime: str
    consolidation: str
    spatial_sharing: Has
    reconfigures: Has
    energy_aware: Has
    phase_aware: Has
    idle: Literal["cold", "off"] = "cold"


def _stage(number: int, adds: str, dispatch: str, runtime: str, consolidation: str) -> System:
    """Return a stage of the paper's ablation (4.3, Fig. 13)."""
    reconfigures: Has = "yes" if number >= 3 else "no"
    return System(
        about=f"Festina's ablation, stage {number}: {adds}",
        dispatch=dispatch,
        runtime=runtime,
        consolidation=consolidation,
        spatial_sharing="yes",
        reconfigures=reconfigures,
        energy_aware="no" if number == 1 else "yes",
        phase_aware=reconfigures,
    )


_LITERAL = ("least-energy-literal", "joint-sweep-literal")

SYSTEMS: dict[str, System] = {
    "festina": System(
        "Festina at its best", "least-energy", "joint-sweep", "ewr", "yes", "yes", "yes", "yes"
    ),
    "festina-paper": System(
        "Festina as published: stage 5 of its ablation", *_LITERAL, "ewr-literal", "yes", "yes", "yes", "yes"
    ),
    "festina-stage-1": _stage(1, "SLO-aware dispatching", "in-time", "ungoverned", "none"),
    "festina-stage-2": _stage(2, "and frequency-aware dispatching", _LITERAL[0], "affinity", "none"),
    "festina-stage-3": _stage(3, "and clocks and SM shares at run time", *_LITERAL, "none"),
    "festina-stage-4": _stage(4, "and SLO-aware placement", *_LITERAL, "demand-literal"),
    "festina-stage-5": _stage(5, "and frequency-affine placement", *_LITERAL, "ewr-literal"),
    "festina-stage-6": replace(
        _stage(6, "and empty GPUs off (Festina+)", *_LITERAL, "ewr-literal"), idle="off"
    ),
    "festina-pdd": System(
        "Festina with prefill and decode on different GPUs",
        *_LITERAL,
        "apart",
        *("yes", "yes", "yes", "yes"),
    ),
    "serverlessllm": System(
        "ServerlessLLM: a GPU for one model at a time, until its requests have ended",
        *("where-loaded", "until-done", "none"),
        *("no", "partial", "no", "no"),
    ),
    "serverlessllm-shared": System(
        "ServerlessLLM, generous: a GPU's time for all models that fit into it together",
        *("where-loaded", "while-they-fit", "none"),
        *("yes", "partial", "no", "no"),
    ),
    "aegaeon": System(
        "Aegaeon: models change between tokens, prompts and decodes on different GPUs",
        *("joins-group", "tokens", "apart-in-turns"),
        *("yes", "yes", "no", "partial"),
    ),
    "aegvoltana": System(
        "Aegaeon with VoltanaLLM's EcoFreq per GPU",
        *("joins-group", "tokens-ecofreq", "apart-in-turns"),
        *("yes", "yes", "yes", "yes"),
    ),
    "prism": System(
        "Prism, co-located: models by the pressure on KV memory, prompts by slack",
        *("least-loaded", "slack-first", "kv-pressure"),
        *("yes", "partial", "no", "no"),
    ),
    "muxserve": System(
        "MuxServe: SM shares and placement made offline",
        *("static", "static-shares", "none"),
        *("yes", "no", "no", "no"),
    ),
    "dilu": System(
        "Dilu: SM shares by demand, first come first served",
        *("least-loaded", "shares-by-demand", "none"),
        *("yes", "yes", "no", "no"),
    ),
    "voltanallm": System(
        "VoltanaLLM, co-located: EcoRoute, and EcoFreq per GPU",
        *("eco-route", "ecofreq", "none"),
        *("no", "no", "yes", "yes"),
    ),
    "greenllm": System(
        "GreenLLM, co-located: a clock per phase, the higher of them per GPU",
        *("least-loaded", "greenllm", "none"),
        *("no", "no", "yes", "yes"),
    ),
    "dynamollm": System(
        "DynamoLLM, co-located: a clock per class of requests, the highest of them per GPU",
        *("least-loaded", "class-clocks", "none"),
        *("no", "partial", "yes", "no"),
    ),
}


def system_for(name: str) -> System:
    """Return the system of this name. Raises ConfigError naming those there are."""
    if name not in SYSTEMS:
        raise ConfigError(f"no system is called {name!r}; there are: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
