"""Spans kept in files, for `festina explain` where no Jaeger runs: one JSON object a line, bounded in size.

Each process writes ``SERVICE.ID.jsonl`` in a folder that all of one machine share. At half of what it may
take, the file becomes ``SERVICE.ID.old.jsonl`` in place of the one before it. What is older is gone. Ids may
be new with each start, so a process that begins a file deletes the oldest of its service, but none in use.
"""

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from shared.spans import SpanLine

TRACES = "traces"  # the folder's name in the state folder of a pool on one machine
SUFFIX, OLD_SUFFIX = ".jsonl", ".old.jsonl"
FILES_KEPT = 16  # of one service, besides those of the process that begins one
IN_USE_S = 600.0  # a file written to so lately belongs to a process that runs


class SpanLog:
    """The file of one process.

    Args:
        folder: made, with the first spans, if it is not there.
        most_bytes: what both files together may take.
    """

    def __init__(self, folder: Path, service: str, ident: str, most_bytes: int) -> None:
        self._service = service
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
        lines = self._encoder.encode_lines(spans)
        try:
            file = self._opened()
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, "no room for a whole line", str(self._path))
        except OSError:
            self.close()
            raise
        if file.tell() >= self._most_bytes:
            self.close()
            self._path.replace(self._old)

    def _opened(self) -> BinaryIO:
        """Return the file, begun anew if it, or its folder, has been deleted meanwhile."""
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink:
            return self._file
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._delete_oldest()
        self._file = self._path.open("ab", buffering=0)
        self._file.write(b"\n")  # what was written last may have been cut off in the middle of a line
        return self._file

    def _delete_oldest(self) -> None:
        written_s: dict[Path, float] = {}
        for path in self._path.parent.glob(f"{self._service}.*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                written_s[path] = path.stat().st_mtime
        for own in (self._path, self._old):
            written_s.pop(own, None)
        oldest_first = sorted(written_s, key=lambda path: (written_s[path], path))
        for path in oldest_first[: max(0, len(oldest_first) - FILES_KEPT)]:
            if written_s[path] < time.time() - IN_USE_S:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def files_in(folder: Path) -> list[Path]:
    """Return the files of all processes, older ones last: what becomes one while one reads is not missed."""
    return sorted(folder.glob("*" + SUFFIX), key=lambda path: (path.name.endswith(OLD_SUFFIX), path.name))


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
