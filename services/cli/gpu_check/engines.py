"""Two vLLM engines on the card: held and let go by plans, put to sleep and woken."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from services.cli.gpu_check.kernels import Skipped
from services.cli.gpu_check.lab import Lab
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.vllm_env import smollm2_spec
from shared import engine as en
from shared.errors import FestinaError
from shared.events import Event
from shared.model import ModelSpec, Objectives, Plan, Request

POOL_TOKENS = 2_304
TOKENS = 64
LOAD_S, ANSWER_S = 180.0, 60.0
HELD_S = 1.0


class EnginesFound(msgspec.Struct, frozen=True):
    """Times of two engines of one small model.

    Args:
        load_ms: of each, started together.
        tokens_per_s: of one engine alone, and of each beside the other.
        held_steps: steps of an engine under a plan that holds all of its requests; 0 is right.
        resumed: the tokens were those that it gives undisturbed.
        asleep_ms, freed_bytes, wake_ms: of sleep level 1, weights in host memory.
        warm_w, asleep_w: the card with both awake and idle, and with one asleep.
        woken_same: it answered the same after it had slept.
    """

    vllm: str
    load_ms: tuple[float, float]
    alone_tokens_per_s: float
    beside_tokens_per_s: tuple[float, float]
    held_steps: int
    resumed: bool
    asleep_ms: float
    freed_bytes: int
    wake_ms: float
    warm_w: float | None
    asleep_w: float | None
    woken_same: bool


def engines(lab: Lab) -> EnginesFound:
    """Exercise two engines. Raises Skipped: vLLM for CUDA or the small model is not here."""
    facts = lab.host.engine
    if facts.trouble or not facts.vllm:
        raise Skipped(f"vLLM is not installed: {facts.trouble or facts.python + ' has none'}")
    if not facts.torch_cuda:
        raise Skipped(f"not a CUDA device: torch {facts.torch} is a CPU build")
    try:
        spec = smollm2_spec(lab.state_dir / "models")
    except FestinaError as why:
        raise Skipped(str(why)) from None
    with _visible(lab.gpu.uuid):
        return asyncio.run(exercise(lab, spec))


async def exercise(lab: Lab, spec: ModelSpec) -> EnginesFound:
    """Load two engines of a model, and do everything with them that a plan can ask for."""
    names = (f"{spec.name}-one", f"{spec.name}-two")
    pair = _Pair()
    made = VllmEngines(
        python=lab.host.engine.python, run_dir=lab.state_dir / "gpu-check", report=pair.heard.put_nowait
    )
    pair.perform = made.perform
    await made.start()
    try:
        for name in names:
            pool_bytes = POOL_TOKENS * spec.kv_bytes_per_token
            model = msgspec.structs.replace(spec, name=name)
            made.perform(en.LoadEngine(model=model, kv_pool_bytes=pool_bytes))
        await pair.until(lambda: pair.ready.keys() == set(names), LOAD_S)
        load_ms = (pair.ready[names[0]], pair.ready[names[1]])
        alone_s = await pair.answer("alone", names[:1])
        beside_s = await pair.answer("beside", names)
        warm = await asyncio.to_thread(lab.watch, 3.0)
        held_steps = await pair.held(names[0])
        made.perform(en.SleepEngine(model=names[0]))
        await pair.until(lambda: bool(pair.asleep), ANSWER_S)
        asleep = pair.asleep[0]
        if asleep.reason:
            raise FestinaError(f"the engine does not sleep: {asleep.reason}")
        resting = await asyncio.to_thread(lab.watch, 3.0)
        pair.ready.clear()
        made.perform(en.WakeEngine(model=names[0], serve=msgspec.structs.replace(spec, name=names[0])))
        await pair.until(lambda: names[0] in pair.ready, ANSWER_S)
        await pair.answer("woken", names[:1])
    finally:
        await made.close()
    undisturbed = pair.tokens[f"alone {names[0]}"]
    return EnginesFound(
        vllm=lab.host.engine.vllm,
        load_ms=load_ms,
        alone_tokens_per_s=TOKENS / alone_s[0],
        beside_tokens_per_s=(TOKENS / beside_s[0], TOKENS / beside_s[1]),
        held_steps=held_steps,
        resumed=pair.tokens[f"held {names[0]}"] == undisturbed,
        asleep_ms=asleep.took_ms,
        freed_bytes=asleep.freed_bytes,
        wake_ms=pair.ready[names[0]],
        warm_w=warm.power_w,
        asleep_w=resting.power_w,
        woken_same=pair.tokens[f"woken {names[0]}"] == undisturbed,
    )


class _Pair:
    """What both engines have reported, with steps by plan, and requests to them."""

    def __init__(self) -> None:
        self.perform: Callable[[en.Order], None] = lambda order: None
        self.heard: asyncio.Queue[Event] = asyncio.Queue()
        self.ready: dict[str, float] = {}
        self.asleep: list[en.EngineAsleep] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended_s: dict[str, float] = {}
        self.steps: Counter[int] = Counter()

    async def until(self, so: Callable[[], bool], within_s: float) -> None:
        """Listen until something is so. Raises FestinaError: an engine died, or it is not so in time."""
        until_s = time.monotonic() + within_s
        while not so():
            try:
                self._hear(await asyncio.wait_for(self.heard.get(), until_s - time.monotonic()))
            except TimeoutError:
                raise FestinaError(f"the engines did not do it within {within_s:.0f} s") from None

    async def answer(self, what: str, names: tuple[str, ...]) -> list[float]:
        """Have engines answer at one time; returns the seconds that each took."""
        began_s = time.monotonic()
        for name in names:
            self.perform(en.RunRequest(model=name, request=_request(f"{what} {name}", name)))
        await self.until(lambda: all(f"{what} {name}" in self.ended_s for name in names), ANSWER_S)
        return [self.ended_s[f"{what} {name}"] - began_s for name in names]

    async def held(self, name: str) -> int:
        """Hold a request in the middle and let it go; returns the steps made under the plan that holds it."""
        request_id = f"held {name}"
        self.perform(en.RunRequest(model=name, request=_request(request_id, name)))
        await self.until(lambda: len(self.tokens.get(request_id, ())) >= TOKENS // 8, ANSWER_S)
        self.perform(en.SetPlan(model=name, plan=Plan(plan_id=1, held=frozenset({request_id}))))
        await self._listen(HELD_S)
        made = self.steps[1]
        self.perform(en.SetPlan(model=name, plan=Plan(plan_id=2)))
        await self.until(lambda: request_id in self.ended_s, ANSWER_S)
        return made

    async def _listen(self, for_s: float) -> None:
        await asyncio.sleep(for_s)
        while not self.heard.empty():
            self._hear(self.heard.get_nowait())

    def _hear(self, event: Event) -> None:
        match event:
            case en.EngineReady(model=name, load_ms=load_ms):
                self.ready[name] = load_ms
            case en.EngineAsleep():
                self.asleep.append(event)
            case en.EngineEnded(model=name, reason=reason):
                raise FestinaError(f"the engine of {name} has ended: {reason}")
            case en.StepDone(outputs=outputs, plan_id=plan_id):
                self.steps[plan_id] += 1
                for output in outputs:
                    self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                    if output.finish_reason:
                        self.ended_s[output.request_id] = time.monotonic()


def _request(request_id: str, model: str) -> Request:
    return Request(
        request_id=request_id,
        attempt=1,
        gateway="gpu-check",
        model=model,
        prompt_tokens=tuple(range(1000, 1128)),
        max_tokens=TOKENS,
        objectives=Objectives(ttft_ms=60_000.0, tbt_ms=1_000.0),
        sampling={"temperature": 0, "ignore_eos": True},
    )


@contextmanager
def _visible(uuid: str) -> Iterator[None]:
    """Let processes that are started see this card alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
