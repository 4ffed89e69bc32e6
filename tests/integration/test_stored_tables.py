"""Stored look-up tables and what was learnt, on real servers, with the services' own shells."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from support import Servers, eventually

from services.cli import tables
from services.global_sched import main as global_main
from services.global_sched.core import GlobalSchedCore
from services.global_sched.settings import GlobalSettings
from services.local_sched import main as local_main
from services.local_sched.core import LocalSchedCore
from services.local_sched.settings import LocalSettings
from shared import events as ev
from shared.catalog import emulated_models
from shared.config import Common
from shared.devices import device_for
from shared.lut import Lut, from_samples, pack
from shared.lut_samples import Sample
from shared.lut_table import Provenance
from shared.runtime import Shell
from shared.subjects import GATEWAY, lut_key, model_key, subject_of

H100 = device_for("h100-80gb")
QWEN, LLAMA = emulated_models(2)


def table(ms: float, model=QWEN) -> Lut:
    samples = [
        Sample(phase, clock, share, ms, 300.0, tokens * (phase == "prefill"), decode, tokens * decode)
        for phase, decode in (("prefill", 0), ("decode", 1))
        for clock in (795, 1980)
        for share in (10, 100)
        for tokens in (64, 4096)
    ]
    return from_samples(H100, model, samples, Provenance(kind="measured", device="test"))


@pytest.fixture
async def serving(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Start services as their `serve` does; gives their cores."""
    servers.flush()
    store = redis.Redis(port=servers.store_port)
    for model in (QWEN, LLAMA):
        store.set(model_key(model.name), msgspec.msgpack.encode(model))
    stop = asyncio.Event()
    running: list[asyncio.Task[bool]] = []
    cores: dict[str, Any] = {}

    def kept(kind: type) -> Any:
        def make(ident: str, *args: Any, **more: Any) -> Any:
            cores[ident] = kind(ident, *args, **more)
            return cores[ident]

        return make

    monkeypatch.setattr(global_main, "GlobalSchedCore", kept(GlobalSchedCore))
    monkeypatch.setattr(local_main, "LocalSchedCore", kept(LocalSchedCore))

    async def start(ident: str, settings: Any) -> Any:
        common = msgspec.structs.replace(servers.settings, id=ident, drain_s=0.0)
        if isinstance(settings, GlobalSettings):
            serve = global_main.serve(common, settings, stop)
        else:
            serve = local_main.serve(common, local_main.DeviceSettings(), settings, stop)
        running.append(asyncio.create_task(serve))
        await eventually(lambda: ident in cores)
        return cores[ident]

    yield start
    stop.set()
    for task in running:
        assert await asyncio.wait_for(task, 20)


def ttft_ms(core: GlobalSchedCore, model=QWEN) -> float:
    lut = core._fleet.lut("h100-80gb", model.name)
    return 0.0 if lut is None else round(float(lut.ttft_ms(1005, 100, 512)), 1)


async def test_a_table_in_the_store_is_used_from_the_start_and_a_new_one_at_once(
    serving: Any, servers: Servers
) -> None:
    await tables.put(servers.settings, table(41.0))
    scheduler, gpu = await serving("s", GlobalSettings()), await serving("g", LocalSettings())
    await eventually(lambda: ttft_ms(scheduler) == 41.0)
    assert ttft_ms(scheduler, LLAMA) not in (0.0, 41.0)  # modelled
    await eventually(lambda: gpu.state.lut(QWEN).provenance.kind == "measured")

    await tables.put(servers.settings, table(77.0))
    await tables.tell(servers.settings, table(77.0))
    await eventually(lambda: ttft_ms(scheduler) == 77.0)
    await eventually(lambda: round(float(gpu.state.lut(QWEN).ttft_ms(1005, 100, 512)), 1) == 77.0)


async def test_a_damaged_table_is_refused_by_name_and_the_model_serves(
    serving: Any, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    packed = bytearray(pack(table(41.0)))
    packed[-40] ^= 0xFF
    redis.Redis(port=servers.store_port).set(lut_key("h100-80gb", QWEN.name), bytes(packed))
    redis.Redis(port=servers.store_port).set(lut_key("h100-80gb", LLAMA.name), b"old")
    with caplog.at_level(logging.WARNING):
        scheduler = await serving("s", GlobalSettings())
        await eventually(lambda: ttft_ms(scheduler) > 0.0)
        await eventually(lambda: len([r for r in caplog.records if "refused" in r.message]) == 2)
    assert QWEN.name in caplog.text or any(QWEN.name in getattr(r, "error", "") for r in caplog.records)
    assert ttft_ms(scheduler) != 41.0


async def test_what_a_scheduler_learnt_outlives_it_and_helps_a_new_replica(
    serving: Any, servers: Servers
) -> None:
    settings = GlobalSettings(prediction_save_ms=50.0)
    first = await serving("s-1", settings)
    sender = Shell(GATEWAY, "gw", servers.settings)
    await sender.open()
    await eventually(lambda: QWEN.name in first._fleet.models)
    for _ in range(250):
        ended = ev.RequestEnded("r", QWEN.name, "t", "stop", 100, 33)
        sender.bus.publish(subject_of(ev.RequestEnded, QWEN.name), msgspec.msgpack.encode(ended))
    store = redis.Redis(port=servers.store_port)
    key = "festina:v1:learnt:s-1:qwen2-5-7b-instruct"
    await eventually(lambda: (store.get(key) or b"").count(b"\xcb@@\x80") == 250)  # 33.0, 250 times
    assert store.pttl(key) > 0
    again, replica = await serving("s-1", settings), await serving("s-2", settings)
    for core in (again, replica):
        await eventually(
            lambda core=core: core._predictor.predict(QWEN.name, 100, 10_000, 100_000) == 35  # 33 and 5 %
        )
    await sender.close()


async def test_files_are_offered_and_bad_ones_are_named(servers: Servers, tmp_path: Path) -> None:
    servers.flush()
    path = tables.save(tmp_path, table(41.0))
    assert path.name == "h100-80gb--qwen2-5-7b-instruct.lut"
    (tmp_path / "old.lut").write_bytes(b"rubbish")
    (why,) = await tables.offer_files(servers.settings, tmp_path)
    assert why.startswith("old.lut: ")
    stored = redis.Redis(port=servers.store_port).get(lut_key("h100-80gb", QWEN.name))
    assert stored == path.read_bytes()


async def test_without_a_store_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FESTINA_REDIS_URL", raising=False)
    assert not await tables.answers(Common(redis_url="redis://127.0.0.1:1/0"))
    environ = {"FESTINA_NATS_URL": "nats://127.0.0.1:7", "FESTINA_REDIS_URL": "redis://:secret@elsewhere:1/0"}
    tables.note_servers(tmp_path, environ, ["nats"])  # the store is another's
    assert "secret" not in (tmp_path / tables.SERVERS_FILE).read_text()
    assert tables.servers_of(tmp_path).nats_url == "nats://127.0.0.1:7"
    monkeypatch.setenv("FESTINA_NATS_URL", "nats://here:8")
    assert tables.servers_of(tmp_path).nats_url == "nats://here:8"
