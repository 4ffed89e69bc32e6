"""What the card draws while nothing runs on it, without a context and with one, and how long one takes."""

import time

import msgspec

from services.cli.gpu_check.kernels import Skipped
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.watched import Watched

WINDOW_S, SETTLE_S = 10.0, 5.0


class IdleFound(msgspec.Struct, frozen=True):
    """The card at rest: without any context, with one, and after that has ended.

    `start_ms` is from the start of a process to its context, libraries included; `context_ms` its last part.
    """

    cold: Watched
    warm: Watched | None = None
    after: Watched | None = None
    start_ms: float | None = None
    context_ms: float | None = None
    not_run: str = ""


def idle(lab: Lab) -> IdleFound:
    """Measure the states ``cold`` and ``warm`` of the device model. Raises Skipped: others use the card."""
    card = lab.gpu.card
    if others := {*card.processes, *card.mps_processes}:
        raise Skipped(f"{len(others)} processes use this GPU, so it is not at rest")
    cold = lab.watch(WINDOW_S)
    started_s = time.monotonic()
    try:
        with lab.kernels() as kernels:
            start_ms = 1000.0 * (time.monotonic() - started_s)
            time.sleep(SETTLE_S * lab.pace)
            warm = lab.watch(WINDOW_S)
            context_ms = kernels.device["start_ms"]
    except Skipped as why:
        return IdleFound(cold, not_run=str(why))
    time.sleep(SETTLE_S * lab.pace)
    return IdleFound(cold, warm, lab.watch(WINDOW_S / 2), start_ms, context_ms)
