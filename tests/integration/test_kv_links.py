"""KV between two migrators over TCP, both ends real: what arrives, what is refused, what is left behind."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import uvloop
from support import eventually

from services.migrator.actions import ChunkSent, CloseStage, OpenStage, SendChunk, StageOpened
from services.migrator.carrier import Carrier
from services.migrator.link import Links
from services.migrator.receiver import Receiver
from services.migrator.settings import LinkSettings
from services.migrator.stages import Stages
from services.migrator.transport_tcp import Connection, Hello, admit
from shared.errors import Unavailable
from shared.events import Event
from shared.stage import StageDamaged, StageHeader, StageSettings, mapped

BLOCK_BYTES, BLOCK_TOKENS = 50_000, 32
HEADER = StageHeader(model="m", digest="d", dtype="float32", shape=(1,), block_tokens=BLOCK_TOKENS)
SETTINGS = LinkSettings(secret="known to both", chunk_bytes=200_000, timeout_s=1.0)


@dataclass
class Pair:
    """The host `a`, which sends, and the host `b`, which receives."""

    a: Stages
    b: Stages
    links: Links
    receiver: Receiver

    async def stage(self, name: str, blocks: int, room: int = 0) -> None:
        """Make a stage on `a`, or fill it further."""
        assert await self.a.hold(name, BLOCK_BYTES, room or blocks) == ""
        with mapped(self.a.path(name)) as stage:
            stage.describe(HEADER)
            for block in range(blocks):
                stage.block(block)[:] = os.urandom(BLOCK_BYTES)
                stage.fill(block, BLOCK_TOKENS)

    def arrived(self, name: str) -> int:
        """How many tokens of a stage are on `b`, all its blocks checked and compared."""
        with mapped(self.a.path(name)) as sent, mapped(self.b.path(name)) as stage:
            assert stage.header() == HEADER
            for block in range(min(sent.capacity_blocks, stage.capacity_blocks)):
                if stage.check(block):
                    assert stage.block(block) == sent.block(block)
            return stage.tokens(BLOCK_TOKENS)

    async def until_gone(self, within_s: float = 3.0) -> None:
        """Wait until nothing is left on `b`."""
        await eventually(lambda: not self.b.pool.stages, within_s)
        assert [path.name for path in self.b.folder.iterdir()] == [".lock"]
        assert self.b.pool.taken_bytes == 0


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with made_pair(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def made_pair(tmp_path: Path) -> AsyncIterator[Pair]:
    settings = StageSettings(dir=str(tmp_path), max_bytes=20 << 20, slab_bytes=1 << 17)
    a, b = Stages("a", settings), Stages("b", msgspec.structs.replace(settings, max_bytes=16 << 20))
    receiver = Receiver(b, SETTINGS)
    await receiver.start()
    made = Pair(a, b, Links("a", a.folder, SETTINGS), receiver)
    yield made
    await made.links.close_all()
    await receiver.close()
    a.close()
    b.close()
    await made.until_gone()


@dataclass
class Wire:
    """A proxy on the way from `a` to `b`, where bytes can be changed, held up, or lost."""

    to: str
    spoil_at: set[int] = field(default_factory=set)
    stop_at: int = 1 << 60
    stall_at: int = 1 << 60
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    passed: int = 0
    address: str = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0, limit=1 << 16)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        return server

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.to.split(":")
        there, back = await asyncio.open_connection(host, int(port))
        answers = asyncio.create_task(self._pass(there, writer))
        with contextlib.suppress(ConnectionError):
            while self.passed < self.stop_at and (data := bytearray(await reader.read(1 << 15))):
                for at in [at for at in self.spoil_at if self.passed <= at < self.passed + len(data)]:
                    data[at - self.passed] ^= 1
                    self.spoil_at.discard(at)
                self.passed += len(data)
                back.write(data)
                await back.drain()
                if self.passed >= self.stall_at:
                    await self.go_on.wait()
        answers.cancel()
        back.close()
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 15):
                writer.write(data)


@contextlib.asynccontextmanager
async def wire(
    pair: Pair, spoil_at: set[int] = frozenset(), stop_at: int = 1 << 60, stall_at: int = 1 << 60
) -> AsyncIterator[Wire]:
    made = Wire(pair.receiver.address, set(spoil_at), stop_at, stall_at)
    async with await made.start():
        yield made


async def test_blocks_arrive_while_the_stage_still_grows_and_go_with_the_connection(pair: Pair) -> None:
    peer = pair.receiver.address
    await pair.stage("move-1", 5)
    sent = await pair.links.send(peer, "move-1", 0, 5)
    assert (sent.n_bytes, sent.reason) == (5 * BLOCK_BYTES, "")
    assert pair.arrived("move-1") == 5 * BLOCK_TOKENS
    await pair.stage("move-1", 40)
    assert (await pair.links.send(peer, "move-1", 0, 40)).reason == ""
    assert pair.arrived("move-1") == 40 * BLOCK_TOKENS
    await pair.links.close("move-1")
    await pair.until_gone()
    assert pair.links.stages == ()


def test_it_is_the_same_in_the_loop_that_services_run_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with made_pair(tmp_path) as pair:
            await test_blocks_arrive_while_the_stage_still_grows_and_go_with_the_connection(pair)
            await test_a_damaged_chunk_is_sent_again(pair)
            await pair.links.close("move-1")
            await test_an_abort_in_the_middle_of_a_chunk_stops_it_at_once(pair)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_many_stages_at_once(pair: Pair) -> None:
    names = [f"move-{number}" for number in range(12)]
    for name in names:
        await pair.stage(name, 7)
    sent = await asyncio.gather(*(pair.links.send(pair.receiver.address, name, 0, 7) for name in names))
    assert {each.reason for each in sent} == {""}
    assert {pair.arrived(name) for name in names} == {7 * BLOCK_TOKENS}


async def test_a_damaged_chunk_is_sent_again(pair: Pair) -> None:
    await pair.stage("move-1", 20)
    async with wire(pair, spoil_at={30_000, 500_000, 700_000}) as between:
        assert (await pair.links.send(between.address, "move-1", 0, 20)).reason == ""
        assert not between.spoil_at and between.passed > 22 * BLOCK_BYTES
    assert pair.arrived("move-1") == 20 * BLOCK_TOKENS


async def test_what_arrives_damaged_every_time_is_given_up(pair: Pair) -> None:
    await pair.stage("move-1", 8)
    with mapped(pair.a.path("move-1")) as stage:
        stage.block(6)[100] ^= 1  # the memory itself is wrong
    sent = await pair.links.send(pair.receiver.address, "move-1", 0, 8)
    assert sent == (0, sent.took_ms, "the checksum of block 6 is wrong, 3 times")
    await pair.until_gone()


async def test_with_another_secret_nothing_is_taken(pair: Pair) -> None:
    await pair.stage("move-1", 3)
    stranger = Links("c", pair.a.folder, msgspec.structs.replace(SETTINGS, secret="guessed"))
    sent = await stranger.send(pair.receiver.address, "move-1", 0, 3)
    assert "does not know this pool's secret" in sent.reason and pair.b.pool.stages == ()
    without = Links("c", pair.a.folder, msgspec.structs.replace(SETTINGS, secret=""))
    assert "does not leave this host" in (await without.send(pair.receiver.address, "move-1", 0, 3)).reason
    deaf = Receiver(pair.b, msgspec.structs.replace(SETTINGS, secret=""))
    await deaf.start()
    assert deaf.address == ""


async def test_a_receiver_without_the_secret_is_found_out_and_a_sender_too(pair: Pair) -> None:
    """Neither side takes the other's word: each is tried against one that knows everything but the secret."""
    await pair.stage("move-1", 3)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def impostor() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with contextlib.suppress(Exception):
            await admit(Connection(sock, 1.0), "guessed")
        sock.close()

    task = asyncio.create_task(impostor())
    sent = await pair.links.send(f"127.0.0.1:{listener.getsockname()[1]}", "move-1", 0, 3)
    assert "the other migrator does not know this pool's secret" in sent.reason
    await task
    listener.close()
    host, port = pair.receiver.address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        connection = Connection(sock, 1.0)
        await connection.send(Hello(version=1, sender="x", nonce=b"n" * 32))
        challenge = await connection.receive()
        await connection.send(challenge)  # said back as it came
        refusal = await connection.receive()
    assert "where Proof was due" in refusal.reason


@pytest.mark.parametrize("junk", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello", os.urandom(4096)])
async def test_strangers_leave_no_trace(pair: Pair, junk: bytes) -> None:
    host, port = pair.receiver.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(junk)
    async with asyncio.timeout(3.0):  # said nothing, or nonsense: it is shown the door
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()
    await pair.stage("move-1", 3)
    assert (await pair.links.send(pair.receiver.address, "move-1", 0, 3)).reason == ""


async def test_a_reader_that_stops_reading_costs_no_memory_and_ends_the_move(pair: Pair) -> None:
    await pair.stage("move-1", 300)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    sock: list[socket.socket] = []

    async def sleepy() -> None:
        sock.append((await asyncio.get_running_loop().sock_accept(listener))[0])
        connection = Connection(sock[0], 1.0)
        await admit(connection, SETTINGS.secret)

    task = asyncio.create_task(sleepy())
    resident = resident_bytes()
    sent = await pair.links.send(f"127.0.0.1:{listener.getsockname()[1]}", "move-1", 0, 300)
    assert "did not respond within 1 s" in sent.reason and sent.took_ms < 4_000
    assert resident_bytes() - resident < 8 << 20
    await task
    sock[0].close()
    listener.close()


def resident_bytes() -> int:
    """This process's own memory, without what it shares."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


async def test_a_peer_that_dies_in_the_middle_ends_the_move_on_both_sides(pair: Pair) -> None:
    await pair.stage("move-1", 40)
    async with wire(pair, stop_at=20 * BLOCK_BYTES) as between:
        sent = await pair.links.send(between.address, "move-1", 0, 40)
        assert sent.n_bytes == 0 and "other migrator" in sent.reason
        await pair.until_gone()
    assert (await pair.links.send(pair.receiver.address, "move-1", 0, 40)).reason == ""
    assert pair.arrived("move-1") == 40 * BLOCK_TOKENS


async def test_an_abort_in_the_middle_of_a_chunk_stops_it_at_once(pair: Pair) -> None:
    await pair.stage("move-1", 40)
    async with wire(pair, stall_at=2 * BLOCK_BYTES) as between:
        sending = asyncio.create_task(pair.links.send(between.address, "move-1", 0, 40))
        await eventually(lambda: between.passed >= 2 * BLOCK_BYTES, 3.0)
        await pair.links.close("move-1")
        sent = await asyncio.wait_for(sending, 3.0)
        between.go_on.set()
    assert sent.reason and pair.links.stages == ()
    await pair.until_gone()


async def test_a_host_without_room_says_so(pair: Pair) -> None:
    await pair.stage("move-1", 3, room=300)
    peer = pair.receiver.address
    assert (await pair.links.send(peer, "move-1", 0, 3)).reason == ""
    await pair.stage("move-2", 3, room=90)
    sent = await pair.links.send(peer, "move-2", 0, 3)
    assert "bytes for stages are free" in sent.reason
    with pytest.raises(StageDamaged), mapped(pair.b.path("move-2")):
        pass
    assert pair.arrived("move-1") == 3 * BLOCK_TOKENS


async def test_what_a_core_orders_of_stages_is_done_and_reported(pair: Pair) -> None:
    async def address_of(host: str) -> str:
        if host != "b":
            raise Unavailable(f"no migrator of {host} takes in KV")
        return pair.receiver.address

    reports: list[Event] = []
    carrier = Carrier(pair.a, pair.links, address_of, reports.append)

    async def reported(count: int) -> Event:
        await eventually(lambda: len(reports) >= count, 3.0)
        return reports[count - 1]

    carrier.open(OpenStage("1", "move-1", BLOCK_BYTES, 6))
    assert await reported(1) == StageOpened("1")
    await pair.stage("move-1", 6)
    carrier.send(SendChunk("1", "move-1", "b", 0, 6))
    sent = await reported(2)
    assert isinstance(sent, ChunkSent) and (sent.n_bytes, sent.reason) == (6 * BLOCK_BYTES, "")
    assert pair.arrived("move-1") == 6 * BLOCK_TOKENS
    carrier.send(SendChunk("1", "move-1", "c", 0, 6))
    assert await reported(3) == ChunkSent("1", reason="no migrator of c takes in KV")
    carrier.free(CloseStage("move-1", "b"))
    await pair.until_gone()
    carrier.open(OpenStage("2", "move-2", BLOCK_BYTES, 1_000))
    refused = await reported(4)
    assert isinstance(refused, StageOpened) and "bytes for stages are free" in refused.reason
    carrier.open(OpenStage("3", "move-3", BLOCK_BYTES, 300))
    await asyncio.sleep(0)
    carrier.free(CloseStage("move-3", ""))  # before there is any
    gone = await reported(5)
    assert isinstance(gone, StageOpened) and "not wanted any more" in gone.reason
    assert [path.name for path in pair.a.folder.iterdir()] == [".lock"]
    await carrier.close()
