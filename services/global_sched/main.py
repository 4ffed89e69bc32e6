"""The global scheduler's shell. Any number may run; each rebuilds all it knows from the bus and the store."""

import asyncio

from services.global_sched.core import GlobalSchedCore
from services.global_sched.predict import Learnt, LearntRead
from services.global_sched.presets import preset
from services.global_sched.settings import GlobalSettings
from shared.config import Common, load
from shared.metrics import Metrics
from shared.process import run_service
from shared.runtime import Shell, wait_for_stop
from shared.subjects import GLOBAL, LEARNT_KEYS

SHOW_PERIOD_S = 0.25


async def serve(common: Common, settings: GlobalSettings, stop: asyncio.Event) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(GLOBAL, common.id, common)
    core = GlobalSchedCore(shell.ident, settings)
    await shell.open()
    shower = None
    try:
        await shell.start(core, {})
        shower = asyncio.create_task(_show_load(shell.metrics, core))
        found = await shell.store.read_all(LEARNT_KEYS, Learnt)
        # what this replica has learnt itself comes last, and counts; a new one goes on from the others'
        for learnt in sorted(found, key=lambda each: each.scheduler == shell.ident):
            shell.feed(LearntRead(learnt=learnt))
        return await wait_for_stop(shell, stop)
    finally:
        if shower is not None:
            shower.cancel()
        await shell.close()


async def _show_load(metrics: Metrics, core: GlobalSchedCore) -> None:
    """Show regularly what is held back here and what is reserved: nothing, when nobody asks for anything."""
    while True:
        reservations, reserved_bytes = core.reserved
        metrics.show("waiting_dispatches", {}, core.waiting)
        metrics.show("reservations", {}, reservations)
        metrics.show("reserved_bytes", {}, reserved_bytes)
        await asyncio.sleep(SHOW_PERIOD_S)


def main() -> None:
    """Entry point."""
    common = load(Common)
    settings = load(GlobalSettings, GLOBAL, preset=preset(common.system))
    run_service(common, lambda stop: serve(common, settings, stop))


if __name__ == "__main__":
    main()
