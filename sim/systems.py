"""Settings of a world's services under the name of a system, as each service would resolve it."""

from typing import Any

from msgspec.structs import replace

from services.consolidator import presets as consolidator
from services.global_sched import presets as global_sched
from services.local_sched import presets as local_sched
from sim.scenario import Settings


def under(system: str, settings: Settings | None = None, **local: Any) -> Settings:
    """Return settings with a system's own in the place of what they say there.

    Args:
        system: its name.
        settings: the others; as shipped if left out.
        local: settings of local schedulers that win over both: a system's knobs.

    Raises:
        ConfigError: no system has this name.
    """
    base = settings or Settings()
    return replace(
        base,
        scheduler=replace(base.scheduler, **global_sched.preset(system)),
        local=replace(base.local, **(local_sched.preset(system) | local)),
        consolidator=replace(base.consolidator, **consolidator.preset(system)),
    )
