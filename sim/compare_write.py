"""Writing what a comparison has come to: a page, Markdown, CSVs."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.cells import Played
from sim.page import Section, html, markdown

FIGURES = ("energy_j", "energy_parts_j", "attainment", "ttft_ms", "tbt_ms", "clock_mhz")


def write_page(folder: Path, title: str, intro: Sequence[str], sections: Sequence[Section]) -> None:
    """Write index.html and body.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(html(title, intro, sections))
    (folder / "body.md").write_text(markdown(sections))


def write_csv(path: Path, lines: Iterable[Sequence[object]]) -> None:
    """Write lines, the header first."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)


def cell_lines(played: Sequence[Played]) -> Iterator[Sequence[object]]:
    """Yield a line for each cell: what was played, and every number of its report."""
    header: list[str] = []
    for one in played:
        values: dict[str, Any] = {
            name: getattr(one.cell, name) for name in one.cell.__struct_fields__ if name != "traced"
        }
        for name in one.report.__struct_fields__:
            value = getattr(one.report, name)
            if name in FIGURES:
                values |= {f"{name}.{part}": getattr(value, part) for part in value.__struct_fields__}
            else:
                values[name] = value
        if not header:
            header = list(values)
            yield header
        yield [values[name] for name in header]
