"""The consolidator's shell."""

import asyncio

from services.consolidator.core import ConsolidatorCore
from services.consolidator.presets import preset
from services.consolidator.settings import ConsolidatorSettings
from shared.config import Common, load
from shared.model import ModelSpec, Placement
from shared.process import run_service
from shared.runtime import Shell, wait_for_stop
from shared.subjects import CONSOLIDATOR, MODEL_KEYS, PLACEMENT_KEY


async def serve(common: Common, settings: ConsolidatorSettings, stop: asyncio.Event) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(CONSOLIDATOR, common.id, common)
    await shell.open()
    try:
        placement = await shell.store.read(PLACEMENT_KEY, Placement)
        models = await shell.store.read_all(MODEL_KEYS, ModelSpec)
        await shell.start(ConsolidatorCore(shell.ident, settings, placement, tuple(models)), {})
        return await wait_for_stop(shell, stop)
    finally:
        await shell.close()


def main() -> None:
    """Entry point."""
    common = load(Common)
    settings = load(ConsolidatorSettings, CONSOLIDATOR, preset=preset(common.system))
    run_service(common, lambda stop: serve(common, settings, stop))


if __name__ == "__main__":
    main()
