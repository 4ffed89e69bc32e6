"""The migrator's shell: one per GPU host, named by it."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from services.migrator.actions import CloseStage, DropWeights, KeepWeights, OpenStage, SendChunk
from services.migrator.carrier import Carrier
from services.migrator.core import MigratorCore
from services.migrator.link import Links
from services.migrator.receiver import Receiver
from services.migrator.settings import LinkSettings, MigratorSettings
from services.migrator.stages import Stages
from services.migrator.weight_files import WeightFiles
from services.migrator.weights import Weights
from shared.config import Common, load
from shared.errors import Unavailable
from shared.model import HostAddress
from shared.process import run_service
from shared.runtime import Shell, wait_for_stop
from shared.stage import StageSettings
from shared.subjects import MIGRATOR, host_key

HEARTBEAT_S = 5.0


async def serve(
    common: Common,
    settings: MigratorSettings,
    link: LinkSettings,
    where: StageSettings,
    stop: asyncio.Event,
) -> bool:
    """Run until told to stop; returns whether all went well."""
    shell = Shell(MIGRATOR, common.id, common)
    if not link.secret:
        settings = msgspec.structs.replace(settings, network_bytes_s=0.0)
    stages = Stages(shell.ident, where)
    receiver, links = Receiver(stages, link), Links(shell.ident, stages.folder, link)
    files, core = WeightFiles(), MigratorCore(shell.ident, settings)
    carrier = Carrier(stages, links, lambda host: _address(shell, host), shell.heard)
    async with contextlib.AsyncExitStack() as after:
        after.callback(stages.close)
        after.push_async_callback(receiver.close)
        after.push_async_callback(carrier.close)
        after.push_async_callback(files.close)
        after.push_async_callback(shell.close)
        await receiver.start()
        await shell.open()
        performers: dict[type, Callable[[Any], None]]
        performers = {OpenStage: carrier.open, SendChunk: carrier.send, CloseStage: carrier.free}
        performers |= {KeepWeights: files.keep, DropWeights: files.drop}
        await shell.start(core, performers)
        heart = asyncio.create_task(_beat(shell, stages, core.weights, receiver.address))
        after.callback(heart.cancel)
        return await wait_for_stop(shell, stop)


async def _beat(shell: Shell, stages: Stages, weights: Weights, address: str) -> None:
    """Tell others where KV is taken in, and show what the stages and the weights take."""
    while True:
        if address:
            here = HostAddress(host=shell.ident, address=address)
            shell.store.put(host_key(shell.ident), here, 3_000 * HEARTBEAT_S)
        shell.metrics.show("stages", {}, len(stages.pool.stages))
        shell.metrics.show("stage_bytes", {}, stages.pool.taken_bytes)
        shell.metrics.show("stage_fragmentation", {}, stages.pool.fragmentation)
        shell.metrics.show("cached_weight_bytes", {}, weights.cache.taken_bytes)
        shell.metrics.show("cached_models", {}, len(weights.cache.kept))
        await asyncio.sleep(HEARTBEAT_S)


async def _address(shell: Shell, host: str) -> str:
    """Return where another host's migrator takes in KV; raises Unavailable if that is not known."""
    found = await shell.store.read(host_key(host), HostAddress)
    if found is None:
        raise Unavailable(f"no migrator of {host} takes in KV: is FESTINA_LINK_SECRET set there?")
    return found.address


def main() -> None:
    """Entry point; the id (FESTINA_ID) is the host's name."""
    common, settings = load(Common), load(MigratorSettings, MIGRATOR)
    link, where = load(LinkSettings, "link"), load(StageSettings, "stages")
    run_service(common, lambda stop: serve(common, settings, link, where, stop))


if __name__ == "__main__":
    main()
