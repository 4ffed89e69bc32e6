"""The shell on a real NATS and a real Redis-protocol server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme
from msgspec.structs import replace
from support import Servers, eventually

from shared import events as ev
from shared.catalog import emulated_models
from shared.config import Common
from shared.errors import Unavailable
from shared.model import Instance, Placement, slug
from shared.runtime import Shell
from shared.store import Store
from shared.subjects import CONSOLIDATOR, GLOBAL, LOCAL, PLACEMENT_KEY, model_key

Heard = list[ev.Message | ev.Event]


class Listener:
    """A core that remembers what it hears and answers with what the test gives it."""

    def __init__(self, *answers: ev.Action) -> None:
        self.heard: Heard = []
        self.answers = list(answers)
        self.wake_ms: float | None = None

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        self.heard.append(event)
        if isinstance(event, ev.Tick):
            self.wake_ms = None
        answers, self.answers = self.answers, []
        return answers

    def of(self, kind: type) -> list:
        return [event for event in self.heard if isinstance(event, kind)]


@pytest.fixture
async def shells(servers: Servers) -> AsyncIterator:
    opened: list[Shell] = []

    async def make(service: str, ident: str, core: Listener) -> Shell:
        shell = Shell(service, ident, servers.settings)
        await shell.open()
        opened.append(shell)
        await shell.start(core, {})
        return shell

    servers.flush()
    yield make
    for shell in opened:
        await shell.close()


async def test_a_command_reaches_its_gpu_and_no_other(shells) -> None:
    first, second, sender = Listener(), Listener(), Listener()
    await shells(LOCAL, "Host.A/gpu-0", first)
    await shells(LOCAL, "Host.A/gpu-1", second)
    shell = await shells(GLOBAL, "s", sender)
    order = ev.Unload(model="m", placement_version=3)
    sender.answers = [ev.Send(to="Host.A/gpu-0", message=order)]
    shell.feed(ev.Tick())
    await eventually(lambda: first.of(ev.Unload) == [order])
    assert second.of(ev.Unload) == []


async def test_one_replica_of_a_queue_group_gets_each_message(shells, servers: Servers) -> None:
    from shared.model import Objectives, Request

    schedulers = [Listener(), Listener(), Listener()]
    for i, core in enumerate(schedulers):
        await shells(GLOBAL, f"s{i}", core)
    sender = Listener()
    shell = await shells("gateway", "g", sender)
    for number in range(30):
        request = Request(
            request_id=f"r{number}",
            attempt=1,
            gateway="g",
            model="m",
            prompt_tokens=(1, 2),
            max_tokens=4,
            objectives=Objectives(ttft_ms=1, tbt_ms=1),
        )
        sender.answers = [ev.Send(to="any", message=ev.Dispatch(request=request))]
        shell.feed(ev.Tick())
    await eventually(lambda: sum(len(s.of(ev.Dispatch)) for s in schedulers) == 30)
    await asyncio.sleep(0.1)
    got = sorted(e.request.request_id for s in schedulers for e in s.of(ev.Dispatch))
    assert got == sorted(f"r{n}" for n in range(30))


async def test_what_is_put_is_found_again_by_a_restarted_service(shells, servers: Servers) -> None:
    placement = Placement(version=7, instances=(Instance(model="m", gpus=("g",)),))
    writer = await shells(CONSOLIDATOR, "c", Listener(ev.Put(key=PLACEMENT_KEY, value=placement)))
    store = Store(servers.settings)
    await store.connect()
    for _ in range(200):
        if await store.read(PLACEMENT_KEY, Placement) == placement:
            break
        await asyncio.sleep(0.01)
    late = Listener()
    await shells(GLOBAL, "late", late)
    assert late.of(ev.PlacementChanged) == [ev.PlacementChanged(placement=placement)]
    writer.feed(ev.Tick())
    await store.close()


async def test_what_comes_while_a_service_starts_is_heard_after_what_the_store_knows(
    shells, servers: Servers
) -> None:
    known = Placement(version=7)
    await shells(CONSOLIDATOR, "c", Listener(ev.Put(key=PLACEMENT_KEY, value=known)))
    sender = Listener()
    shell = await shells("gateway", "g", sender)
    late = Listener()
    starting = Shell(GLOBAL, "late", servers.settings)
    await starting.open()
    read, restore = asyncio.Event(), starting._restore

    async def slow() -> None:
        await read.wait()
        await restore()

    starting._restore = slow
    task = asyncio.create_task(starting.start(late, {}))
    await asyncio.sleep(0.1)
    ended = ev.RequestEnded(
        request_id="r", model="m", tenant="t", outcome="stop", input_tokens=1, output_tokens=1
    )
    sender.answers = [ev.Send(to="m", message=ended)]
    shell.feed(ev.Tick())
    await asyncio.sleep(0.2)
    assert late.of(ev.RequestEnded) == []
    read.set()
    await task
    heard = [type(event) for event in late.heard if not isinstance(event, ev.Tick)]
    assert heard == [ev.PlacementChanged, ev.RequestEnded]
    await starting.close()


async def test_a_model_told_before_a_service_listens_and_stored_after_it_has_read_is_heard_of(
    shells, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.runtime.REREAD_S", 0.2)
    added, gone = emulated_models(2)
    store = Store(servers.settings)
    await store.connect()
    store.put(model_key(gone.name), gone)
    await eventually(lambda: not store._waiting)
    core = Listener()
    await shells(LOCAL, "g", core)
    assert core.of(ev.ModelRegistered) == [ev.ModelRegistered(model=gone)]
    store.put(model_key(added.name), added)
    store.delete(model_key(gone.name))
    await eventually(lambda: core.of(ev.ModelRemoved) == [ev.ModelRemoved(model=gone.name)])
    assert core.of(ev.ModelRegistered)[1:] == [ev.ModelRegistered(model=added)]
    await store.close()


async def test_a_core_is_woken_when_it_asked_to_be(shells) -> None:
    from shared.clock import now_ms

    core = Listener()
    shell = await shells(GLOBAL, "s", core)
    core.wake_ms = now_ms() + 50
    shell.feed(ev.BusRestored())
    ticks = len(core.of(ev.Tick))
    await eventually(lambda: len(core.of(ev.Tick)) == ticks + 1)


async def test_an_undecodable_message_is_counted_and_does_not_harm(shells) -> None:
    core = Listener()
    shell = await shells(LOCAL, "g", core)
    shell.bus.publish(f"festina.v1.cmd.gpu.{slug('g')}.unload", b"\xff not msgpack")
    order = ev.Unload(model="m", placement_version=1)
    shell.bus.publish(f"festina.v1.cmd.gpu.{slug('g')}.unload", shell._encoder.encode(order))
    await eventually(lambda: core.of(ev.Unload) == [order])
    assert (
        b'festina_undecodable_messages_total{id="g",service="local_sched",type="Unload"} 1.0'
        in shell.metrics.page()
    )


async def test_a_lost_bus_and_its_return_are_told_and_messages_arrive_again(shells, servers: Servers) -> None:
    listener, sender = Listener(), Listener()
    await shells(LOCAL, "g", listener)
    shell = await shells(GLOBAL, "s", sender)
    servers.stop("nats")
    await eventually(lambda: len(sender.of(ev.BusLost)) == 1 and len(listener.of(ev.BusLost)) == 1)
    order = ev.Unload(model="m", placement_version=1)
    sender.answers = [ev.Send(to="g", message=order)]
    shell.feed(ev.Tick())  # published while the bus is away: kept in the outbox
    servers.start("nats")
    await eventually(lambda: len(sender.of(ev.BusRestored)) == 1 and len(listener.of(ev.BusRestored)) == 1)
    sender.answers = [ev.Send(to="g", message=order)]
    shell.feed(ev.Tick())
    await eventually(lambda: order in listener.of(ev.Unload))


async def test_what_was_missed_while_the_bus_was_away_is_read_from_the_store(
    shells, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.runtime.REREAD_S", 0.2)
    kept, gone, changed, added = emulated_models(4)
    store = Store(servers.settings)
    await store.connect()
    for model in (kept, gone, changed):
        store.put(model_key(model.name), model)
    await eventually(lambda: not store._waiting)
    core = Listener()
    await shells(LOCAL, "g", core)
    servers.stop("nats")
    await eventually(lambda: len(core.of(ev.BusLost)) == 1)
    core.heard.clear()
    larger = replace(changed, context_tokens=2 * changed.context_tokens)
    store.put(model_key(added.name), added)
    store.put(model_key(larger.name), larger)
    store.delete(model_key(gone.name))
    placement = Placement(version=9, drained=("g",))
    store.put(PLACEMENT_KEY, placement)
    await eventually(lambda: not store._waiting)
    servers.start("nats")
    await eventually(lambda: core.of(ev.ModelRemoved) == [ev.ModelRemoved(model=gone.name)])
    registered = core.of(ev.ModelRegistered)
    assert sorted(event.model.name for event in registered) == sorted([added.name, larger.name])
    assert ev.ModelRegistered(model=larger) in registered
    assert core.of(ev.PlacementChanged)[0] == ev.PlacementChanged(placement=placement)
    await store.close()


async def test_what_is_heard_after_the_bus_is_back_is_newer_than_what_the_store_says(
    shells, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.runtime.REREAD_S", 0.2)
    model, own = emulated_models(2)
    core, sender = Listener(), Listener()
    shell = await shells(LOCAL, "g", core)
    admin = await shells("gateway", "gw", sender)
    shell.heard(ev.BusRestored())
    sender.answers = [ev.Send(to="m", message=ev.ModelRegistered(model=model))]  # and in the store later
    admin.feed(ev.Tick())
    await eventually(lambda: core.of(ev.ModelRegistered) == [ev.ModelRegistered(model=model)])
    await asyncio.sleep(0.6)
    assert core.of(ev.ModelRemoved) == []
    # what this process itself has queued to write counts as well
    shell._models.specs[own.name] = own
    servers.stop("store")
    shell.store.put(model_key(own.name), own)
    servers.start("store")
    shell._models.heard.clear()
    await shell._reread()
    assert core.of(ev.ModelRemoved) == [ev.ModelRemoved(model=model.name)]


async def test_writes_survive_a_store_that_is_away(shells, servers: Servers) -> None:
    core = Listener()
    shell = await shells(CONSOLIDATOR, "c", core)
    servers.stop("store")
    for version in (1, 2):
        core.answers = [ev.Put(key=PLACEMENT_KEY, value=Placement(version=version))]
        shell.feed(ev.Tick())
    await asyncio.sleep(0.2)
    servers.start("store")
    found: list[Placement | None] = []

    async def look() -> None:
        while not found or found[-1] is None:
            await asyncio.sleep(0.05)
            try:
                found.append(await shell.store.read(PLACEMENT_KEY, Placement))
            except Exception:
                found.append(None)

    await asyncio.wait_for(look(), 10)
    assert found[-1] == Placement(version=2)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Servers]:
    """Servers that ask for a user and passwords."""
    found = Servers(
        tmp_path, nats=["--user", "festina", "--pass", "bus-secret"], store=["--requirepass", "store-secret"]
    )
    for name in ("nats", "store"):
        found.start(name)
    yield found
    found.stop_all()


def with_passwords(servers: Servers, bus: str, store: str) -> Common:
    url = f"redis://:{store}@127.0.0.1:{servers.store_port}/0"
    return replace(servers.settings, nats_user="festina", nats_password=bus, redis_url=url)


async def test_bus_and_store_are_used_with_their_credentials(guarded: Servers) -> None:
    first, second = Listener(), Listener()
    settings = with_passwords(guarded, "bus-secret", "store-secret")
    opened = [Shell(GLOBAL, "s", settings), Shell(LOCAL, "g", settings)]
    for shell, core in zip(opened, (first, second), strict=True):
        await shell.open()
        await shell.start(core, {})
    order = ev.Unload(model="m", placement_version=3)
    first.answers = [ev.Send(to="g", message=order), ev.Put(key=PLACEMENT_KEY, value=Placement(version=2))]
    opened[0].feed(ev.Tick())
    await eventually(lambda: second.of(ev.Unload) == [order])
    await eventually(lambda: not opened[0].store._waiting)
    assert await opened[1].store.read(PLACEMENT_KEY, Placement) == Placement(version=2)
    for shell in opened:
        await shell.close()


@pytest.mark.parametrize(
    ("bus", "store", "cure"),
    [
        ("wrong-word", "store-secret", "FESTINA_NATS_PASSWORD"),
        ("bus-secret", "wrong-word", "FESTINA_REDIS_URL"),
    ],
)
async def test_a_wrong_password_is_named_with_the_cure_and_not_shown(
    guarded: Servers, monkeypatch: pytest.MonkeyPatch, bus: str, store: str, cure: str
) -> None:
    monkeypatch.setattr("shared.bus.CONNECT_WITHIN_S", 2.0)
    shell = Shell(GLOBAL, "s", with_passwords(guarded, bus, store))
    with pytest.raises(Unavailable, match=cure) as raised:
        await shell.open()
    assert not any(secret in str(raised.value) for secret in ("wrong-word", "bus-secret", "store-secret"))
    assert "\n" not in str(raised.value)
    await shell.close()


async def test_a_password_in_the_address_of_the_bus_is_not_shown_either(
    guarded: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.CONNECT_WITHIN_S", 1.0)
    address = f"nats://festina:wrong-word@127.0.0.1:{guarded.nats_port}"
    shell = Shell(GLOBAL, "s", replace(guarded.settings, nats_url=address))
    with pytest.raises(Unavailable, match="Authorization") as raised:
        await shell.open()
    assert "wrong-word" not in str(raised.value) and str(guarded.nats_port) in str(raised.value)
    await shell.close()


async def test_the_bus_by_tls_with_an_authority_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.CONNECT_WITHIN_S", 2.0)
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "nats.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    pem = str(tmp_path / "nats.pem")
    servers = Servers(tmp_path, nats=["--tls", "--tlscert", pem, "--tlskey", pem])
    for name in ("nats", "store"):
        servers.start(name)
    address = f"tls://127.0.0.1:{servers.nats_port}"
    secured = replace(servers.settings, nats_url=address, nats_ca_file=str(tmp_path / "ca.pem"))
    core = Listener()
    shell = Shell(LOCAL, "g", secured)
    await shell.open()
    await shell.start(core, {})
    order = ev.Unload(model="m", placement_version=1)
    shell.bus.publish(f"festina.v1.cmd.gpu.{slug('g')}.unload", shell._encoder.encode(order))
    await eventually(lambda: core.of(ev.Unload) == [order])
    await shell.close()
    distrusting = Shell(LOCAL, "h", replace(secured, nats_ca_file=str(tmp_path / "stranger.pem")))
    with pytest.raises(Unavailable, match="FESTINA_NATS_CA_FILE"):
        await distrusting.open()
    await distrusting.close()
    servers.stop_all()


async def test_a_missing_bus_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.CONNECT_WITHIN_S", 0.5)
    shell = Shell(GLOBAL, "s", Common(nats_url="nats://127.0.0.1:1", tracing=False))
    with pytest.raises(Unavailable, match="FESTINA_NATS_URL"):
        await shell.open()
