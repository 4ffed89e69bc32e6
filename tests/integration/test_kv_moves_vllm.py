"""A request in the middle of decoding moves between two real vLLM engines, with its KV and by recomputation.

fp32 and greedy, so what the destination goes on to write must be, token for token, what would have come
without the move. Freeze is from the hold at the source to the first token at the destination.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import pytest
import pytest_asyncio
from vllm_pair import prompt_of, request
from vllm_support import MODEL, PYTHON, needs_vllm, widened

from services.local_sched.engine_vllm import VllmEngines
from services.migrator.link import Links
from services.migrator.receiver import Receiver
from services.migrator.settings import LinkSettings
from services.migrator.stages import Stages
from shared import engine as en
from shared.events import Event
from shared.model import ModelSpec, Plan
from shared.stage import StageSettings, mapped

pytestmark = [*needs_vllm, pytest.mark.asyncio(loop_scope="module")]

NAME = "smol-fp32"
BLOCK_TOKENS, MOVED_AT, MAX_TOKENS = 32, 20, 60
PROMPT = prompt_of("The quick brown fox jumps over the lazy dog. " * 30 + "Go on.") if MODEL else ()
LINK = LinkSettings(secret="of the test")


@dataclass
class Side:
    """One engine in a process of its own, and what it has reported."""

    engines: VllmEngines
    model: ModelSpec
    reports: list[Event] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    token_s: dict[str, list[float]] = field(default_factory=dict)
    prefilled: dict[str, int] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    plan_id: int = 0

    def heard(self, event: Event) -> None:
        self.reports.append(event)
        if isinstance(event, en.StepDone):
            for output in event.outputs:
                run = output.request_id
                self.tokens.setdefault(run, []).extend(output.token_ids)
                self.token_s.setdefault(run, []).extend([time.perf_counter()] * len(output.token_ids))
                self.prefilled[run] = self.prefilled.get(run, 0) + output.prefilled_tokens
        self.news.set()

    async def until(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def until_tokens(self, run: str, count: int) -> None:
        await self.until(lambda: len(self.tokens.get(run, ())) >= count)

    async def next_of(self, kind: type, since: int) -> Event:
        """The first report of a kind after the first `since` reports."""
        await self.until(lambda: any(isinstance(event, kind) for event in self.reports[since:]))
        return next(event for event in self.reports[since:] if isinstance(event, kind))

    def run(
        self,
        run: str,
        done: tuple[int, ...] = (),
        stage: str = "",
        kv_tokens: int = 0,
        prompt: tuple[int, ...] = PROMPT,
    ) -> None:
        asked = msgspec.structs.replace(request(run, NAME, prompt, MAX_TOKENS), output_tokens=done)
        self.engines.perform(en.RunRequest(model=NAME, request=asked, stage=stage, kv_tokens=kv_tokens))

    def hold(self, *held: str) -> None:
        self.plan_id += 1
        self.engines.perform(en.SetPlan(model=NAME, plan=Plan(plan_id=self.plan_id, held=frozenset(held))))

    async def export(self, run: str, stage: str, first_block: int, blocks: int) -> en.KvExported:
        since = len(self.reports)
        self.engines.perform(en.ExportKv(NAME, run, "move", first_block, blocks, stage))
        exported = await self.next_of(en.KvExported, since)
        assert isinstance(exported, en.KvExported)
        return exported

    def stop(self, run: str) -> None:
        self.engines.perform(en.StopRequest(model=NAME, request_id=run))


@dataclass
class Hosts:
    """`source` and `near` share the host `a`; `far` is on the host `b`."""

    source: Side
    near: Side
    far: Side
    a: Stages
    b: Stages
    block_bytes: int

    async def begin(self, run: str, stage: str) -> en.KvExported:
        """Start a request and stage its full blocks while it goes on decoding."""
        self.source.run(run)
        await self.source.until_tokens(run, MOVED_AT)
        blocks = -(-(len(PROMPT) + MAX_TOKENS) // BLOCK_TOKENS)
        assert await self.a.hold(stage, self.block_bytes, blocks) == ""
        exported = await self.source.export(run, stage, 0, blocks)
        assert not exported.reason and exported.tokens == exported.blocks * BLOCK_TOKENS
        assert exported.n_bytes == exported.blocks * self.block_bytes
        return exported

    async def freeze(self, run: str, stage: str, first_block: int) -> en.KvExported:
        """Hold the request and stage the rest of its KV."""
        self.source.hold(run)
        exported = await self.source.export(run, stage, first_block, 1 << 20)
        assert not exported.reason
        assert exported.tokens == len(PROMPT) + len(self.source.tokens[run]) - 1  # the last has none yet
        return exported

    async def resume(
        self, side: Side, run: str, stage: str = "", kv_tokens: int = 0
    ) -> tuple[float, en.KvImported | None]:
        """Start the request elsewhere; returns when its first token came, and what became of its KV."""
        since = len(side.reports)
        side.run(run, tuple(self.source.tokens[run]), stage, kv_tokens)
        await side.until_tokens(run, 1)
        imported = next((e for e in side.reports[since:] if isinstance(e, en.KvImported)), None)
        return side.token_s[run][0], imported

    async def whole(self, side: Side, run: str) -> list[int]:
        """All tokens of a moved request, once they are there."""
        before = self.source.tokens[run]
        await side.until_tokens(run, MAX_TOKENS - len(before))
        self.source.stop(run)
        return before + side.tokens[run]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosts]:
    folder = tmp_path_factory.mktemp("moves")
    where = StageSettings(dir=str(folder / "stages"))
    model = widened(NAME)
    a, b = Stages("a", where), Stages("b", where)
    sides = []
    for name, stages in (("source", a), ("near", a), ("far", b)):
        side = Side(
            VllmEngines(
                python=str(PYTHON),
                run_dir=folder / name,
                report=lambda event, name=name: by_name[name].heard(event),
                stages=stages.folder,
            ),
            model,
        )
        sides.append(side)
    by_name = dict(zip(("source", "near", "far"), sides, strict=True))
    for side in sides:
        await side.engines.start()
        side.engines.perform(en.LoadEngine(model=model, kv_pool_bytes=2_240 * model.kv_bytes_per_token))
    for side in sides:
        await side.until(lambda side=side: bool(side.reports), within_s=300)
        assert isinstance(side.reports[0], en.EngineReady), side.reports
        side.run("warm-up")
        await side.until_tokens("warm-up", MAX_TOKENS)
    made = Hosts(*sides, a, b, BLOCK_TOKENS * model.kv_bytes_per_token)
    yield made
    for side in sides:
        await side.engines.close()
    a.close()
    b.close()
    for stages in (a, b):
        assert [path.name for path in stages.folder.iterdir()] == [".lock"]


@pytest.fixture(scope="module")
def expected(hosts: Hosts) -> list[int]:
    """What the request is answered when it stays where it is."""
    return hosts.source.tokens["warm-up"]


async def test_with_its_kv_and_by_recomputation_it_goes_on_as_if_it_had_stayed(
    hosts: Hosts, expected: list[int]
) -> None:
    source, near = hosts.source, hosts.near
    begun = await hosts.begin("kv", "move-kv")
    assert begun.blocks * BLOCK_TOKENS <= len(PROMPT) + len(source.tokens["kv"])
    frozen_s = time.perf_counter()
    last = await hosts.freeze("kv", "move-kv", begun.blocks)
    assert last.first_block == begun.blocks and last.blocks <= 2  # none if the last block was just full
    asked_s = time.perf_counter()
    first_s, imported = await hosts.resume(near, "kv", "move-kv", last.tokens)
    assert imported is not None and (imported.tokens, imported.reason) == (last.tokens, "")
    assert near.prefilled["kv"] == len(PROMPT) + len(source.tokens["kv"]) - last.tokens == 1
    assert not hosts.a.path("move-kv").exists()  # who has read it removes it
    assert await hosts.whole(near, "kv") == expected
    print(
        f"\n{last.tokens} tokens with their KV: {begun.n_bytes + last.n_bytes:,} bytes, {last.n_bytes:,} "
        f"of them in the freeze of {1000 * (first_s - frozen_s):.0f} ms; exported in {begun.took_ms:.1f} + "
        f"{last.took_ms:.1f} ms, imported in {imported.took_ms:.1f} ms, first token after "
        f"{1000 * (first_s - asked_s):.0f} ms"
    )
    source.run("again")
    await source.until_tokens("again", MOVED_AT)
    frozen_s = time.perf_counter()
    source.hold("again")
    await source.export("again", "", 0, 0)  # by then the step under way has been reported
    asked_s = time.perf_counter()
    first_s, imported = await hosts.resume(near, "again")
    assert imported is None
    assert near.prefilled["again"] == len(PROMPT) + len(source.tokens["again"])
    assert await hosts.whole(near, "again") == expected
    print(
        f"recomputed: freeze of {1000 * (first_s - frozen_s):.0f} ms, first token after "
        f"{1000 * (first_s - asked_s):.0f} ms"
    )


async def test_over_tcp_to_another_host(hosts: Hosts, expected: list[int]) -> None:
    receiver = Receiver(hosts.b, LINK)
    await receiver.start()
    links = Links("a", hosts.a.folder, LINK)
    begun = await hosts.begin("tcp", "move-tcp")
    assert (await links.send(receiver.address, "move-tcp", 0, begun.blocks)).reason == ""
    frozen_s = time.perf_counter()
    last = await hosts.freeze("tcp", "move-tcp", begun.blocks)
    sent = await links.send(receiver.address, "move-tcp", last.first_block, last.blocks)
    assert not sent.reason
    first_s, imported = await hosts.resume(hosts.far, "tcp", "move-tcp", last.tokens)
    assert imported is not None and (imported.tokens, imported.reason) == (last.tokens, "")
    await links.close("move-tcp")
    hosts.a.free("move-tcp")
    assert await hosts.whole(hosts.far, "tcp") == expected
    freeze_ms = 1000 * (first_s - frozen_s)
    print(f"\nover TCP: freeze of {freeze_ms:.0f} ms, the last bytes took {sent.took_ms:.1f} ms")
    await receiver.close()


def _spoil(hosts: Hosts, stage: str) -> None:
    with mapped(hosts.a.path(stage)) as memory:
        memory.block(3)[777] ^= 1


def _lose(hosts: Hosts, stage: str) -> None:
    hosts.a.free(stage)


def _rename(hosts: Hosts, stage: str) -> None:
    with mapped(hosts.a.path(stage)) as memory:
        header = memory.header()
        assert header is not None
        memory.describe(msgspec.structs.replace(header, digest="of other weights"))


def _shorten(hosts: Hosts, stage: str) -> None:
    with mapped(hosts.a.path(stage)) as memory:
        memory.empty(1)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_spoil, "the checksum of block 3 is wrong"),
        (_lose, "is not there"),
        (_rename, "holds no KV that fits"),
        (_shorten, "tokens, not"),
    ],
)
async def test_kv_that_is_not_right_is_computed_instead_and_that_is_said(
    hosts: Hosts, expected: list[int], harm: Callable[[Hosts, str], None], reason: str
) -> None:
    run = f"harmed {harm.__name__}"
    stage = f"move{harm.__name__}"
    begun = await hosts.begin(run, stage)
    last = await hosts.freeze(run, stage, begun.blocks)
    harm(hosts, stage)
    _, imported = await hosts.resume(hosts.near, run, stage, last.tokens)
    assert imported is not None and imported.tokens == 0 and reason in imported.reason, imported
    assert await hosts.whole(hosts.near, run) == expected
    assert not hosts.a.path(stage).exists()


async def test_after_an_abort_the_source_goes_on_where_it_was(hosts: Hosts, expected: list[int]) -> None:
    begun = await hosts.begin("stays", "move-stays")
    await hosts.freeze("stays", "move-stays", begun.blocks)
    hosts.a.free("move-stays")
    hosts.source.hold()
    await hosts.source.until_tokens("stays", MAX_TOKENS)
    assert hosts.source.tokens["stays"] == expected
    assert hosts.source.prefilled["stays"] == len(PROMPT)


async def test_what_cannot_be_exported_is_refused_and_harms_nothing(
    hosts: Hosts, expected: list[int]
) -> None:
    source = hosts.source
    await hosts.begin("asked", "move-asked")
    assert "is not in the engine" in (await source.export("nobody", "move-asked", 0, 1)).reason
    assert "is not there" in (await source.export("asked", "move-none", 0, 1)).reason
    assert "no name of a stage" in (await source.export("asked", "../x", 0, 1)).reason
    assert await hosts.a.hold("move-small", 1_000, 4) == ""
    refused = await source.export("asked", "move-small", 0, 1)
    assert "blocks of 1000 bytes" in refused.reason and refused.blocks == refused.n_bytes == 0
    assert await hosts.a.hold("move-short", hosts.block_bytes, 1) == ""
    assert "room for" in (await source.export("asked", "move-short", 0, 10)).reason
    for stage in hosts.a.pool.stages:
        hosts.a.free(stage)
    await source.until_tokens("asked", MAX_TOKENS)
    assert source.tokens["asked"] == expected


async def test_without_free_blocks_the_kv_is_left(hosts: Hosts, expected: list[int]) -> None:
    """The destination is full: what has come is not taken, and is computed once there is memory."""
    near = hosts.near
    fillers = {"long": PROMPT * 5, "short": PROMPT}  # leave less than the request needs
    for run, prompt in fillers.items():
        near.run(run, prompt=prompt)
        await near.until_tokens(run, 1)
    near.hold(*fillers)
    begun = await hosts.begin("late", "move-late")
    last = await hosts.freeze("late", "move-late", begun.blocks)
    since = len(near.reports)
    near.run("late", tuple(hosts.source.tokens["late"]), "move-late", last.tokens)
    imported = await near.next_of(en.KvImported, since)
    assert isinstance(imported, en.KvImported) and imported.tokens == 0, imported
    assert "free blocks" in imported.reason
    for run in fillers:
        near.stop(run)
    assert await hosts.whole(near, "late") == expected


async def test_killed_after_the_freeze_the_source_is_not_missed(hosts: Hosts, expected: list[int]) -> None:
    begun = await hosts.begin("orphan", "move-orphan")
    last = await hosts.freeze("orphan", "move-orphan", begun.blocks)
    since = len(hosts.source.reports)
    (engine,) = hosts.source.engines._engines.values()
    assert engine.process is not None
    os.kill(engine.process.pid, signal.SIGKILL)
    ended = await hosts.source.next_of(en.EngineEnded, since)
    assert isinstance(ended, en.EngineEnded) and "SIGKILL" in ended.reason
    _, imported = await hosts.resume(hosts.near, "orphan", "move-orphan", last.tokens)
    assert imported is not None and imported.tokens == last.tokens
    await hosts.near.until_tokens("orphan", MAX_TOKENS - len(hosts.source.tokens["orphan"]))
    assert hosts.source.tokens["orphan"] + hosts.near.tokens["orphan"] == expected
    assert not hosts.a.path("move-orphan").exists()
