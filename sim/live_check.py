"""Is the simulator what it simulates, and what does governing the clocks save? One workload, four times.

``python -m sim.live_check`` (``make live-check``) sends Poisson arrivals to a live emulated pool, and the
same to one whose clocks stay at the device's default; then it plays both in virtual time. Live and simulated
must agree on energy, attainment and tokens, and every core of the first pool must do again what was recorded
of it. Numbers go to ``build/live-check.json``, clocks over time to ``build/live-check.png``.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from services.local_sched.made_up import VocabSlice, answer
from services.local_sched.settings import LocalSettings
from shared.catalog import pool_models
from shared.devices import device_for
from shared.model import ModelSpec, Request
from shared.slo import objectives_for
from sim.figures import check_plottable
from sim.live_plot import plot
from sim.live_pool import ENDS_S, POOL_SETTINGS, TAIL_S, Live, live_run, prompt_of
from sim.replay import Differs, replay
from sim.report import attainment, metered_j, quantiles
from sim.scenario import RequestRecord, Scenario, Settings
from sim.workload import Arrival, generate
from sim.world import run

LEAD_MS = 20_000.0  # before the first request in the simulator, in which the models are loaded
ENERGY_WITHIN, ATTAINMENT_WITHIN = 0.05, 0.02
VOCAB = VocabSlice(token_ids=(1,), eos_id=2)  # only lengths matter here
GPU_TYPE = "h100-80gb"
OUTPUT = Path("build")
IDLE = "modelled H100; energy with idle time, 110 W warm and 70 W cold"
SAME = "all the same"
FIXED = "FESTINA_LOCAL_SCHED_FIXED_CLOCK_MHZ"


class Figures(msgspec.Struct):
    """What one run of the workload came to.

    Args:
        energy_j: as the devices' meters have it, idle time included.
        charged_j: the part of it that was reported with the requests' ends.
    """

    energy_j: float
    charged_j: float
    output_tokens: int
    j_per_token: float
    charged_j_per_token: float
    attainment: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None


class Pair(msgspec.Struct):
    """The same workload live and simulated, and what differs."""

    name: str
    live: Figures
    simulated: Figures
    energy_off: float
    attainment_off: float
    requests_with_other_tokens: int
    pool_cores: float
    machine_cores: float

    @property
    def agrees(self) -> tuple[bool, bool, bool]:
        """Whether energy, attainment and tokens are as close as they must be."""
        return (
            abs(self.energy_off) <= ENERGY_WITHIN,
            abs(self.attainment_off) <= ATTAINMENT_WITHIN,
            self.requests_with_other_tokens == 0,
        )


def answered(arrivals: tuple[Arrival, ...], models: tuple[ModelSpec, ...]) -> tuple[Arrival, ...]:
    """Give each arrival the length that the emulated model's answer to its prompt will have.

    So no client has to say how long it shall be, and the live schedulers have to guess it as always.
    """
    context_tokens = {model.name: model.context_tokens for model in models}
    lengths = []
    for index, arrival in enumerate(arrivals):
        request = Request(
            request_id="",
            attempt=1,
            gateway="",
            model=arrival.model,
            prompt_tokens=tuple(prompt_of(index, arrival.input_tokens)),
            max_tokens=1 << 30,
            objectives=objectives_for(arrival.input_tokens),
            sampling={"seed": index},
        )
        made = answer(request, VOCAB, context_tokens[arrival.model])
        lengths.append(min(made.length or made.max_tokens, made.max_tokens))
    return tuple(
        msgspec.structs.replace(arrival, output_tokens=length)
        for arrival, length in zip(arrivals, lengths, strict=True)
    )


def simulated(
    arrivals: tuple[Arrival, ...], models: tuple[ModelSpec, ...], gpus: int, fixed_mhz: int | None
) -> tuple[float, list[RequestRecord]]:
    """Play the same in a world; return its joules over the time measured live, and its requests."""
    later = tuple(msgspec.structs.replace(one, at_ms=one.at_ms + LEAD_MS) for one in arrivals)
    until_ms = later[-1].at_ms + TAIL_S * 1000.0
    end_ms = until_ms + ENDS_S * 1000.0  # what is still open then may end
    settings = Settings(local=LocalSettings(fixed_clock_mhz=fixed_mhz))
    world = Scenario(models=models, arrivals=later, gpus=gpus, horizon_ms=end_ms, settings=settings)
    result = run(world)
    return metered_j(result.devices, LEAD_MS, until_ms), result.requests


def figures(energy_j: float, requests: Sequence[RequestRecord]) -> Figures:
    """Sum up a run."""
    tokens = sum(one.output_tokens for one in requests)
    ttft_ms = [one.token_ms[0] - one.arrived_ms for one in requests if one.token_ms]
    p50, p99 = quantiles(ttft_ms, 0.5, 0.99)
    charged_j = sum(one.energy_j or 0.0 for one in requests)
    return Figures(
        energy_j=energy_j,
        charged_j=charged_j,
        output_tokens=tokens,
        j_per_token=energy_j / max(1, tokens),
        charged_j_per_token=charged_j / max(1, tokens),
        attainment=attainment(requests).request or 0.0,
        ttft_p50_ms=p50,
        ttft_p99_ms=p99,
    )


def compared(name: str, live: Live, energy_j: float, requests: Sequence[RequestRecord]) -> Pair:
    """Set a live run beside the simulated one."""
    ours, theirs = figures(live.energy_j, live.requests), figures(energy_j, requests)
    return Pair(
        name=name,
        live=ours,
        simulated=theirs,
        energy_off=ours.energy_j / theirs.energy_j - 1.0,
        attainment_off=ours.attainment - theirs.attainment,
        requests_with_other_tokens=sum(
            a.output_tokens != b.output_tokens for a, b in zip(live.requests, requests, strict=True)
        ),
        pool_cores=live.pool_cores,
        machine_cores=live.machine_cores,
    )


def main(
    minutes: Annotated[float, typer.Option(help="How long requests arrive.")] = 10.0,
    models: Annotated[int, typer.Option(help="Models served, by rank in the catalog.")] = 16,
    gpus: Annotated[int, typer.Option(help="Emulated H100.")] = 4,
    rps: Annotated[float, typer.Option(help="Requests per second and model, at the highest.")] = 0.35,
    workload: Annotated[str, typer.Option(help="Name of a workload, as for `festina sim`.")] = "step",
    seed: int = 0,
    default_clock: Annotated[
        int, typer.Option(help="Clock in MHz to compare with; 0: no comparison, half the time.")
    ] = device_for(GPU_TYPE).default_clock_mhz,
    output: Annotated[Path, typer.Option(help="Folder for the numbers and the picture.")] = OUTPUT,
) -> None:
    """Compare a live emulated pool with the simulator, and its energy with that at the default clock.

    Ends with status 1 where live and simulated differ by more than they may, or a core does not do again
    what was recorded of it.
    """
    output.mkdir(parents=True, exist_ok=True)
    check_plottable(output / "live-check.png")
    console = Console()
    served = pool_models(models)
    made = generate(workload, models=served, rps_per_llm=rps, minutes=minutes, seed=seed).arrivals
    arrivals = answered(made, served)
    clocks: list[int | None] = [None, default_clock] if default_clock else [None]
    names = ["governed", f"fixed at {default_clock} MHz"][: len(clocks)]
    lives, pairs = [], []
    with tempfile.TemporaryDirectory(prefix="festina-live-") as folder, progress_bar(console) as bar:
        for number, (name, clock_mhz) in enumerate(zip(names, clocks, strict=True)):
            task = bar.add_task(f"live, clocks {name}", total=1.0)
            place, said = Path(folder) / str(number), teller(bar, task)
            settings = {} if clock_mhz is None else {FIXED: str(clock_mhz)}
            lives.append(asyncio.run(live_run(arrivals, served, gpus, place, said, settings)))
            bar.update(task, completed=1.0)
        for name, clock_mhz, live in zip(names, clocks, lives, strict=True):
            task = bar.add_task(f"simulated, clocks {name}", total=None)
            pairs.append(compared(name, live, *simulated(arrivals, served, gpus, clock_mhz)))
            bar.update(task, total=1.0, completed=1.0)
        replayed = _replayed(Path(folder) / "0" / "recorded", bar)
    title = (
        f"{len(arrivals):,} requests ({workload}) in {minutes:g} min, {models} models, {gpus} x {GPU_TYPE}"
    )
    plot(list(zip(names, lives, strict=True)), f"{title} (emulated, live)", output / "live-check.png")
    good = _show(console, title, pairs, replayed)
    kept: dict[str, Any] = {"workload": title, "seed": seed, "good": good, "replayed": replayed}
    kept |= {"runs": pairs, "saved": savings(pairs)}
    (output / "live-check.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    console.print(f"written to {output / 'live-check.json'} and {output / 'live-check.png'}")
    if not good:
        raise typer.Exit(1)


def progress_bar(console: Console) -> Progress:
    """Return a bar for runs of some minutes."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def teller(bar: Progress, task: Any) -> Any:
    """Return what a run tells its progress to."""
    return lambda part: bar.update(task, completed=part)


def _replayed(folder: Path, bar: Progress) -> dict[str, str]:
    """Return, by service, how many steps its core did again, or where it did something else."""
    found = {}
    for path in bar.track(sorted(folder.glob("*.rec")), description="replayed"):
        try:
            found[path.stem] = f"{replay(path, POOL_SETTINGS):,} steps, {SAME}"
        except Differs as error:
            found[path.stem] = str(error)
    return found


def savings(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return what governing the clocks saves live, as parts of what the default takes."""
    if len(pairs) < 2:
        return {}
    ours, theirs = pairs[0].live, pairs[1].live
    return {
        "energy": 1.0 - ours.energy_j / theirs.energy_j,
        "j_per_token": 1.0 - ours.j_per_token / theirs.j_per_token,
        "charged_j_per_token": 1.0 - ours.charged_j_per_token / theirs.charged_j_per_token,
        "attainment": ours.attainment - theirs.attainment,
    }


# ---- printing


def _show(console: Console, title: str, pairs: Sequence[Pair], replayed: dict[str, str]) -> bool:
    """Print all; say whether live and simulated agree, and everything was replayed."""
    table = Table("clocks", "figure", "live", "simulated", "difference", "within", title=title, caption=IDLE)
    for pair in pairs:
        for row, good in zip(_rows(pair), (*pair.agrees, True, True, True), strict=True):
            table.add_row(pair.name, *row, style="" if good else "red")
    console.print(table)
    for name, said in replayed.items():
        console.print(f"replayed {name}: {said}", style="" if said.endswith(SAME) else "red", highlight=False)
    for pair in pairs:
        cores = f"the pool took {pair.pool_cores:.2f} cores, this machine {pair.machine_cores:.2f} in all"
        console.print(f"{pair.name}: {cores}", highlight=False)
    if saved := savings(pairs):
        console.print(
            f"governed against {pairs[1].name}, live: [bold]{saved['energy']:.1%} less energy[/bold], "
            f"{saved['j_per_token']:.1%} less per token ({saved['charged_j_per_token']:.1%} of what requests "
            f"are charged, idle time left out), attainment {100 * saved['attainment']:+.2f} points",
            soft_wrap=True,
        )
    same = bool(replayed) and all(said.endswith(SAME) for said in replayed.values())
    return same and all(all(pair.agrees) for pair in pairs)


def _rows(pair: Pair) -> list[tuple[str, ...]]:
    ours, theirs = pair.live, pair.simulated
    energies = (f"{one.energy_j / 1e3:.2f}" for one in (ours, theirs))
    per_token = (f"{one.j_per_token:.3f}" for one in (ours, theirs))
    charged = (f"{one.charged_j_per_token:.3f}" for one in (ours, theirs))
    met = (f"{one.attainment:.2%}" for one in (ours, theirs))
    tokens = (f"{one.output_tokens:,}" for one in (ours, theirs))
    ttft = (f"{one.ttft_p50_ms or 0:.1f}, {one.ttft_p99_ms or 0:.1f}" for one in (ours, theirs))
    other = f"{pair.requests_with_other_tokens} requests differ"
    return [
        ("energy, kJ", *energies, f"{pair.energy_off:+.2%}", "5 %"),
        ("attainment by request", *met, f"{100 * pair.attainment_off:+.2f} points", "2 points"),
        ("output tokens", *tokens, other, "none"),
        ("J per output token", *per_token, "", ""),
        ("that charged to requests", *charged, "", ""),
        ("TTFT p50, p99, ms", *ttft, "", ""),
    ]


if __name__ == "__main__":
    typer.run(main)
