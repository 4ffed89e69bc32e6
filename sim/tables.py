"""What the simulator's commands show to people."""

from collections.abc import Iterator

from rich.table import Table

from shared.devices import Device
from sim.plan import Case, Outcome, Plan
from sim.report import Report
from sim.workload import MOST_TOKENS, Workload


def summary(numbers: Report, device: Device, title: str, span_ms: float) -> Table:
    """Return the numbers of a run over [span_ms / 3, span_ms) as a table."""
    table = Table(title=title, title_justify="left", show_header=False)
    energy, parts = numbers.energy_j, numbers.energy_parts_j
    table.add_row("window", f"minutes {span_ms / 180_000:.1f} to {span_ms / 60_000:.1f}")
    idle_w = {"cold": device.static_w, "warm": device.context_idle_w, "off": 0.0}
    for accounting, watts in idle_w.items():
        joules = getattr(energy, accounting)
        table.add_row(f"energy, unused GPUs {accounting} ({watts:g} W)", f"{joules / 1000:,.1f} kJ")
    causes = ", ".join(f"{name} {getattr(parts, name) / 1000:,.1f}" for name in parts.__struct_fields__)
    table.add_row("of it (cold)", f"{causes} kJ")
    table.add_row("output tokens", f"{numbers.output_tokens:,}")
    table.add_row("energy per token (cold)", _number(numbers.j_per_token, "{:.3f} J"))
    reached = numbers.attainment
    for name, share in (("request", reached.request), ("strict", reached.strict), ("token", reached.token)):
        table.add_row(f"attainment by {name}", _number(share, "{:.2%}"))
    table.add_row("TTFT p50, p99", _pair(numbers.ttft_ms.p50, numbers.ttft_ms.p99))
    table.add_row("TBT p50, p99", _pair(numbers.tbt_ms.p50, numbers.tbt_ms.p99))
    clocks = (numbers.clock_mhz.p10, numbers.clock_mhz.p50, numbers.clock_mhz.p90)
    table.add_row("SM clock p10, p50, p90", ", ".join(_number(clock, "{:.0f}") for clock in clocks) + " MHz")
    table.add_row("GPUs with a model, mean", f"{numbers.active_gpus_mean:.2f}")
    moved = f"{numbers.loads}, {numbers.migrations}, {numbers.clock_switches}"
    table.add_row("loads, migrations, clock switches", moved)
    table.add_row("took", f"{numbers.wall_s:.1f} s; trace {numbers.trace_hash[:12]}")
    return table


def planned(answer: Plan, base: Case, price: float | None) -> Iterator[Table | str]:
    """Yield what a plan says, part by part; `price` is that of a kWh."""
    hours = base.span_ms / 3.6e6
    table = Table(title=f"{len(base.arrivals):,} requests in {hours * 60:.1f} minutes", title_justify="left")
    for name in ("GPUs", "device model", "on time", "tokens", "kJ", "J/token", "used"):
        table.add_column(name, justify="left" if name == "device model" else "right", no_wrap=True)
    for one in answer.tried:
        table.add_row(*_outcome(one, "as in the table"))
    for one in answer.banded:
        table.add_row(*_outcome(one, one.changed))
    yield table
    gpus = f"{answer.chosen.gpus} x {base.device.name}"
    wanted = f"{answer.target:.0%} of the requests on time"
    if answer.needed_gpus is None:
        yield f"[yellow]No number of GPUs that was tried brings {wanted};[/yellow] with {gpus}:"
    else:
        yield f"[bold]{gpus}[/bold] are the fewest tried that bring {wanted}:"
    energy, share = answer.energy_kwh, answer.attainment
    ends = (energy.value, energy.least, energy.most)
    yield (
        "  energy {:.3g} kWh ({:.3g} to {:.3g} over the bands of the device model)".format(*ends)
        + f"; {energy.value * 24 / hours:.3g} kWh a day at this rate"
    )
    if price is not None:
        yield "  cost {:.3g} ({:.3g} to {:.3g})".format(*(kwh * price for kwh in ends))
    yield f"  on time {share.value:.1%} ({share.least:.1%} to {share.most:.1%})"
    used = " ".join(f"{count:.1f}" for count in answer.chosen.active_gpus)
    yield f"  GPUs with a model, over the time of the trace: {used}"
    yield f"Modelled energy; a GPU without a model counts as cold ({base.device.static_w:g} W)."


def said(load: Workload) -> str:
    """Return what was done to the requests that are too long; empty if there were none."""
    told = [f"Left out, over {MOST_TOKENS:,} tokens: {load.left_out:,} requests."] if load.left_out else []
    told += [f"Shortened to their model's context: {load.shortened:,} requests."] if load.shortened else []
    return " ".join(told)


def _outcome(one: Outcome, device_model: str) -> list[str]:
    numbers = one.report
    reached = numbers.attainment
    return [
        str(one.gpus),
        device_model,
        _number(reached.request, "{:.1%}"),
        _number(reached.token, "{:.1%}"),
        f"{numbers.energy_j.cold / 1000:,.1f}",
        _number(numbers.j_per_token, "{:.3f}"),
        f"{numbers.active_gpus_mean:.2f}",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _pair(p50: float | None, p99: float | None) -> str:
    return f"{_number(p50, '{:.1f}')}, {_number(p99, '{:.1f}')} ms"
