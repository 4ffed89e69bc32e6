"""Run the benchmarks, print a table and write ``build/bench.json`` (figure -> value).

The machines this runs on are shared and noisy: read figures as ratios within one run. Benches of the cores
alone measure them as they are shipped, compiled (`make compiled`), and once more as a checkout runs them:
``interpreted.FIGURE``.
"""

import importlib
import json
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import bench

OUTPUT = Path("build/bench.json")
COMPILED = Path("build/compiled")
OF_CORES = {"dispatch", "local", "sim"}  # benches of pure cores alone


def main() -> None:
    """Run the benchmarks named on the command line, all by default; others' last figures are kept."""
    console = Console()
    names = sys.argv[1:] or [m.name for m in pkgutil.iter_modules(bench.__path__) if m.name[0] != "_"]
    figures: dict[str, float] = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    OUTPUT.parent.mkdir(exist_ok=True)
    for name in names:
        module = importlib.import_module(f"bench.{name}")
        if not hasattr(module, "run"):
            continue
        started = time.monotonic()
        with console.status(f"bench {name}"):
            measured: dict[str, float] = module.run()
            if name in OF_CORES:
                interpreted = {f"interpreted.{figure}": value for figure, value in measured.items()}
                measured = compiled(name) | interpreted
        figures.update(measured)
        table = Table(title=f"{name} ({time.monotonic() - started:.0f} s)", title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for figure, value in measured.items():
            table.add_row(figure, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
        console.print(table)
        OUTPUT.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    console.print(f"written to {OUTPUT}")


def compiled(name: str) -> dict[str, float]:
    """Return what a bench measures of the compiled form, which is brought up to date before."""
    subprocess.run(["make", "--silent", str(COMPILED / ".done")], check=True)
    program = (
        f"import sys; sys.path.insert(0, {str(COMPILED)!r});"
        f" import json; from bench.{name} import run; print(json.dumps(run()))"
    )
    child = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    measured: dict[str, float] = json.loads(child.stdout)
    return measured


if __name__ == "__main__":
    main()
