"""Running requests move between two real vLLM engines by the services themselves, and each gets killed.

All processes are real: a gateway, a global scheduler, two local schedulers with their engines, and the host's
migrator. There is no consolidator: the test places the model on both GPUs, and orders the moves.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from house import HOST, Answer, House
from support import ROUNDS, eventually
from vllm_support import PYTHON, needs_vllm, widened

from shared import events as ev

pytestmark = [*needs_vllm, pytest.mark.asyncio(loop_scope="module")]

NAME, OTHER_HOST = "smol-fp32", "host-1"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 30 + "Go on."
MAX_TOKENS, MOVED_AT = 120, 15


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    env = {
        "FESTINA_DEVICE_ENGINE": "vllm",
        "FESTINA_DEVICE_GPU_TYPE": "cpu",
        "FESTINA_DEVICE_VLLM_PYTHON": str(PYTHON),
        "FESTINA_LINK_SECRET": "of the test",
        "FESTINA_MIGRATOR_NETWORK_BYTES_S": "1e9",
        "FESTINA_MIGRATOR_CHUNK_BYTES": str(4 << 20),
    }
    folder = tmp_path_factory.mktemp("moves-pool")
    made = House(folder, widened(NAME), gpus=2, env=env, prompt=PROMPT, max_tokens=MAX_TOKENS)
    async with made.running():
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(house: House) -> str:
    return await house.expected()


async def move_one(house: House, expected: str) -> None:
    """Move a request while it decodes, and expect its KV to go with it."""
    await house.all_ready()
    answer = Answer()
    asking = asyncio.create_task(house.ask(answer))
    source = await house.source()
    await eventually(lambda: len(answer.pieces) >= MOVED_AT, within_s=60)
    await house.move(source)
    await asking
    assert (answer.text, answer.finish_reasons, answer.errors) == (expected, ["length"], [])
    loaded = msgspec.msgpack.decode(house.last("kv_loaded"), type=ev.KvLoaded)
    assert loaded.tokens > 0 and not loaded.reason
    print(f"\n{loaded.tokens} tokens moved with their KV; longest gap {answer.longest_gap_ms:.0f} ms")
    await house.at_rest()


async def test_a_running_request_moves_with_its_kv_and_its_client_does_not_notice(
    house: House, expected: str
) -> None:
    await move_one(house, expected)


async def kill_in_a_move(house: House, expected: str, victim: str, verb: str, back_on: str = "") -> None:
    """Kill a process as soon as a message is sent, start it again, and expect the answer to be whole.

    A GPU can come back `back_on` another host, whose migrator is started as well.
    """
    await house.all_ready()
    killed: list[str] = []
    answer = Answer()
    asking = asyncio.create_task(house.ask(answer))
    source = await house.source()
    who = {"source": source, "destination": next(g for g in house.gpus if g != source)}.get(victim, victim)

    def kill_at(heard: str) -> None:
        if heard == verb and not killed:
            killed.append(who)
            house.kill(who)

    await eventually(lambda: len(answer.pieces) >= MOVED_AT, within_s=60)
    order = house.order(source, house.other(source))
    with house.listening(kill_at):
        await house.say_until(lambda: bool(killed), house.host_of[source], order, within_s=20.0)
        if back_on:
            house.host_of[who] = back_on
            house.launch(back_on)
        house.launch(who)
        await asking
    assert (answer.text, answer.finish_reasons, answer.errors) == (expected, ["length"], [])
    if who in house.gpus:
        await house.ready(who)
    await house.at_rest()


MIGRATOR = [(HOST, verb) for verb in ("prepared", "kv_staged", "released", "adopted", "commit_move")]
SOURCE = [("source", verb) for verb in ("kv_staged", "adopt")]
DESTINATION = [("destination", verb) for verb in ("released", "adopted")]


@pytest.mark.resilience
@pytest.mark.parametrize(
    ("victim", "verb"),
    [*MIGRATOR, *SOURCE, *DESTINATION] if ROUNDS > 1 else [MIGRATOR[2], SOURCE[0]],
)  # in a short run one of each, the destination below: tests/resilience kills them at every stage, emulated
async def test_whoever_is_killed_when_a_message_is_sent_the_request_ends_once(
    house: House, expected: str, victim: str, verb: str
) -> None:
    await kill_in_a_move(house, expected, victim, verb)


async def test_between_hosts_kv_goes_by_tcp_and_without_the_other_migrator_it_is_computed(
    house: House, expected: str
) -> None:
    await kill_in_a_move(house, expected, *DESTINATION[0], back_on=OTHER_HOST)
    await move_one(house, expected)
    await kill_in_a_move(house, expected, OTHER_HOST, "kv_staged")
