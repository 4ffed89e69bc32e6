"""A small pool with API keys, tracing and little room: who may come in, what is traced, how it ends."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from support import RunningPool
from trace_collector import TraceCollector

from services.cli.supervise import free_port, port_is_free

MODEL = "Qwen2.5-7B-Instruct"
HELLO = [{"role": "user", "content": "Hello"}]
KEYS = '[keys]\n"alpha" = "team-a"\n"root" = "admin"\n'
MAX_INFLIGHT = 4


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, collector: TraceCollector) -> Iterator[RunningPool]:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "keys.toml").write_text(KEYS)
    env = {
        "FESTINA_TRACING": "1",
        "FESTINA_OTLP_ENDPOINT": collector.url,
        "FESTINA_GATEWAY_API_KEYS_FILE": str(folder / "keys.toml"),
        "FESTINA_GATEWAY_MAX_INFLIGHT": str(MAX_INFLIGHT),
        "FESTINA_ADMIN_KEY": "root",
    }
    made = RunningPool(folder, "--emulated", "--gpus", "1", "--models", "2", env=env)
    try:
        made.wait_for_models(MODEL, key="root")
        yield made
    finally:
        made.stop()


def client_with(pool: RunningPool, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=pool.url + "/v1", api_key=key, max_retries=0, timeout=30)


def test_a_wrong_key_is_refused_and_a_right_one_is_not(pool: RunningPool) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client_with(pool, "alphA").chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert caught.value.response.json()["error"]["code"] == "invalid_api_key"
    bare = httpx.post(
        pool.url + "/v1/chat/completions", json={"model": MODEL, "messages": HELLO}, trust_env=False
    )
    assert bare.status_code == 401 and bare.headers["www-authenticate"] == "Bearer"
    answer = client_with(pool, "alpha").chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert answer.usage.completion_tokens == 2


def test_admin_needs_the_admin_tenant(pool: RunningPool) -> None:
    def ask(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(pool.url + "/admin/gpus", headers=headers, trust_env=False).status_code

    assert (ask("alpha"), ask("nope"), ask("root")) == (403, 401, 200)


def test_a_key_made_on_the_command_line_works(pool: RunningPool) -> None:
    environ = Path(f"/proc/{pool.pid_of('gateway-0')}/environ").read_bytes().decode().split("\0")
    store = next(line for line in environ if line.startswith("FESTINA_REDIS_URL="))
    program = str(Path(sys.executable).parent / "festina")
    made = subprocess.run(
        [program, "keys", "add", "team-b"],
        env={**os.environ, "FESTINA_REDIS_URL": store.partition("=")[2]},
        capture_output=True,
        text=True,
        check=True,
    )
    client, deadline = client_with(pool, made.stdout.strip()), time.monotonic() + 10
    while True:
        try:
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            break
        except openai.AuthenticationError:
            assert time.monotonic() < deadline, "the key is never taken"
            time.sleep(0.2)


def test_a_model_of_another_tenant_does_not_exist(pool: RunningPool) -> None:
    admin = {"Authorization": "Bearer root"}
    spec = httpx.get(pool.url + "/admin/models", headers=admin, trust_env=False).json()["models"][0]
    secret = {**spec, "name": "secret", "weight_bytes": 10**9, "tenants": ["team-z"]}
    assert (
        httpx.post(pool.url + "/admin/models", json=secret, headers=admin, trust_env=False).status_code == 201
    )
    client = client_with(pool, "alpha")
    assert "secret" not in [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="secret", messages=HELLO)
    httpx.delete(pool.url + "/admin/models/secret", headers=admin, trust_env=False)


def test_overload_is_refused_early_with_retry_after(pool: RunningPool) -> None:
    client = client_with(pool, "alpha")

    def ask(_: int) -> openai.RateLimitError | None:
        try:
            client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=300, extra_body={"ignore_eos": True}
            )
        except openai.RateLimitError as error:
            return error
        return None

    with ThreadPoolExecutor(12) as threads:
        outcomes = list(threads.map(ask, range(12)))
    errors = [error for error in outcomes if error is not None]
    assert len(outcomes) - len(errors) >= MAX_INFLIGHT
    assert errors, "twelve at once fit into four places"
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in errors)
    assert errors[0].response.json()["error"]["code"] == "too_many_requests"


def test_one_trace_from_the_client_to_the_engine(pool: RunningPool, collector: TraceCollector) -> None:
    trace_id, client_span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    client_with(pool, "alpha").chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=30,
        extra_headers={"traceparent": f"00-{trace_id}-{client_span}-01"},
    )
    wanted = {"gateway.request", "global.dispatch", "local.queue", "local.prefill", "local.decode"}
    spans, deadline = {}, time.monotonic() + 10
    while set(spans) != wanted:
        assert time.monotonic() < deadline, sorted(spans)
        time.sleep(0.1)
        data = httpx.get(f"{collector.url}/api/traces/{trace_id}", trust_env=False).json()["data"]
        spans = {span["operationName"]: span for trace in data for span in trace["spans"]}
    [trace] = data
    assert len(trace["spans"]) == len(wanted)  # never one per token
    services = {process["serviceName"] for process in trace["processes"].values()}
    assert services == {"festina-gateway", "festina-global_sched", "festina-local_sched"}
    assert spans["gateway.request"]["references"][0]["spanID"] == client_span
    below = spans["gateway.request"]["spanID"]
    assert all(
        s["references"][0]["spanID"] == below for name, s in spans.items() if name != "gateway.request"
    )
    tags = {tag["key"]: tag["value"] for tag in spans["local.decode"]["tags"]}
    assert tags["festina.model"] == MODEL and tags["festina.tenant"] == "team-a"
    assert tags["festina.gpu"] == "emulated-0-gpu-0" and tags["festina.energy_j"] > 0
    assert 345 <= tags["festina.sm_clock_mhz"] <= 1980 and 0 < tags["festina.sm_share_pct"] <= 100
    starts = [
        spans[name]["startTime"]
        for name in ("gateway.request", "local.queue", "local.prefill", "local.decode")
    ]
    assert starts == sorted(starts)
    listed = httpx.get(f"{collector.url}/api/services", trust_env=False).json()["data"]
    assert services <= set(listed)


def test_an_unsampled_trace_is_not_recorded(pool: RunningPool, collector: TraceCollector) -> None:
    trace_id = "1af7651916cd43dd8448eb211c80319c"
    client_with(pool, "alpha").chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=2,
        extra_headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-00"},
    )
    time.sleep(1.5)
    assert httpx.get(f"{collector.url}/api/traces/{trace_id}", trust_env=False).json()["data"] == []


def test_ctrl_c_lets_what_runs_end_and_leaves_nothing_behind(
    tmp_path: Path, collector: TraceCollector
) -> None:
    before = set(os.listdir("/dev/shm"))
    pool = RunningPool(tmp_path, "--emulated", "--gpus", "1", "--models", "1")
    pool.wait_for_models(MODEL)
    children = pool.children()
    assert len(children) >= 6
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="none", max_retries=0, timeout=60)
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream)]
    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(pool.stop)
        chunks += list(stream)
        assert stopping.result() == 0
    assert chunks[-1].choices[0].finish_reason == "length"
    left = [command for pid, command in children.items() if Path(f"/proc/{pid}").exists()]
    assert left == []
    assert port_is_free("127.0.0.1", pool.port)
    assert not (tmp_path / "state" / "run").exists()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    import socket

    port = free_port()
    program = str(Path(sys.executable).parent / "festina")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        outcome = subprocess.run(
            [program, "up", "--emulated", "--port", str(port), "--state-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert outcome.returncode == 1
    assert (
        str(port) in outcome.stderr and "FESTINA_PORT" in outcome.stderr and "Traceback" not in outcome.stderr
    )


def test_a_setting_that_does_not_exist_stops_the_pool_with_one_line(tmp_path: Path) -> None:
    pool = RunningPool(tmp_path, "--emulated", "--gpus", "1", env={"FESTINA_GATEWAY_MAX_INFLIHGT": "3"})
    assert pool._process.wait(60) == 1
    assert "FESTINA_GATEWAY_MAX_INFLIHGT" in pool.output and "Traceback" not in pool.output
