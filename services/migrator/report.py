"""What is told of moves: how they ended, their spans with steps and bytes, and what is counted."""

from hashlib import blake2b

from services.migrator.run import KV, TOKENS, Run
from shared import events as ev


def ended(
    migrator: str, move_id: str, request_id: str, outcome: str, stage: str, reason: str
) -> list[ev.Action]:
    """Report the end of a move."""
    told = ev.MoveEnded(move_id=move_id, request_id=request_id, outcome=outcome, reason=reason)
    return [
        ev.Send(to=migrator, message=told),
        ev.Count(name="moves_ended", labels={"outcome": outcome, "stage": stage}),
    ]


def counts(now_ms: float, run: Run) -> list[ev.Action]:
    """Count a request that has moved: how, with how much KV, and for how long it stood still."""
    labels = {"mode": run.mode if run.kv_tokens or run.mode != KV else TOKENS}
    counted: list[ev.Action] = [ev.Count(name="moved_requests", labels=labels)]
    if run.frozen_ms:
        counted.append(ev.Count(name="move_freeze_ms", labels=labels, value=now_ms - run.frozen_ms))
    if run.n_bytes:
        counted.append(ev.Count(name="moved_kv_bytes", labels={}, value=run.n_bytes))
    return counted


def spans(now_ms: float, run: Run, error: str) -> list[ev.Action]:
    """Return the span of a move that ends now, and below it one for each step it has been through."""
    parts = run.traceparent.split("-")
    if len(parts) != 4:  # it is not traced
        return []
    version, trace_id, _, flags = parts
    run.passed[run.stage].end_ms = now_ms
    span_id = blake2b(f"{run.step_id} {run.started_ms}".encode(), digest_size=8).hexdigest()
    attributes = {
        "festina.request_id": run.request_id,
        "festina.source": run.move.source,
        "festina.destination": run.move.destination,
        "festina.mode": run.mode,
        "festina.bytes": run.n_bytes,
        "festina.kv_tokens": run.kv_tokens,
        "festina.copied_j": run.copied_j,
        "festina.freeze_ms": now_ms - run.frozen_ms if run.frozen_ms else 0.0,
        "festina.stage": run.stage,
    }
    whole = ev.Span(
        name="migrate",
        traceparent=run.traceparent,
        start_ms=run.started_ms,
        end_ms=now_ms,
        attributes=attributes,
        error=error,
        span_id=span_id,
    )
    below = f"{version}-{trace_id}-{span_id}-{flags}"
    return [whole, *(_step(below, name, run) for name in run.passed)]


def _step(traceparent: str, name: str, run: Run) -> ev.Span:
    passed = run.passed[name]
    return ev.Span(
        name=f"migrate.{name}",
        traceparent=traceparent,
        start_ms=passed.start_ms,
        end_ms=passed.end_ms,
        attributes={"festina.bytes": passed.n_bytes, "festina.times": passed.times},
    )
