"""The consolidator's shell."""

import asyncio

from services.consolidator.core import ConsolidatorCore
from services.consolidator.presets import preset
from services.consolidator.settings import ConsolidatorSettings
from shared.config import Common, load
from shared.process import run_service
from shared.runtime import Shell, wait_for_stop
from shared.subjects import CONSOLIDATOR


async def serve(common: Common, settings: ConsolidatorSettings, stop: asyncio.Event) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(CONSOLIDATOR, common.id, common)
    await shell.open()
    try:
        await shell.start(ConsolidatorCore(shell.ident, settings), {})
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
