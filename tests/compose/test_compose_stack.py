"""The compose file for real: built, started, asked, broken, asked again, stopped."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from docker_engine import DockerEngine, engine_or_skip
from standin_images import make_standins

from services.cli.supervise import free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen2.5-7B-Instruct"
HELLO = [{"role": "user", "content": "Say hello to the whole wide world."}]
GPUS = {f"emulated-{host}-gpu-{gpu}" for host in (0, 1) for gpu in (0, 1)}
SERVERS = ("nats", "redis", "prometheus", "jaeger")

pytestmark = pytest.mark.compose


class Stack:
    """The pool of compose.yaml, under a project name and on ports of its own."""

    def __init__(self, engine: DockerEngine, folder: Path) -> None:
        self.engine = engine
        self.ports = {
            name: free_port() for name in ("API", "JAEGER", "PROMETHEUS", "NATS", "REDIS", "OTLP", "GRAFANA")
        }
        # passwords that a careless configuration would read as a number
        settings = {"NATS_PASSWORD": "12k", "REDIS_PASSWORD": "00123", "GRAFANA_PASSWORD": "1e5"}
        settings |= {f"{name}_PORT": str(port) for name, port in self.ports.items()}
        self._env_file = folder / "env"
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def compose(self, *args: str, within_s: float = 120.0) -> str:
        where = ["--project-directory", str(ROOT), "--file", str(ROOT / "compose.yaml")]
        where += ["--env-file", str(self._env_file), "--project-name", "festina-test"]
        return self.engine.run("compose", *where, *args, within_s=within_s)

    def up(self) -> None:
        self.compose("up", "--detach", "--build", "--wait", "--wait-timeout", "240", within_s=600)

    def url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def get(self, name: str, path: str, **params: str) -> Any:
        answer = httpx.get(self.url(name, path), params=params, trust_env=False, timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def containers(self) -> dict[str, dict[str, Any]]:
        """Service -> what the engine knows about its one container, ended ones included."""
        ids = self.compose("ps", "--all", "--quiet").split()
        inspected = json.loads(self.engine.run("inspect", *ids))
        return {found["Config"]["Labels"]["com.docker.compose.service"]: found for found in inspected}

    def gpus(self) -> dict[str, str]:
        """GPU -> state."""
        return {gpu["gpu"]: gpu["state"] for gpu in self.get("API", "/admin/gpus")["gpus"]}

    def query(self, expression: str) -> list[dict[str, Any]]:
        found = self.get("PROMETHEUS", "/api/v1/query", query=expression)
        return found["data"]["result"]


@contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"\n{what}: {time.monotonic() - started:.0f} s", flush=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    images = {name: services[name]["image"] for name in SERVERS}
    [images["python"]] = set(
        re.findall(r"^FROM (python:\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    )
    (folder / "engine").mkdir()
    with timed("Docker engine"):
        engine = engine_or_skip(folder / "engine", images["nats"])
    try:
        if engine.own and not engine.pulls(images["nats"]):
            with timed("no registry: stand-in images"):
                make_standins(engine, folder, images)
        made = Stack(engine, folder)
        try:
            with timed("building and starting"):
                made.up()
            yield made
        except BaseException:
            with suppress(Exception):
                print(made.compose("ps", "--all"), made.compose("logs", "--tail", "20"))
            raise
        finally:
            made.compose("down", "--volumes", "--timeout", "5")
    finally:
        engine.close()


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url("API", "/v1"), api_key="unused", max_retries=0, timeout=60)


def eventually(what: str, condition: Any, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        with suppress(httpx.HTTPError, AssertionError):
            if condition():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.25)


def test_every_container_runs_as_it_should(stack: Stack) -> None:
    containers = stack.containers()
    job = containers.pop("catalog")
    assert job["State"]["Status"] == "exited" and job["State"]["ExitCode"] == 0
    assert set(containers) > GPUS and len(containers) == 13
    for name, found in containers.items():
        assert found["State"]["Health"]["Status"] == "healthy", name
        assert found["HostConfig"]["ReadonlyRootfs"] and not found["HostConfig"]["Privileged"], name
        bound = [b for each in found["NetworkSettings"]["Ports"].values() for b in each or ()]
        assert {b["HostIp"] for b in bound} <= {"127.0.0.1"}, name
        uids = re.findall(r"^\s*\d+\s+(\d+)", stack.engine.run("top", found["Id"], "-eo", "pid,uid"), re.M)
        assert uids and "0" not in uids, name


def test_chat_completions_and_a_stream(stack: Stack, client: openai.OpenAI) -> None:
    eventually("the catalog is not served", lambda: len(client.models.list().data) == 16, 10)
    for model in (MODEL, "Llama-3.1-8B-Instruct"):
        answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=12)
        assert answer.usage.completion_tokens == 12 and answer.festina["gpu"] in GPUS
    chunks = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True)
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content


def test_jaeger_shows_the_whole_trace(stack: Stack, client: openai.OpenAI) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    header = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, extra_headers=header)
    wanted = {"gateway.request", "global.dispatch", "local.queue", "local.prefill", "local.decode"}

    def shown() -> set[str]:
        traces = stack.get("JAEGER", f"/api/traces/{trace_id}")["data"]
        return {span["operationName"] for trace in traces for span in trace["spans"]}

    eventually("the trace is incomplete", lambda: shown() == wanted, 15)


def test_prometheus_has_every_service_and_the_dashboard_has_data(stack: Stack, client: openai.OpenAI) -> None:
    running = {"gateway", "global_sched", "consolidator", "migrator", "local_sched"}
    eventually(
        "services are missing",
        lambda: {r["metric"]["service"] for r in stack.query("festina_started_s")} == running,
        40,
    )
    eventually(
        "GPUs are missing", lambda: {r["metric"]["id"] for r in stack.query("festina_power_w")} == GPUS, 20
    )
    rules = stack.get("PROMETHEUS", "/api/v1/rules")["data"]["groups"][0]["rules"]
    assert len(rules) >= 10 and all(rule["health"] != "err" for rule in rules), rules
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/festina.json").read_text())
    quiet = {"Migrations per minute", "Lost attempts, refusals, evictions per minute"}
    quiet |= {"Loads and unloads per minute"}  # nothing is unloaded so soon

    def without_data() -> set[str]:
        return {
            panel["title"]
            for panel in dashboard["panels"]
            for target in panel["targets"]
            if not stack.query(target["expr"].replace("$__rate_interval", "1m"))
        }

    def judged() -> bool:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
        return without_data() <= quiet

    eventually(f"panels without data: {without_data()}", judged, 40)


def test_a_killed_gpu_breaks_no_stream_and_comes_back(stack: Stack, client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 600, "extra_body": {"ignore_eos": True}}
    undisturbed = client.chat.completions.create(**asked)
    gpu, text = undisturbed.festina["gpu"], ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        if not text:
            stack.compose("kill", "--signal", "SIGKILL", gpu)
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == undisturbed.choices[0].message.content
    again = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert again.usage.completion_tokens == 5 and again.festina["gpu"] in GPUS - {gpu}
    stack.compose("up", "--detach", "--wait", "--no-deps", gpu)
    eventually("the GPU does not come back", lambda: stack.gpus().get(gpu, "silent") != "silent", 15)


def test_a_restart_of_everything_keeps_the_models(stack: Stack, client: openai.OpenAI) -> None:
    stack.compose("restart", "--timeout", "30", "redis", "gateway", "global-sched", "consolidator")

    def answers() -> bool:
        with suppress(openai.APIError):
            asked = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
            return asked.usage.completion_tokens == 5 and len(client.models.list().data) == 16
        return False

    eventually("the pool does not come back", answers, 60)


def test_it_stops_cleanly_when_told(stack: Stack) -> None:
    stack.compose("stop", "--timeout", "30", within_s=180)
    codes = {name: found["State"]["ExitCode"] for name, found in stack.containers().items()}
    assert set(codes.values()) == {0}, codes
