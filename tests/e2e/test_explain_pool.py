"""`festina explain` on a running pool: a request of a real client, told by kept spans and by Jaeger."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support import RunningPool, bare_environ
from trace_collector import TraceCollector

MODEL = "Qwen2.5-7B-Instruct"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, collector: TraceCollector) -> Iterator[RunningPool]:
    env = {"FESTINA_TRACING": "1", "FESTINA_OTLP_ENDPOINT": collector.url}
    folder = tmp_path_factory.mktemp("pool")
    made = RunningPool(folder, "--emulated", "--gpus", "2", "--models", "2", env=env)
    try:
        made.wait_for_models(MODEL)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def answer(pool: RunningPool) -> Any:
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="none", max_retries=0, timeout=60)
    return client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=60, extra_body={"ignore_eos": True}
    )


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "festina")
    return subprocess.run(
        [program, "explain", *arguments], env=bare_environ(), capture_output=True, text=True, timeout=60
    )


def test_it_tells_why_that_gpu_clock_and_share(pool: RunningPool, answer: Any) -> None:
    told = explain(answer.id, "--state-dir", str(pool.folder / "state"), "--json")
    assert told.returncode == 0, told.stderr
    story = json.loads(told.stdout)
    assert story["ended"] and "chatcmpl-" + story["request_id"] == answer.id
    assert [moment["where"] for moment in story["moments"]] == [
        "gateway", "dispatch", "queue", "prefill", "decode", "end",
    ]  # fmt: skip
    assert story["facts"]["output_tokens"] == answer.usage.completion_tokens == 60
    assert story["facts"]["energy_j"] == answer.festina["energy_j"] > 0
    dispatch, *points = story["choices"]
    assert dispatch["phase"] == "current_clock" and dispatch["what"] == f"GPU {answer.festina['gpu']}"
    chosen = dispatch["candidates"][dispatch["chosen"]]
    assert chosen["gpu"] == answer.festina["gpu"] and chosen["energy_j"] > 0 and chosen["ttft_ms"] > 0
    assert len(points) == 2
    assert {point["phase"] for point in points} <= {"least_energy", "clock_kept"}
    for point in points:
        taken = point["candidates"][point["chosen"]]
        assert f"clock {taken['sm_clock_mhz']} MHz, share {taken[MODEL + '_pct']} %" in point["what"]
        assert taken["energy_j"] is not None


def test_a_person_reads_the_same(pool: RunningPool, answer: Any) -> None:
    told = explain(answer.id, "--state-dir", str(pool.folder / "state"))
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert answer.id.removeprefix("chatcmpl-") in lines[0] and MODEL in lines[0]
    assert sum(line.startswith(">") for line in lines) == 3
    text = " ".join(told.stdout.split())  # wherever a column was too narrow
    assert "wanted: the first token within 250 ms" in text
    assert re.search(r"60 tokens on .* J with its prefill", text)


def test_jaeger_tells_the_same(pool: RunningPool, answer: Any, collector: TraceCollector) -> None:
    from_files = json.loads(explain(answer.id, "--state-dir", str(pool.folder / "state"), "--json").stdout)
    told = explain(answer.id, "--state-dir", "/nowhere", "--jaeger", collector.url, "--json")
    assert told.returncode == 0, told.stderr
    from_jaeger = json.loads(told.stdout)
    assert from_jaeger["source"] == collector.url and from_jaeger["facts"] == from_files["facts"]
    assert [c["candidates"] for c in from_jaeger["choices"]] == [
        c["candidates"] for c in from_files["choices"]
    ]


def test_an_unknown_id_is_one_line_without_a_traceback(pool: RunningPool, answer: Any) -> None:
    told = explain("chatcmpl-nobody", "--state-dir", str(pool.folder / "state"))
    assert told.returncode == 1 and "nobody" in told.stderr and "the oldest span of 20" in told.stderr
    assert "Traceback" not in told.stderr
    assert "Traceback" not in explain("x", "--state-dir", "/nowhere", "--jaeger", "http://127.0.0.1:9").stderr


def test_help_teaches() -> None:
    told = explain("--help").stdout
    assert "Example: festina explain chatcmpl-" in told and "--jaeger" in told
