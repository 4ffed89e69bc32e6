"""Two models in real vLLM on one CPU, fp32, greedy: both obey their plans, and one scheduler serves both.

One is SmolLM2, its weights widened to fp32; the other is a small Llama with random weights. In fp32 an answer
does not hang on how its prompt was cut into chunks, or with whom a step was shared: tokens must be identical.
"""

import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import msgspec
import pytest
import pytest_asyncio
from tiny_llama import make_tiny_llama
from vllm_pair import TBT_MS, Pair, prompt_of, request
from vllm_support import MODEL, children, cpu_s, needs_vllm, widened

from shared import engine as en
from shared import events as ev

pytestmark = [*needs_vllm, pytest.mark.asyncio(loop_scope="module")]

SMOL, TINY = "smol-fp32", "tiny-fp32"
POOL_TOKENS = 2_240  # vLLM wants room for one whole context of 2,048
MOST_TOKENS = 40
PREFILLS = 7  # prompts that a decode is beside
FILLER = "The quick brown fox jumps over the lazy dog beside the old mill. "
TOPICS = tuple(FILLER * 3 + topic for topic in ("A river.", "Three colours.", "How bread is baked."))
SPREE = random.Random(7)  # holds and clients of the tests below, the same each time


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    assert MODEL is not None
    folder = tmp_path_factory.mktemp("two")
    models = {SMOL: widened(SMOL), TINY: make_tiny_llama(folder / "tiny", TINY, like=MODEL)}
    made = Pair(models, folder / "run")
    await made.engines.start()
    for model in models.values():
        pool_bytes = POOL_TOKENS * model.kv_bytes_per_token
        made.perform(en.LoadEngine(model=model, kv_pool_bytes=pool_bytes))
    await made.until(lambda: made.ready.keys() == models.keys(), within_s=240)
    for name, model in models.items():  # the pool holds as many fp32 tokens as the specification says
        assert 0 <= POOL_TOKENS - made.ready[name].kv_pool_bytes / model.kv_bytes_per_token < 3 * 32
    yield made
    await made.engines.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(pair: Pair) -> dict[tuple[str, str], list[int]]:
    """What each model answers to each topic when nothing disturbs it."""
    for name in pair.models:
        for topic in TOPICS:
            request_id = f"alone {name} {topic}"
            pair.run(request_id, name, prompt_of(topic), MOST_TOKENS)
            await pair.until_ended(request_id)
    found = {(name, topic): pair.tokens[f"alone {name} {topic}"] for name in pair.models for topic in TOPICS}
    assert all(len(tokens) == MOST_TOKENS for tokens in found.values())
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
    return found


async def test_held_and_let_go_at_random_both_engines_obey_and_answer_the_same(
    pair: Pair, expected: dict[tuple[str, str], list[int]]
) -> None:
    asked = {(name, topic): f"spree {name} {topic}" for name, topic in expected}
    for plan_id, name in enumerate(pair.models, start=1):
        pair.plan(name, plan_id, frozenset(asked.values()), chunk=3)
    for (name, topic), request_id in asked.items():
        pair.run(request_id, name, prompt_of(topic), MOST_TOKENS)
    plan_id = 2
    while not pair.ended.keys() >= set(asked.values()):
        for name in pair.models:
            plan_id += 1
            left = [i for i in asked.values() if i.split()[1] == name and i not in pair.ended]
            held = frozenset(i for i in left if SPREE.random() < 0.5)
            pair.plan(name, plan_id, held, chunk=SPREE.choice((1, 3, 8, 64)))
        await pair.pause(SPREE.uniform(0.0, 0.4))
    assert {key: pair.tokens[request_id] for key, request_id in asked.items()} == expected
    assert plan_id > 10 and pair.shortages == 0


async def test_with_everything_held_both_engines_sleep(pair: Pair) -> None:
    asked = [(name, f"asleep {name} {number}") for name in pair.models for number in range(3)]
    for name in pair.models:
        pair.plan(name, 1_000)
    for name, request_id in asked:
        pair.run(request_id, name, prompt_of(TOPICS[0]), 500)
    await pair.until(lambda: all(pair.tokens.get(request_id) for _, request_id in asked))
    for name in pair.models:
        pair.plan(name, 1_001, frozenset(request_id for _, request_id in asked))
    await pair.pause(1.0)  # the steps under way end
    processes, steps = children(os.getpid()), dict(pair.steps)
    before_s = [cpu_s(pid) for pid in processes]
    await pair.pause(2.0)
    used_s = [cpu_s(pid) - before for pid, before in zip(processes, before_s, strict=True)]
    assert len(processes) == 2 and max(used_s) <= 0.2, used_s
    assert pair.steps == steps
    for name, request_id in asked:
        pair.perform(en.StopRequest(model=name, request_id=request_id))


async def test_a_long_prefill_of_one_model_does_not_stall_the_others_decode(pair: Pair) -> None:
    """Either way round: prompts of one are computed while the other goes on within its TBT target.

    Of several prompts the median counts: a busy machine may let one engine wait through any one of them.
    """
    long_prompt = prompt_of(FILLER * 150)
    pair.govern()
    for decoding, prefilling, prompt_tokens in ((TINY, SMOL, 200), (SMOL, TINY, 2_000)):
        flow = f"flow {decoding}"
        pair.submit(request(flow, decoding, prompt_of(TOPICS[0]), 1_800), 1_800, seq=1)
        await pair.until(lambda flow=flow: len(pair.tokens.get(flow, ())) > 20)
        alone_ms = _mean_tbt_ms(pair.token_s[flow], 0.0, time.monotonic())
        beside_ms, took_ms = [], []
        for number in range(PREFILLS):
            long = f"long {prefilling} {number}"
            started_s = time.monotonic()
            pair.submit(request(long, prefilling, long_prompt[:prompt_tokens], 2), 2, seq=2 + number)
            await pair.until(lambda long=long: bool(pair.tokens.get(long)))
            ended_s = pair.token_s[long][0]
            beside_ms.append(_mean_tbt_ms([started_s, *pair.token_s[flow], ended_s], started_s, ended_s))
            took_ms.append((ended_s - started_s) * 1000)
            await pair.until_ended(long)
        assert flow not in pair.ended
        pair.feed(ev.Abort(request_id=flow, attempt=1, reason="seen enough"))
        rounds = ", ".join(f"{ms:.0f} in {took:.0f}" for ms, took in zip(beside_ms, took_ms, strict=True))
        print(f"{decoding}: {alone_ms:.0f} ms a token; beside prefills of {prefilling}: {rounds}")
        assert median(took_ms) > 2 * alone_ms  # else there was nothing to be stalled by
        assert median(beside_ms) <= max(TBT_MS, 3 * alone_ms)  # the latter where this CPU cannot hold it
    pair.leave()


def _mean_tbt_ms(times_s: list[float], since_s: float, until_s: float) -> float:
    """Mean time between tokens in a stretch of time."""
    inside = [at_s for at_s in times_s if since_s <= at_s <= until_s]
    return (inside[-1] - inside[0]) * 1000 / (len(inside) - 1)


async def test_a_scheduler_that_is_short_of_memory_never_makes_vllm_preempt(
    pair: Pair, expected: dict[tuple[str, str], list[int]]
) -> None:
    """More requests than fit in the small one, most longer than predicted: they wait, or leave and return.

    Those that leave come back with their KV, kept in host memory meanwhile, and go on as if they had not.
    """
    pair.govern()
    asked = {}
    for name, clients in ((SMOL, 8), (TINY, 60)):
        for number in range(clients):
            topic = TOPICS[number % len(TOPICS)]
            request_id = f"tight {name} {number}"
            asked[request_id] = expected[name, topic]
            predicted = SPREE.choice((1, 5, MOST_TOKENS))
            pair.submit(request(request_id, name, prompt_of(topic), MOST_TOKENS), predicted, seq=10 + number)
    await pair.until_ended(*asked)
    print(f"{pair.evictions} evictions, {pair.taken}, {pair.shortages} steps without memory")
    assert pair.evictions > 0 and pair.taken["taken"] > 0
    assert not pair.taken["computed"], pair.untaken
    assert pair.core.state.offload.stages == ()
    assert {request_id: pair.tokens[request_id] for request_id in asked} == asked
    assert all(not pool.holders for pool in pair.core.state.ledger.pools.values())
    pair.leave()


async def test_an_engine_sleeps_and_wakes_as_it_was(
    pair: Pair, expected: dict[tuple[str, str], list[int]]
) -> None:
    pair.plan(SMOL, 10**6)
    pair.run("awake", SMOL, prompt_of(TOPICS[0]), MOST_TOKENS)
    assert "requests" in (await pair.asleep_after(en.SleepEngine(SMOL))).reason
    await pair.until_ended("awake")
    refused = await pair.asleep_after(en.SleepEngine(SMOL, level=2))
    assert refused.level == 0 and "in host memory already" in refused.reason
    used_bytes = pair.engines.sample().used_bytes
    slept = await pair.asleep_after(en.SleepEngine(SMOL))
    assert (slept.level, slept.reason) == (1, "") and slept.freed_bytes > pair.ready[SMOL].kv_pool_bytes
    assert used_bytes - pair.engines.sample().used_bytes > 0.3 * slept.freed_bytes  # not all was ever written
    awake_ms = await pair.ready_in_ms(en.WakeEngine(SMOL, serve=pair.models[SMOL]))
    pair.run("woken", SMOL, prompt_of(TOPICS[1]), MOST_TOKENS)
    await pair.until_ended("woken")
    assert pair.tokens["woken"] == expected[SMOL, TOPICS[1]]
    print(f"asleep in {slept.took_ms:.1f} ms, {slept.freed_bytes:,} bytes free, awake in {awake_ms:.1f} ms")


async def test_a_model_that_is_unloaded_and_loaded_again_has_its_process_still(
    pair: Pair, expected: dict[tuple[str, str], list[int]]
) -> None:
    processes = set(children(os.getpid()))
    await pair.unload(SMOL)
    assert pair.engines.sample().asleep == (SMOL,)
    pool_bytes = POOL_TOKENS * pair.models[SMOL].kv_bytes_per_token
    loaded_ms = await pair.ready_in_ms(en.LoadEngine(pair.models[SMOL], pool_bytes))
    assert set(children(os.getpid())) == processes and pair.engines.sample().asleep == ()
    pair.run("loaded again", SMOL, prompt_of(TOPICS[2]), MOST_TOKENS)
    await pair.until_ended("loaded again")
    assert pair.tokens["loaded again"] == expected[SMOL, TOPICS[2]]
    print(f"loaded again in {loaded_ms:.0f} ms")


async def test_a_process_goes_on_with_the_weights_of_another_model(
    pair: Pair, expected: dict[tuple[str, str], list[int]], tmp_path: Path
) -> None:
    assert MODEL is not None
    other = make_tiny_llama(tmp_path / "other", "other-fp32", like=MODEL, seed=1)
    fresh = msgspec.structs.replace(other, name="fresh-fp32")
    pool_bytes = POOL_TOKENS * other.kv_bytes_per_token
    start_ms = await pair.ready_in_ms(en.LoadEngine(fresh, pool_bytes))
    refused = await pair.asleep_after(en.WakeEngine(SMOL, serve=other))
    assert "cannot take the place" in refused.reason and "hidden_size" in refused.reason
    swap_ms = await pair.ready_in_ms(en.WakeEngine(TINY, serve=other))
    for name in (fresh.name, other.name):
        pair.run(name, name, prompt_of(TOPICS[0]), MOST_TOKENS)
    await pair.until_ended(fresh.name, other.name)
    assert pair.tokens[other.name] == pair.tokens[fresh.name] != expected[TINY, TOPICS[0]]
    await pair.ready_in_ms(en.WakeEngine(other.name, serve=pair.models[TINY]))
    pair.run("back", TINY, prompt_of(TOPICS[0]), MOST_TOKENS)
    await pair.until_ended("back")
    assert pair.tokens["back"] == expected[TINY, TOPICS[0]]
    print(f"other weights in {swap_ms:.0f} ms, against {start_ms:.0f} ms for a process of their own")
    await pair.unload(fresh.name)  # asleep, its process takes the weights of whatever model is like it
    processes = set(children(os.getpid()))
    loaded_ms = await pair.ready_in_ms(en.LoadEngine(other, pool_bytes))
    assert set(children(os.getpid())) == processes and pair.engines.sample().asleep == ()
    pair.run("loaded", other.name, prompt_of(TOPICS[0]), MOST_TOKENS)
    await pair.until_ended("loaded")
    assert pair.tokens["loaded"] == pair.tokens[fresh.name]
    print(f"loaded in its place in {loaded_ms:.0f} ms")
