"""Spans kept in files, for `festina explain` where no Jaeger runs: one JSON object a line, bounded in size.

Each process writes ``SERVICE.ID.jsonl`` in a folder that all of one machine share. At half of what it may
take, the file becomes ``SERVICE.ID.old.jsonl`` in place of the one before it. What is older is gone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shared.spans import SpanLine

SUFFIX, OLD_SUFFIX = ".jsonl", ".old.jsonl"


class SpanLog:
    """The file of one process.

    Args:
        folder: made if it is not there.
        most_bytes: what both files together may take.
    """

    def __init__(self, folder: Path, service: str, ident: str, most_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{service}.{ident}{SUFFIX}"
        self._old = folder / f"{service}.{ident}{OLD_SUFFIX}"
        self._most_bytes = most_bytes // 2
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._file = self._path.open("ab")

    def write(self, spans: Sequence[SpanLine]) -> None:
        """Add spans, readable by others when this returns; the oldest make room."""
        self._file.write(self._encoder.encode_lines(spans))
        self._file.flush()
        if self._file.tell() >= self._most_bytes:
            self._file.close()
            self._path.replace(self._old)
            self._file = self._path.open("ab")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def files_in(folder: Path) -> list[Path]:
    """Return the files of all processes."""
    return sorted(folder.glob("*" + SUFFIX))


def spans_naming(folder: Path, text: str) -> Iterator[SpanLine]:
    """Yield the spans that say `text` anywhere; a line that was cut off is passed over."""
    needle, decoder = text.encode(), msgspec.json.Decoder(SpanLine)
    for path in files_in(folder):
        with path.open("rb") as file:
            for line in file:
                if needle not in line:
                    continue
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError:  # its process was killed while it wrote
                    continue


def oldest_ms(folder: Path) -> float | None:
    """Return when the oldest span that is kept began, Unix ms; None if there is none."""
    decoder = msgspec.json.Decoder(SpanLine)
    starts = []
    for path in files_in(folder):
        with path.open("rb") as file:
            try:
                starts.append(decoder.decode(file.readline()).start_ms)
            except msgspec.DecodeError:
                continue
    return min(starts, default=None)
