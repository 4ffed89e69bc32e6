"""The store: a Redis-protocol server holding what must outlive a process. One writer per key.

Writes are queued by key, the newest value of a key replacing an older one that is still waiting, so that a
store that is away neither blocks a core nor grows a queue; they reach it in the end.
"""

import asyncio
import logging
from typing import Any, TypeVar

import msgspec
import redis.asyncio as redis
from redis.exceptions import AuthenticationError, RedisError

from shared.config import Common
from shared.errors import Unavailable

log = logging.getLogger("festina.store")

T = TypeVar("T", bound=msgspec.Struct)


class Store:
    """One connection pool to the store."""

    def __init__(self, settings: Common) -> None:
        tls: dict[str, Any] = {"ssl_ca_certs": settings.redis_ca_file} if settings.redis_ca_file else {}
        self._url = settings.redis_url
        self._redis = redis.from_url(
            settings.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0, protocol=2, **tls
        )
        self._waiting: dict[str, tuple[bytes | None, float]] = {}
        self._scripts: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Make sure the store answers, waiting some seconds for one that is still starting.

        Raises:
            Unavailable: it does not.
        """
        for attempt in range(40):
            try:
                await self._redis.ping()
                break
            except (RedisError, OSError) as error:
                if attempt == 39 or isinstance(error, AuthenticationError):
                    where = self._url.rpartition("@")[2]  # never show a password
                    cure = "check FESTINA_REDIS_URL and the user and password in it"
                    raise Unavailable(f"no store at {where}: {error}; {cure}") from error
                await asyncio.sleep(0.25)
        self._writer = asyncio.create_task(self._write())

    async def answers(self) -> bool:
        """Say whether the store answers now."""
        try:
            return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    async def read(self, key: str, value_type: type[T]) -> T | None:
        """Return the value under `key`, None if there is none. Raises Unavailable."""
        data = (await self._values([key]))[0]
        return None if data is None else msgspec.msgpack.decode(data, type=value_type)

    async def read_all(self, prefix: str, value_type: type[T]) -> list[T]:
        """Return the values of all keys that start with `prefix`, in their order. Raises Unavailable."""
        found = await self.read_bytes(prefix)
        return [msgspec.msgpack.decode(value, type=value_type) for value in found.values()]

    async def read_texts(self, prefix: str) -> dict[str, str]:
        """Return key (without `prefix`) -> text of all plain strings under `prefix`. Raises Unavailable."""
        found = await self.read_bytes(prefix)
        return {key[len(prefix) :]: value.decode() for key, value in found.items()}

    async def read_bytes(self, prefix: str) -> dict[str, bytes]:
        """Return key -> value of all keys that start with `prefix`, undecoded. Raises Unavailable."""
        keys = await self._keys(prefix)
        found = zip(keys, await self._values(keys), strict=True)
        return {key: value for key, value in found if value is not None}

    async def write_bytes(self, key: str, value: bytes) -> None:
        """Write bytes as they are, at once. Raises Unavailable."""
        try:
            await self._redis.set(key, value)
        except (RedisError, OSError) as error:
            raise Unavailable(f"the store is away: {error}") from error

    async def write_text(self, key: str, text: str) -> None:
        """Write a plain string at once."""
        await self._redis.set(key, text)

    async def run(self, script: str, keys: list[str], args: list[Any]) -> Any:
        """Run a Lua script in the store, atomically; `keys` are all that it touches. Raises Unavailable."""
        known = self._scripts.get(script)
        if known is None:
            known = self._scripts[script] = self._redis.register_script(script)
        try:
            return await known(keys=keys, args=args)
        except (RedisError, OSError) as error:
            raise Unavailable(f"the store is away: {error}") from error

    def put(self, key: str, value: msgspec.Struct, ttl_ms: float = 0.0) -> None:
        """Queue a write."""
        self._waiting[key] = (msgspec.msgpack.encode(value), ttl_ms)
        self._wake.set()

    def delete(self, key: str) -> None:
        """Queue a removal."""
        self._waiting[key] = (None, 0.0)
        self._wake.set()

    async def close(self) -> None:
        """Write what is queued, for a second at most, and close."""
        deadline = asyncio.get_running_loop().time() + 1.0
        while self._waiting and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if self._writer is not None:
            self._writer.cancel()
        await self._redis.aclose()

    async def _keys(self, prefix: str) -> list[str]:
        queued = [key for key in self._waiting if key.startswith(prefix)]
        try:
            found = {key.decode() async for key in self._redis.scan_iter(match=prefix + "*", count=1000)}
        except (RedisError, OSError) as error:
            raise Unavailable(f"the store is away: {error}") from error
        return sorted(found.union(queued))

    async def _values(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of keys; what this process has queued to write counts as written."""
        if not keys:
            return []
        queued = {key: self._waiting[key][0] for key in keys if key in self._waiting}
        try:
            found: list[Any] = await self._redis.mget(keys)  # bytes, as decoding is off
        except (RedisError, OSError) as error:
            raise Unavailable(f"the store is away: {error}") from error
        return [queued.get(key, value) for key, value in zip(keys, found, strict=True)]

    async def _write(self) -> None:
        away = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            for key, entry in list(self._waiting.items()):
                try:
                    await self._write_one(key, *entry)
                except (RedisError, OSError) as error:
                    if not away:
                        log.warning("store away", extra={"error": str(error)})
                    away = True
                    self._wake.set()
                    await asyncio.sleep(0.5)
                    break
                if away:
                    log.warning("store back")
                away = False
                if self._waiting.get(key) is entry:
                    del self._waiting[key]
                else:
                    self._wake.set()

    async def _write_one(self, key: str, data: bytes | None, ttl_ms: float) -> None:
        if data is None:
            await self._redis.delete(key)
        else:
            await self._redis.set(key, data, px=int(ttl_ms) or None)
