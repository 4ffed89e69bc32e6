"""What a run of `make gpu-check` found, in lines for people, beside what the device model says."""

from collections.abc import Callable, Iterator

from services.cli.gpu_check.clocks import ClocksFound
from services.cli.gpu_check.copies import CopiesFound
from services.cli.gpu_check.engines import EnginesFound
from services.cli.gpu_check.idle import IdleFound
from services.cli.gpu_check.isolation import IsolationFound, slowed
from services.cli.gpu_check.meter import MeterFound, differs_pct
from services.cli.gpu_check.run import DONE, DoctorFound, Report
from services.cli.gpu_check.shares import SharesFound
from services.cli.gpu_check.watched import Watched
from services.local_sched.preflight_gpu import NOT_APPLICABLE, OK
from shared import silicon
from shared.devices import Device


def summary(report: Report, device: Device) -> list[str]:
    """Return the lines: a heading for each step, then what it found."""
    lines = [
        f"{report.card}, driver {report.driver}, {report.date}; beside the model of {report.modelled_as}"
    ]
    for name, step in report.steps.items():
        lines.append(f"{name}: {step.outcome}, {step.took_s:.0f} s" + (f": {step.why}" if step.why else ""))
        if step.outcome == DONE:
            lines += [f"    {line}" for line in SAYS[type(step.found)](step.found, device)]
    return lines


def _doctor(found: DoctorFound, device: Device) -> Iterator[str]:
    for row in found.rows:
        if row.outcome not in (OK, NOT_APPLICABLE):
            yield f"{row.outcome}: {row.check}: {row.found}"


def _idle(found: IdleFound, device: Device) -> Iterator[str]:
    rows = {"cold": found.cold, "warm": found.warm, "cold again": found.after}
    for state, watched in rows.items():
        if watched is not None:
            modelled_w = silicon.idle_power_w(device, state.split()[0])
            yield f"{state}: {_watts(watched)}, modelled {modelled_w:.0f} W"
    if found.start_ms is not None:
        yield f"a context takes {found.start_ms:.0f} ms, modelled {device.context_start_ms:.0f}"
    if found.not_run:
        yield f"no context made: {found.not_run}"


def _meter(found: MeterFound, device: Device) -> Iterator[str]:
    yield f"changes: counter {_every(found.counter_every_ms)}, power {_every(found.power_every_ms)}"
    for what, watched in found.windows.items():
        pct = differs_pct(watched)
        told = "cannot be compared" if pct is None else f"counter {pct:+.1f} % against integrated power"
        yield f"{what}: {_watts(watched)}; {told}; faults: {watched.faults or 'none'}"
    if found.not_run:
        yield f"nothing run: {found.not_run}"


def _shares(found: SharesFound, device: Device) -> Iterator[str]:
    yield f"{found.sms} SMs, in {found.groups} groups of {found.group_sms}"
    for row in found.rows:
        power = "unknown W" if row.power_w is None else f"{row.power_w:.0f} W ({row.source})"
        rate = f"{row.gb_per_s:.0f} GB/s" if row.kernel == "decode" else f"{row.tflop_per_s:.0f} TFLOP/s"
        yield (
            f"{row.kernel} on {row.sms}: {row.ms:.2f} ms, {rate}, {power} at {row.real_mhz:.0f} MHz; "
            f"{row.speed:.2f} of full speed, modelled {row.modelled:.2f}"
        )


def _isolation(found: IsolationFound, device: Device) -> Iterator[str]:
    for where, beside in ((f"on {found.sms_each} SMs each", found.on_parts), ("both on all", found.on_all)):
        decode, prefill = slowed(beside)
        yield f"{where}: decode takes {decode:.2f} times as long, prefill {prefill:.2f}"
    if found.turns:
        yield f"the processes take turns: {found.turns}"


def _copies(found: CopiesFound, device: Device) -> Iterator[str]:
    for copied in found.copies:
        size, modelled = f"{copied.n_bytes / 2**20:.0f} MiB", found.modelled_gb_per_s
        yield f"{size} to {copied.to}: {copied.gb_per_s:.1f} GB/s, modelled {modelled:.1f}"


def _engines(found: EnginesFound, device: Device) -> Iterator[str]:
    loads = " and ".join(f"{ms / 1000:.1f}" for ms in found.load_ms)
    yield f"vLLM {found.vllm}: loaded in {loads} s, together"
    beside = " and ".join(f"{rate:.0f}" for rate in found.beside_tokens_per_s)
    yield f"{found.alone_tokens_per_s:.0f} tokens/s alone, {beside} beside each other"
    yield f"held: {found.held_steps} steps; resumed with the same tokens: {found.resumed}"
    yield (
        f"asleep in {found.asleep_ms:.0f} ms, {found.freed_bytes / 1e9:.1f} GB freed; awake in "
        f"{found.wake_ms:.0f} ms, same answer: {found.woken_same}"
    )


def _clocks(found: ClocksFound, device: Device) -> Iterator[str]:
    for row in found.rows:
        settled = "did not run" if row.settle_ms is None else f"ran after {row.settle_ms:.0f} ms"
        joules = "unknown J" if row.joules is None else f"{row.joules:.2f} J"
        held = f", held down by {', '.join(row.limits)}" if row.limits else ""
        yield f"{row.kernel} at {row.asked_mhz} MHz: {settled}{held}; {row.ms:.2f} ms, {joules} a run"


SAYS: dict[type, Callable[..., Iterator[str]]] = {
    DoctorFound: _doctor,
    IdleFound: _idle,
    MeterFound: _meter,
    SharesFound: _shares,
    IsolationFound: _isolation,
    CopiesFound: _copies,
    EnginesFound: _engines,
    ClocksFound: _clocks,
}


def _watts(watched: Watched) -> str:
    return "unknown W" if watched.power_w is None else f"{watched.power_w:.1f} W ({watched.source})"


def _every(every_ms: float | None) -> str:
    return "none seen" if every_ms is None else f"every {every_ms:.0f} ms"
