"""A running request's move is cut off at each of its steps, and the request ends once, with its tokens.

At each step the bus holds back the message that the step waits for. Then it is lost for so long that the
migrator gives up, or source, destination or migrator is killed; and it comes late in either case. The
processes are real, the GPUs emulated; the steps that need a stage in fact are cut off in
`tests/e2e/test_kv_moves_pool.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import msgspec
import pytest
import pytest_asyncio
from house import HOST, Answer, House
from support import FAST_ANSWERS, ROUNDS, eventually

from shared import events as ev
from shared.catalog import emulated_models

pytestmark = [pytest.mark.resilience, pytest.mark.asyncio(loop_scope="module")]

MODEL = next(model for model in emulated_models(16) if model.params < 4e9)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 60 + "Go on."
MAX_TOKENS, MOVED_AT, GPUS = 320, 20, 4
HASTY = {
    **FAST_ANSWERS,
    "FESTINA_MIGRATOR_STEP_TIMEOUT_MS": "600",
    "FESTINA_MIGRATOR_CREDIT_TRIES": "1",
    "FESTINA_MIGRATOR_CHUNK_BYTES": str(8 << 20),
    "FESTINA_LOCAL_SCHED_MOVE_TTL_MS": "1500",
}

ORDERS = ("release", "prepare", "reserve", "stage_kv", "freeze", "adopt", "commit_move")
ANSWERS = ("prepared", "granted", "kv_staged", "adopted")
BY_TOKENS = ("tokens reserve", "tokens freeze")
STEPS = (*ORDERS, *BY_TOKENS, *ANSWERS) if ROUNDS > 1 else ORDERS
FATES = ("lost", "source killed", "destination killed", "migrator killed")
BEFORE_KV = ORDERS[:3]  # little is at stake there: half of the fates in a short run


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    made = House(tmp_path_factory.mktemp("cut-off"), MODEL, GPUS, HASTY, PROMPT, MAX_TOKENS)
    async with made.running():
        nurse = asyncio.create_task(made.nurse())
        yield made
        nurse.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(house: House) -> str:
    return await house.expected()


@dataclass
class Cut:
    """One move on its way to the step at which it is cut off."""

    house: House
    source: str
    destination: str

    async def reach(self, step: str) -> tuple[str, bytes]:
        """Return the message held back there."""
        way, _, verb = step.rpartition(" ")
        first = "prepare" if verb == "freeze" else verb  # its order is the second release
        self.house.hold(first)
        await asyncio.sleep(0.05)  # the bus reads its rules
        order = self.house.order(self.source, self.destination, by_tokens=way == "tokens")
        await self.house.say_until(lambda: not self.house.held.empty(), HOST, order, within_s=10.0)
        held = await asyncio.wait_for(self.house.held.get(), 5.0)
        if verb == "freeze":
            self.house.hold("release")
            await asyncio.sleep(0.05)
            await self.house.deliver(held)
            held = await asyncio.wait_for(self.house.held.get(), 5.0)
        assert held[0].endswith("release" if verb == "freeze" else verb)
        return held

    async def cut(self, fate: str, held: tuple[str, bytes]) -> None:
        """Let the message be lost, or somebody die; then it comes after all."""
        who = {"source": self.source, "destination": self.destination, "migrator": HOST}.get(fate.split()[0])
        if who is None:
            await eventually(lambda: self.house.has_heard("ended"), within_s=5.0)
            ended = msgspec.msgpack.decode(self.house.last("ended"), type=ev.MoveEnded)
            assert ended.outcome == "aborted", ended
        else:
            self.house.kill(who)
            self.house.launch(who)
        await self.house.let_go(held)


def figures(house: House, gpu: str) -> dict[str, float]:
    """What a GPU's metrics say is held for requests, and what its engine has in fact."""
    shown = httpx.get(f"http://127.0.0.1:{house.metrics_ports[gpu]}/metrics", trust_env=False).text
    names = ("promised_kv_bytes", "open_moves", "engine_requests", "running_requests", "waiting_requests")
    found = {}
    for name in (*names, "used_bytes"):
        values = [
            line.rpartition(" ")[2] for line in shown.splitlines() if line.startswith(f"festina_{name}{{")
        ]
        assert values, f"{gpu} does not show {name}"
        found[name] = sum(map(float, values))
    return found


async def nothing_left(house: House, *gpus: str) -> None:
    """Wait until nobody holds anything, and the ledger's memory is the engine's."""
    await house.at_rest()
    nothing = {"used_bytes": float(MODEL.weight_bytes)}
    deadline_s = time.monotonic() + 5.0
    for gpu in gpus:
        while any(value != nothing.get(name, 0.0) for name, value in figures(house, gpu).items()):
            assert time.monotonic() < deadline_s, (gpu, figures(house, gpu))
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("step", STEPS)
async def test_cut_off_at_any_step_it_ends_once_and_nothing_is_left(
    house: House, expected: str, step: str
) -> None:
    for fate in FATES[:2] if ROUNDS == 1 and step in BEFORE_KV else FATES:
        answer = Answer()
        started_s = time.monotonic()
        house.heard.clear()
        asking = asyncio.create_task(house.ask(answer))
        await eventually(
            lambda answer=answer: len(answer.pieces) >= MOVED_AT and house.has_heard("admitted"), within_s=20
        )
        source = msgspec.msgpack.decode(house.last("admitted"), type=ev.Admitted).gpu
        move = Cut(house, source, house.other(source))
        await move.cut(fate, await move.reach(step))
        await asking
        case = f"{step}, {fate}"
        assert (answer.text, answer.finish_reasons, answer.errors) == (expected, ["length"], []), case
        alive = [gpu for gpu in (move.source, move.destination) if house.engine(gpu).get("state") == "ready"]
        await nothing_left(house, *alive)
        print(f"{case}: {time.monotonic() - started_s:.1f} s, longest gap {answer.longest_gap_ms:.0f} ms")
