"""A record of all that a core has heard and done, to be played again: (now_ms, event, actions), in order.

A core is a function of what it hears, so a fresh one that hears the same at the same times must do the same.
Set FESTINA_RECORD to a folder, and each service writes ``SERVICE.ID.rec`` there: msgpack frames one after
another. The files hold prompts and answers, and grow without bound: they are for experiments.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared import events as ev

FOLDER_VARIABLE = "FESTINA_RECORD"

_encoder = msgspec.msgpack.Encoder(order="deterministic")  # sets have no order of their own


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """One step of a core; `actions` are as `encoded` gives them."""

    now_ms: float
    event: msgspec.Raw
    actions: tuple[tuple[str, bytes], ...]


def encoded(actions: Sequence[ev.Action]) -> tuple[tuple[str, bytes], ...]:
    """Return actions as (type, bytes), equal for equal actions in whichever process."""
    return tuple((type(action).__name__, _encoder.encode(action)) for action in actions)


class Recorder:
    """Writes what one core hears and does."""

    def __init__(self, folder: Path, service: str, ident: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{service}.{ident}.rec").open("wb")

    def write(self, now_ms: float, event: ev.Message | ev.Event, actions: Sequence[ev.Action]) -> None:
        """Add one step."""
        frame = Frame(now_ms, msgspec.Raw(_encoder.encode(event)), encoded(actions))
        data = _encoder.encode(frame)
        self._file.write(len(data).to_bytes(4, "little") + data)

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()


def recorder(service: str, ident: str) -> Recorder | None:
    """Return a recorder if the environment asks for one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Recorder(Path(folder), service, ident) if folder else None


def event_types() -> list[type]:
    """Return every type of event that is known in this process."""

    def below(base: type) -> Iterator[type]:
        kind: type
        for kind in base.__subclasses__():
            yield kind
            yield from below(kind)

    return [*below(ev.Message), *below(ev.Event)]


def read(path: Path) -> Iterator[tuple[float, Any, tuple[tuple[str, bytes], ...]]]:
    """Yield (now_ms, event, encoded actions) of each step of a recording, up to where its writer was stopped.

    The modules that define the events of its service must have been imported.
    """
    union: Any = event_types()[0]
    for kind in event_types()[1:]:
        union = union | kind
    frames, events = msgspec.msgpack.Decoder(Frame), msgspec.msgpack.Decoder(union)
    with path.open("rb") as file:
        while len(head := file.read(4)) == 4:
            data = file.read(int.from_bytes(head, "little"))
            if len(data) < int.from_bytes(head, "little"):
                return
            frame = frames.decode(data)
            yield frame.now_ms, events.decode(frame.event), frame.actions
