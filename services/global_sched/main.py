"""The global scheduler's shell. Any number may run; each rebuilds all it knows from the bus and the store."""

import asyncio

from services.global_sched.core import GlobalSchedCore
from services.global_sched.settings import GlobalSettings
from shared.config import Common, load
from shared.runtime import Shell, run_service, wait_for_stop
from shared.subjects import GLOBAL


async def serve(common: Common, settings: GlobalSettings, stop: asyncio.Event) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(GLOBAL, common.id, common)
    await shell.open()
    try:
        await shell.start(GlobalSchedCore(shell.ident, settings), {})
        await shell.restore()
        return await wait_for_stop(shell, stop)
    finally:
        await shell.close()


def main() -> None:
    """Entry point."""
    common, settings = load(Common), load(GlobalSettings, GLOBAL)
    run_service(common, lambda stop: serve(common, settings, stop))


if __name__ == "__main__":
    main()
