"""The serving systems that can be compared, by name: which policy each tier follows under that name.

Names only; every service resolves the name of its own policy.
"""

from shared.errors import ConfigError
from shared.model import Struct


class System(Struct):
    """Names of one system's policies.

    Args:
        dispatch: how the global scheduler places requests (3.3).
        runtime: how local schedulers batch, and choose clock and SM shares (3.4).
        consolidation: how models are placed and moved (3.5).
    """

    dispatch: str
    runtime: str
    consolidation: str


SYSTEMS: dict[str, System] = {
    "festina": System(dispatch="least-energy", runtime="joint-sweep", consolidation="ewr"),
}


def system_for(name: str) -> System:
    """Return the system of this name. Raises ConfigError naming those there are."""
    if name not in SYSTEMS:
        raise ConfigError(f"no system is called {name!r}; there are: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
