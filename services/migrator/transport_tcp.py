"""TCP between migrators: who may speak, and what is said (3.5, F). KV never crosses the bus.

Each connection carries one stage, from the host of the source to the host of the destination, and the copy
there lives as long as the connection. First each side proves that it knows the pool's secret: it answers the
other's random challenge with an HMAC. Then come frames, each a length of four bytes and a struct in
MessagePack; after `Blocks`, the bytes of these blocks as they are. Each `Open` and `Blocks` is answered by
`Taken`, the latter once its checksums have been compared.

The secret keeps strangers out. It does not hide or sign what is sent: between hosts that do not share a
trusted network, let it run through a tunnel.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable
from hashlib import sha256
from typing import TypeAlias, TypeVar

import msgspec

from shared.errors import Unavailable
from shared.model import Struct

VERSION = 1
MAX_FRAME_BYTES = 1 << 16
NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")


class Hello(Struct, tag=True):
    """The sender's first words."""

    version: int
    sender: str
    nonce: bytes


class Challenge(Struct, tag=True):
    """The receiver's answer, with its proof."""

    nonce: bytes
    proof: bytes


class Proof(Struct, tag=True):
    """The sender's proof."""

    proof: bytes


class Open(Struct, tag=True):
    """Make room for so many blocks of a stage in all; `head` is the stage's description, as it is there."""

    stage: str
    block_bytes: int
    blocks: int
    head: bytes


class Blocks(Struct, tag=True):
    """Blocks of the stage from `first` on: tokens and checksum of each. Their bytes follow."""

    first: int
    tokens: tuple[int, ...]
    checksums: tuple[int, ...]


class Taken(Struct, tag=True):
    """The receiver has what was last opened or sent, or says why not."""

    reason: str = ""


Frame: TypeAlias = Hello | Challenge | Proof | Open | Blocks | Taken
F = TypeVar("F", bound=Struct)
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Connection:
    """A socket that frames and blocks go over. Raises Unavailable for whatever goes wrong with it.

    What waits for the other side waits for `timeout_s` at most.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, frame: Frame, *pieces: memoryview) -> None:
        """Send a frame, and the bytes that follow it, straight from where they are."""
        body = _encoder.encode(frame)
        await self._within(self._loop.sock_sendall(self._socket, _LENGTH.pack(len(body)) + body))
        for piece in pieces:
            await self._within(self._loop.sock_sendall(self._socket, piece))

    async def receive(self, begin_s: float = 0.0) -> Frame | None:
        """Return the next frame, None at the end of the stream; `begin_s` is how long it may let us wait."""
        header = bytearray(_LENGTH.size)
        first = self._loop.sock_recv_into(self._socket, memoryview(header)[:1])
        if not await self._within(first, begin_s or self._timeout_s):
            return None
        await self.fill(memoryview(header)[1:])
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise Unavailable(f"the other migrator sent a frame of {length} bytes")
        body = bytearray(length)
        await self.fill(memoryview(body))
        try:
            return _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise Unavailable(f"the other migrator sent what is no frame: {error}") from None

    async def expect(self, kind: type[F]) -> F:
        """Return the next frame, which has to be of this kind; a refusal is raised as Unavailable."""
        frame = await self.receive()
        if isinstance(frame, kind):
            return frame
        if isinstance(frame, Taken):  # what it had to say before it closes the connection
            raise Unavailable(f"the other migrator refused: {frame.reason}")
        found = "closed the connection" if frame is None else f"sent {type(frame).__name__}"
        raise Unavailable(f"the other migrator {found} where {kind.__name__} was due")

    async def fill(self, memory: memoryview) -> None:
        """Read exactly as many bytes as there is room for."""
        while len(memory):
            received = await self._within(self._loop.sock_recv_into(self._socket, memory))
            if received == 0:
                raise Unavailable("the other migrator closed the connection in the middle of a message")
            memory = memory[received:]

    def shut_down(self) -> None:
        """End the conversation; whoever waits for something in it is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, when nobody waits for something."""
        self._socket.close()

    async def _within(self, doing: Awaitable[T], within_s: float = 0.0) -> T:
        within_s = within_s or self._timeout_s
        try:
            async with asyncio.timeout(within_s):
                return await doing
        except TimeoutError:
            raise Unavailable(f"the other migrator did not respond within {within_s:g} s") from None
        except OSError as error:
            raise Unavailable(f"the connection to the other migrator is gone: {error}") from None


async def introduce(connection: Connection, sender: str, secret: str) -> None:
    """Prove to the receiver that this side knows the secret, and have it prove the same.

    Raises:
        Unavailable: it does not know it, or is something else.
    """
    hello = Hello(version=VERSION, sender=sender, nonce=secrets.token_bytes(NONCE_BYTES))
    await connection.send(hello)
    challenge = await connection.expect(Challenge)
    if not hmac.compare_digest(challenge.proof, _proof(secret, b"receiver", hello, challenge.nonce)):
        raise Unavailable("the other migrator does not know this pool's secret (FESTINA_LINK_SECRET)")
    await connection.send(Proof(proof=_proof(secret, b"sender", hello, challenge.nonce)))
    admitted = await connection.expect(Taken)
    if admitted.reason:
        raise Unavailable(f"the other migrator refused: {admitted.reason}")


async def admit(connection: Connection, secret: str) -> str:
    """Let in a sender that knows the secret; returns who it says it is.

    Raises:
        Unavailable: it does not know it, or is something else.
    """
    hello = await connection.expect(Hello)
    if hello.version != VERSION or len(hello.nonce) != NONCE_BYTES:
        raise Unavailable(f"a migrator speaks version {hello.version} of the protocol, not {VERSION}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    await connection.send(Challenge(nonce=nonce, proof=_proof(secret, b"receiver", hello, nonce)))
    proof = await connection.expect(Proof)
    if not hmac.compare_digest(proof.proof, _proof(secret, b"sender", hello, nonce)):
        await connection.send(Taken(reason="it does not know this pool's secret (FESTINA_LINK_SECRET)"))
        raise Unavailable(f"{hello.sender!r} does not know this pool's secret")
    await connection.send(Taken())
    return hello.sender


def _proof(secret: str, role: bytes, hello: Hello, nonce: bytes) -> bytes:
    """Return what only who knows the secret can say; each role's is its own, or it could be said back."""
    said = msgspec.msgpack.encode((role, hello.version, hello.sender, hello.nonce, nonce))
    return hmac.digest(secret.encode(), said, sha256)
