"""GPU hosts with networks of their own join by the addresses of bus and store, are cut off, and leave."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from chaos import Clients, wait_until_idle
from netns import Network, why_not
from support import FAST_ANSWERS, ROUNDS, RunningPool, bare_environ

from services.cli.pool import nats_server_argv, store_server_argv
from services.cli.supervise import free_port
from shared.catalog import emulated_models

pytestmark = pytest.mark.resilience

CUT_S = 10.0  # longer than the lease of a gateway and than the 3 s in which a dead link is noticed
MODELS = emulated_models(2)
METRICS_PORT = 9464


class Pool:
    """Bus, store and gateway on the root's side of a bridge; GPU hosts in namespaces."""

    def __init__(self, folder: Path) -> None:
        self.network = Network()
        self.folder = folder
        self.servers: list[subprocess.Popen[bytes]] = []
        self.hosts: dict[int, list[subprocess.Popen[bytes]]] = {}
        nats_port, store_port = free_port(), free_port()
        nats = [*nats_server_argv(nats_port), "-a", "0.0.0.0", "--user", "festina", "--pass", "bus-secret"]
        store = store_server_argv(store_port, folder)
        store += ["--bind", "0.0.0.0", "--requirepass", "store-secret"]
        for argv in (nats, store):
            self.servers.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        self.credentials = {
            "FESTINA_NATS_URL": f"nats://{self.network.address}:{nats_port}",
            "FESTINA_NATS_USER": "festina",
            "FESTINA_NATS_PASSWORD": "bus-secret",
            "FESTINA_REDIS_URL": f"redis://:store-secret@{self.network.address}:{store_port}/0",
        }
        self.up = RunningPool(folder, "--emulated", "--gpus", "0", env=self.credentials)

    def join(self) -> int:
        """Start a GPU host: a migrator and the local scheduler of its one GPU."""
        number = self.network.add()
        name = f"host-{number}"
        environ = {**bare_environ(), **self.credentials, **FAST_ANSWERS, "FESTINA_TRACING": "0"}
        gpu = {
            "FESTINA_ID": f"{name}-gpu-0",
            "FESTINA_DEVICE_HOST": name,
            "FESTINA_METRICS_HOST": "0.0.0.0",
            "FESTINA_METRICS_PORT": str(METRICS_PORT),
        }
        self.hosts[number] = [
            self._start(number, "local_sched", {**environ, **gpu}),
            self._start(number, "migrator", {**environ, "FESTINA_ID": name}),
        ]
        return number

    def _start(self, number: int, service: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        argv = self.network.argv(number, sys.executable, "-m", f"services.{service}.main")
        with (self.folder / f"{environ['FESTINA_ID']}.log").open("ab") as log:
            return subprocess.Popen(argv, env=environ, stdout=log, stderr=log)

    def gpus(self) -> dict[str, dict]:
        found = httpx.get(self.up.url + "/admin/gpus", trust_env=False).json()["gpus"]
        return {gpu["gpu"]: gpu for gpu in found}

    def metrics(self, number: int) -> str:
        address = self.network.address_of(number)
        return httpx.get(f"http://{address}:{METRICS_PORT}/metrics", trust_env=False).text

    def close(self) -> None:
        try:
            self.up.stop()
        finally:
            processes = [process for started in self.hosts.values() for process in started] + self.servers
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            self.network.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    if reason := why_not():
        pytest.skip(reason)
    made = Pool(tmp_path_factory.mktemp("hosts"))
    try:
        yield made
    finally:
        made.close()


async def until(condition, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            if condition():
                return
        except (httpx.HTTPError, KeyError):
            pass
        assert time.monotonic() < deadline, f"still not so after {within_s} s"
        await asyncio.sleep(0.1)


async def test_hosts_join_are_cut_off_and_leave_under_load(hosts: Pool) -> None:
    await until(lambda: httpx.get(hosts.up.url + "/health", trust_env=False).status_code == 200, 30)
    for _ in range(2):
        hosts.join()
    await until(lambda: len(hosts.gpus()) == 2, 15)
    for model in MODELS:
        answer = httpx.post(
            hosts.up.url + "/admin/models", content=msgspec.json.encode(model), trust_env=False
        )
        assert answer.status_code < 300
    hosts.up.wait_for_models(*(model.name for model in MODELS))
    clients = Clients([hosts.up.url], [model.name for model in MODELS])
    await clients.learn(prompts=4)
    assert {len(gpu["engines"]) for gpu in hosts.gpus().values()} == {1}  # one model each

    stop = asyncio.Event()
    load = asyncio.create_task(clients.load(8, stop))
    for number in (0, 1) * 2 if ROUNDS > 1 else (0,):
        await asyncio.sleep(2.0)
        hosts.network.link(number, up=False)
        await asyncio.sleep(CUT_S)
        assert len(hosts.gpus()) == 2
        hosts.network.link(number, up=True)
        await asyncio.sleep(4.0)
        # what ran behind the cut went on, and took no gateway for dead
        assert "festina_gateways_lost" not in hosts.metrics(number)
    leaving = hosts.hosts[0][0]
    leaving.terminate()  # it drains, and the other takes over
    assert await asyncio.to_thread(leaving.wait, 30) == 0
    await asyncio.sleep(2.0)
    stop.set()
    await load
    await clients.close()
    print(clients.summary())

    assert clients.wrong() == [] and clients.failed() == []
    assert {o.report["gpu"] for o in clients.outcomes} == {"host-0-gpu-0", "host-1-gpu-0"}
    assert any(o.report["attempt"] == 2 for o in clients.outcomes)  # what ran behind the cut link
    assert hosts.hosts[1][0].poll() is None and hosts.hosts[1][1].poll() is None
    await wait_until_idle(hosts.up.url, 3.0)
