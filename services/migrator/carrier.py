"""Carries out what the core orders: stages are made, sent to other hosts, and freed (3.5, F)."""

import logging
from collections.abc import Awaitable, Callable

from services.migrator.actions import ChunkSent, CloseStage, OpenStage, SendChunk, StageOpened
from services.migrator.link import Links
from services.migrator.stages import Stages
from services.migrator.tasks import Tasks
from shared.errors import FestinaError
from shared.events import Event

log = logging.getLogger(__name__)


class Carrier:
    """Performs the core's orders one after the other for each stage. Use it in one asyncio loop.

    Args:
        stages: the host's.
        links: to other hosts.
        address_of: returns where the migrator of a host listens; raises Unavailable.
        report: is told what came of an order; never from within one.
    """

    def __init__(
        self,
        stages: Stages,
        links: Links,
        address_of: Callable[[str], Awaitable[str]],
        report: Callable[[Event], None],
    ) -> None:
        self._stages = stages
        self._links = links
        self._address_of = address_of
        self._report = report
        self._tasks = Tasks()

    def open(self, order: OpenStage) -> None:
        """Make a stage."""
        self._tasks.begin(self._open(order))

    def send(self, order: SendChunk) -> None:
        """Send blocks of a stage to another host."""
        self._tasks.begin(self._send(order))

    def free(self, order: CloseStage) -> None:
        """Free a stage here, and with its connection on the other host; one being made goes once it is."""
        self._stages.free(order.stage)
        self._tasks.begin(self._links.close(order.stage))

    async def close(self) -> None:
        """End everything under way."""
        await self._tasks.end()
        await self._links.close_all()

    async def _open(self, order: OpenStage) -> None:
        try:
            reason = await self._stages.hold(order.stage, order.block_bytes, order.blocks)
        except FestinaError as error:
            reason = str(error)
        if reason:
            log.warning("no stage for move %s: %s", order.move_id, reason)
        self._report(StageOpened(move_id=order.move_id, reason=reason))

    async def _send(self, order: SendChunk) -> None:
        try:
            peer = await self._address_of(order.host)
        except FestinaError as error:
            self._report(ChunkSent(move_id=order.move_id, reason=str(error)))
            return
        sent = await self._links.send(peer, order.stage, order.first_block, order.blocks)
        if sent.reason:
            log.warning("KV of move %s did not get to %s: %s", order.move_id, order.host, sent.reason)
        self._report(
            ChunkSent(move_id=order.move_id, n_bytes=sent.n_bytes, took_ms=sent.took_ms, reason=sent.reason)
        )
