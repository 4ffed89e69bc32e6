"""Runs the steps of `make gpu-check` one after the other, and keeps what they found."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import msgspec

from services.cli.gpu_check.clocks import clocks
from services.cli.gpu_check.copies import copies
from services.cli.gpu_check.engines import engines
from services.cli.gpu_check.idle import idle
from services.cli.gpu_check.isolation import isolation
from services.cli.gpu_check.kernels import Skipped
from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.meter import meter
from services.cli.gpu_check.shares import shares
from services.local_sched import preflight
from services.local_sched.preflight_gpu import Row
from shared.errors import FestinaError

DONE, SKIPPED, FAILED = "done", "skipped", "failed"
MOST_S = 470.0
"""No step begins that would not end within this."""


class DoctorFound(msgspec.Struct, frozen=True):
    """What `festina doctor` says of this host."""

    rows: tuple[Row, ...]


def doctor(lab: Lab) -> DoctorFound:
    """Judge the host."""
    return DoctorFound(tuple(preflight.judge(lab.host)))


class Step(msgspec.Struct, frozen=True):
    """A step, and the seconds it takes at most on a card where all goes well."""

    does: Callable[[Lab], Any]
    most_s: float


STEPS = {
    "doctor": Step(doctor, 5.0),
    "idle": Step(idle, 55.0),
    "meter": Step(meter, 60.0),
    "shares": Step(shares, 45.0),
    "isolation": Step(isolation, 70.0),
    "copies": Step(copies, 25.0),
    "engines": Step(engines, 140.0),
    "clocks": Step(clocks, 60.0),
}
"""In their order: at rest first, the card being cool and alone."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a step: ``done`` with what it found, or ``skipped`` or ``failed`` and why."""

    outcome: str
    took_s: float
    why: str = ""
    found: Any = None


class Report(msgspec.Struct, frozen=True):
    """All of a run. `modelled_as` is the row of the device table that figures are held against."""

    card: str
    driver: str
    modelled_as: str
    date: str
    steps: dict[str, Outcome]

    @property
    def failed(self) -> bool:
        """Whether any step has failed, or the preflight found something that has."""
        doctor = self.steps["doctor"].found
        return any(step.outcome == FAILED for step in self.steps.values()) or (
            doctor is not None and preflight.failed(list(doctor.rows))
        )


def run(
    lab: Lab, say: Callable[[str], None], keep: Callable[[Report], None], most_s: float = MOST_S
) -> Report:
    """Run every step that there is time for; one that cannot run, or fails, does not end the others.

    Args:
        lab: the card.
        say: is told how it goes.
        keep: is given what there is after each step.
        most_s: no step begins that would not end within this.
    """
    until_s = time.monotonic() + most_s
    report = Report(
        card=lab.gpu.name,
        driver=lab.gpu.driver,
        modelled_as=lab.device.name,
        date=datetime.date.today().isoformat(),
        steps={},
    )
    for name, step in STEPS.items():
        say(f"{name} …")
        if time.monotonic() + step.most_s * lab.pace > until_s:
            outcome = Outcome(SKIPPED, 0.0, "there is no time left for it")
        else:
            outcome = _outcome(step, lab)
        say(f"{name}: {outcome.outcome} {outcome.why}".rstrip())
        report.steps[name] = outcome
        keep(report)
    return report


def _outcome(step: Step, lab: Lab) -> Outcome:
    started_s = time.monotonic()
    outcome, why, found = DONE, "", None
    try:
        found = step.does(lab)
    except Skipped as reason:
        outcome, why = SKIPPED, str(reason)
    except FestinaError as reason:
        outcome, why = FAILED, str(reason)
    except Exception as reason:  # whatever a card does that no test has seen, the other steps go on
        outcome, why = FAILED, f"{type(reason).__name__}: {reason}"
    return Outcome(outcome, round(time.monotonic() - started_s, 2), why, found)
