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


@pytest.fixture(scope="session")
def bus_and_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("chaos-store"))
    made.start("nats")
    made.start("store")
    yield made
    made.stop_all()


@pytest.fixture(scope="session")
def traces() -> Iterator[TraceCollector]:
    made = TraceCollector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool(
    tmp_path_factory: pytest.TempPathFactory, bus_and_store: Servers, traces: TraceCollector
) -> Iterator[RunningPool]:
    env = {
        "FESTINA_NATS_URL": bus_and_store.settings.nats_url,
        "FESTINA_REDIS_URL": bus_and_store.settings.redis_url,
        "FESTINA_TRACING": "1",
        "FESTINA_OTLP_ENDPOINT": traces.url,
    }
    replicas = ("--schedulers", "3", "--consolidators", "2", "--hosts", "2")
    flags = ("--emulated", "--gpus", "4", "--models", str(len(MODELS)), *replicas)
    made = RunningPool(tmp_path_factory.mktemp("chaos"), *flags, gateways=GATEWAYS, env=env)
    try:
        made.wait_for_models(*MODELS)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
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
