"""Play scenarios at random until an invariant breaks: ``python -m sim.soak --seeds 0:2000 --jobs 2``.

`--seed N` plays one and tells what happened in it; `--system NAME` plays them under another system.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

from shared.systems import SYSTEMS
from sim.check import InvariantBroken
from sim.scenario import Result
from sim.systems import under
from sim.wild import scenario
from sim.world import run


def play(seed: int, system: str = "festina") -> Result:
    """Play the scenario of a seed under a system. Raises InvariantBroken."""
    played = scenario(seed)
    played = replace(played, settings=under(system, played.settings))
    named = "" if system == "festina" else f" --system {system}"
    return run(played, check=True, replay=f"python -m sim.soak --seed {seed}{named}")


def _verdict(seed: int, system: str) -> tuple[int, str, int]:
    try:
        return seed, "", play(seed, system).events
    except InvariantBroken as error:
        return seed, str(error), 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first seed and the one after the last, as A:B")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--system", default="festina", choices=SYSTEMS, help="the system that serves")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if an invariant broke."""
    asked = _parse(sys.argv[1:] if argv is None else argv)
    console = Console()
    if asked.seed is not None:
        _, broken, events = _verdict(asked.seed, asked.system)
        print(broken or f"seed {asked.seed}: all held, {events} events")
        return int(bool(broken))
    first, last = (int(part) for part in asked.seeds.split(":"))
    started, events, failures = time.monotonic(), 0, []
    with ProcessPoolExecutor(asked.jobs) as pool:
        verdicts = pool.map(partial(_verdict, system=asked.system), range(first, last), chunksize=4)
        for seed, broken, count in track(verdicts, "soak", last - first, console=console):
            events += count
            if broken:
                failures.append(seed)
                print(broken.splitlines()[0], f"(seed {seed})", flush=True)
    seconds = time.monotonic() - started
    print(f"{last - first} seeds, {events} events in {seconds:.0f} s; broken: {failures or 'none'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
