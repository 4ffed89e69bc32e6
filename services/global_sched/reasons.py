"""Why a decision was made, for the traces: attributes of the span ``global.dispatch`` (3.3).

``festina.decision.phase`` is one of ``current_clock`` (phases one and two, and other systems), ``boost``
(phase three at F_max), ``activate``, ``best_effort`` and ``refused``; ``.reason`` is one sentence;
``.candidates`` is what was looked at: the chosen one, then those that came nearest. They stay structs until a
thread exports them.
"""

from collections.abc import Sequence

from services.global_sched.dispatch import Decision
from services.global_sched.estimate import Candidate, Work
from services.global_sched.fleet import Start
from shared.lut_points import best_point
from shared.model import Struct

MOST = 8  # candidates told of

PHASES = {
    "least_energy": "current_clock",
    "lowest_latency": "current_clock",
    "f_max": "boost",
    "in_time": "current_clock",
    "least_loaded": "current_clock",
    "eco_route": "current_clock",
    "best_effort": "best_effort",
}


class Option(Struct):
    """One candidate as traces show it; `slack_ms` is what its TTFT leaves of the objective."""

    gpu: str
    sm_clock_mhz: int
    sm_share_pct: int
    ttft_ms: float
    tbt_ms: float
    energy_j: float | None
    slack_ms: float
    free_bytes: int
    why: str


def chosen(decision: Decision, work: Work) -> dict[str, object]:
    """Return the attributes of a decision for a GPU."""
    return {
        "festina.decision.phase": PHASES[decision.reason],
        "festina.decision.reason": _sentence(decision, work),
        "festina.decision.chosen": 0,
        "festina.decision.candidates": _options(decision, work, "chosen"),
    }


def refused(decision: Decision, work: Work, why: str) -> dict[str, object]:
    """Return the attributes of a decision against serving late."""
    return {
        "festina.decision.phase": "refused",
        "festina.decision.reason": why,
        "festina.decision.candidates": _options(decision, work, _shortfall(decision.candidate, work)),
    }


def turned_away(why: str) -> dict[str, object]:
    """Return the attributes of a refusal for which no GPU was compared."""
    return {"festina.decision.phase": "refused", "festina.decision.reason": why}


def activation(work: Work, starts: Sequence[Start]) -> dict[str, object]:
    """Return the attributes of a wait for a GPU to be activated, at the tables' best point.

    The time to wake a GPU and to load counts against the deadline: from host memory if a host has the
    weights there, else from disk.
    """
    reason = f"No GPU has {work.model} ready, so another is asked for."
    best = [
        (start.lut.request_energy_j(*point, work.input_tokens, work.output_tokens), point, start)
        for start in starts
        if start.lut.device.has_meter
        and (point := best_point(start.lut, work.input_tokens, work.output_tokens, work.objectives))
    ]
    if best:
        _, (clock_mhz, share_pct), start = min(best, key=lambda each: each[0])
        first_ms = start.after_ms + start.lut.ttft_ms(clock_mhz, share_pct, work.input_tokens)
        verdict = "in time for" if first_ms <= work.left_ms else "too late for"
        memory = "host memory" if start.source == "host" else "disk"
        reason += (
            f" Loaded from {memory}, a {start.lut.device.name} that is {start.state}, at its best point,"
            f" {clock_mhz} MHz with {share_pct} % of the SMs, gives the first token in {first_ms:.0f} ms,"
            f" {verdict} the {work.left_ms:.0f} ms left."
        )
    return {"festina.decision.phase": "activate", "festina.decision.reason": reason}


def _sentence(decision: Decision, work: Work) -> str:
    best = decision.candidate
    where = f"{best.gpu} at {best.sm_clock_mhz} MHz"
    match decision.reason:
        case "least_energy":
            energy = f"{best.energy_j:.1f} J"
            return f"{where} is in time for {energy}, the least or as good, and has most memory free."
        case "lowest_latency":
            return f"{where} is the quickest of those in time, {best.latency_ms:.0f} ms; it has no meter."
        case "least_loaded" | "eco_route":
            return f"{where} is in time, and next by the rule of another system ({decision.reason})."
        case "in_time":
            return f"{where} is in time, and has memory first."
        case "f_max":
            return f"No GPU is in time at its clock; {where}, its highest, is, and has memory first."
    return (
        f"No GPU can be in time even at its highest clock; {where} is the soonest: {_shortfall(best, work)}."
    )


def _options(decision: Decision, work: Work, why: str) -> tuple[Option, ...]:
    best = decision.candidate
    others = {c.gpu: c for c in decision.seen if c.gpu != best.gpu}
    nearest = sorted(others.values(), key=lambda c: _distance(c, work))[: MOST - 1]
    told = [_option(best, work, why)]
    told += [_option(c, work, _shortfall(c, work) or _outdone(c, decision)) for c in nearest]
    return tuple(told)


def _distance(c: Candidate, work: Work) -> tuple[bool, float]:
    late = bool(_shortfall(c, work))
    return late, c.ttft_ms if late or c.energy_j is None else c.energy_j


def _shortfall(c: Candidate, work: Work) -> str:
    """Say what makes a candidate infeasible; empty if nothing does."""
    if c.ttft_ms == float("inf"):
        return "its memory does not come free"
    if c.ttft_ms > work.objectives.ttft_ms:
        return f"first token {c.ttft_ms - work.objectives.ttft_ms:.0f} ms late"
    if c.tbt_ms > work.objectives.tbt_ms:
        return f"{c.tbt_ms:.0f} ms between tokens, over {work.objectives.tbt_ms:.0f}"
    return "" if c.keeps_others else "it would make others late"


def _outdone(c: Candidate, decision: Decision) -> str:
    best = decision.candidate
    if decision.reason in ("f_max", "in_time"):
        return "its memory comes free later, or it has less"
    if c.energy_j is None or best.energy_j is None:
        return f"takes {c.latency_ms - best.latency_ms:.0f} ms longer"
    if c.energy_j <= best.energy_j * 1.02:
        return "as little energy, but less memory or fewer SMs free"
    return f"takes {c.energy_j / best.energy_j - 1:.0%} more energy"


def _option(c: Candidate, work: Work, why: str) -> Option:
    return Option(
        c.gpu,
        c.sm_clock_mhz,
        c.sm_share_pct,
        c.ttft_ms,
        c.tbt_ms,
        c.energy_j,
        work.objectives.ttft_ms - c.ttft_ms,
        c.free_bytes,
        why,
    )
