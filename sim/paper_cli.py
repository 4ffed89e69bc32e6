"""`festina paper`: the paper's evaluation, a figure or all of it."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shared.errors import ConfigError
from sim.cli import Json, print_json, progress

OUT = Path("build/paper")


def paper(
    figures: Annotated[
        list[str] | None,
        typer.Argument(help="Figures by name, such as fig10; none: all.", show_default=False),
    ] = None,
    full: Annotated[
        bool, typer.Option(help="All rates and long windows: about 50 hours on two cores.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of results, and of the page that is made of them.")] = OUT,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: as many as there are cores.")] = 0,
    list_them: Annotated[
        bool, typer.Option("--list", help="Only name the figures, and what they play.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Play the paper's evaluation and write it beside the paper's numbers: OUT/index.html, CSVs and body.md.

    What was played before, by the same sources, is not played again; so figures can be asked for one by one,
    and a run that was stopped goes on. docs/evaluation.md tells what was found.
    """
    from sim.compare_write import cell_lines, write_csv, write_page
    from sim.grid import Grid
    from sim.paper.build import FIGURES, NAMES, cells, sections
    from sim.paper.entry import FULL, REDUCED, Results

    if strange := [name for name in figures or () if name not in NAMES]:
        raise ConfigError(f"no figure is called {strange[0]!r}; there are: {', '.join(NAMES)}")
    chosen = [figure for figure in FIGURES if not figures or figure.name in figures]
    scale, store, started_s = FULL if full else REDUCED, Grid(out), time.monotonic()
    if list_them:
        for figure in chosen:
            asked = figure.cells(scale)
            left = len(store.missing(asked))
            Console().print(f"{figure.name:12} {figure.title}: {len(asked)} cells, {left} to play")
        return
    asked = cells(chosen, scale)
    with progress() as bar:
        store.play(asked, bar, workers or None)
    played = [one for one in map(store.kept, asked) if one is not None]
    made = sections(chosen, Results(played), scale)
    cores_s = sum({one.cell.key(""): one.report.wall_s for one in played}.values())
    intro = (
        "The evaluation of Energy-Aware Scheduling for Serverless LLM Serving on Shared GPUs"
        " (arXiv:2606.30391) on emulated H100s: nothing here was measured on a GPU, and every joule follows"
        " the device model.",
        f"Scale: {scale.name}; {scale.minutes:g} minutes a cell ({scale.long_minutes:g} for Figs. 13, 14 and"
        f" 16), of which the last two thirds count; seeds {', '.join(map(str, scale.seeds[0]))}."
        f" {len(played)} cells took {cores_s / 60:.0f} minutes of a core.",
    )
    write_page(out, "Festina: the paper's evaluation", intro, made)
    write_csv(out / "cells.csv", cell_lines(played))
    if as_json:
        print_json(tuple(made))
        return
    took = time.monotonic() - started_s
    Console().print(f"{len(made)} figures in {out}/index.html, in {took / 60:.1f} minutes")
