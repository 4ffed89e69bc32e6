"""Playing a grid of cells side by side, and keeping each result: a second run plays what is missing.

A result is kept under its cell and the version of all that had a part in it: the sources of the services, the
simulator and the device model. So a change of any of them plays everything anew, and nothing old is shown.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
from rich.progress import Progress

from shared.errors import FestinaError
from sim.cells import Cell, Played, check, play
from sim.collector import collecting_rarely

ROOT = Path(__file__).parents[1]
COMPILED = ROOT / "build" / "compiled"
SERVICES = ("consolidator", "gateway", "global_sched", "local_sched", "migrator")
PLAYING = ("shared", *(f"services/{name}" for name in SERVICES))
OF_SIM = """cells chance clients hardware lengths network nodes report scenario shells systems tasks wakes
    windows workload world"""


class Failed(FestinaError):
    """Cells could not be played."""


def version(root: Path = ROOT) -> str:
    """Return the hash of all sources that have a part in a result."""
    files = sorted(path for folder in PLAYING for path in (root / folder).rglob("*") if path.is_file())
    files = [path for path in files if path.suffix in (".py", ".json")]
    files += [path for name in OF_SIM.split() if (path := root / "sim" / f"{name}.py").is_file()]
    told = hashlib.sha256()
    for path in files:
        told.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return told.hexdigest()[:16]


class Grid:
    """The results that a folder keeps, for the present version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "cells"
        self._version = version()
        self._read: dict[Path, Played] = {}  # a result has a whole run's course: each is read once

    def kept(self, cell: Cell) -> Played | None:
        """Return what came of a cell, if it is known."""
        path = self._path(cell)
        if path not in self._read:
            try:
                self._read[path] = msgspec.json.decode(path.read_bytes(), type=Played)
            except (FileNotFoundError, msgspec.MsgspecError):
                return None
        return self._read[path]

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return those of these cells that are to be played, each once, the longest first."""
        asked = {cell.key(""): cell for cell in cells}
        rest = [cell for cell in asked.values() if self.kept(cell) is None]
        return sorted(rest, key=lambda cell: -cell.llms * cell.rps * cell.minutes)

    def play(self, cells: Sequence[Cell], bar: Progress, workers: int | None = None) -> None:
        """Play what is missing of these cells.

        Raises:
            ConfigError: at once, for a cell that names what there is not.
            Failed: after all others were played, naming a cell that could not be.
        """
        missing = self.missing(cells)
        for cell in missing:
            check(cell)
        self._folder.mkdir(parents=True, exist_ok=True)
        task = bar.add_task(f"{len(missing)} of {len(cells)} cells to play", total=len(missing) or 1)
        if not missing:
            bar.update(task, completed=1)
            return
        failures: list[str] = []
        with _processes(min(workers or os.cpu_count() or 1, len(missing))) as pool:
            playing = {pool.submit(_play, cell): cell for cell in missing}
            try:
                for done in as_completed(playing):
                    cell = playing[done]
                    if (error := done.exception()) is not None:
                        failures.append(f"{said(cell)}: {type(error).__name__}: {error}")
                    else:
                        self._keep(done.result())
                    bar.update(task, advance=1, description=f"last: {said(cell)}")
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failures:
            raise Failed(f"{len(failures)} cells could not be played; the first: {failures[0]}")

    def _keep(self, played: Played) -> None:
        path = self._path(played.cell)
        partial = path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(played))
        partial.replace(path)

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.key(self._version)}.json"


def said(cell: Cell) -> str:
    """Return a cell in a few words."""
    clock = f" @ {cell.default_clock_mhz} MHz" if cell.default_clock_mhz else ""
    models = f"{len(cell.models) or cell.llms} LLMs"
    knobs = "".join(f", {place} {value:g}" for place, value in cell.knobs.items())
    return f"{cell.system}{clock}, {cell.workload}, {models}, {cell.rps:g} rps, seed {cell.seed}{knobs}"


def _processes(count: int) -> ProcessPoolExecutor:
    """Return processes that play; with the compiled form, where it is the same as the sources."""
    if (COMPILED / ".done").exists() and version(COMPILED) == version() and str(COMPILED) not in sys.path:
        sys.path.insert(0, str(COMPILED))  # a spawned process takes this path along, and looks there first
    return ProcessPoolExecutor(count, get_context("spawn"))


def _play(cell: Cell) -> Played:
    started_s = time.monotonic()
    with collecting_rarely():
        played = play(cell)
    report = msgspec.structs.replace(played.report, wall_s=time.monotonic() - started_s)
    return msgspec.structs.replace(played, report=report)
