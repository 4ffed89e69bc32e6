"""The whole pool on emulated GPUs, started as a person does, used with the plain `openai` client."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support import RunningPool

QWEN, LLAMA = "Qwen2.5-7B-Instruct", "Llama-3.1-8B-Instruct"
HELLO = [{"role": "user", "content": "Say hello to the whole wide world."}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    made = RunningPool(tmp_path_factory.mktemp("pool"), "--emulated")
    try:
        made.wait_for_models(QWEN, LLAMA)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def client(pool: RunningPool) -> openai.OpenAI:
    return openai.OpenAI(base_url=pool.url + "/v1", api_key="unused", max_retries=0, timeout=60)


def gpus(pool: RunningPool) -> list[dict[str, Any]]:
    return httpx.get(pool.url + "/admin/gpus", trust_env=False).json()["gpus"]


def running(pool: RunningPool) -> int:
    return sum(e["running"] + e["queued"] for gpu in gpus(pool) for e in gpu["engines"])


def wait_until_idle(pool: RunningPool, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while running(pool):
        assert time.monotonic() < deadline, gpus(pool)
        time.sleep(0.02)


# ---- answers


def test_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=12)
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and len(choice.message.content.split()) == 12
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    report = answer.festina
    assert report["energy_j"] > 0 and "emulated" in report["energy_source"]
    assert report["gpu"].startswith("emulated-0") and report["slo_met"] is True
    assert 0 < report["mean_tbt_ms"] < 100 and 0 < report["ttft_ms"] < 250


def test_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model=QWEN, messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [c.choices[0] for c in chunks if c.choices]
    assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant"
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert deltas[-1].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-1].festina["energy_j"] > 0
    assert len([d for d in deltas if d.delta.content]) > 5  # as tokens come, not all at the end


def test_stream_without_usage_has_none_and_still_reports(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=4, stream=True))
    assert all(chunk.choices for chunk in chunks) and all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].festina["energy_j"] > 0


def test_plain_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=LLAMA, prompt="Once upon a time", max_tokens=9)
    assert whole.object == "text_completion" and whole.usage.completion_tokens == 9
    pieces = client.completions.create(model=LLAMA, prompt="Once upon a time", max_tokens=9, stream=True)
    assert "".join(c.choices[0].text for c in pieces) == whole.choices[0].text


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=QWEN, messages=HELLO, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_an_answer_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=QWEN, messages=HELLO)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens >= 16


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_differ_and_each_ends_once(client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": QWEN, "messages": HELLO, "max_tokens": 8, "n": 3, "seed": 5}
    if stream:
        texts, finishes = {0: "", 1: "", 2: ""}, []
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finishes += [choice.index] if choice.finish_reason else []
        assert sorted(finishes) == [0, 1, 2]
    else:
        answer = client.chat.completions.create(**asked)
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage.completion_tokens == 24
    assert len(set(texts.values())) == 3 and all(len(t.split()) == 8 for t in texts.values())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_token_borders(client: openai.OpenAI, pool: RunningPool, stream: bool) -> None:
    full = (
        client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=40).choices[0].message.content
    )
    words = full.split(" ")
    stop = words[9][-2:] + " " + words[10][:2]  # ends one token and begins the next
    cut = full[: full.index(stop)]
    asked = {"model": QWEN, "messages": HELLO, "max_tokens": 4000, "stop": [stop, "never there"]}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    else:
        answer = client.chat.completions.create(**asked)
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len((cut + stop).split())
    assert text == cut
    wait_until_idle(pool, 1.0)


# ---- errors


def refused(client: openai.OpenAI, kind: type[openai.APIStatusError], **asked: Any) -> dict[str, Any]:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": QWEN, "messages": HELLO, **asked})
    body = caught.value.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["message"]
    return body


@pytest.mark.parametrize("name", ["nope", QWEN.lower(), f" {QWEN}", f"{QWEN} ", ""])
def test_unknown_model(client: openai.OpenAI, name: str) -> None:
    assert refused(client, openai.NotFoundError, model=name)["code"] == "model_not_found"


def test_context_too_long(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    assert refused(client, openai.BadRequestError, messages=long)["code"] == "context_length_exceeded"
    body = refused(client, openai.BadRequestError, max_tokens=8192)
    assert body["code"] == "context_length_exceeded" and "8192" in body["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("logprobs", True),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["audio"]),
    ],
)
def test_an_unsupported_field_is_named(client: openai.OpenAI, field: str, value: Any) -> None:
    body = refused(client, openai.BadRequestError, **{field: value})
    assert body["param"] == field and field in body["message"] and body["code"] == "unsupported_parameter"


def test_an_unknown_field_is_named(client: openai.OpenAI) -> None:
    body = refused(client, openai.BadRequestError, extra_body={"temprature": 1})
    assert body["param"] == "temprature" and body["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 3), ("top_p", 0), ("n", 0), ("max_tokens", 0), ("stop", [""] * 5)]
)
def test_a_value_out_of_range_is_named(client: openai.OpenAI, field: str, value: Any) -> None:
    assert refused(client, openai.BadRequestError, **{field: value})["param"] == field


def test_a_bad_objective_header_is_named(client: openai.OpenAI) -> None:
    body = refused(client, openai.BadRequestError, extra_headers={"x-festina-ttft-ms": "soon"})
    assert "x-festina-ttft-ms" in body["message"]


def test_body_too_large(pool: RunningPool) -> None:
    content = json.dumps({"model": QWEN, "messages": [{"role": "user", "content": "x" * (5 << 20)}]})
    answer = httpx.post(pool.url + "/v1/chat/completions", content=content, trust_env=False)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"


def test_broken_json_and_unknown_paths(pool: RunningPool) -> None:
    broken = httpx.post(pool.url + "/v1/chat/completions", content=b"{", trust_env=False)
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"
    assert httpx.get(pool.url + "/v1/nothing", trust_env=False).json()["error"]["code"] == "not_found"
    wrong = httpx.get(pool.url + "/v1/chat/completions", trust_env=False)
    assert wrong.status_code == 405 and "error" in wrong.json()


def test_own_objectives_decide_whether_they_were_met(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=QWEN, messages=HELLO, max_tokens=4, extra_headers={"x-festina-tbt-ms": "0.5"}
    )
    assert answer.festina["slo_met"] is False


# ---- clients that leave


def post_and_leave(pool: RunningPool, body: dict[str, Any], after_s: float) -> None:
    """Send a request on a plain socket and close it after a while, as a killed client does."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pool.port)) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(after_s)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("window", ["before dispatch", "before the first token", "in the middle"])
def test_a_lost_client_ends_the_work_within_a_second(pool: RunningPool, stream: bool, window: str) -> None:
    words = 6000 if window == "before the first token" else 5
    body = {
        "model": QWEN,
        "messages": [{"role": "user", "content": "word " * words}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
    }
    post_and_leave(
        pool, body, {"before dispatch": 0.0, "before the first token": 0.12, "in the middle": 0.6}[window]
    )
    time.sleep(0.3)  # what was on its way has arrived by now
    wait_until_idle(pool, 1.0)


# ---- models and GPUs


def admin(pool: RunningPool, method: str, path: str, **more: Any) -> httpx.Response:
    return httpx.request(method, pool.url + path, trust_env=False, timeout=10, **more)


def test_listing_and_retrieving_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert len(names) == 16 and QWEN in names
    assert client.models.retrieve(QWEN).state == "ready"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_a_model_is_registered_loaded_on_demand_unloaded_and_loaded_again(
    pool: RunningPool, client: openai.OpenAI
) -> None:
    spec = next(
        m for m in admin(pool, "GET", "/admin/models").json()["models"] if m["name"] == "Qwen2.5-3B-Instruct"
    )
    small = {**spec, "name": "My-Model.v1", "weight_bytes": 1_000_000_000, "keep_alive_ms": 1500.0}
    assert admin(pool, "POST", "/admin/models", json=small).status_code == 201
    assert admin(pool, "POST", "/admin/models", json=small).status_code == 201  # the same again is no error
    clash = admin(pool, "POST", "/admin/models", json={**small, "name": "my-model-v1"})
    assert clash.status_code == 409
    ask = lambda: client.chat.completions.create(model="My-Model.v1", messages=HELLO, max_tokens=3)  # noqa: E731
    assert ask().usage.completion_tokens == 3
    deadline = time.monotonic() + 10
    while client.models.retrieve("My-Model.v1").state != "cold":
        assert time.monotonic() < deadline, "it is never unloaded"
        time.sleep(0.1)
    again = ask()
    assert again.usage.completion_tokens == 3 and again.festina["ttft_ms"] > 100  # it had to be loaded
    for about_then_s in (1.5, 1.75):  # it is about to be unloaded, or just is, or has been
        time.sleep(about_then_s)
        assert ask().usage.completion_tokens == 3
    assert admin(pool, "DELETE", "/admin/models/My-Model.v1").status_code == 200
    with pytest.raises(openai.NotFoundError):
        ask()


def test_bad_models_are_refused_by_field(pool: RunningPool) -> None:
    spec = admin(pool, "GET", "/admin/models").json()["models"][0]
    for field, value in (("engine", "magic"), ("weight_bytes", 0), ("name", " x"), ("surprise", 1)):
        answer = admin(pool, "POST", "/admin/models", json={**spec, "name": "another", field: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_drained_gpu_takes_no_work_and_its_models_still_answer(
    pool: RunningPool, client: openai.OpenAI
) -> None:
    gpu = client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=2).festina["gpu"]
    assert admin(pool, "POST", f"/admin/gpus/{gpu}/drain").status_code == 202
    deadline = time.monotonic() + 5
    while next(g for g in gpus(pool) if g["gpu"] == gpu)["state"] != "draining":
        assert time.monotonic() < deadline, "it never drains"
        time.sleep(0.05)
    moved = client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=2)
    assert moved.festina["gpu"] != gpu
    assert admin(pool, "POST", f"/admin/gpus/{gpu}/undrain").status_code == 202
    while next(g for g in gpus(pool) if g["gpu"] == gpu)["state"] == "draining":
        assert time.monotonic() < deadline + 5, "it drains for ever"
        time.sleep(0.05)


def gpu_that_runs(pool: RunningPool) -> str:
    return next(g["gpu"] for g in gpus(pool) if any(e["running"] for e in g["engines"]))


def test_the_drain_of_its_gpu_moves_a_stream_and_its_client_does_not_notice(
    pool: RunningPool, client: openai.OpenAI
) -> None:
    tokens = 400
    asked = {
        "model": LLAMA,
        "prompt": "Count the stars, one by one, and tell me of each. " * 60,
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True},
    }
    started_s = time.monotonic()
    whole = client.completions.create(**asked)
    alone_s = time.monotonic() - started_s
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
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
            assert admin(pool, "POST", f"/admin/gpus/{source}/drain").status_code == 202
        if source and number % 10 == 0:
            runs_on |= {g["gpu"] for g in gpus(pool) if any(e["running"] for e in g["engines"])}
    assert admin(pool, "POST", f"/admin/gpus/{source}/undrain").status_code == 202
    report, took_s = chunk.festina, time.monotonic() - started_s - alone_s
    print(f"{alone_s:.1f} s alone, {took_s:.1f} s with a move; longest gap {longest_ms:.0f} ms")
    assert text == whole.choices[0].text and finish_reasons == ["length"]
    assert chunk.usage.completion_tokens == tokens
    assert report["gpu"] != source and report["gpu"] in runs_on
    assert report["energy_j"] > 0


def test_the_clock_follows_the_work(pool: RunningPool, client: openai.OpenAI) -> None:
    gpu = client.chat.completions.create(model=QWEN, messages=HELLO, max_tokens=60).festina["gpu"]
    shown = next(g for g in gpus(pool) if g["gpu"] == gpu)
    assert 345 <= shown["sm_clock_mhz"] < 1980 and shown["power_w"] >= 70


def test_health_readiness_documentation_and_metrics(pool: RunningPool) -> None:
    get = lambda path: httpx.get(pool.url + path, trust_env=False)  # noqa: E731
    assert get("/health").json() == {"status": "alive"}
    assert get("/ready").json() == {"ready": True, "missing": []}
    assert "/v1/chat/completions" in get("/openapi.json").json()["paths"]
    page = get("/metrics").text
    assert re.search(r'festina_gateway_requests_total\{[^}]*outcome="length"[^}]*\} [1-9]', page)


# ---- faults


def test_a_killed_local_scheduler_does_not_break_the_stream(pool: RunningPool, client: openai.OpenAI) -> None:
    asked = {"model": QWEN, "messages": HELLO, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    undisturbed = client.chat.completions.create(**asked)
    pid = pool.pid_of(undisturbed.festina["gpu"])
    text = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
        if pid and len(text.split()) > 50:
            os.kill(pid, signal.SIGKILL)
            pid = 0
        last = chunk
    assert last.festina["attempt"] == 2
    assert text == undisturbed.choices[0].message.content
