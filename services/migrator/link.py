"""The sending end of links: a stage's blocks go to another host while the source still decodes (3.5, F)."""

import asyncio
import contextlib
import socket
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from services.migrator.settings import LinkSettings
from services.migrator.transport_tcp import Blocks, Connection, Open, Taken, introduce
from shared.errors import FestinaError, Unavailable
from shared.stage import Stage, mapped, stage_path

TRIES = 3
"""How often blocks are sent that arrive damaged."""


class Sent(NamedTuple):
    """What became of blocks that were to be sent. `reason` says why they are not there; empty: they are."""

    n_bytes: int
    took_ms: float
    reason: str = ""


class Chunk(NamedTuple):
    """Blocks that are confirmed together."""

    first: int
    blocks: int


class _Link:
    """One stage on its way to one host, by a connection of its own, opened when it is first needed."""

    def __init__(self, sender: str, peer: str, path: Path, settings: LinkSettings) -> None:
        self._sender = sender
        self._peer = peer
        self._path = path
        self._settings = settings
        self._connection: Connection | None = None
        self._opened_blocks = 0
        self._turn = asyncio.Lock()
        self._closed = False

    async def send(self, first: int, blocks: int) -> Sent:
        """Send blocks, and return once the other side has confirmed them; raises Unavailable."""
        async with self._turn:
            if self._closed:
                raise Unavailable("its move has ended")
            self._closed = True  # unless this ends well: else the stream stands in the middle of something
            with mapped(self._path) as stage:
                connection = self._connection or await self._connect()
                if first + blocks > self._opened_blocks:
                    await self._open(connection, stage)
                started = time.perf_counter()
                await self._send_all(connection, stage, first, first + blocks)
                took_ms = (time.perf_counter() - started) * 1000
            self._closed = False
            return Sent(blocks * stage.block_bytes, took_ms)

    async def _send_all(self, connection: Connection, stage: Stage, first: int, end: int) -> None:
        """Send blocks in chunks, and those again that arrive damaged."""
        size, reason = max(1, self._settings.chunk_bytes // stage.block_bytes), ""
        chunks = [Chunk(at, min(size, end - at)) for at in range(first, end, size)]
        for _ in range(TRIES):
            chunks, reason = await self._push(connection, stage, chunks)
            if not chunks:
                return
        raise Unavailable(f"{reason}, {TRIES} times")

    async def _push(
        self, connection: Connection, stage: Stage, chunks: list[Chunk]
    ) -> tuple[list[Chunk], str]:
        """Send chunks, a few ahead of what is confirmed; returns those that arrived damaged, and how."""
        damaged, reason = [], ""
        on_their_way: deque[Chunk] = deque()
        for chunk in [*chunks, None]:
            while on_their_way and (chunk is None or len(on_their_way) >= self._settings.window_chunks):
                taken = await connection.expect(Taken)
                sent = on_their_way.popleft()
                if taken.reason:
                    damaged.append(sent)
                    reason = taken.reason
            if chunk is not None:
                await self._send_chunk(connection, stage, chunk)
                on_their_way.append(chunk)
        return damaged, reason

    async def _send_chunk(self, connection: Connection, stage: Stage, chunk: Chunk) -> None:
        numbers = range(chunk.first, chunk.first + chunk.blocks)
        records = [stage.record(block) for block in numbers]
        frame = Blocks(
            first=chunk.first,
            tokens=tuple(tokens for tokens, _ in records),
            checksums=tuple(checksum for _, checksum in records),
        )
        with contextlib.ExitStack() as views:
            await connection.send(frame, *(views.enter_context(stage.block(block)) for block in numbers))

    async def _connect(self) -> Connection:
        host, _, port = self._peer.rpartition(":")
        try:
            sock = await asyncio.to_thread(
                socket.create_connection, (host.strip("[]"), int(port)), self._settings.timeout_s
            )
        except (OSError, ValueError) as error:
            raise Unavailable(f"the migrator at {self._peer} cannot be reached: {error}") from None
        connection = Connection(sock, self._settings.timeout_s)
        try:
            await introduce(connection, self._sender, self._settings.secret)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    async def _open(self, connection: Connection, stage: Stage) -> None:
        """Have the other side make room for all that there is room for here."""
        opened = Open(
            stage=self._path.name,
            block_bytes=stage.block_bytes,
            blocks=stage.capacity_blocks,
            head=stage.head(),
        )
        await connection.send(opened)
        taken = await connection.expect(Taken)
        if taken.reason:
            raise Unavailable(f"the other migrator has no room: {taken.reason}")
        self._opened_blocks = stage.capacity_blocks

    async def close(self) -> None:
        """End the connection, and with it the stage on the other side; what is being sent stops."""
        if self._connection is not None:
            self._connection.shut_down()
        async with self._turn:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class Links:
    """The stages that are on their way from this host to others. Use it in one asyncio loop.

    Args:
        host: id of this host.
        folder: where its stages are.
        settings: see `LinkSettings`.
    """

    def __init__(self, host: str, folder: Path, settings: LinkSettings) -> None:
        self._host = host
        self._folder = folder
        self._settings = settings
        self._links: dict[str, _Link] = {}

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages on their way."""
        return tuple(self._links)

    async def send(self, peer: str, name: str, first_block: int, blocks: int) -> Sent:
        """Send blocks of a stage to the migrator at `peer` (``host:port``), and wait for its word.

        After a failure the stage's connection is closed, and the peer removes what it had of it.
        """
        started = time.perf_counter()
        try:
            return await self._link(peer, name).send(first_block, blocks)
        except FestinaError as error:
            await self.close(name)
            return Sent(0, (time.perf_counter() - started) * 1000, str(error))

    async def close(self, name: str) -> None:
        """End a stage's connection, if it has one; the other side removes its copy of the stage."""
        if link := self._links.pop(name, None):
            await link.close()

    async def close_all(self) -> None:
        """End all connections."""
        for name in list(self._links):
            await self.close(name)

    def _link(self, peer: str, name: str) -> _Link:
        if not self._settings.secret:
            raise Unavailable("FESTINA_LINK_SECRET is empty: KV does not leave this host")
        if name not in self._links:
            if len(self._links) >= self._settings.max_links:
                raise Unavailable(f"{len(self._links)} stages are on their way already")
            self._links[name] = _Link(self._host, peer, stage_path(self._folder, name), self._settings)
        return self._links[name]
