"""One pool with replicas of everything, whose bus and store belong to the test."""

import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio
from chaos import Clients
from support import RunningPool, Servers
from trace_collector import TraceCollector

from shared.catalog import emulated_models

GATEWAYS = 2
MODELS = [model.name for model in emulated_models(4)]


@pytest.fixture(scope="module")
def pool(
    tmp_path_factory: pytest.TempPathFactory, servers: Servers, collector: TraceCollector
) -> Iterator[RunningPool]:
    env = {
        "FESTINA_NATS_URL": servers.settings.nats_url,
        "FESTINA_REDIS_URL": servers.settings.redis_url,
        "FESTINA_TRACING": "1",
        "FESTINA_OTLP_ENDPOINT": collector.url,
    }
    replicas = ("--schedulers", "3", "--consolidators", "2", "--hosts", "2")
    flags = ("--emulated", "--gpus", "4", "--models", str(len(MODELS)), *replicas)
    made = RunningPool(tmp_path_factory.mktemp("chaos"), *flags, gateways=GATEWAYS, env=env)
    try:
        made.wait_for_models(*MODELS)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def urls(pool: RunningPool) -> list[str]:
    return pool.urls


@pytest_asyncio.fixture
async def clients(urls: list[str]) -> AsyncIterator[Clients]:
    """Clients of a pool on which everything is up."""
    deadline = time.monotonic() + 30
    for url in urls:
        while True:
            try:
                listed = httpx.get(url + "/v1/models", trust_env=False).json()["data"]
                cold = [model["id"] for model in listed if model["state"] == "cold"]
                for name in cold:  # its keep-alive has ended; a request brings it back
                    body = {"model": name, "prompt": "x", "max_tokens": 1}
                    httpx.post(url + "/v1/completions", json=body, timeout=30, trust_env=False)
                if all(model["state"] == "ready" for model in listed):
                    break
            except (httpx.HTTPError, KeyError):
                listed = []
            assert time.monotonic() < deadline, f"{url} has not all models ready: {listed}"
            time.sleep(0.1)
    made = Clients(urls, MODELS)
    yield made
    await made.close()
