"""What is told about a request when a part of its life here is over: trace spans, and its end."""

from services.local_sched.state import Decision, State
from services.local_sched.tune import Candidate, feasible
from services.local_sched.work import Work
from shared.events import Action, Span
from shared.model import RequestEnd

RULES = {
    "least_energy": "Of all points that meet every deadline it takes the least energy.",
    "clock_kept": "The least energy at the present clock; to switch saves too little, or is too soon.",
    "own_rule": "The clock and the shares are chosen by the rules of another system.",
    "fixed_clock": "The clock is fixed by a setting: the least energy there that meets every deadline.",
    "memory_short": "Memory is short: the least energy of the widest shares, so that requests leave sooner.",
    "memory_awaited": "A request waits for memory: the highest clock, for others to leave sooner.",
    "infeasible": "No point meets every deadline: the highest clock, shares by need.",
}
"""Why a clock and shares are in force (3.4), as traces tell it."""


def span(
    state: State, now_ms: float, work: Work, name: str, start_ms: float | None, error: str = ""
) -> list[Action]:
    """Return the span of a part of a traced request that ends now; nothing if it is not traced."""
    if not work.request.traceparent or start_ms is None:
        return []
    request = work.request
    attributes: dict[str, object] = {
        "festina.request_id": request.request_id,
        "festina.gpu": state.gpu,
        "festina.model": request.model,
        "festina.tenant": request.tenant,
        "festina.sm_clock_mhz": state.clock_mhz,
        "festina.sm_share_pct": sm_share_pct(state, work),
        "festina.output_tokens": work.output_count,
        "festina.slack_ms": slack_ms(now_ms, work, name == "local.decode"),
    }
    if name != "local.queue":
        attributes |= _decision(state, now_ms, work)
    if name == "local.decode" and work.energy_j is not None:
        attributes["festina.energy_j"] = work.energy_j
    traced = Span(
        name=name,
        traceparent=request.traceparent,
        start_ms=start_ms,
        end_ms=now_ms,
        attributes=attributes,
        error=error,
    )
    return [traced]


def last_span(state: State, now_ms: float, work: Work, error: str = "") -> list[Action]:
    """Return the span of whatever part of its life a request was in when it ended."""
    if work.first_ms is not None:
        return span(state, now_ms, work, "local.decode", work.first_ms, error)
    if work.given_ms is not None:
        return span(state, now_ms, work, "local.prefill", work.given_ms, error)
    return span(state, now_ms, work, "local.queue", work.arrived_ms, error)


def end_of(state: State, now_ms: float, work: Work, finish_reason: str, error: str = "") -> RequestEnd:
    """Return the account of a request that ends now: where its time went, and the energy it took."""
    given_ms = now_ms if work.given_ms is None else work.given_ms
    first_ms = now_ms if work.first_ms is None else work.first_ms
    metered = work.energy_j is not None
    return RequestEnd(
        finish_reason=finish_reason,
        error=error,
        queue_ms=given_ms - work.arrived_ms,
        prefill_ms=first_ms - given_ms,
        decode_ms=now_ms - first_ms,
        energy_j=work.energy_j,
        energy_source=f"modelled: {state.engine_kind} {state.device.name}"
        if metered
        else "no meter on this device",
        sm_clock_mhz=state.clock_mhz,
        sm_share_pct=sm_share_pct(state, work),
        dispatch=work.dispatch,
    )


def sm_share_pct(state: State, work: Work) -> int:
    """Return the SM share that the request's engine has by its plan; 0 before the first plan."""
    engine = state.engines.get(work.request.model)
    return engine.plan.sm_share_pct if engine and engine.plan else 0


def slack_ms(now_ms: float, work: Work, decoding: bool) -> float:
    """Return how long before its time a request is: with its first token, or on its mean TBT since then."""
    if not decoding or work.run_first_ms is None:
        return work.due_ms - now_ms
    pace_ms = work.request.objectives.tbt_ms * (work.run_tokens - 1)
    return work.run_first_ms + pace_ms - now_ms


def _decision(state: State, now_ms: float, work: Work) -> dict[str, object]:
    """Return what is told of the decision in force: why this clock and these shares, and out of what."""
    engine, decision = state.engines.get(work.request.model), state.decision
    told: dict[str, object] = {}
    if engine is not None and engine.plan is not None:
        told["festina.chunk_tokens"] = engine.plan.chunk_tokens
    if decision is not None:
        points = decision.points
        rule = _rule(state, decision, points)
        told["festina.decision.phase"] = rule
        told["festina.decision.reason"] = RULES[rule]
        told["festina.decision.age_ms"] = now_ms - state.decided_ms
        told["festina.decision.models"] = decision.models
        told["festina.decision.candidates"] = tuple(points)
        if decision.chosen is not None:
            told["festina.decision.chosen"] = points.index(decision.chosen)
    return told


def _rule(state: State, decision: Decision, points: list[Candidate]) -> str:
    """Name the rule of `RULES` by which clock and shares in force were chosen."""
    chosen = decision.chosen
    if chosen is None:
        return "infeasible" if points else "memory_awaited"
    if state.settings.clock != "sweep":
        return "own_rule"
    if state.settings.fixed_clock_mhz is not None:
        return "fixed_clock"
    if decision.memory_short:
        return "memory_short"
    least_j = min(point.energy_j for point in points if feasible(point, decision.budget_pct))
    return "least_energy" if chosen.energy_j <= least_j else "clock_kept"
