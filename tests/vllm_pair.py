"""Two models in real vLLM on this machine's CPU, their reports checked, with or without a local scheduler."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from vllm_support import MODEL, PYTHON

from services.local_sched.core import LocalSchedCore
from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.clock import now_ms
from shared.devices import device_for
from shared.model import ModelSpec, Objectives, Plan, Request

TBT_MS = 250.0
SLEEP_BYTES = 32 << 30


class Pair:
    """Both engines, and all that they have reported; with a core, its local scheduler as well.

    Every step is checked against the plan that it says it ran under.
    """

    def __init__(self, models: dict[str, ModelSpec], run_dir: Path) -> None:
        self.models = models
        self.engines = VllmEngines(
            python=str(PYTHON), run_dir=run_dir, report=self.heard, sleep_bytes=SLEEP_BYTES
        )
        self.ready: dict[str, en.EngineReady] = {}
        self.plans: dict[tuple[str, int], Plan] = {}
        self.tokens: dict[str, list[int]] = {}
        self.token_s: dict[str, list[float]] = {}
        self.ended: dict[str, str] = {}
        self.steps: Counter[str] = Counter()
        self.asleep: list[en.EngineAsleep] = []
        self.unloaded: list[str] = []
        self.prefilled: Counter[str] = Counter()
        self.shortages = 0
        self.given: dict[str, int] = {}
        self.evictions = 0
        self.taken: Counter[str] = Counter()  # KV from host memory, or not, by the outcome
        self.untaken: list[str] = []  # why not
        self.wrong: Exception | None = None
        self.core: LocalSchedCore | None = None
        self._decoding: defaultdict[str, set[str]] = defaultdict(set)
        self._stopped: set[str] = set()
        self._short: set[str] = set()  # wait for memory, and have said so
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # ---- orders and reports

    def perform(self, order: en.Order) -> None:
        match order:
            case en.LoadEngine(model=model) if model.name in self.ready:
                asyncio.get_running_loop().call_soon(self.heard, self.ready[model.name])
                return
            case en.RunRequest(request=request):
                self.given[request.request_id] = request.context_tokens
            case en.SetPlan(model=name, plan=plan):
                self.plans[name, plan.plan_id] = plan
            case en.StopRequest(model=name, request_id=run_id):
                self._decoding[name].discard(run_id)
                self._stopped.add(run_id)
        self.engines.perform(order)

    def heard(self, event: ev.Event) -> None:
        """Take a report; what is wrong with it is told to whoever waits, and not to the engine."""
        self._news.set()
        try:
            self._hear(event)
        except Exception as error:
            self.wrong = self.wrong or error

    def _hear(self, event: ev.Event) -> None:
        match event:
            case en.EngineReady(model=name):
                self.ready[name] = event
            case en.EngineAsleep():
                self.asleep.append(event)
            case en.StepDone():
                self._check(event)
            case en.OutOfMemory():
                self._short.add(event.request_id)
                self.shortages += 1
            case en.KvExported(reason=reason) | en.KvImported(reason=reason) if reason:
                self.untaken.append(reason)
            case en.EngineEnded(model=name, reason=""):
                self.unloaded.append(name)
            case en.EngineEnded():
                raise AssertionError(event)
        if self.core is not None:
            self.feed(event)
        elif isinstance(event, en.StepDone):
            for output in event.outputs:
                self._take(output.request_id, output.token_ids, output.finish_reason)

    def _check(self, step: en.StepDone) -> None:
        """No held request ran, no free one that decodes was left out, and no chunk was too large.

        Nor was anything computed twice in one run, as it is when vLLM preempts.
        """
        self.steps[step.model] += 1
        plan = self.plans.get((step.model, step.plan_id), Plan(plan_id=0))
        ran = {output.request_id: output for output in step.outputs}
        assert not ran.keys() & plan.held, (ran, plan)
        decoding = self._decoding[step.model]
        self._short -= ran.keys()
        free = decoding - plan.held - self._short
        assert free <= ran.keys(), f"{free - ran.keys()} were left out under {plan}"
        assert all(len(ran[run_id].token_ids) == 1 for run_id in free)
        assert sum(output.prefilled_tokens for output in step.outputs) <= plan.chunk_tokens, (step, plan)
        for run_id, output in ran.items():
            self.prefilled[run_id] += output.prefilled_tokens
            assert self.prefilled[run_id] <= self.given[run_id], run_id
        decoding |= {run_id for run_id, output in ran.items() if output.token_ids} - self._stopped
        decoding -= {run_id for run_id, output in ran.items() if output.finish_reason}

    def _take(self, request_id: str, token_ids: tuple[int, ...], finish_reason: str) -> None:
        self.tokens.setdefault(request_id, []).extend(token_ids)
        self.token_s.setdefault(request_id, []).extend([time.monotonic()] * len(token_ids))
        if finish_reason:
            self.ended[request_id] = finish_reason

    # ---- the local scheduler, without a bus

    def govern(self) -> None:
        """Put a local scheduler in charge of both engines from now on."""
        pool_bytes = max(ready.kv_pool_bytes for ready in self.ready.values())
        settings = LocalSettings(kv_pool_bytes=pool_bytes, stall_ms=30_000.0)  # the cores are not ours alone
        self.core = LocalSchedCore("cpu-0", "cpu", "vllm", device_for("cpu"), settings, now_ms())
        for model in self.models.values():
            self.feed(ev.Load(model=model, placement_version=1))

    def feed(self, event: ev.Message | ev.Event) -> None:
        assert self.core is not None
        for action in self.core.step(now_ms(), event):
            match action:
                case en.Order():
                    self.perform(action)
                case ev.Send(message=ev.Tokens(deltas=deltas)):
                    self._acknowledge(deltas)
                case ev.Count(name="evictions"):
                    self.evictions += 1
                case ev.Count(name="offload_imports", labels={"outcome": outcome}):
                    self.taken[outcome] += 1
                case ev.Send(message=ev.Refused()):
                    raise AssertionError(action)
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (self.core.wake_ms - now_ms()) / 1000)
        alive = ev.GatewayAlive(gateway="g")  # is as good as a tick, and keeps the gateway's lease
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.feed, alive)

    def _acknowledge(self, deltas: tuple[ev.TokenDelta, ...]) -> None:
        """Be the gateway: take what is new, and say so."""
        acks = []
        for delta in deltas:
            assert delta.end is None or not delta.end.error, delta
            known = len(self.tokens.get(delta.request_id, ())) - delta.first_seq
            self._take(
                delta.request_id, delta.token_ids[known:], delta.end.finish_reason if delta.end else ""
            )
            have = len(self.tokens[delta.request_id])
            acks.append(ev.AckedThrough(delta.request_id, delta.attempt, have, delta.end is not None))
        asyncio.get_running_loop().call_soon(self.feed, ev.Ack(gateway="g", acks=tuple(acks)))

    def submit(self, request: Request, predicted_output_tokens: int, seq: int) -> None:
        self.feed(ev.Submit(request, "s", seq, predicted_output_tokens))

    def leave(self) -> None:
        """Take the local scheduler away again."""
        if self._timer is not None:
            self._timer.cancel()
        self.core = self._timer = None

    # ---- waiting

    async def until(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            self._raise_what_is_wrong()
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"still not so after {within_s} s; ended: {self.ended}"
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                continue

    async def pause(self, for_s: float) -> None:
        await asyncio.sleep(for_s)
        self._raise_what_is_wrong()

    def _raise_what_is_wrong(self) -> None:
        if self.wrong is not None:
            raise self.wrong

    async def ready_in_ms(self, order: en.LoadEngine | en.WakeEngine) -> float:
        """Give an order after which an engine is ready, and return how long that took, seen from outside."""
        name = order.model.name if isinstance(order, en.LoadEngine) else order.serve.name
        self.ready.pop(name, None)
        since_s = time.monotonic()
        self.perform(order)
        await self.until(lambda: name in self.ready, within_s=240)
        return (time.monotonic() - since_s) * 1000

    async def asleep_after(self, order: en.SleepEngine | en.WakeEngine) -> en.EngineAsleep:
        """Give an order, and return what is said of it."""
        count = len(self.asleep)
        self.perform(order)
        await self.until(lambda: len(self.asleep) > count)
        return self.asleep[-1]

    async def unload(self, name: str) -> None:
        """Unload a model, and wait until it is gone."""
        count = len(self.unloaded)
        self.perform(en.UnloadEngine(name))
        await self.until(lambda: len(self.unloaded) > count)

    async def until_ended(self, *request_ids: str) -> None:
        await self.until(lambda: self.ended.keys() >= set(request_ids))

    def run(self, request_id: str, model: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Give an engine a request, past any scheduler."""
        self.perform(en.RunRequest(model=model, request=request(request_id, model, prompt, max_tokens)))

    def plan(self, name: str, plan_id: int, held: frozenset[str] = frozenset(), chunk: int = 8192) -> None:
        self.perform(en.SetPlan(model=name, plan=Plan(plan_id=plan_id, held=held, chunk_tokens=chunk)))


@lru_cache
def _tokenizer() -> Tokenizer:
    assert MODEL is not None
    return Tokenizer.from_file(f"{MODEL.tokenizer}/tokenizer.json")


@lru_cache
def prompt_of(text: str) -> tuple[int, ...]:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(_tokenizer().encode(chat, add_special_tokens=False).ids)


def request(request_id: str, model: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        attempt=1,
        gateway="g",
        model=model,
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        objectives=Objectives(ttft_ms=60_000.0, tbt_ms=TBT_MS),
        sampling={"temperature": 0, "ignore_eos": True},
    )
