"""The story of one request, out of its spans: what happened when, and what each decision chose from.

Pure: `services/cli/explain.py` finds the spans and prints.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.spans import SpanLine

PREFIX = "festina."
WHERE = {
    "gateway.request": "gateway",
    "global.dispatch": "dispatch",
    "local.queue": "queue",
    "local.prefill": "prefill",
    "local.decode": "decode",
    "migrate": "move",
}
RANK = {name: rank for rank, name in enumerate(WHERE)}  # of spans that begin at one moment
FACTS_OF_ALL = ("model", "tenant", "ttft_objective_ms", "tbt_objective_ms")
FACTS_OF_GATEWAY = ("gpu", "attempt", "ttft_ms", "mean_tbt_ms", "energy_j", "slo_met")
TOKENS = ("input_tokens", "output_tokens")


class Moment(msgspec.Struct, frozen=True):
    """One thing that happened, `at_ms` after the request reached its gateway; it lasted `took_ms`."""

    at_ms: float
    took_ms: float
    where: str
    what: str
    error: str = ""


class Choice(msgspec.Struct, frozen=True):
    """One decision: `phase` names the rule, `reason` says it; `chosen` is an index of `candidates`."""

    at_ms: float
    what: str
    by: str
    phase: str
    reason: str
    candidates: tuple[dict[str, Any], ...]
    chosen: int | None = None


class Story(msgspec.Struct, frozen=True):
    """All of it; `ended` is false where the gateway's span, the last to be written, is missing."""

    request_id: str
    trace_id: str
    source: str
    ended: bool
    facts: dict[str, Any]
    moments: tuple[Moment, ...]
    choices: tuple[Choice, ...]


def call_of(request_id: str) -> str:
    """Return the id that spans have: without the prefix that clients see (``chatcmpl-``, ``cmpl-``)."""
    return request_id.strip().removeprefix("chatcmpl-").removeprefix("cmpl-")


def belongs(span: SpanLine, call: str) -> bool:
    """Say whether a span is of this request, of one choice of this call, or of the call of this choice."""
    found = str(span.attributes.get(PREFIX + "request_id", ""))
    if span.name == "gateway.request":
        return found != "" and (call == found or call.startswith(found + "-"))
    return call == found or found.startswith(call + "-")


def tell(spans: Sequence[SpanLine], call: str, source: str) -> Story:
    """Put the spans of one request in order, and say in words what each means.

    Args:
        spans: at least one; those of other requests of the same trace are left out.
        source: where they were found.
    """
    mine = sorted((s for s in spans if belongs(s, call)), key=lambda s: (s.start_ms, RANK.get(s.name, 9)))
    start_ms = mine[0].start_ms
    gateway = next((span for span in mine if span.name == "gateway.request"), None)
    moments = [
        Moment(
            at_ms=span.start_ms - start_ms,
            took_ms=span.end_ms - span.start_ms,
            where=WHERE.get(span.name, span.name),
            what=_what(span, _attributes(span)),
            error=span.error,
        )
        for span in mine
    ]
    if gateway is not None:
        end = Moment(gateway.end_ms - start_ms, 0.0, "end", _ending(_attributes(gateway)), gateway.error)
        moments.append(end)
    choices = [_choice(span, _attributes(span), start_ms) for span in mine]
    by_weight = sorted(mine, key=lambda span: span is gateway)  # what the gateway says holds
    return Story(
        request_id=call,
        trace_id=mine[0].trace_id,
        source=source,
        ended=gateway is not None,
        facts={name: value for span in by_weight for name, value in _facts(span).items()},
        moments=tuple(moments),
        choices=tuple(choice for choice in choices if choice is not None),
    )


def _attributes(span: SpanLine) -> dict[str, Any]:
    """Return a span's attributes without their prefix; JSON that Jaeger keeps as text is read."""
    found = {}
    for name, value in span.attributes.items():
        if isinstance(value, str) and value[:1] in ("[", "{"):
            value = _read(value)
        found[name.removeprefix(PREFIX)] = value
    return found


def _read(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _facts(span: SpanLine) -> dict[str, Any]:
    attributes = _attributes(span)
    wanted = list(FACTS_OF_ALL)
    if span.name == "gateway.request":
        wanted += FACTS_OF_GATEWAY
    facts = {name: attributes[name] for name in wanted if name in attributes}
    for name in TOKENS:
        if "gen_ai.usage." + name in attributes:
            facts[name] = attributes["gen_ai.usage." + name]
    return facts


# ---- in words


def number(value: float, unit: str = "") -> str:
    """Return a number as one reads it: three digits that say something, and its unit."""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{text} {unit}".rstrip()


def _what(span: SpanLine, has: dict[str, Any]) -> str:
    match span.name:
        case "gateway.request":
            return f"taken by {span.id}{_objectives(has)}"
        case "global.dispatch":
            if span.error:
                return f"{span.id} turned it away: {has.get('reason', 'no reason given')}"
            predicted = has.get("predicted_output_tokens")
            guess = f", expecting {predicted} output tokens" if predicted is not None else ""
            return f"{span.id} sent it to {has.get('gpu')}{guess}"
        case "local.queue":
            return f"waited on {has.get('gpu')}{_slack(has, 'left for its first token', 'late by then')}"
        case "local.prefill":
            slack = _slack(has, "left at its first token", "late with its first token")
            return f"on {has.get('gpu')} {_point(has)}{slack}"
        case "local.decode":
            tokens, energy_j = has.get("output_tokens"), has.get("energy_j")
            cost = f", {number(energy_j, 'J')} with its prefill" if energy_j is not None else ""
            slack = _slack(has, "ahead of its TBT", "behind its TBT")
            return f"{tokens} tokens on {has.get('gpu')} {_point(has)}{cost}{slack}"
        case "migrate":
            way = f"from {has.get('source')} to {has.get('destination')}, as far as: {has.get('stage')}"
            return way + _load(has)
    return span.id


def _load(has: dict[str, Any]) -> str:
    """Say what a move took along, and for how long the request stood still for it."""
    told = ""
    if has.get("kv_tokens"):
        told += f"; with {number(has.get('bytes', 0) / 1e6, 'MB')} of its KV, {has['kv_tokens']} tokens"
    if has.get("copied_j"):
        told += f"; copying that out took {number(has['copied_j'], 'J')}"
    if has.get("freeze_ms"):
        told += f"; it stood still for {number(has['freeze_ms'], 'ms')}"
    return told


def _objectives(has: dict[str, Any]) -> str:
    if "ttft_objective_ms" not in has:
        return ""
    ttft, tbt = number(has["ttft_objective_ms"]), number(has["tbt_objective_ms"], "ms")
    return f"; wanted: the first token within {ttft} ms, then one every {tbt}"


def _point(has: dict[str, Any]) -> str:
    parts = []
    if has.get("sm_clock_mhz"):
        parts.append(f"{has['sm_clock_mhz']} MHz")
    if has.get("sm_share_pct"):
        parts.append(f"{has['sm_share_pct']} % of the SMs")
    if has.get("chunk_tokens"):
        parts.append(f"up to {has['chunk_tokens']} prompt tokens a step")
    return "at " + ", ".join(parts) if parts else "(no clock known)"


def _slack(has: dict[str, Any], early: str, late: str) -> str:
    slack_ms = has.get("slack_ms")
    if slack_ms is None:
        return ""
    return f"; {number(abs(slack_ms), 'ms')} {early if slack_ms >= 0 else late}"


def _ending(has: dict[str, Any]) -> str:
    if "ttft_ms" not in has:
        return "without an answer"
    parts = [f"first token after {number(has['ttft_ms'], 'ms')}"]
    if has.get("mean_tbt_ms"):
        parts.append(f"then one every {number(has['mean_tbt_ms'], 'ms')}")
    parts.append("objectives met" if has.get("slo_met") else "objectives missed")
    if has.get("energy_j") is not None:
        parts.append(number(has["energy_j"], "J"))
    return ", ".join(parts)


# ---- decisions


def _choice(span: SpanLine, has: dict[str, Any], start_ms: float) -> Choice | None:
    reason = has.get("decision.reason") or has.get("reason")
    candidates = has.get("decision.candidates", ())
    if not reason:
        return None
    candidates = tuple(_by_model(one, has.get("decision.models", ())) for one in candidates)
    chosen = has.get("decision.chosen")
    if chosen is None and "gpu" in has:
        chosen = next((i for i, one in enumerate(candidates) if one.get("gpu") == has["gpu"]), None)
    return Choice(
        at_ms=span.end_ms - start_ms - float(has.get("decision.age_ms", 0.0)),
        what=_decided(span, has),
        by=span.id,
        phase=str(has.get("decision.phase", "")),
        reason=str(reason),
        candidates=candidates,
        chosen=chosen,
    )


def _decided(span: SpanLine, has: dict[str, Any]) -> str:
    if span.name == "global.dispatch":
        return "turned away" if span.error else f"GPU {has.get('gpu')}"
    when = {"local.prefill": "when its first token came", "local.decode": "when it ended"}.get(span.name, "")
    clock, share = has.get("sm_clock_mhz"), has.get("sm_share_pct")
    return f"clock {clock} MHz, share {share} %, in force {when}".rstrip(", ")


def _by_model(candidate: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """Give the shares of a point of the sweep the names of their models, and their sum."""
    shares = candidate.get("shares_pct")
    if not isinstance(shares, list) or len(shares) != len(models):
        return candidate
    named = {f"{model}_pct": share for model, share in zip(models, shares, strict=True)}
    rest = {name: value for name, value in candidate.items() if name != "shares_pct"}
    total = {"total_pct": sum(shares)} if len(shares) > 1 and None not in shares else {}
    return {**rest, **named, **total}
