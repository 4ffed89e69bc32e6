"""The real vLLM engine on this machine's CPU: its tokens, holding, stopping, dying. Mostly one engine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from vllm_support import (
    COLOURS,
    COLOURS_TOKENS,
    MODEL,
    MODELS_DIR,
    PYTHON,
    ROOT,
    children,
    cpu_s,
    needs_vllm,
    offline,
    widened,
)

from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.vllm_env import MODEL_NAME
from shared.engine import (
    ClockApplied,
    EngineEnded,
    EngineReady,
    ExportKv,
    KvExported,
    LoadEngine,
    RunRequest,
    SetClock,
    SetPlan,
    StepDone,
    StepOutput,
    StopRequest,
    UnloadEngine,
)
from shared.events import Event
from shared.model import Objectives, Plan, Request

pytestmark = [*needs_vllm, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = COLOURS_TOKENS
POOL_BYTES = 128 << 20


@dataclass
class Bench:
    """The engines under test, and what they have reported."""

    engines: VllmEngines
    prompt: tuple[int, ...]
    heard: "asyncio.Queue[Event]"
    plan_id: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[StepOutput] = field(default_factory=list)

    async def next(self, within_s: float = 60.0) -> Event:
        event = await asyncio.wait_for(self.heard.get(), within_s)
        if isinstance(event, StepDone):
            for output in event.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self.outputs.append(output)
        return event

    async def until_end(self, request_id: str) -> StepOutput:
        while True:
            event = await self.next()
            assert isinstance(event, StepDone), event
            for output in event.outputs:
                if output.request_id == request_id and output.finish_reason:
                    return output

    async def until_tokens(self, request_id: str, count: int) -> None:
        while len(self.tokens.get(request_id, ())) < count:
            await self.next()

    async def obeyed(self) -> None:
        """Wait until the engine has obeyed all orders so far, and told of the step then under way."""
        self.engines.perform(
            ExportKv(
                model=MODEL_NAME, request_id="nobody's", move_id="asked", first_block=0, blocks=0, stage=""
            )
        )
        while not isinstance(await self.next(), KvExported):
            pass

    async def until_silent(self, for_s: float) -> None:
        """Wait until nothing has come for that long."""
        while True:
            try:
                await self.next(within_s=for_s)
            except TimeoutError:
                return

    def prefilled(self, request_id: str) -> int:
        return sum(output.prefilled_tokens for output in self.outputs if output.request_id == request_id)

    def plan(self, *held: str, order: tuple[str, ...] = (), chunk_tokens: int = 8192, **more: float) -> None:
        self.plan_id += 1
        plan = Plan(
            plan_id=self.plan_id, held=frozenset(held), order=order, chunk_tokens=chunk_tokens, **more
        )
        self.engines.perform(SetPlan(model=MODEL_NAME, plan=plan))

    def run(
        self, request_id: str, max_tokens: int = MAX_TOKENS, done: tuple[int, ...] = (), **sampling: object
    ) -> None:
        request = Request(
            request_id=request_id,
            attempt=1,
            gateway="g",
            model=MODEL_NAME,
            prompt_tokens=self.prompt,
            output_tokens=done,
            max_tokens=max_tokens,
            objectives=Objectives(ttft_ms=15_000, tbt_ms=1_000),
            sampling={"temperature": 0} | sampling,
        )
        self.engines.perform(RunRequest(model=MODEL_NAME, request=request))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    assert MODEL is not None
    heard: asyncio.Queue[Event] = asyncio.Queue()
    run_dir = tmp_path_factory.mktemp("run")
    engines = VllmEngines(python=str(PYTHON), run_dir=run_dir, report=heard.put_nowait)
    await engines.start()
    model = widened(MODEL_NAME)
    engines.perform(LoadEngine(model=model, kv_pool_bytes=POOL_BYTES))
    tokenizer = Tokenizer.from_file(f"{MODEL.tokenizer}/tokenizer.json")
    made = Bench(engines, tuple(tokenizer.encode(COLOURS, add_special_tokens=False).ids), heard)
    ready = await made.next(within_s=120)
    assert isinstance(ready, EngineReady), ready
    assert ready.block_tokens == 32
    assert POOL_BYTES - 2 * 32 * model.kv_bytes_per_token < ready.kv_pool_bytes < POOL_BYTES
    yield made
    await engines.close()
    assert not children(os.getpid())
    assert {path.suffix for path in run_dir.iterdir()} == {".log"}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What vLLM itself generates for the prompt, with its own scheduler."""
    tokens = offline().colours
    assert len(tokens) > 20
    return tokens


async def test_generates_what_vllm_generates(bench: Bench, expected: list[int]) -> None:
    bench.plan()
    bench.run("a")
    first = await bench.next()
    assert isinstance(first, StepDone)
    assert first.plan_id == bench.plan_id
    assert first.duration_ms > 0
    assert first.outputs == (
        StepOutput(request_id="a", token_ids=(expected[0],), prefilled_tokens=len(bench.prompt)),
    )
    assert bench.engines.sample().state == "active"
    end = await bench.until_end("a")
    assert bench.tokens["a"] == expected
    assert end.finish_reason == ("length" if len(expected) == MAX_TOKENS else "stop")
    reading = bench.engines.sample()
    assert (reading.state, reading.power_w, reading.energy_j) == ("warm", None, None)
    assert 300e6 < reading.used_bytes < 4e9


async def test_decode_steps_keep_the_interval_of_the_plan(bench: Bench, expected: list[int]) -> None:
    bench.plan(step_interval_ms=300.0)
    bench.run("paced", max_tokens=4)
    ends_s = []
    for _ in range(4):
        assert isinstance(await bench.next(), StepDone)
        ends_s.append(time.monotonic())
    assert bench.tokens["paced"] == expected[:4]
    assert min(later - end for end, later in pairwise(ends_s[1:])) > 0.15  # from start to start it is 0.3 s
    bench.plan(step_interval_ms=60_000.0)
    bench.run("hurried", max_tokens=2)
    await bench.until_tokens("hurried", 1)
    bench.plan()
    await bench.until_end("hurried")


async def test_held_from_the_start_waits_without_burning_cpu(bench: Bench, expected: list[int]) -> None:
    bench.plan("held-one")
    bench.run("held-one")
    bench.run("free-one")
    await bench.until_end("free-one")
    assert bench.tokens["free-one"] == expected
    await bench.obeyed()
    (pid,) = children(os.getpid())
    before_s = cpu_s(pid)
    await bench.until_silent(1.0)
    assert cpu_s(pid) - before_s < 0.1
    assert "held-one" not in bench.tokens
    bench.plan()
    await bench.until_end("held-one")
    assert bench.tokens["held-one"] == expected


async def test_an_interrupt_from_the_terminal_is_not_for_it(bench: Bench) -> None:
    (pid,) = children(os.getpid())
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)


async def test_held_while_running_goes_on_where_it_was(bench: Bench, expected: list[int]) -> None:
    bench.plan()
    bench.run("pausing")
    await bench.until_tokens("pausing", 5)
    bench.plan("pausing")
    await bench.obeyed()
    so_far = len(bench.tokens["pausing"])
    assert 5 <= so_far < len(expected)
    prefilled = bench.prefilled("pausing")
    bench.plan()
    event = await bench.next()
    assert isinstance(event, StepDone)
    assert event.plan_id == bench.plan_id
    await bench.until_end("pausing")
    assert bench.tokens["pausing"] == expected
    assert bench.prefilled("pausing") == prefilled


async def test_resumes_with_tokens_made_elsewhere(bench: Bench, expected: list[int]) -> None:
    bench.plan()
    bench.run("second-attempt", done=tuple(expected[:10]), max_tokens=20)
    end = await bench.until_end("second-attempt")
    assert end.finish_reason == "length"
    assert bench.prefilled("second-attempt") == len(bench.prompt) + 10
    assert bench.tokens["second-attempt"] == expected[10:20]


async def test_a_step_computes_no_more_prompt_than_the_plan_says(bench: Bench) -> None:
    bench.plan("other")
    bench.run("decoding", ignore_eos=True, max_tokens=200)
    await bench.until_tokens("decoding", 1)
    bench.plan("other", chunk_tokens=5)
    await bench.obeyed()
    bench.run("chunked", max_tokens=1)
    del bench.outputs[:]
    steps_with_prefill = 0
    while not bench.tokens.get("chunked"):
        event = await bench.next()
        assert isinstance(event, StepDone)
        done = {o.request_id: o for o in event.outputs}
        assert len(done["decoding"].token_ids) == 1, "a prefill must not hold up a decode"
        steps_with_prefill += "chunked" in done
    prefilled = [o.prefilled_tokens for o in bench.outputs if o.request_id == "chunked"]
    assert max(prefilled) == 5
    assert sum(prefilled) == len(bench.prompt)
    assert steps_with_prefill == -(-len(bench.prompt) // 5)
    bench.engines.perform(StopRequest(model=MODEL_NAME, request_id="decoding"))
    await bench.obeyed()


async def test_prefills_take_turns_as_the_plan_says(bench: Bench, expected: list[int]) -> None:
    bench.plan("first", "second", "third", order=("third", "second", "first"), chunk_tokens=5)
    for request_id in ("first", "second", "third"):
        bench.run(request_id, max_tokens=2)
    bench.plan(order=("third", "second", "first"), chunk_tokens=5)
    for request_id in ("third", "second", "first"):
        await bench.until_end(request_id)
    assert [o.request_id for o in bench.outputs if o.finish_reason][-3:] == ["third", "second", "first"]
    assert {tuple(bench.tokens[i]) for i in ("first", "second", "third")} == {tuple(expected[:2])}


async def test_one_that_is_more_urgent_overtakes_a_prompt_that_is_half_computed(
    bench: Bench, expected: list[int]
) -> None:
    bench.plan(order=("urgent", "begun"), chunk_tokens=2)
    bench.run("begun", max_tokens=2)
    while not bench.prefilled("begun"):
        await bench.next()
    bench.run("urgent", max_tokens=1)
    await bench.until_end("urgent")
    assert "begun" not in bench.tokens or not bench.tokens["begun"]
    assert bench.prefilled("begun") < len(bench.prompt)
    await bench.until_end("begun")
    assert bench.tokens["begun"] == expected[:2] and bench.tokens["urgent"] == expected[:1]
    assert bench.prefilled("begun") == len(bench.prompt)


async def test_says_what_vllm_refuses(bench: Bench) -> None:
    bench.plan()
    bench.run("cold", temperature=-1.0)
    bench.run("unheard-of", warmth=1)
    bench.run("too-long", done=tuple(range(100, 2148)), max_tokens=3000)
    for request_id, telling in (("cold", "temperature"), ("unheard-of", "warmth"), ("too-long", "2048")):
        end = await bench.until_end(request_id)
        assert end.finish_reason == "error"
        assert telling in end.error


async def test_stopped_requests_say_nothing_more(bench: Bench, expected: list[int]) -> None:
    bench.plan()
    bench.run("endless", ignore_eos=True, max_tokens=1500)
    await bench.until_tokens("endless", 3)
    bench.engines.perform(StopRequest(model=MODEL_NAME, request_id="endless"))
    bench.engines.perform(StopRequest(model=MODEL_NAME, request_id="never-there"))
    await bench.obeyed()
    count = len(bench.tokens["endless"])
    assert count < 100
    bench.run("next")
    await bench.until_end("next")
    assert bench.tokens["next"] == expected
    assert len(bench.tokens["endless"]) == count


async def test_a_cpu_has_no_clock_to_set(bench: Bench) -> None:
    bench.engines.perform(SetClock(sm_clock_mhz=1200))
    assert await bench.next() == ClockApplied(asked_mhz=1200, applied_mhz=0, reason="no clock control on cpu")


async def test_a_killed_engine_is_reported_with_its_cause(bench: Bench) -> None:
    bench.run("lost", ignore_eos=True, max_tokens=1500)
    await bench.until_tokens("lost", 1)
    (pid,) = children(os.getpid())
    os.kill(pid, signal.SIGKILL)
    event: Event = await bench.next()
    while isinstance(event, StepDone):
        event = await bench.next()
    assert isinstance(event, EngineEnded)
    assert "SIGKILL" in event.reason
    assert bench.engines.sample().state == "cold"
    bench.run("too-late")
    await bench.until_silent(0.2)
    assert "too-late" not in bench.tokens


async def test_a_model_that_cannot_be_loaded_is_reported_with_its_cause(bench: Bench, tmp_path: Path) -> None:
    assert MODEL is not None
    unloadable = msgspec.structs.replace(MODEL, name="unloadable", weights=str(tmp_path / "missing"))
    bench.engines.perform(LoadEngine(model=unloadable))
    event = await bench.next(within_s=60)
    assert isinstance(event, EngineEnded)
    assert event.model == "unloadable"
    assert "missing' are no folder" in event.reason
    assert event.reason.endswith(".log")


async def test_unloads_while_loading(bench: Bench) -> None:
    assert MODEL is not None
    bench.engines.perform(LoadEngine(model=MODEL))
    await asyncio.sleep(0.5)
    assert len(children(os.getpid())) == 1
    bench.engines.perform(UnloadEngine(model=MODEL_NAME))
    assert await bench.next(within_s=10) == EngineEnded(model=MODEL_NAME)
    assert not children(os.getpid())


PARENT = """
import asyncio, sys
from pathlib import Path
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.vllm_env import smollm2_spec
from shared.engine import LoadEngine
async def main():
    engines = VllmEngines(python=sys.argv[1], run_dir=Path(sys.argv[2]), report=print)
    await engines.start()
    engines.perform(LoadEngine(model=smollm2_spec(Path(sys.argv[3]))))
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_an_engine_does_not_outlive_its_scheduler(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(PYTHON), str(tmp_path), str(MODELS_DIR)], cwd=ROOT
    )
    for _ in range(100):
        await asyncio.sleep(0.1)
        if found := children(parent.pid):
            break
    (pid,) = found
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"engine process {pid} lives on")
