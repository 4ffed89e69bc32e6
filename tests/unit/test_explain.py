"""The story of a request out of its spans: order, times, words, what was chosen; and where spans are kept."""

import io
import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.explain import candidates_table, from_jaeger, in_folder, show
from services.cli.explain_story import call_of, tell
from services.cli.main import app
from shared.config import Common
from shared.errors import FestinaError
from shared.events import Span
from shared.span_log import SpanLog, oldest_ms, spans_naming
from shared.spans import SpanLine
from shared.tracing import Tracing

CALL, TRACE = "0f8fad5bd9cb469fa16570867728950e", "0af7651916cd43dd8448eb211c80319c"
GPUS = [
    {"gpu": "gpu-0", "energy_j": 42.0, "ttft_ms": 120.0, "keeps_others": True},
    {"gpu": "gpu-1", "energy_j": 30.0, "ttft_ms": 180.0, "keeps_others": True},
    {"gpu": "gpu-2", "energy_j": None, "ttft_ms": 410.0, "keeps_others": False},
]
POINTS = [
    {"sm_clock_mhz": 900, "shares_pct": [80, 40], "energy_j": None},
    {"sm_clock_mhz": 1100, "shares_pct": [60, 40], "energy_j": 40.0},
    {"sm_clock_mhz": 1300, "shares_pct": [50, 40], "energy_j": 48.0},
]


def line(name: str, start_ms: float, end_ms: float, error: str = "", **attributes: object) -> SpanLine:
    service = {"gateway": "gateway", "global": "global_sched", "local": "local_sched"}[name.partition(".")[0]]
    named = {"festina." + key.replace("__", "."): value for key, value in attributes.items()}
    return SpanLine(
        service=service,
        id=f"{service}-0",
        name=name,
        start_ms=start_ms,
        end_ms=end_ms,
        attributes={"festina.request_id": CALL, "festina.model": "m", "festina.tenant": "t"} | named,
        trace_id=TRACE,
        span_id=f"{start_ms:016.0f}",
        error=error,
    )


def spans() -> list[SpanLine]:
    """Return those of one request that came at 1,000 ms and ended at 1,900 ms, in no order."""
    usage = {"gen_ai.usage.input_tokens": 152, "gen_ai.usage.output_tokens": 87}
    gateway = line(
        "gateway.request",
        1_000.0,
        1_900.0,
        ttft_objective_ms=400.0,
        tbt_objective_ms=100.0,
        ttft_ms=150.0,
        mean_tbt_ms=8.72,
        slo_met=True,
        energy_j=31.5,
        gpu="gpu-1",
    )
    point = {"gpu": "gpu-1", "sm_clock_mhz": 1100, "sm_share_pct": 60, "chunk_tokens": 512}
    decided = {
        "decision__phase": "least_energy",
        "decision__reason": "Of all points it takes the least.",
        "decision__age_ms": 20.0,
        "decision__models": ["m", "other"],
        "decision__candidates": POINTS,
        "decision__chosen": 1,
    }
    return [
        msgspec.structs.replace(gateway, attributes=gateway.attributes | usage),
        line(
            "local.decode",
            1_150.0,
            1_890.0,
            **point,
            **decided,
            output_tokens=87,
            energy_j=31.5,
            slack_ms=-5.0,
        ),
        line("local.prefill", 1_010.0, 1_150.0, **point, **decided, slack_ms=250.0),
        line("local.queue", 1_002.0, 1_010.0, gpu="gpu-1", slack_ms=390.0),
        line(
            "global.dispatch",
            1_001.0,
            1_001.5,
            gpu="gpu-1",
            predicted_output_tokens=90,
            decision__phase="current_clock",
            decision__reason="gpu-1 is in time for 30.0 J.",
            decision__candidates=GPUS,
        ),
        msgspec.structs.replace(
            line("local.queue", 900.0, 999.0), attributes={"festina.request_id": "another"}
        ),
    ]


def test_the_story_is_in_order_and_counts_from_the_arrival() -> None:
    story = tell(spans(), CALL, "here")
    assert [(m.where, m.at_ms, m.took_ms) for m in story.moments] == [
        ("gateway", 0.0, 900.0),
        ("dispatch", 1.0, 0.5),
        ("queue", 2.0, 8.0),
        ("prefill", 10.0, 140.0),
        ("decode", 150.0, 740.0),
        ("end", 900.0, 0.0),
    ]
    assert story.ended and story.trace_id == TRACE
    assert story.facts["input_tokens"] == 152 and story.facts["output_tokens"] == 87
    what = {m.where: m.what for m in story.moments}
    assert what["gateway"] == (
        "taken by gateway-0; wanted: the first token within 400 ms, then one every 100 ms"
    )
    assert what["dispatch"] == "global_sched-0 sent it to gpu-1, expecting 90 output tokens"
    assert what["queue"] == "waited on gpu-1; 390 ms left for its first token"
    assert "at 1100 MHz, 60 % of the SMs, up to 512 prompt tokens a step" in what["prefill"]
    assert "; 250 ms left at its first token" in what["prefill"]
    assert "31.5 J" in what["decode"] and "; 5.00 ms behind its TBT" in what["decode"]
    assert what["end"] == ("first token after 150 ms, then one every 8.72 ms, objectives met, 31.5 J")


def test_each_decision_says_what_it_chose_from_and_what_it_took() -> None:
    dispatch, prefill, decode = tell(spans(), CALL, "here").choices
    assert (dispatch.by, dispatch.phase, dispatch.at_ms, dispatch.chosen) == (
        "global_sched-0",
        "current_clock",
        1.5,
        1,
    )
    assert dispatch.candidates[1]["energy_j"] == 30.0
    assert (prefill.at_ms, prefill.chosen) == (130.0, 1)  # 20 ms before the first token at 150 ms
    assert prefill.candidates[0] == {
        "sm_clock_mhz": 900, "energy_j": None, "m_pct": 80, "other_pct": 40, "total_pct": 120,
    }  # fmt: skip
    assert decode.at_ms == 870.0


def test_the_candidate_taken_is_marked() -> None:
    out = io.StringIO()
    show(tell(spans(), CALL, "here"), Console(file=out, width=160))
    lines = out.getvalue().splitlines()
    assert [text.split()[:3] for text in lines if text.startswith(">")] == [
        [">", "gpu-1", "30.0"],
        [">", "1100", "40.0"],
        [">", "1100", "40.0"],
    ]
    assert any("energy J" in text and "TTFT ms" in text and "keeps others" in text for text in lines)
    assert any("gpu-2" in text and " - " in text and " no" in text for text in lines)


def test_of_many_candidates_the_best_are_shown_and_the_one_taken() -> None:
    many = tuple({"sm_clock_mhz": 800 + i, "energy_j": None if i < 5 else 100.0 - i} for i in range(30))
    out = io.StringIO()
    Console(file=out, width=100).print(candidates_table(many, 2))
    shown = [line.removeprefix(">").split()[0] for line in out.getvalue().splitlines()[1:]]
    assert shown == ["802", *[str(800 + i) for i in range(19, 30)]]


def test_what_has_not_ended_says_so() -> None:
    story = tell([span for span in spans() if span.name != "gateway.request"], CALL, "here")
    out = io.StringIO()
    show(story, Console(file=out, width=160))
    assert not story.ended and "It has not ended yet" in out.getvalue()
    assert story.moments[0].where == "dispatch" and story.moments[0].at_ms == 0.0


def test_a_refusal_is_told_with_its_reason() -> None:
    refused = line("global.dispatch", 1_001.0, 1_001.5, error="Every queue is full", reason="overloaded")
    [choice] = tell([refused], CALL, "here").choices
    assert (choice.what, choice.reason) == ("turned away", "overloaded")


def test_ids_are_taken_as_clients_see_them() -> None:
    assert call_of(f" chatcmpl-{CALL}\n") == call_of(f"cmpl-{CALL}") == call_of(CALL) == CALL


def test_a_call_has_all_its_choices_and_a_choice_its_call() -> None:
    def of(request_id: str, name: str) -> SpanLine:
        return msgspec.structs.replace(line(name, 1.0, 2.0), attributes={"festina.request_id": request_id})

    found = [of(CALL, "gateway.request"), of(CALL + "-0", "local.queue"), of(CALL + "-1", "local.queue")]
    assert len(tell(found, CALL, "").moments) == 4
    one = tell(found, CALL + "-1", "")
    assert [m.where for m in one.moments] == ["gateway", "queue", "end"]


def jaeger_trace() -> dict[str, object]:
    """Return the same spans as Jaeger's API gives them: numbers and texts as tags, JSON as text."""
    shown, processes = [], {}
    for number, span in enumerate(spans()):
        processes[f"p{number}"] = {
            "serviceName": f"festina-{span.service}",
            "tags": [{"key": "service.instance.id", "value": span.id}],
        }
        tags = [
            {"key": key, "value": json.dumps(value) if isinstance(value, list) else value}
            for key, value in span.attributes.items()
        ]
        shown.append(
            {
                "traceID": TRACE,
                "spanID": span.span_id,
                "operationName": span.name,
                "startTime": span.start_ms * 1000,
                "duration": (span.end_ms - span.start_ms) * 1000,
                "processID": f"p{number}",
                "tags": tags,
            }
        )
    return {"traceID": TRACE, "spans": shown, "processes": processes}


def test_jaeger_tells_the_same_story() -> None:
    assert tell(from_jaeger(jaeger_trace()), CALL, "x") == tell(spans(), CALL, "x")


# ---- where spans are kept


class Point(NamedTuple):
    sm_clock_mhz: int
    shares_pct: tuple[int | None, ...]
    energy_j: float


def test_a_core_s_span_is_found_again_with_its_candidates(tmp_path: Path) -> None:
    tracing = Tracing(Common(otlp_endpoint="", trace_dir=str(tmp_path)), "local_sched", "gpu-0")
    points = (Point(900, (None,), float("inf")), Point(1100, (40,), 40.0))
    attributes = {"festina.request_id": CALL, "festina.decision.candidates": points}
    parent = "00f067aa0ba902b7"
    traceparent = f"00-{TRACE}-{parent}-01"
    tracing.export(Span("local.decode", traceparent, 1_000.0, 1_000.5, attributes, error="lost"))
    tracing.export(Span("local.decode", f"00-{TRACE}-{parent}-00", 1.0, 2.0, attributes))  # not sampled
    tracing.export(Span("local.decode", "", 1.0, 2.0, attributes))
    tracing.close()
    [found] = in_folder(tmp_path, CALL)
    assert (found.service, found.id, found.trace_id, found.parent_id) == (
        "local_sched", "gpu-0", TRACE, parent,
    )  # fmt: skip
    assert (found.start_ms, found.end_ms, found.error) == (1_000.0, 1_000.5, "lost")
    assert found.attributes["festina.decision.candidates"] == [
        {"sm_clock_mhz": 900, "shares_pct": [None], "energy_j": None},
        {"sm_clock_mhz": 1100, "shares_pct": [40], "energy_j": 40.0},
    ]


def test_nothing_is_traced_where_tracing_is_off(tmp_path: Path) -> None:
    tracing = Tracing(Common(tracing=False, trace_dir=str(tmp_path / "x")), "gateway", "g")
    assert not tracing.tracer.start_span("gateway.request").is_recording()
    tracing.close()
    assert not (tmp_path / "x").exists()


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=20_000)
    for number in range(500):
        span = line("gateway.request", float(number), number + 1.0)
        log.write([msgspec.structs.replace(span, attributes={"festina.request_id": f"r{number:03}"})])
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_500
    assert not list(spans_naming(tmp_path, "r000")) and list(spans_naming(tmp_path, "r499"))
    first_ms = oldest_ms(tmp_path)
    assert first_ms is not None and 300 < first_ms < 460
    assert list(spans_naming(tmp_path, f"r{first_ms:03.0f}"))


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=20_000)
    log.write(spans())
    log.close()
    with (tmp_path / "gateway.g.jsonl").open("ab") as file:
        file.write(b'{"service":"gateway","id":"' + CALL.encode())
    assert len(in_folder(tmp_path, CALL)) == 5


# ---- the command


def run(*arguments: str) -> tuple[str, BaseException | None]:
    outcome = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    return outcome.output, outcome.exception


def test_the_command_prints_a_story_or_json(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "traces", "gateway", "g", most_bytes=1_000_000)
    log.write(spans())
    log.close()
    text, error = run("chatcmpl-" + CALL, "--state-dir", str(tmp_path))
    assert error is None and "GPU gpu-1: gpu-1 is in time for 30.0 J." in text
    told, error = run(CALL, "--state-dir", str(tmp_path), "--json")
    assert error is None and json.loads(told)["choices"][0]["chosen"] == 1


@pytest.mark.parametrize("made", [False, True])
def test_an_unknown_request_says_what_was_looked_at(
    tmp_path: Path, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.explain.WRITTEN_WITHIN_S", 0.0)
    if made:
        log = SpanLog(tmp_path / "traces", "gateway", "g", most_bytes=1_000_000)
        log.write(spans())
        log.close()
    _, error = run("chatcmpl-nobody", "--state-dir", str(tmp_path))
    assert isinstance(error, FestinaError) and "'nobody'" in str(error)
    assert str(tmp_path / "traces") in str(error) and "--jaeger" in str(error)
    assert ("the oldest span of 1970" if made else "no such folder") in str(error)


def test_a_jaeger_that_does_not_answer_is_named(tmp_path: Path) -> None:
    _, error = run("nobody", "--state-dir", str(tmp_path), "--jaeger", "http://127.0.0.1:9")
    assert isinstance(error, FestinaError) and "http://127.0.0.1:9 does not answer" in str(error)
