"""The emulated GPU: several engines on one device, advanced exactly from event to event.

Between two events nothing changes: a fixed set of steps runs at a fixed clock, each at a fixed speed, and
the device draws a fixed power (`shared/silicon.py`). So time and energy are computed in closed form, and it
makes no difference how often `advance` is called. Steps that overlap slow each other down; when their set or
the clock changes, what is left of each is stretched or shrunk.

Energy goes to one of three uses: requests (while any step runs), overhead (while models load and no step
runs, and the part of steps that requests stopped meanwhile had), idle (nothing runs or loads). While steps
run, the idle power of the device is split over them by SM share, and what is above it half by SM share and
half by bytes moved; no device measures its engines one by one.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from services.local_sched.clocks import granted, snapped
from services.local_sched.emulated_engine import Engine
from services.local_sched.emulated_meter import IDLE, OVERHEAD, REQUESTS, Meter
from services.local_sched.emulated_step import Step, idle_parts_w, run_together
from services.local_sched.made_up import VocabSlice
from services.local_sched.meter import MODELLED, UNKNOWN
from shared.devices import Device
from shared.engine import (
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
    StopRequest,
    UnloadEngine,
    WakeEngine,
)
from shared.events import Event
from shared.model import Request
from shared.silicon import load_ms, wake_ms


class EmulatedGpu:
    """One device and its engines, one per model.

    Every order takes effect `control_delay_ms` after it is given, in the order given; a plan from the next
    step on. A step is never interrupted: a request stopped in the middle of one frees its memory at once, and
    is left out of the step's report.

    Args:
        device: row of the device table.
        control_delay_ms: how long an order takes to reach the device (vLLM: 2-4 ms).
        elastic_kv: whether an engine may draw KV memory from whatever is free on the device; if not, each
            needs a pool of its own, fixed when it loads.
        vocab: what the answers are made of.
        output_length: how many tokens the answer to a request has, where a workload says; None draws it.
        report_steps: most decode steps that an engine takes before it reports them; above 1, steps between
            which nothing happens take no events of their own (`emulated_engine.py`).
    """

    def __init__(
        self,
        device: Device,
        *,
        vocab: VocabSlice,
        control_delay_ms: float = 3.0,
        elastic_kv: bool = True,
        output_length: Callable[[Request], int] | None = None,
        report_steps: int = 1,
    ) -> None:
        self.device = device
        self._control_delay_ms = control_delay_ms
        self._elastic_kv = elastic_kv
        self._vocab = vocab
        self._output_length = output_length
        self._report_steps = report_steps
        self._engines: dict[str, Engine] = {}
        self._orders: deque[tuple[float, Order]] = deque()
        self._clock_mhz = device.default_clock_mhz
        self._rest = "sleeping"  # its state without engines: a process stands ready at first
        self._awake_ms = -math.inf  # from when on there is a context
        self._hung_ms: dict[str, float] = {}  # since when nothing was heard of them
        self._now_ms: float | None = None
        self._wake_ms: float | None = None
        self._conditions: tuple[Any, ...] = ()  # that time and power were last worked out for
        self._meter = Meter()

    # ---- what experiments do to it

    def kill(self, now_ms: float, model: str) -> None:
        """Let a model's engine die at once, without a report: whoever kills it says so."""
        self._pass(now_ms)
        self._sum_energy(now_ms)
        self._obey(now_ms, UnloadEngine(model=model), [])
        self._set_conditions(now_ms)

    def hang(self, now_ms: float, model: str, *, heard: bool = False) -> None:
        """Let a model's engine stand still: it takes no order but to end; its process may still be heard."""
        self._pass(now_ms)
        self._sum_energy(now_ms)
        engine = self._engines[model]
        self._meter.write_off(engine.unreported_j)
        self._engines[model] = replace(engine, ready_ms=None, sequences={}, step=None)
        self._hung_ms[model] = math.inf if heard else now_ms
        self._set_conditions(now_ms)

    def report_each_step(self, now_ms: float) -> None:
        """Report every step from now on, and with the one under way all that was not reported."""
        self._pass(now_ms)
        self._report_steps = 1
        for engine in self._engines.values():
            engine.report_due = bool(engine.sequences)
            if engine.step is not None:
                engine.step.cut(now_ms)
        self._look_ahead()

    # ---- what the local scheduler sees

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by model, those that load included; to be read, not changed."""
        return self._engines

    @property
    def wake_ms(self) -> float | None:
        """When something next happens: an order arrives, a model is loaded, or a step ends."""
        return self._wake_ms

    def order(self, now_ms: float, order: Order) -> None:
        """Take an order; it reaches the device after the control delay."""
        self._pass(now_ms)
        self._orders.append((now_ms + self._control_delay_ms, order))
        self._look_ahead()

    def advance(self, now_ms: float) -> list[Event]:
        """Let the device run up to `now_ms` and return what happened, in order of time.

        The first call of any kind starts the device's energy count.
        """
        self._pass(now_ms)
        events: list[Event] = []
        while (wake_ms := self._wake_ms) is not None and wake_ms <= now_ms:
            self._happen(wake_ms, events)
        return events

    def sample(self, now_ms: float) -> DeviceSampled:
        """Read the device as it is at `now_ms`, after `advance(now_ms)`."""
        self._pass(now_ms)
        metered = self.device.has_meter
        return DeviceSampled(
            state=self.state,
            used_bytes=self.used_bytes,
            power_w=self.power_w if metered else None,
            energy_j=self.energy_j if metered else None,
            energy_source=MODELLED if metered else UNKNOWN,
            unheard_ms={
                model: now_ms - since_ms for model, since_ms in self._hung_ms.items() if since_ms < now_ms
            },
        )

    @property
    def state(self) -> str:
        """``active`` while a step runs or a model loads, ``warm`` with idle engines.

        Without engines it is ``sleeping``, for a process stands ready, until it is told to be ``cold`` or
        ``off``.
        """
        return self._meter.state

    @property
    def sm_clock_mhz(self) -> int:
        """The clock that was asked for last, as the device offers it; the power cap may hold it lower."""
        return self._clock_mhz

    @property
    def used_bytes(self) -> int:
        """Bytes of weights, fixed KV pools, and elastic KV."""
        return sum(
            e.model.weight_bytes + (e.pool_bytes or e.blocks * self._block_bytes(e))
            for e in self._engines.values()
        )

    @property
    def power_w(self) -> float:
        """What it draws now; meaningless without a meter."""
        return self._meter.power_w

    @property
    def energy_j(self) -> float:
        """Joules since the device was first called; the sum of the three uses."""
        return self._meter.energy_j(self._now_ms or 0.0)

    @property
    def request_energy_j(self) -> float:
        """Joules that went to requests, those of the steps that run now included."""
        return self._meter.used_j(REQUESTS, self._now_ms or 0.0)

    @property
    def overhead_energy_j(self) -> float:
        """Joules that went to loading models and to aborted work."""
        return self._meter.used_j(OVERHEAD, self._now_ms or 0.0)

    @property
    def idle_energy_j(self) -> float:
        """Joules while nothing ran or loaded."""
        return self._meter.used_j(IDLE, self._now_ms or 0.0)

    @property
    def energy_parts_j(self) -> tuple[float, ...]:
        """Joules by what they were for: floor, context, SM clock, HBM, compute; the sum is `energy_j`."""
        return self._meter.parts_j(self._now_ms or 0.0)

    @property
    def state_ms(self) -> tuple[float, ...]:
        """Time spent so far active, warm, sleeping, cold and off."""
        return self._meter.state_ms(self._now_ms or 0.0)

    # ---- time and energy

    def _pass(self, now_ms: float) -> None:
        if self._now_ms is None:
            self._meter.since_ms = now_ms
            self._set_conditions(now_ms)
        assert self._now_ms is None or now_ms >= self._now_ms, (
            f"time ran back from {self._now_ms} to {now_ms}"
        )
        self._now_ms = now_ms

    def _sum_energy(self, now_ms: float) -> None:
        """Charge the time since the last event to its use, and to the steps that ran."""
        seconds = self._meter.pass_to(now_ms)
        for step in self._steps():
            step.energy_j += step.power_w * seconds

    def _happen(self, now_ms: float, events: list[Event]) -> None:
        """Do all that is due at `now_ms`: steps end, models are ready, orders arrive, steps start."""
        self._sum_energy(now_ms)
        for engine in self._engines.values():
            if engine.step is not None and engine.step.end_ms <= now_ms:
                done, lost_j = engine.finish_step(self.device, self._report_steps)
                self._meter.write_off(lost_j)
                if done is not None:
                    events.append(done)
            elif engine.ready_ms is not None and engine.ready_ms <= now_ms:
                engine.ready_ms = None
                events.append(self._ready(engine))
            if (copied_ms := engine.copies.due_ms) is not None and copied_ms <= now_ms:
                self._end_copy(now_ms, engine, events)
        while self._orders and self._orders[0][0] <= now_ms:
            self._obey(now_ms, self._orders.popleft()[1], events)
        for engine in self._engines.values():
            idle = engine.step is None and engine.ready_ms is None and engine.sequences
            if idle and engine.due_ms <= now_ms:
                free_blocks = self._free_blocks(engine)
                events.extend(engine.start_step(self.device, free_blocks, now_ms, self._report_steps))
            if engine.copies.waiting:
                self._begin_copy(now_ms, engine)
        self._set_conditions(now_ms)

    def _begin_copy(self, now_ms: float, engine: Engine) -> None:
        """Begin the next copy of an engine, if none is under way."""
        waits = any(each.copies.frees for each in self._engines.values())
        free_blocks = self._free_blocks(engine)
        engine.blocks += engine.copies.begin(
            now_ms, self.device, engine.plan, engine.step, free_blocks, waits
        )

    def _end_copy(self, now_ms: float, engine: Engine, events: list[Event]) -> None:
        """End a copy of KV; what has come in joins the next step."""
        report, energy_j, freed_blocks = engine.copies.finish(self.device)
        engine.blocks -= freed_blocks
        if report is not None:
            events.append(report)
        self._meter.charge(energy_j)
        if engine.step is not None:
            engine.step.cut(now_ms)

    def _set_conditions(self, now_ms: float) -> None:
        """Work out speeds and power from what runs now, and move the ends of the running steps."""
        steps = self._steps()
        loading = any(engine.ready_ms is not None for engine in self._engines.values())
        conditions = (self._clock_mhz, loading, len(self._engines), self._rest, *steps)
        if conditions != self._conditions:
            self._conditions = conditions
            use = REQUESTS if steps else OVERHEAD if loading else IDLE
            state = "active" if use != IDLE else "warm" if self._engines else self._rest
            if steps:
                parts_w = run_together(self.device, self._clock_mhz, steps, now_ms)
            else:
                parts_w = idle_parts_w(self.device, state)
            self._meter.set(use, state, parts_w)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Work out when something next happens."""
        wake_ms = self._orders[0][0] if self._orders else math.inf
        for engine in self._engines.values():
            if engine.step is not None:
                wake_ms = min(wake_ms, engine.step.end_ms)
            elif engine.ready_ms is not None:
                wake_ms = min(wake_ms, engine.ready_ms)
            elif engine.sequences and (due_ms := engine.due_ms) > self._meter.since_ms:
                wake_ms = min(wake_ms, due_ms)
            if (copied_ms := engine.copies.due_ms) is not None:
                wake_ms = min(wake_ms, copied_ms)
        self._wake_ms = None if wake_ms == math.inf else wake_ms

    def _steps(self) -> list[Step]:
        return [engine.step for engine in self._engines.values() if engine.step is not None]

    # ---- orders

    def _obey(self, now_ms: float, order: Order, events: list[Event]) -> None:
        """Carry out an order that has arrived; what is meant for an engine that is gone is gone with it."""
        if isinstance(order, LoadEngine):
            self._load(now_ms, order, events)
        elif isinstance(order, SetClock):
            self._clock_mhz = snapped(self.device.clocks_mhz, order.sm_clock_mhz)
            events.append(granted(order.sm_clock_mhz, self._clock_mhz))
        elif isinstance(order, RestDevice):
            if not self._engines:
                self._rest = order.state
        elif isinstance(order, UnloadEngine):
            engine = self._engines.pop(order.model, None)
            self._hung_ms.pop(order.model, None)
            if engine is not None:
                self._meter.write_off(engine.unreported_j)
                events.append(EngineEnded(model=order.model))
        elif isinstance(order, RunRequest | StopRequest | SetPlan) and self._obeys(order.model):
            engine = self._engines[order.model]
            if isinstance(order, RunRequest):
                self._run(engine, order)
            elif isinstance(order, StopRequest):
                self._meter.write_off(engine.drop(order.request_id))
            else:
                engine.plan = order.plan
            if engine.step is not None:
                engine.step.cut(now_ms)
        elif isinstance(order, SleepEngine | WakeEngine) and self._obeys(order.model):
            events.append(EngineAsleep(model=order.model, level=0, reason="emulated engines do not sleep"))
        elif isinstance(order, ExportKv) and self._obeys(order.model):
            engine = self._engines[order.model]
            engine.copies.export(order, engine.sequences.get(order.request_id), self.device.block_tokens)
        elif isinstance(order, FreeStage) and self._obeys(order.model):
            self._engines[order.model].copies.free(order.stage)

    def _obeys(self, model: str) -> bool:
        return model in self._engines and model not in self._hung_ms

    def _run(self, engine: Engine, order: RunRequest) -> None:
        """Take a request in, with its KV if it brings any."""
        length = self._output_length(order.request) if self._output_length else None
        sequence = engine.add(order.request, self._vocab, length)
        if order.kv_tokens:
            free_blocks = self._free_blocks(engine)
            block_tokens = self.device.block_tokens
            engine.blocks += engine.copies.take_in(order, sequence, block_tokens, free_blocks)

    def _load(self, now_ms: float, order: LoadEngine, events: list[Event]) -> None:
        """Start loading a model if its weights, and its KV pool if it has one, fit in the free memory."""
        model = order.model
        assert model.name not in self._engines, f"{model.name} is loaded already: unload it first"
        needed, free = model.weight_bytes + order.kv_pool_bytes, self._free_bytes()
        if not self._elastic_kv and not order.kv_pool_bytes:
            reason = "KV memory is not elastic on this device: order the engine with kv_pool_bytes"
        elif needed > free:
            reason = f"out of memory: weights and KV pool take {needed} bytes, {free} are free"
        else:
            self._awake_ms = max(self._awake_ms, now_ms + wake_ms(self.device, self._rest))
            self._rest = "sleeping"
            took_ms = self._awake_ms - now_ms + load_ms(self.device, model.weight_bytes, order.source)
            self._engines[model.name] = Engine(model, order.kv_pool_bytes, took_ms, now_ms + took_ms)
            return
        events.append(EngineEnded(model=model.name, reason=reason))

    # ---- memory

    def _ready(self, engine: Engine) -> EngineReady:
        return EngineReady(
            model=engine.model.name,
            kv_pool_bytes=engine.pool_bytes or self._free_bytes(),
            block_tokens=self.device.block_tokens,
            load_ms=engine.load_ms,
        )

    def _free_bytes(self) -> int:
        return self.device.total_bytes - self.used_bytes

    def _block_bytes(self, engine: Engine) -> int:
        return self.device.block_tokens * engine.model.kv_bytes_per_token

    def _free_blocks(self, engine: Engine) -> int:
        """Blocks that the engine may still take, from its pool or from the device."""
        block_bytes = self._block_bytes(engine)
        if engine.pool_bytes:
            return engine.pool_bytes // block_bytes - engine.blocks
        return self._free_bytes() // block_bytes
