"""Parts of the SMs by green contexts: which there are, and time and watts of a kernel on each of them."""

from dataclasses import replace

import msgspec

from services.cli.gpu_check.kernels import Kernels, Ran, Skipped
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.watched import Watched
from services.local_sched.host_facts import no_green_contexts
from services.local_sched.partition import Cut, cut_of
from shared import silicon

WINDOW_S = 1.5
KERNELS = ("decode", "prefill")


class OnPart(msgspec.Struct, frozen=True):
    """A kernel on a part of the SMs; `sms` is the whole device in the last row of each kernel.

    Args:
        speed: against the whole device's; `modelled` what the device model has for it: b(s) or c(s).
    """

    kernel: str
    sms: int
    ms: float
    gb_per_s: float
    tflop_per_s: float
    power_w: float | None
    source: str
    real_mhz: float
    speed: float
    modelled: float


class SharesFound(msgspec.Struct, frozen=True):
    """How the driver cuts the device, and what its parts do."""

    sms: int
    group_sms: int
    groups: int
    rows: tuple[OnPart, ...]


def shares(lab: Lab) -> SharesFound:
    """Run a decode-like and a prefill-like kernel on each size that engines would be given."""
    with lab.kernels() as kernels:
        cut, groups = split(lab, kernels)
        sizes = [size * cut.unit_groups for size in cut.sizes[:-1]]
        rows: list[OnPart] = []
        for kernel in KERNELS:
            whole = lab.watch_running(kernels, WINDOW_S, kernel=kernel)
            for size in sizes:
                ran, watched = lab.watch_running(kernels, WINDOW_S, kernel=kernel, groups=size)
                rows.append(on_part(lab, kernel, size * cut.group_sms, cut.sm_count, ran, watched, whole[0]))
            rows.append(on_part(lab, kernel, cut.sm_count, cut.sm_count, *whole, whole[0]))
    return SharesFound(cut.sm_count, cut.group_sms, groups, tuple(rows))


def split(lab: Lab, kernels: Kernels) -> tuple[Cut, int]:
    """Have the driver split the SMs; returns how Festina cuts this device, and how many groups there are.

    Raises:
        Skipped: there are no green contexts here.
    """
    if why := no_green_contexts(lab.host):
        raise Skipped(why)
    group_sms = lab.device.sm_group
    found = kernels.ask(do="split", group_sms=group_sms)
    return cut_of(replace(lab.device, sm_count=found["sms"])), found["groups"]


def on_part(lab: Lab, kernel: str, sms: int, all_sms: int, ran: Ran, watched: Watched, whole: Ran) -> OnPart:
    """Return a row: what a kernel did on a part, beside what it did on the whole."""
    model = silicon.bandwidth_of_share if kernel == "decode" else silicon.compute_of_share
    return OnPart(
        kernel=kernel,
        sms=sms,
        ms=ran.ms,
        gb_per_s=ran.gb_per_s,
        tflop_per_s=ran.tflop_per_s,
        power_w=watched.power_w,
        source=watched.source,
        real_mhz=watched.real_mhz,
        speed=whole.ms / ran.ms,
        modelled=float(model(lab.device, sms / all_sms)),
    )
