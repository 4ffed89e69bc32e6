"""`festina doctor`: which parts of Festina work on this host, and what to do about those that do not."""

import json
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.local_sched import preflight
from services.local_sched.host_probe import probe
from services.local_sched.preflight_gpu import FAILED, NOT_APPLICABLE, OK, WARNING, Row
from shared.config import load

COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red", NOT_APPLICABLE: "dim"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say what works on this host: GPUs, clocks, meter, SM shares, engine. Changes nothing.

    It goes by the settings of a local scheduler here (FESTINA_DEVICE_...). The exit status is 0 when nothing
    has failed, 1 otherwise. A machine without a GPU is no failure, unless the settings want one.
    """
    from services.local_sched.main import DeviceSettings  # with all that a local scheduler imports

    where = load(DeviceSettings, "device")
    host = probe(
        vllm_python=where.vllm_python,
        clock_guard=where.clock_guard,
        wanted=where.clocks == "nvml",
        gpu_type=where.gpu_type,
    )
    rows = preflight.judge(host, where.sm_partition, where.mps_share_pct)
    if as_json:
        found = {"failed": preflight.failed(rows), "rows": rows, "host": host}
        sys.stdout.write(json.dumps(msgspec.to_builtins(found), indent=2) + "\n")
    else:
        Console().print(as_table(rows))
    raise typer.Exit(preflight.failed(rows))


def as_table(rows: list[Row]) -> Table:
    """Return the rows for people: outcome, check, and what is to be said of it."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        gpus = f" {', '.join(map(str, row.gpus))}" if row.gpus else ""
        said = [escape(row.found)]
        said += [f"[dim]{escape(row.means)}[/dim]"] if row.means else []
        said += [f"cure: {escape(row.cure)}"] if row.cure else []
        colour = COLOURS[row.outcome]
        name = row.check if row.check == "GPU" or not gpus else f"{row.check}, GPU"
        table.add_row(f"[{colour}]{row.outcome}[/{colour}]", name + gpus, "\n".join(said))
    return table
