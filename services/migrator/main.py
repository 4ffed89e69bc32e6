"""The migrator's shell: one per GPU host, named by it."""

import asyncio

from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared.config import Common, load
from shared.runtime import Shell, run_service, wait_for_stop
from shared.subjects import MIGRATOR


async def serve(common: Common, settings: MigratorSettings, stop: asyncio.Event) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(MIGRATOR, common.id, common)
    await shell.open()
    try:
        await shell.start(MigratorCore(shell.ident, settings), {})
        return await wait_for_stop(shell, stop)
    finally:
        await shell.close()


def main() -> None:
    """Entry point; the id (FESTINA_ID) is the host's name."""
    common, settings = load(Common), load(MigratorSettings, MIGRATOR)
    run_service(common, lambda stop: serve(common, settings, stop))


if __name__ == "__main__":
    main()
