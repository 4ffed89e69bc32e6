"""What `festina lut` prints: tables for a terminal, and Markdown as docs/fidelity.md holds it."""

import sys
from typing import Any

from rich.table import Table

from services.cli import lut_paper
from services.cli.lut_fidelity import Check
from services.cli.lut_paper import Point
from shared.devices import PARAMETERS

REQUEST = (1024, 128, 8)  # input, output, batch of the heat map


def curves_table(phase: str, view: dict[str, Any]) -> Table:
    """Return energy and time against the clock, one workload a column."""
    table = Table("MHz", title=f"{phase}: energy / least energy (and ms), whole device", title_justify="left")
    curves = view[phase]
    for curve in curves:
        table.add_column(f"{curve['workload']}\nleast {curve['least_j']:g} J", justify="right")
    for i, clock in enumerate(view["clocks_mhz"]):
        cells = []
        for curve in curves:
            text = f"{curve['energy'][i]:.3f} ({curve['ms'][i]:g})"
            cells.append(f"[green]{text} <[/green]" if clock == curve["best_mhz"] else text)
        table.add_row(str(clock), *cells)
    saved = (f"-{curve['saving_pct']:.0f} % of {lut_paper.TDP_MHZ} MHz" for curve in curves)
    table.add_row("best", *saved, end_section=True)
    return table


def heat_table(grid: dict[str, Any]) -> Table:
    """Return the energy of a request over shares and clocks, coloured."""
    title = f"energy of a request / least ({grid['least_j']:g} J): {grid['workload']}, batch shares its power"
    table = Table("SM %", *map(str, grid["clocks_mhz"]), title=title, title_justify="left", padding=(0, 0))
    for share, row in zip(grid["shares_pct"], grid["energy"], strict=True):
        table.add_row(str(share), *(f"[on {_shade(value)}] {value:.2f} [/]" for value in row))
    return table


def _shade(value: float) -> str:
    """From green at the least energy to red at twice as much and more."""
    part = min(1.0, value - 1.0)
    return f"#{int(180 * part):02x}{int(120 * (1 - part)):02x}20"


def chosen_table(chosen: list[dict[str, Any]]) -> Table:
    """Return the points chosen for several input lengths."""
    _, output, batch = REQUEST
    title = f"chosen points: {output} out, batch {batch}, objectives of Table 2"
    table = Table(
        "input", "TTFT objective", "least energy", "TTFT ms", "TBT ms", "J", "least clock", title=title
    )
    table.title_justify = "left"
    for line in chosen:
        best, least = (f"{p[0]} MHz, {p[1]} %" if p else "none" for p in (line["best"], line["least"]))
        found = (line[key] for key in ("ttft_ms", "tbt_ms", "energy_j"))
        numbers = ("-" if number is None else f"{number:g}" for number in found)
        table.add_row(str(line["input_tokens"]), f"{line['ttft_objective_ms']:g}", best, *numbers, least)
    return table


COLUMNS = ("check", "of", "n", "mean %", "bias %", "p95 %", "worst %", "bound %", "verdict")


def _cells(c: Check) -> list[str]:
    bound = "" if c.bound_pct is None else f"{c.bound_pct:g}"
    if c.worst_bound_pct is not None:
        bound += f", worst {c.worst_bound_pct:g}"
    if c.skipped:
        return [c.check, c.subject, "", "", "", "", "", bound, f"skipped: {c.skipped}"]
    numbers = (f"{v:.2f}" for v in (c.mean_pct, c.bias_pct, c.p95_pct, c.worst_pct))
    return [c.check, c.subject, str(c.n), *numbers, bound, c.verdict + (f" ({c.note})" if c.note else "")]


def checks_table(checks: list[Check]) -> Table:
    """Return the comparisons, coloured by their verdicts."""
    table = Table(*COLUMNS, title="modelled against measured, errors in percent", title_justify="left")
    colour = {"within": "green", "over": "red", "skipped": "yellow", "reported": "default"}
    for c in checks:
        table.add_row(*_cells(c), style=colour[c.verdict])
    return table


POINT_COLUMNS = ("figure", "of", "paper", "ours", "holds", "note")


def _point_cells(point: Point) -> list[str]:
    holds = "" if point.meets is None else "yes" if point.meets else "no"
    return [point.figure, point.subject, point.paper, point.ours, holds, point.why]


def points_table(points: list[Point]) -> Table:
    """Return the paper's points beside ours."""
    table = Table(*POINT_COLUMNS, title="the paper's points, on the device model", title_justify="left")
    for point in points:
        table.add_row(*_point_cells(point))
    return table


ASSUMED_COLUMNS = ("assumed", "value", "band", "why")


def _assumed_cells(gpu_type: str) -> list[list[str]]:
    """The numbers of a device that nobody measured."""
    return [
        [name, f"{p.value:g}", "-".join(f"{end:g}" for end in p.band or ()), p.source]
        for name, p in PARAMETERS[gpu_type].items()
        if p.status == "assumed"
    ]


def print_markdown(checks: list[Check], points: list[Point]) -> None:
    """Print the tables as Markdown, as docs/fidelity.md holds them."""
    tables = [
        (COLUMNS, [_cells(c) for c in checks]),
        (POINT_COLUMNS, [_point_cells(p) for p in points]),
        (ASSUMED_COLUMNS, _assumed_cells("h100-80gb")),
    ]
    for columns, rows in tables:
        if rows:
            for line in (columns, ["---"] * len(columns), *rows):
                sys.stdout.write("| " + " | ".join(line) + " |\n")
            sys.stdout.write("\n")
