"""Do two processes leave each other alone, each on its half of the SMs? A decode beside a prefill."""

import msgspec

from services.cli.gpu_check.kernels import Kernels, Ran
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.shares import split
from services.local_sched.host_facts import no_mps

WINDOW_S = 2.0


class Beside(msgspec.Struct, frozen=True):
    """Two kernels in two processes: ms of a run of each alone, and of each beside the other."""

    decode_alone_ms: float
    decode_ms: float
    prefill_alone_ms: float
    prefill_ms: float


class IsolationFound(msgspec.Struct, frozen=True):
    """On parts that do not overlap, and both on the whole device.

    `turns` says why processes take turns here; empty: they do not.
    """

    sms_each: int
    on_parts: Beside
    on_all: Beside
    turns: str


def isolation(lab: Lab) -> IsolationFound:
    """Run a decode beside a prefill. Without MPS the two take turns, whatever their parts."""
    with lab.kernels() as one, lab.kernels() as other:
        cut, groups = split(lab, one)
        split(lab, other)
        half = groups // 2
        parts = ({"first": 0, "groups": half}, {"first": half, "groups": half})
        on_parts, on_all = _beside(lab, one, other, *parts), _beside(lab, one, other, {}, {})
    return IsolationFound(half * cut.group_sms, on_parts, on_all, no_mps(lab.host))


def _beside(lab: Lab, one: Kernels, other: Kernels, first: dict[str, int], second: dict[str, int]) -> Beside:
    decode = {"do": "run", "kernel": "decode", "for_s": WINDOW_S * lab.pace, **first}
    prefill = {"do": "run", "kernel": "prefill", "for_s": WINDOW_S * lab.pace, **second}
    decode_alone, prefill_alone = one.run(**decode), other.run(**prefill)
    other.begin(**prefill | {"for_s": 3 * WINDOW_S * lab.pace})  # all along
    decode_beside = one.run(**decode)
    other.ended()
    one.begin(**decode | {"for_s": 3 * WINDOW_S * lab.pace})
    prefill_beside = other.run(**prefill)
    one.ended()
    return beside(decode_alone, decode_beside, prefill_alone, prefill_beside)


def beside(decode_alone: Ran, decode: Ran, prefill_alone: Ran, prefill: Ran) -> Beside:
    """Return what four runs say."""
    return Beside(decode_alone.ms, decode.ms, prefill_alone.ms, prefill.ms)


def slowed(found: Beside) -> tuple[float, float]:
    """Return how many times as long the decode and the prefill took beside each other."""
    return found.decode_ms / found.decode_alone_ms, found.prefill_ms / found.prefill_alone_ms
