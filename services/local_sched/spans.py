"""What is told about a request when a part of its life here is over: trace spans, and its end."""

from services.local_sched.state import State, Work
from shared.events import Action, Span
from shared.model import RequestEnd


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
    }
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
    )


def sm_share_pct(state: State, work: Work) -> int:
    """Return the SM share that the request's engine has by its plan; 0 before the first plan."""
    engine = state.engines.get(work.request.model)
    return engine.plan.sm_share_pct if engine and engine.plan else 0
