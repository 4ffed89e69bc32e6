"""The global scheduler's shell. Any number may run; each rebuilds all it knows from the bus and the store."""

import asyncio

from services.global_sched.core import GlobalSchedCore
from services.global_sched.predict import Learnt, LearntRead
from services.global_sched.settings import GlobalSettings
from shared.config import Common, load
from shared.runtime import Shell, run_service, wait_for_stop
from shared.subjects import GLOBAL, LEARNT_KEYS


async def serve(common: Common, settings: GlobalSettings, stop: asyncio.Event) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(GLOBAL, common.id, common)
    await shell.open()
    try:
        await shell.start(GlobalSchedCore(shell.ident, settings), {})
        found = await shell.store.read_all(LEARNT_KEYS, Learnt)
        # what this replica has learnt itself comes last, and counts; a new one goes on from the others'
        for learnt in sorted(found, key=lambda each: each.scheduler == shell.ident):
            shell.feed(LearntRead(learnt=learnt))
        return await wait_for_stop(shell, stop)
    finally:
        await shell.close()


def main() -> None:
    """Entry point."""
    common, settings = load(Common), load(GlobalSettings, GLOBAL)
    run_service(common, lambda stop: serve(common, settings, stop))


if __name__ == "__main__":
    main()
