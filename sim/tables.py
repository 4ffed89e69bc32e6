"""What the simulator's commands show to people."""

from collections.abc import Iterator

from rich.table import Table

from shared.devices import Device
from sim.bound import Bound
from sim.page import Sheet
from sim.plan import Plan, Range
from sim.report import Report
from sim.tasks import Case
from sim.tries import Outcome
from sim.windows import Estimate
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


def least(answer: Bound, device: Device, title: str) -> Table:
    """Return the least energy of a setting as a table."""
    table = Table(title=title, title_justify="left", show_header=False)
    seconds, tokens = answer.span_ms / 1000, max(1, answer.output_tokens)
    table.add_row("requests, output tokens", f"{answer.requests:,}, {answer.output_tokens:,}")
    if answer.energy_j is None:
        table.add_row("cannot be served", "these GPUs have too little memory or speed, whatever the policy")
    else:
        idle_w = {"cold": device.static_w, "warm": device.context_idle_w, "off": 0.0}
        for accounting, watts in idle_w.items():
            joules = getattr(answer.energy_j, accounting)
            said = f"{joules / seconds:,.0f} W, {joules / tokens:.4f} J per token"
            table.add_row(f"unused GPUs {accounting} ({watts:g} W)", said)
        table.add_row("GPUs on, empty ones off", _number(answer.gpus, "{:.2f}"))
        table.add_row("SM clock, likewise", _number(answer.clock_mhz, "{:.0f} MHz"))
        table.add_row("between steps, likewise", _number(answer.step_interval_ms, "{:.0f} ms"))
    table.add_row("KV memory if steps wait for TBT", f"{answer.kv_bytes / 1e9:,.0f} GB")
    return table


def of_sheet(sheet: Sheet, title: str, columns: int) -> Table:
    """Return the first columns of a document's table for the terminal."""
    table = Table(title=f"{title}; {sheet.title}", title_justify="left")
    for name in sheet.header[:columns]:
        table.add_column(name, no_wrap=True)
    for row in sheet.rows:
        table.add_row(*row[:columns])
    return table


def planned(answer: Plan, base: Case, price: float | None) -> Iterator[Table | str]:
    """Yield what a plan says, part by part; `price` is that of a kWh."""
    hours = base.span_ms / 3.6e6
    chosen = answer.chosen
    table = Table(title=f"{len(base.arrivals):,} requests in {hours * 60:.1f} minutes", title_justify="left")
    for name in ("GPUs", "played", "on time", "tokens on time", "kWh", "J/token", "GPUs used"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in answer.tried:
        table.add_row(*_outcome(one, answer.windows))
    yield table
    yield from _verdict(answer, base.device.name)
    energy, share = answer.energy_kwh, answer.attainment
    half, a_day = _half(chosen.energy_kwh, "{:.2g}"), energy.value * 24 / hours
    ends = _over_bands("{:.3g}", energy)
    yield f"  energy {energy.value:.3g}{half} kWh{ends}; {a_day:.3g} kWh a day at this rate"
    if price is not None:
        cost = Range(*(kwh * price for kwh in (energy.value, energy.least, energy.most)))
        yield f"  cost {cost.value:.3g}{_over_bands('{:.3g}', cost)}"
    yield f"  on time {share.value:.1%}{_over_bands('{:.1%}', share)}"
    used = " ".join(f"{count:.1f}" for _, count in chosen.active_gpus)
    minutes = " ".join(f"{minute:.0f}" for minute, _ in chosen.active_gpus)
    yield f"  GPUs with a model: {used}\n  from minute:       {minutes}"
    if not answer.bands:
        yield "  No time was left for the bands of the device model; give more with --budget-s."
    for band in answer.bands:
        yield (
            f"  {band.changed}: energy {band.energy_factor - 1:+.1%}, on time {band.attainment_change:+.1%}"
            f" ({band.windows} of {answer.windows} windows)"
        )
    yield f"Modelled energy; a GPU without a model counts as cold ({base.device.static_w:g} W)."
    if not all(one.whole for one in answer.tried):
        yield (
            f"Sampled: of {answer.windows} windows of {answer.window_s:.0f} s, those counted above"
            " were played; ± is the 95 % interval that this leaves. They do not show what the consolidator"
            " saves over many minutes. --budget-s 0 plays all."
        )


def said(load: Workload) -> str:
    """Return what was done to the requests that are too long; empty if there were none."""
    told = [f"Left out, over {MOST_TOKENS:,} tokens: {load.left_out:,} requests."] if load.left_out else []
    told += [f"Shortened to their model's context: {load.shortened:,} requests."] if load.shortened else []
    return " ".join(told)


def _verdict(answer: Plan, gpu_type: str) -> Iterator[str]:
    """Say how many GPUs are needed, and how sure that is."""
    gpus, wanted = f"{answer.chosen.gpus} x {gpu_type}", f"{answer.target:.0%} of the requests on time"
    unsure = "" if answer.sure else ", by its middle: the interval reaches over the target"
    mean, most = answer.work_gpus
    yield f"The work alone fills {mean:.1f} GPUs at the highest clock, {most:.1f} in the busiest window."
    if answer.needed_gpus is None:
        yield f"[yellow]No number of GPUs that was tried brings {wanted}{unsure};[/yellow] with {gpus}:"
    else:
        yield f"[bold]{gpus}[/bold] are the fewest tried that bring {wanted}{unsure}:"


def _over_bands(form: str, one: Range) -> str:
    """Return the ends of a range over the bands; empty where no band was played."""
    ends = (form.format(end) for end in (one.least, one.most))
    return " ({} to {} over the bands of the device model)".format(*ends) if one.most > one.least else ""


def _half(one: Estimate, form: str) -> str:
    """Return half of an interval, with its sign; empty where nothing was left open."""
    half = max(one.high - one.value, one.value - one.low)
    return f" ± {form.format(half)}" if half > 0 else ""


def _outcome(one: Outcome, windows: int) -> list[str]:
    shares = (one.attainment, one.token_attainment)
    return [
        str(one.gpus),
        "whole" if one.whole else f"{one.windows} of {windows}",
        *(f"{share.value:.1%}{_half(share, '{:.1%}')}" for share in shares),
        f"{one.energy_kwh.value:.3g}{_half(one.energy_kwh, '{:.2g}')}",
        _number(one.j_per_token, "{:.3f}"),
        f"{one.active_gpus_mean.value:.2f}{_half(one.active_gpus_mean, '{:.2f}')}",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _pair(p50: float | None, p99: float | None) -> str:
    return f"{_number(p50, '{:.1f}')}, {_number(p99, '{:.1f}')} ms"
