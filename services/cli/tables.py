"""Profiled tables: a file each below the state folder, and a copy in the store for the services to find."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shared.bus import Bus
from shared.config import Common, load
from shared.errors import LutRefused, Unavailable
from shared.events import LutStored
from shared.lut import Lut, pack, unpack
from shared.model import slug
from shared.store import Store
from shared.subjects import lut_key, subject_of

SERVERS_FILE = "servers.json"
"""Where `festina up` notes the addresses of the servers that it started."""


def tables_dir(state_dir: Path) -> Path:
    """Folder of the tables."""
    return state_dir / "tables"


def note_servers(state_dir: Path, environ: Mapping[str, str], started: Sequence[str]) -> None:
    """Leave the addresses of the servers that were started here for other commands on this machine.

    Those of others come from the environment, may hold a password, and are not written down.
    """
    variables = {"nats": "FESTINA_NATS_URL", "store": "FESTINA_REDIS_URL"}
    found = {variables[name]: environ[variables[name]] for name in started}
    (state_dir / SERVERS_FILE).write_text(json.dumps(found))


def servers_of(state_dir: Path) -> Common:
    """Return where bus and store are: what the environment says, else what `festina up` has noted there."""
    noted: dict[str, str] = {}
    path = state_dir / SERVERS_FILE
    if path.exists():
        noted = json.loads(path.read_text())
    return load(Common, environ={**noted, **os.environ})


def save(folder: Path, lut: Lut) -> Path:
    """Write a table to its file, in one step, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(lut.device.name)}--{slug(lut.model.name)}.lut"
    draft = path.with_suffix(".new")
    draft.write_bytes(pack(lut))
    return draft.replace(path)


async def put(common: Common, lut: Lut) -> None:
    """Put a table into the store. Raises Unavailable."""
    store = Store(common)
    try:
        await store.connect()
        await store.write_bytes(lut_key(lut.device.name, lut.model.name), pack(lut))
    finally:
        await store.close()


async def tell(common: Common, lut: Lut) -> None:
    """Let the running services know of a table in the store. Raises Unavailable."""
    bus = Bus(_ignore, _ignore)
    await bus.connect(common, "command_line")
    model = lut.model.name
    message = LutStored(gpu_type=lut.device.name, model=model, content_hash=lut.sha256)
    bus.publish(subject_of(LutStored, model), msgspec.msgpack.encode(message))
    await bus.close()


async def offer_files(common: Common, folder: Path) -> list[str]:
    """Put every table of the folder into the store; returns why some were left out."""
    refused = []
    for path in sorted(folder.glob("*.lut")):
        try:
            await put(common, unpack(path.read_bytes()))
        except LutRefused as error:
            refused.append(f"{path.name}: {error}")
    return refused


async def answers(common: Common) -> bool:
    """Return whether a store is there."""
    store = Store(common)
    try:
        return await store.answers()
    except Unavailable:
        return False
    finally:
        await store.close()


def _ignore() -> None:
    """Nobody waits for this connection."""
