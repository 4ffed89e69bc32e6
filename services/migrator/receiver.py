"""The receiving end of links: stages of other hosts arrive here (3.5, F)."""

import asyncio
import contextlib
import logging
import socket

from services.migrator.settings import LinkSettings
from services.migrator.stages import Stages
from services.migrator.tasks import Tasks
from services.migrator.transport_tcp import Blocks, Connection, Open, Taken, admit
from shared.errors import ConfigError, FestinaError, Unavailable
from shared.stage import Stage, mapped

log = logging.getLogger(__name__)

BACKLOG = 16
PAUSE_S = 0.1


class Receiver:
    """Listens for other hosts' migrators, and puts what they send into stages. Use it in one asyncio loop.

    A stage that has come by a connection is removed when that ends.
    """

    def __init__(self, stages: Stages, settings: LinkSettings) -> None:
        self._stages = stages
        self._settings = settings
        self._listener: socket.socket | None = None
        self._tasks = Tasks()

    @property
    def address(self) -> str:
        """Where others reach this end; empty if it listens to nobody."""
        if self._listener is None:
            return ""
        return self._settings.advertise or "{}:{}".format(*self._listener.getsockname()[:2])

    async def start(self) -> None:
        """Begin to listen, if there is a secret.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        if not self._settings.secret:
            return
        try:
            address = (self._settings.host, self._settings.port)
            self._listener = socket.create_server(address, backlog=BACKLOG)
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"cannot listen for other migrators on {where}: {error}") from None
        self._listener.setblocking(False)
        self._tasks.begin(self._listen(self._listener))

    async def close(self) -> None:
        """Stop listening, and remove what has come."""
        await self._tasks.end()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _listen(self, listener: socket.socket) -> None:
        """Take connections in; one too many is closed at once."""
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # it was given up again, or there are no file descriptors left
                log.warning("no connection could be accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._tasks) > self._settings.max_links:
                sock.close()
                continue
            self._tasks.begin(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Take in one stage; whoever sends it is told what is wrong, where that is possible."""
        connection = Connection(sock, self._settings.timeout_s)
        name = ""
        try:
            sender = await admit(connection, self._settings.secret)
            opened = await connection.expect(Open)
            if opened.stage in self._stages.pool.stages:
                raise Unavailable(f"{sender} sends stage {opened.stage}, which is here already")
            name = opened.stage
            await self._take(connection, opened)
        except (FestinaError, OSError) as error:
            log.warning("a stage of another host was not taken: %s", error)
            with contextlib.suppress(Unavailable):
                await connection.send(Taken(reason=str(error)))
        finally:
            connection.close()
            if name:
                self._stages.free(name)

    async def _take(self, connection: Connection, opened: Open) -> None:
        """Write a stage as it comes, until nothing more does."""
        while grown := await self._fill(connection, opened):
            if (grown.stage, grown.block_bytes) != (opened.stage, opened.block_bytes):
                raise Unavailable(f"stage {opened.stage} became {grown.stage} on its way")
            opened = grown

    async def _fill(self, connection: Connection, opened: Open) -> Open | None:
        """Take blocks until the stage has to grow, or nothing more comes (None)."""
        if reason := await self._stages.hold(opened.stage, opened.block_bytes, opened.blocks):
            raise Unavailable(reason)
        with mapped(self._stages.path(opened.stage), writes=(0, opened.blocks)) as stage:
            stage.put_head(opened.head)
            await connection.send(Taken())
            checking: asyncio.Task[None] | None = None  # a chunk, while the next one comes
            try:
                while True:
                    match await connection.receive(self._settings.idle_s):
                        case Blocks() as blocks:
                            await _read(connection, stage, blocks)
                            if checking is not None:
                                await checking
                            checking = asyncio.create_task(_confirm(connection, stage, blocks))
                        case Open() | None as grown:
                            return grown
                        case other:
                            raise Unavailable(f"{type(other).__name__} was not due")
            finally:
                if checking is not None:
                    with contextlib.suppress(Unavailable):
                        await checking


async def _read(connection: Connection, stage: Stage, blocks: Blocks) -> None:
    """Read blocks off a connection into their stage."""
    if not len(blocks.tokens) == len(blocks.checksums) > 0:
        raise Unavailable("as many tokens as checksums were due")
    for block in range(blocks.first, blocks.first + len(blocks.tokens)):
        stage.empty(block)
        with stage.block(block) as kv:
            await connection.fill(kv)


async def _confirm(connection: Connection, stage: Stage, blocks: Blocks) -> None:
    """Say that blocks have come, or what is wrong with them."""
    await connection.send(Taken(reason=await asyncio.to_thread(_check, stage, blocks)))


def _check(stage: Stage, blocks: Blocks) -> str:
    """Take blocks whose checksums are right as having come; returns what is wrong, if anything."""
    reason = ""
    for number, (tokens, checksum) in enumerate(zip(blocks.tokens, blocks.checksums, strict=True)):
        block = blocks.first + number
        if stage.fill(block, tokens) != checksum:
            stage.empty(block)
            reason = f"the checksum of block {block} is wrong"
    return reason
