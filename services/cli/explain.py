"""`festina explain`: why a request ran where it did, at which clock, on which share.

The spans of its trace tell it. They are looked for where `festina up` keeps the latest of them, and in Jaeger
where its address is given.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.explain_story import TOKENS, Choice, Story, belongs, call_of, number, tell
from shared.errors import FestinaError
from shared.span_log import TRACES, files_in, oldest_ms, spans_naming
from shared.spans import SpanLine

WRITTEN_WITHIN_S = 2.0  # services write their spans twice a second
SHOWN = 12  # candidates of one decision
SERVICES = ("gateway", "global_sched", "local_sched")
UNITS = {"mhz": "MHz", "j": "J", "ms": "ms", "pct": "%", "bytes": "GB", "w": "W", "tokens": "tokens"}

Find = Callable[[str], list[SpanLine]]


def explain(
    request_id: Annotated[
        str, typer.Argument(help="Id of a request: `id` of its answer, or the header `x-request-id`.")
    ],
    state_dir: Annotated[
        Path, typer.Option(envvar="FESTINA_STATE_DIR", help="State folder of the pool on this machine.")
    ] = Path(".festina"),
    trace_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="FESTINA_TRACE_DIR", help="Where its services keep spans, if not in its state folder."
        ),
    ] = None,
    jaeger: Annotated[
        str, typer.Option(envvar="FESTINA_JAEGER_URL", help="Address of Jaeger's API (port 16686), if any.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Tell the story of one request: why that GPU, that clock and that share of the SMs.

    The first table is what happened, in order of time: from the gateway to the GPU, its queue, the prefill,
    the decode, with the slack that was left of each deadline. Then, for each decision, what it chose from;
    `>` marks what was taken. Energies there are what the look-up table expected; the last line of the story
    has what was metered.

    A pool that `festina up` started keeps the latest spans of each service in its state folder (16 MB each;
    FESTINA_TRACE_MB), and they outlive it. Elsewhere give Jaeger's address. A request whose client sent a
    `traceparent` that is not sampled has no trace, nor has any under FESTINA_TRACING=0.

    Example: festina explain chatcmpl-0f8fad5bd9cb469fa16570867728950e
    """
    call = call_of(request_id)
    if not call:
        raise FestinaError("the request id is empty; it is `id` of the answer, or its header x-request-id")
    folder = trace_dir or state_dir / TRACES
    story = _found(call, folder, jaeger.rstrip("/"))
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(story), indent=2) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "160")))
    show(story, console)


def _found(call: str, folder: Path, jaeger: str) -> Story:
    """Return the story; what was written just now may take a moment. Raises FestinaError if there is none."""
    sources: list[tuple[str, Find]] = [(str(folder), lambda call: in_folder(folder, call))]
    if jaeger:
        sources.insert(0, (jaeger, lambda call: in_jaeger(jaeger, call)))
    deadline_s = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        stories = [tell(spans, call, name) for name, find in sources if (spans := find(call))]
        ended = next((story for story in stories if story.ended), None)
        if ended is not None:
            return ended
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    if stories:
        return stories[0]
    looked_at = [f"{folder} ({_kept(folder)})", *[f"Jaeger at {jaeger}"] * bool(jaeger)]
    hint = "" if jaeger else "; elsewhere give --state-dir, or --jaeger URL"
    raise FestinaError(f"nothing is known of a request {call!r}. Looked at: {', '.join(looked_at)}{hint}")


def _kept(folder: Path) -> str:
    """Say for how long the spans in a folder are kept."""
    if not folder.is_dir():
        return "there is no such folder: no pool has run here with tracing on"
    since_ms = oldest_ms(folder)
    if since_ms is None:
        return "empty: no request has been traced"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_ms / 1000.0))
    return f"{len(files_in(folder))} files, the oldest span of {since}; each service keeps its latest"


def in_folder(folder: Path, call: str) -> list[SpanLine]:
    """Return the spans of a request that services of this machine have kept."""
    return [span for span in spans_naming(folder, call.rpartition("-")[0] or call) if belongs(span, call)]


def in_jaeger(url: str, call: str) -> list[SpanLine]:
    """Return the spans of a request that Jaeger has.

    Raises:
        FestinaError: it does not answer, or not as Jaeger does.
    """
    for asked in dict.fromkeys((call, call.rpartition("-")[0] or call)):
        for service in SERVICES:
            tags = json.dumps({"festina.request_id": asked})
            query = {"service": f"festina-{service}", "tags": tags, "limit": "20"}
            traces = _jaeger(url, query)
            found = [span for trace in traces for span in from_jaeger(trace) if belongs(span, call)]
            if found:
                return found
    return []


def _jaeger(url: str, query: dict[str, str]) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(f"{url}/api/traces", params=query, timeout=10.0, trust_env=False)
        answer.raise_for_status()
        return list(answer.json()["data"] or ())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise FestinaError(f"{url} does not answer as Jaeger's API does: {error}") from None


def from_jaeger(trace: dict[str, Any]) -> list[SpanLine]:
    """Return the spans of one trace as Jaeger's API gives it."""
    return [_line(span, trace["processes"][span["processID"]]) for span in trace["spans"]]


def _line(span: dict[str, Any], process: dict[str, Any]) -> SpanLine:
    tags = {tag["key"]: tag["value"] for tag in span.get("tags", ())}
    ids = {tag["key"]: tag["value"] for tag in process.get("tags", ())}
    failed = tags.get("otel.status_code") == "ERROR" or tags.get("error") is True
    parents = [one["spanID"] for one in span.get("references", ()) if one.get("refType") == "CHILD_OF"]
    return SpanLine(
        service=process["serviceName"].removeprefix("festina-"),
        id=str(ids.get("service.instance.id", process["serviceName"])),
        name=span["operationName"],
        start_ms=span["startTime"] / 1000.0,
        end_ms=(span["startTime"] + span["duration"]) / 1000.0,
        attributes=tags,
        trace_id=span["traceID"],
        span_id=span["spanID"],
        parent_id=parents[0] if parents else "",
        error=str(tags.get("otel.status_description") or "failed") if failed else "",
    )


# ---- printing


def show(story: Story, console: Console) -> None:
    """Print a story."""
    facts = story.facts
    console.print(f"[bold]request {story.request_id}[/bold]  {facts.get('model', '')}", highlight=False)
    tokens = [f"{facts[name]:,} {name.replace('_', ' ')}" for name in TOKENS if name in facts]
    about = [f"tenant {facts.get('tenant', 'unknown')}", *tokens, f"trace {story.trace_id}", story.source]
    console.print("  ".join(about), style="dim", highlight=False, soft_wrap=True)
    console.print(_timeline(story))
    if not story.ended:
        console.print(
            "[yellow]It has not ended yet, or its gateway was lost before it told of the end.[/yellow]"
        )
    for choice in story.choices:
        _show_choice(choice, console)


def _timeline(story: Story) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("at ms", justify="right")
    table.add_column("took ms", justify="right")
    table.add_column("where", style="cyan")
    table.add_column("what")
    for moment in story.moments:
        what = Text.assemble(moment.what, (f" {moment.error}" if moment.error else "", "red"))
        took = "" if moment.where == "end" else number(moment.took_ms)
        table.add_row(f"{moment.at_ms:,.1f}", took, moment.where, what)
    return table


def _show_choice(choice: Choice, console: Console) -> None:
    console.print()
    console.print(Text.assemble((choice.what, "bold"), ": ", choice.reason), soft_wrap=True)
    by = f"decided by {choice.by} at {choice.at_ms:,.1f} ms"
    rule = f", {choice.phase.replace('_', ' ')}" if choice.phase else ""
    console.print(by + rule, style="dim", highlight=False, soft_wrap=True)
    if choice.candidates:
        console.print(candidates_table(choice.candidates, choice.chosen))
    if len(choice.candidates) > SHOWN:
        console.print(f"{len(choice.candidates) - SHOWN} of more energy, or infeasible: --json", style="dim")


def candidates_table(candidates: Sequence[dict[str, Any]], chosen: int | None) -> Table:
    """Return the candidates of a decision as a table, the one taken marked; of many, the best."""
    every = dict.fromkeys(name for one in candidates for name in one)
    names = [name for name in every if any(one.get(name) is not None for one in candidates)]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        numeric = all(_is_number(one.get(name)) for one in candidates)
        table.add_column(_heading(name), justify="right" if numeric else "left")
    for index in _shown(candidates, chosen):
        taken = index == chosen
        cells = [Text(_cell(name, candidates[index].get(name))) for name in names]
        table.add_row(">" if taken else "", *cells, style="bold green" if taken else "")
    return table


def _shown(candidates: Sequence[dict[str, Any]], chosen: int | None) -> list[int]:
    """Return the indices of what is shown, in the order given: the one taken, and those of least energy."""

    def rank(index: int) -> tuple[bool, float]:
        energy_j = candidates[index].get("energy_j")
        return index != chosen, math.inf if energy_j is None else energy_j

    return sorted(sorted(range(len(candidates)), key=rank)[:SHOWN])


def _heading(name: str) -> str:
    words, _, unit = name.rpartition("_")
    if words and unit in UNITS:
        name = f"{words} {UNITS[unit]}"
    return name.replace("_", " ").replace("sm ", "SM ").replace("ttft", "TTFT").replace("tbt", "TBT")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(name: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() | float() if name.endswith("_bytes"):
            return number(value / 1e9)
        case float():
            return number(value)
        case list():
            return " ".join(_cell(name, one) for one in value)
    return str(value)
