"""The vLLM engines of one device, as its local scheduler's shell drives them: one child process per model.

Orders and reports are those of `shared/engine.py`; they cross a socket pair to `vllm_ext/host.py`, which runs
in the engine's own Python environment (`vllm_env.py` makes it). To the core an engine that is unloaded is
gone; where host memory has room for it, its process sleeps, and the next load of its model wakes it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from services.local_sched.partition import Partition, Parts
from services.local_sched.sleepers import Sleepers
from services.local_sched.vllm_child import MAX_ORDERS, Child
from services.local_sched.vllm_ext.wire import Alive, EngineOrder, EngineReport, SmCut, UseSms
from shared.engine import (
    ClockApplied,
    DeviceSampled,
    EngineAsleep,
    EngineEnded,
    EngineReady,
    ExportKv,
    FreeStage,
    LoadEngine,
    Order,
    RestDevice,
    RunRequest,
    SetClock,
    SetPlan,
    SleepEngine,
    StepDone,
    StopRequest,
    UnloadEngine,
    WakeEngine,
)
from shared.events import Event

log = logging.getLogger(__name__)

SLEEP_LEVEL = 1
"""Weights in host memory."""
SLEEP_S = 30.0
"""An engine that is not asleep after this long is ended; the weights of a large model take seconds."""


class VllmEngines:
    """Starts, drives and ends the vLLM processes of one device. Use it in one asyncio loop.

    Args:
        python: interpreter of the engine environment.
        run_dir: folder for the children's logs, made by `start`.
        report: called in the loop, never from within `perform`, with EngineReady, EngineAsleep, StepDone,
            OutOfMemory, KvExported, KvImported, EngineEnded and ClockApplied.
        stages: folder of the host's stages; None: KV is not moved.
        partition: how they share the SMs of their GPU; None: not at all.
        sleep_bytes: host memory that engines asleep may take; 0: an engine that is unloaded ends.
    """

    def __init__(
        self,
        *,
        python: str,
        run_dir: Path,
        report: Callable[[Event], None],
        stages: Path | None = None,
        partition: Partition | None = None,
        sleep_bytes: int = 0,
    ) -> None:
        self._command = [python, *(("--stages", str(stages.absolute())) if stages else ())]
        self._environment = partition.environment if partition else {}
        self._shared_fate = partition is not None and partition.shared_fate
        self._parts: Parts | None = None
        if partition is not None and (cut := partition.cut) is not None:
            self._parts = Parts(cut)
            self._command += ["--sms", msgspec.json.encode(SmCut(*cut, parts=cut.parts)).decode()]
        self._run_dir = run_dir
        self._report = report
        self._engines: dict[str, Child] = {}
        self._falling_asleep: dict[str, Child] = {}
        self._sleepers: Sleepers[Child] = Sleepers(sleep_bytes)
        self._lives: dict[Child, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Make the folder for the logs."""
        self._run_dir.mkdir(parents=True, exist_ok=True)

    def perform(self, order: Order) -> None:
        """Carry out an order. One to an engine that is gone is dropped: EngineEnded has told, or will."""
        match order:
            case LoadEngine():
                self._load(order)
            case UnloadEngine(model=name, at_once=at_once):
                self._unload(name, at_once)
            case RestDevice():
                self._end(self._sleepers.clear())
            case (
                RunRequest(model=name)
                | StopRequest(model=name)
                | SetPlan(model=name)
                | ExportKv(model=name)
                | FreeStage(model=name)
                | SleepEngine(model=name)
                | WakeEngine(model=name)
            ):
                if engine := self._engines.get(name):
                    self._share_sms(order)
                    self._pass_on(engine, order)
            case SetClock(sm_clock_mhz=asked_mhz):
                applied = ClockApplied(asked_mhz=asked_mhz, applied_mhz=0, reason="no clock control on cpu")
                asyncio.get_running_loop().call_soon(self._report, applied)
            case _:
                raise TypeError(f"vLLM engines know no order {type(order).__name__}.")

    async def close(self) -> None:
        """End every engine, and return when no process is left; nothing is reported any more."""
        self._report = _drop
        self._end([*self._sleepers.clear(), *self._falling_asleep.values()])
        for name in list(self._engines):
            self._unload(name, at_once=False, may_sleep=False)
        if self._lives:
            await asyncio.wait(self._lives.values())

    def sample(self) -> DeviceSampled:
        """Return the bytes that the engines occupy; no meter tells one process's energy from another's."""
        engines = self._engines.values()
        now_s = asyncio.get_running_loop().time()
        busy = any(engine.requests for engine in engines)
        at_rest = "sleeping" if self._sleepers.models else "cold"
        return DeviceSampled(
            state="active" if busy else "warm" if engines else at_rest,
            used_bytes=sum(engine.resident_bytes for engine in engines),
            power_w=None,
            energy_j=None,
            unheard_ms={
                engine.model: 1000 * (now_s - engine.heard_s)
                for engine in engines
                if engine.heard_s is not None
            },
            asleep=self._sleepers.models,
        )

    def requests(self) -> dict[str, int]:
        """Return by model how many requests its engine has."""
        return {name: len(engine.requests) for name, engine in self._engines.items()}

    # ---- loading and unloading

    def _load(self, order: LoadEngine) -> None:
        """Wake an engine for a model, or start one."""
        name = order.model.name
        if name in self._engines:
            return
        if found := self._sleepers.wakes(order):
            slept, engine = found
            engine.load, engine.waking = order, True
            engine.unloading = engine.quiet = False
            self._engines[name] = engine
            self._pass_on(engine, WakeEngine(model=slept, serve=order.model))
        else:
            self._start(order)

    def _start(self, order: LoadEngine) -> None:
        name = order.model.name
        engine = self._engines[name] = Child(order)
        engine.orders.put_nowait(order)
        self._lives[engine] = asyncio.get_running_loop().create_task(self._live(engine), name=f"vllm {name}")

    def _unload(self, name: str, at_once: bool, may_sleep: bool = True) -> None:
        """Put an engine to sleep where it may, else end it."""
        engine = self._remove(name)
        if engine is None:
            return
        engine.unloading, engine.at_once = True, at_once
        may_sleep = may_sleep and not at_once and self._sleepers.may_sleep(engine.load.model)
        if may_sleep and engine.heard_s is not None and not engine.waking:
            self._falling_asleep[name] = engine
            self._pass_on(engine, SleepEngine(model=name, level=SLEEP_LEVEL))
            asyncio.get_running_loop().call_later(SLEEP_S, self._lies_awake, engine)
        else:
            engine.leave.set()

    def _fell_asleep(self, engine: Child, report: EngineAsleep) -> None:
        """An engine that was unloaded is asleep, and so gone for the core; or it cannot sleep, and ends."""
        del self._falling_asleep[engine.model]
        if report.level != SLEEP_LEVEL:
            engine.leave.set()
            return
        engine.quiet = True
        self._end(self._sleepers.add(engine.load, engine))
        self._report(EngineEnded(model=engine.model))

    def _lies_awake(self, engine: Child) -> None:
        if self._falling_asleep.get(engine.model) is engine:
            engine.leave.set()

    def _woke(self, engine: Child, report: EngineReady | EngineAsleep) -> None:
        """An engine that was asleep serves again, or cannot, and another is started in its place."""
        engine.waking = False
        if isinstance(report, EngineReady):
            self._report(report)
        else:
            self._remove(engine.model)
            self._end([engine])
            self._start(engine.load)

    def _end(self, engines: list[Child]) -> None:
        """End engines that the core does not count on any more."""
        for engine in engines:
            engine.quiet = engine.unloading = True
            engine.leave.set()

    def _remove(self, name: str) -> Child | None:
        if self._parts is not None:
            self._parts.forget(name)
        return self._engines.pop(name, None)

    # ---- orders

    def _share_sms(self, order: Order) -> None:
        """Before an order that changes who computes on which share: tell engines their parts of the SMs."""
        if self._parts is None or not isinstance(order, RunRequest | SetPlan):
            return
        if isinstance(order, SetPlan):
            self._parts.plan(order.model, order.plan.sm_share_pct)
        computing = {name for name, engine in self._engines.items() if engine.requests or name == order.model}
        for name, part in self._parts.moved(computing).items():
            self._pass_on(self._engines[name], UseSms(*part))

    def _pass_on(self, engine: Child, order: EngineOrder) -> None:
        """Queue an order for the child; one that has let the queue fill up counts as dead."""
        match order:
            case RunRequest(request=request):
                engine.requests.add(request.request_id)
            case StopRequest(request_id=request_id):
                engine.requests.discard(request_id)
        try:
            engine.orders.put_nowait(order)
        except asyncio.QueueFull:
            engine.reason = f"it takes no orders: {MAX_ORDERS} are waiting"
            self._forget(engine)
            engine.leave.set()

    # ---- lives and reports

    async def _live(self, engine: Child) -> None:
        """Run one child from its start to its end, and report the end, however it comes about."""
        reason = ""
        try:
            reason = await engine.live(
                self._command,
                self._environment,
                self._run_dir,
                hear=lambda report: self._hear(engine, report),
                leaving=lambda: self._forget(engine),
            )
        finally:
            self._forget(engine)
            del self._lives[engine]
            if reason:
                log.warning("engine ended", extra={"model": engine.model, "reason": reason})
            elif engine.at_once:
                log.warning("engine ended by order, at once", extra={"model": engine.model})
            if reason and self._shared_fate:
                await self._end_sleepers()
            if not engine.quiet:
                self._report(EngineEnded(model=engine.model, reason=reason))

    async def _end_sleepers(self) -> None:
        """An engine has died that takes all others along: MPS takes no new one while a sleeper lives."""
        sleepers = self._sleepers.clear()
        for engine in (*sleepers, *self._falling_asleep.values()):
            engine.at_once = True
            engine.leave.set()
        self._end(sleepers)
        if lives := [self._lives[engine] for engine in sleepers if engine in self._lives]:
            await asyncio.wait(lives)

    def _forget(self, engine: Child) -> None:
        """A child takes no orders any more."""
        name = engine.model
        if self._engines.get(name) is engine:
            self._remove(name)
        if self._falling_asleep.get(name) is engine:
            del self._falling_asleep[name]
        self._sleepers.discard(engine)

    def _hear(self, engine: Child, report: EngineReport) -> None:
        if engine.heard_s is not None or isinstance(report, EngineReady):
            engine.heard_s = asyncio.get_running_loop().time()
        match report:
            case Alive():
                return
            case EngineAsleep() if self._falling_asleep.get(engine.model) is engine:
                self._fell_asleep(engine, report)
                return
            case EngineReady() | EngineAsleep() if engine.waking:
                self._woke(engine, report)
                return
            case EngineReady(model=name) if (
                name != engine.model and self._engines.get(engine.model) is engine
            ):
                self._remove(engine.model)  # it has been given other weights
                engine.load = replace(engine.load, model=replace(engine.load.model, name=name))
                self._engines[name] = engine
            case EngineEnded(reason=reason):
                engine.reason = reason  # its last words; reported when the process is gone
                return
            case StepDone(outputs=outputs):
                engine.requests.difference_update(each.request_id for each in outputs if each.finish_reason)
        self._report(report)


def _drop(event: Event) -> None:
    """Report to nobody."""
