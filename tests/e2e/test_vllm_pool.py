"""The CPU host of the pool: a real vLLM engine with SmolLM2 in fp32, through all five services."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from support import RunningPool
from vllm_support import ENV, QUESTION, children, needs_vllm, offline, widened_folder

from services.local_sched.vllm_env import MODEL_NAME as MODEL

LONG = [{"role": "user", "content": "Write a long story about a river."}]

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    folder = tmp_path_factory.mktemp("pool")
    widened_folder(folder / "state" / "models")
    patient = {"FESTINA_GLOBAL_SCHED_MODEL_WAIT_MS": "240000"}  # an engine starts in 10 to 60 s here
    made = RunningPool(folder, "--gpus", "1", "--models", "1", "--vllm-env", str(ENV), env=patient)
    try:
        made.wait_for_models("Qwen2.5-7B-Instruct")
        made.wait_for_models(MODEL, within_s=180)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def client(pool: RunningPool) -> openai.OpenAI:
    return openai.OpenAI(base_url=pool.url + "/v1", api_key="unused", max_retries=0, timeout=120)


def test_the_greedy_answer_is_that_of_the_offline_engine(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    told, expected = answer.choices[0].message.content, offline()
    assert told == expected.text and "Paris" in told
    used = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert used == (expected.prompt_tokens, expected.output_tokens)
    assert answer.festina["energy_j"] is None and "no meter" in answer.festina["energy_source"]
    assert answer.festina["gpu"] == "cpu-0-vllm" and answer.festina["slo_met"] is True


def test_the_stream_has_the_same_text(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    assert len([c for c in chunks if c.choices[0].delta.content]) > 3


def test_a_stop_string_cuts_a_real_answer(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stop = whole[7:14]
    cut = client.chat.completions.create(**asked, stop=stop)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_seeded_sampling_repeats_itself(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": LONG, "max_tokens": 16, "temperature": 1.0, "n": 2, "seed": 7}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, second)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_the_engine_takes_two_requests_at_once(client: openai.OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    ask = lambda words: client.chat.completions.create(  # noqa: E731
        model=MODEL, messages=[{"role": "user", "content": words}], max_tokens=20, temperature=0
    )
    prompts = ["Name three colours.", "Count to five."]
    alone = [ask(p).choices[0].message.content for p in prompts]
    with ThreadPoolExecutor(2) as threads:
        together = [answer.usage.completion_tokens for answer in threads.map(ask, prompts)]
    assert all(alone) and all(0 < n <= 20 for n in together)


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_client_stops_the_real_engine_within_a_second(pool: RunningPool, stream: bool) -> None:
    body = json.dumps(
        {"model": MODEL, "messages": LONG, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pool.port)) as connection:
        connection.sendall((head + body).encode())
        time.sleep(1.0)
        assert _running(pool) == 1
    deadline = time.monotonic() + 1.0 + 0.5  # a second for the engine, the rest for the summary to tell
    while _running(pool):
        assert time.monotonic() < deadline, "the engine still generates"
        time.sleep(0.05)


def _running(pool: RunningPool) -> int:
    gpus = httpx.get(pool.url + "/admin/gpus", trust_env=False).json()["gpus"]
    return sum(e["running"] + e["queued"] for gpu in gpus for e in gpu["engines"] if gpu["engine"] == "vllm")


def test_a_parameter_that_vllm_refuses_is_an_error_with_its_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=4, extra_body={"logit_bias": {"49151": 101.0}}
        )
    assert caught.value.status_code == 400


def test_a_stream_goes_on_though_its_engine_is_killed_and_then_stands_still(
    pool: RunningPool, client: openai.OpenAI
) -> None:
    """Killed, its end is seen at once; stopped, it is not heard any more. Both times another starts."""
    asked = {"model": MODEL, "messages": LONG, "max_tokens": 60, "temperature": 0}
    undisturbed = client.chat.completions.create(**asked).choices[0].message.content
    local_sched = pool.pid_of("cpu-0-vllm")
    told, harmed = "", []
    for chunk in client.with_options(timeout=300).chat.completions.create(**asked, stream=True):
        told += chunk.choices[0].delta.content or "" if chunk.choices else ""
        for harm, at in ((signal.SIGKILL, 20), (signal.SIGSTOP, 80)):
            if len(told) > at and harm not in harmed:
                (engine,) = children(local_sched)
                os.kill(engine, harm)
                harmed.append(harm)
    assert told == undisturbed
    assert harmed == [signal.SIGKILL, signal.SIGSTOP]
