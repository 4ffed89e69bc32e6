"""The journal of a profile: every measurement is on the disk before the next begins."""

import os
from pathlib import Path

import msgspec

from services.local_sched.profile_grid import Point
from shared.errors import FestinaError
from shared.model import Struct


class Measured(Struct):
    """One line of the journal: a point, the repeats it took, and what they say.

    Args:
        applied_mhz: the clock that the device says it runs at.
        context_tokens: mean context per request while it was measured; 0 for a prefill.
        power_w: None without a meter.
        outliers: how many of the repeats were left out as disturbed.
        precise: whether the confidence interval came out as narrow as was asked for.
    """

    phase: str
    tokens: int
    batch: int
    sm_clock_mhz: int
    sm_share_pct: int
    applied_mhz: int
    repeats_ms: tuple[float, ...]
    latency_ms: float
    context_tokens: float = 0.0
    power_w: float | None = None
    outliers: int = 0
    precise: bool = True

    @property
    def point(self) -> Point:
        """The point of the grid."""
        return Point(self.phase, self.tokens, self.batch, self.sm_clock_mhz, self.sm_share_pct)


class Heading(Struct):
    """First line of a journal: what is being profiled. Another heading is another profile."""

    gpu_type: str
    model: str
    source: str
    grid: str
    schema: int = 1


class Journal:
    """The measurements so far, one JSON line each, on the disk before the next begins.

    A profile that was killed goes on from here; a last line that was cut short is dropped.

    Raises:
        FestinaError: the file belongs to another profile.
    """

    def __init__(self, path: Path, heading: Heading) -> None:
        self.path = path
        self.entries: list[Measured] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._read(heading) if path.exists() else 0
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(heading)

    def _read(self, heading: Heading) -> int:
        """Read what is there; returns the length of its whole lines."""
        data = self.path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return 0
        try:
            found = msgspec.json.decode(lines[0], type=Heading)
            self.entries = [msgspec.json.decode(line, type=Measured) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise FestinaError(f"{self.path} is no journal of a profile ({error}): remove it") from None
        if found != heading:
            raise FestinaError(
                f"{self.path} is of another profile ({found.model} on {found.gpu_type}, other settings or "
                "grid): finish that one, or start anew with --fresh"
            )
        return sum(map(len, lines))

    def of(self, point: Point) -> Measured:
        """Return the newest measurement of a point that has one."""
        return next(entry for entry in reversed(self.entries) if entry.point == point)

    def append(self, entry: Measured) -> None:
        """Write one measurement through to the disk."""
        self.entries.append(entry)
        self._write(entry)

    def _write(self, value: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()
