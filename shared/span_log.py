"""Spans kept in files, for `festina explain` where no Jaeger runs: one JSON object a line, bounded in size.

Each process writes ``SERVICE.ID.jsonl`` in a folder that all of one machine share. At half of what it may
take, the file becomes ``SERVICE.ID.old.jsonl`` in place of the one before it. What is older is gone.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from shared.spans import SpanLine

SUFFIX, OLD_SUFFIX = ".jsonl", ".old.jsonl"


class SpanLog:
    """The file of one process.

    Args:
        folder: made, with the first spans, if it is not there.
        most_bytes: what both files together may take.
    """

    def __init__(self, folder: Path, service: str, ident: str, most_bytes: int) -> None:
        self._path = folder / f"{service}.{ident}{SUFFIX}"
        self._old = folder / f"{service}.{ident}{OLD_SUFFIX}"
        self._most_bytes = most_bytes // 2
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._file: BinaryIO | None = None

    def write(self, spans: Sequence[SpanLine]) -> None:
        """Add spans, readable by others when this returns; the oldest make room.

        Raises:
            OSError: there is no room, or no folder; the next call tries anew.
        """
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._file.write(b"\n")  # its last process may have been killed in the middle of a line
        self._file.write(self._encoder.encode_lines(spans))
        if self._file.tell() >= self._most_bytes:
            self.close()
            self._path.replace(self._old)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def files_in(folder: Path) -> list[Path]:
    """Return the files of all processes, a process's older one first: it is replaced while one reads."""
    return sorted(folder.glob("*" + SUFFIX), key=lambda path: (not path.name.endswith(OLD_SUFFIX), path.name))


def _lines(folder: Path) -> Iterator[Iterator[bytes]]:
    """Yield the lines of each file, but for empty ones; one that has been replaced meanwhile has none."""
    for path in files_in(folder):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            yield (line for line in file if line != b"\n")


def spans_naming(folder: Path, text: str) -> Iterator[SpanLine]:
    """Yield the spans that say `text` anywhere, each once; a line that was cut off is passed over."""
    needle, decoder = text.encode(), msgspec.json.Decoder(SpanLine)
    seen: set[str] = set()
    for lines in _lines(folder):
        for line in lines:
            if needle not in line:
                continue
            try:
                span = decoder.decode(line)
            except msgspec.DecodeError:  # its process was killed while it wrote
                continue
            if span.span_id not in seen:
                seen.add(span.span_id)
                yield span


def oldest_ms(folder: Path) -> float | None:
    """Return when the oldest span that is kept began, Unix ms; None if there is none."""
    decoder = msgspec.json.Decoder(SpanLine)
    starts = []
    for lines in _lines(folder):
        with contextlib.suppress(msgspec.DecodeError):
            starts += [decoder.decode(line).start_ms for line in itertools.islice(lines, 1)]
    return min(starts, default=None)
