"""A request that streams is moved to another GPU while it decodes, and its client does not notice."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support import RunningPool

LLAMA = "Llama-3.1-8B-Instruct"
TOKENS = 400
ASKED = {
    "model": LLAMA,
    "prompt": "Count the stars, one by one, and tell me of each. " * 60,
    "max_tokens": TOKENS,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    made = RunningPool(tmp_path_factory.mktemp("pool"), "--emulated")
    try:
        made.wait_for_models(LLAMA)
        yield made
    finally:
        made.stop()


def gpus(pool: RunningPool) -> list[dict[str, Any]]:
    return httpx.get(pool.url + "/admin/gpus", trust_env=False).json()["gpus"]


def gpu_that_runs(pool: RunningPool) -> str:
    return next(g["gpu"] for g in gpus(pool) if any(e["running"] for e in g["engines"]))


def drain(pool: RunningPool, gpu: str, how: str) -> None:
    answer = httpx.post(f"{pool.url}/admin/gpus/{gpu}/{how}", trust_env=False)
    assert answer.status_code == 202, answer.text


def test_the_drain_of_its_gpu_moves_a_stream_without_a_break(pool: RunningPool) -> None:
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="unused", max_retries=0, timeout=120)
    started_s = time.monotonic()
    whole = client.completions.create(**ASKED)
    alone_s = time.monotonic() - started_s
    stream = client.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    text, finish_reasons, source = "", [], ""
    longest_ms, last_s = 0.0, time.monotonic()
    runs_on: set[str] = set()
    for number, chunk in enumerate(stream):
        now_s = time.monotonic()
        longest_ms, last_s = max(longest_ms, 1000 * (now_s - last_s)) if number else 0.0, now_s
        text += "".join(choice.text for choice in chunk.choices)
        finish_reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        if number == 15:
            source = gpu_that_runs(pool)
            drain(pool, source, "drain")
        if source and number % 10 == 0:
            runs_on |= {g["gpu"] for g in gpus(pool) if any(e["running"] for e in g["engines"])}
    drain(pool, source, "undrain")
    report, took_s = chunk.festina, time.monotonic() - started_s - alone_s
    print(f"{alone_s:.1f} s alone, {took_s:.1f} s with a move; longest gap {longest_ms:.0f} ms")
    assert text == whole.choices[0].text and finish_reasons == ["length"]
    assert chunk.usage.completion_tokens == TOKENS
    assert report["gpu"] != source and report["gpu"] in runs_on
    assert report["energy_j"] > 0
