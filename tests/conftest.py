"""Fixtures that several kinds of test share."""

import time
from collections.abc import Iterator
from pathlib import Path

import nvml as stub_nvml
import pytest
import redis
from guard_process import Guard
from support import Servers
from trace_collector import TraceCollector


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("store"))
    made.start("nats")
    made.start("store")
    deadline = time.monotonic() + 10
    while True:
        try:
            redis.Redis(port=made.store_port).ping()
            break
        except redis.ConnectionError:
            assert time.monotonic() < deadline, "the store does not start"
            time.sleep(0.05)
    yield made
    made.stop_all()


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    made = TraceCollector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stub_nvml.StubNvml:
    """Four GPUs that `pynvml` finds, in this process and in children that get `nvml.env`."""
    made = stub_nvml.StubNvml(nvml_library, tmp_path / "gpus")
    monkeypatch.setenv("FESTINA_NVML_STUB", made.env["FESTINA_NVML_STUB"])
    return made


@pytest.fixture
def guard(nvml: stub_nvml.StubNvml, tmp_path: Path) -> Iterator[Guard]:
    made = Guard(nvml, tmp_path)
    made.start()
    yield made
    made.close()
