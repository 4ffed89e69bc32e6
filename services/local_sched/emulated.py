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

from collections import deque
from collections.abc import Callable, Mapping

from services.local_sched.emulated_step import Engine, Step, run_together
from services.local_sched.made_up import VocabSlice
from shared.devices import Device
from shared.engine import (
    ClockApplied,
    DeviceSampled,
    EngineEnded,
    EngineReady,
    LoadEngine,
    Order,
    RunRequest,
    SetClock,
    SetPlan,
    StopRequest,
    UnloadEngine,
)
from shared.events import Event
from shared.model import Request
from shared.silicon import idle_power_w, load_ms

_REQUESTS, _OVERHEAD, _IDLE = "requests", "overhead", "idle"
_STATES = ("active", "warm", "cold")


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
    """

    def __init__(
        self,
        device: Device,
        *,
        control_delay_ms: float = 3.0,
        elastic_kv: bool = True,
        vocab: VocabSlice,
        output_length: Callable[[Request], int] | None = None,
    ) -> None:
        self.device = device
        self._control_delay_ms = control_delay_ms
        self._elastic_kv = elastic_kv
        self._vocab = vocab
        self._output_length = output_length
        self._engines: dict[str, Engine] = {}
        self._orders: deque[tuple[float, Order]] = deque()
        self._clock_mhz = device.default_clock_mhz
        self._now_ms: float | None = None
        self._since_ms = 0.0  # conditions are what they are since then, and energy is summed up to then
        self._power_w = 0.0
        self._parts_w = [0.0] * 5
        self._parts_j = [0.0] * 5
        self._state_ms = dict.fromkeys(_STATES, 0.0)
        self._use = _IDLE
        self._energy_j = 0.0
        self._uses_j = {_REQUESTS: 0.0, _OVERHEAD: 0.0, _IDLE: 0.0}

    # ---- what experiments do to it

    def kill(self, now_ms: float, model: str) -> None:
        """Let a model's engine die at once, without a report: whoever kills it says so."""
        events: list[Event] = []
        self._pass(now_ms)
        self._sum_energy(now_ms)
        self._obey(now_ms, UnloadEngine(model=model), events)
        self._set_conditions(now_ms)

    # ---- what the local scheduler sees

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by model, those that load included; to be read, not changed."""
        return self._engines

    @property
    def wake_ms(self) -> float | None:
        """When something next happens: an order arrives, a model is loaded, or a step ends."""
        wake_ms = self._orders[0][0] if self._orders else None
        for engine in self._engines.values():
            due_ms = engine.ready_ms if engine.step is None else engine.step.end_ms
            if due_ms is not None and (wake_ms is None or due_ms < wake_ms):
                wake_ms = due_ms
        return wake_ms

    def order(self, now_ms: float, order: Order) -> None:
        """Take an order; it reaches the device after the control delay."""
        self._pass(now_ms)
        self._orders.append((now_ms + self._control_delay_ms, order))

    def advance(self, now_ms: float) -> list[Event]:
        """Let the device run up to `now_ms` and return what happened, in order of time.

        The first call of any kind starts the device's energy count.
        """
        self._pass(now_ms)
        events: list[Event] = []
        while (wake_ms := self.wake_ms) is not None and wake_ms <= now_ms:
            self._happen(wake_ms, events)
        return events

    def sample(self, now_ms: float) -> DeviceSampled:
        """Read the device as it is at `now_ms`, after `advance(now_ms)`."""
        self._pass(now_ms)
        metered = self.device.has_meter
        return DeviceSampled(
            state=self.state,
            used_bytes=self.used_bytes,
            power_w=self._power_w if metered else None,
            energy_j=self.energy_j if metered else None,
        )

    @property
    def state(self) -> str:
        """``active`` while a step runs or a model loads, ``warm`` with idle engines, ``cold`` with none."""
        if self._use != _IDLE:
            return "active"
        return "warm" if self._engines else "cold"

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
        return self._power_w

    @property
    def energy_j(self) -> float:
        """Joules since the device was first called; the sum of the three uses."""
        return self._energy_j + self._unsummed_j()

    @property
    def request_energy_j(self) -> float:
        """Joules that went to requests, those of the steps that run now included."""
        return self._used_j(_REQUESTS)

    @property
    def overhead_energy_j(self) -> float:
        """Joules that went to loading models and to aborted work."""
        return self._used_j(_OVERHEAD)

    @property
    def idle_energy_j(self) -> float:
        """Joules while nothing ran or loaded."""
        return self._used_j(_IDLE)

    @property
    def energy_parts_j(self) -> tuple[float, ...]:
        """Joules by what they were for: floor, context, SM clock, HBM, compute; the sum is `energy_j`."""
        seconds = 0.0 if self._now_ms is None else (self._now_ms - self._since_ms) / 1000
        return tuple(j + w * seconds for j, w in zip(self._parts_j, self._parts_w, strict=True))

    @property
    def state_ms(self) -> tuple[float, ...]:
        """Time spent so far active, warm and cold."""
        passed_ms = 0.0 if self._now_ms is None else self._now_ms - self._since_ms
        state = self.state
        return tuple(self._state_ms[s] + (passed_ms if s == state else 0.0) for s in _STATES)

    # ---- time and energy

    def _pass(self, now_ms: float) -> None:
        if self._now_ms is None:
            self._since_ms = now_ms
            self._set_conditions(now_ms)
        assert self._now_ms is None or now_ms >= self._now_ms, (
            f"time ran back from {self._now_ms} to {now_ms}"
        )
        self._now_ms = now_ms

    def _unsummed_j(self) -> float:
        return 0.0 if self._now_ms is None else self._power_w * (self._now_ms - self._since_ms) / 1000

    def _used_j(self, use: str) -> float:
        return self._uses_j[use] + (self._unsummed_j() if use == self._use else 0.0)

    def _sum_energy(self, now_ms: float) -> None:
        """Charge the time since the last event to its use, and to the steps that ran."""
        self._state_ms[self.state] += now_ms - self._since_ms
        seconds = (now_ms - self._since_ms) / 1000
        self._since_ms = now_ms
        self._parts_j = [j + w * seconds for j, w in zip(self._parts_j, self._parts_w, strict=True)]
        self._energy_j += self._power_w * seconds
        self._uses_j[self._use] += self._power_w * seconds
        for step in self._steps():
            step.energy_j += step.power_w * seconds

    def _happen(self, now_ms: float, events: list[Event]) -> None:
        """Do all that is due at `now_ms`: steps end, models are ready, orders arrive, steps start."""
        self._sum_energy(now_ms)
        for engine in self._engines.values():
            if engine.step is not None and engine.step.end_ms <= now_ms:
                done, lost_j = engine.finish_step(self.device.has_meter)
                self._write_off(lost_j)
                events.append(done)
            elif engine.ready_ms is not None and engine.ready_ms <= now_ms:
                engine.ready_ms = None
                events.append(self._ready(engine))
        while self._orders and self._orders[0][0] <= now_ms:
            self._obey(now_ms, self._orders.popleft()[1], events)
        for engine in self._engines.values():
            if engine.sequences and engine.step is None and engine.ready_ms is None:
                events.extend(engine.start_step(self.device, self._free_blocks(engine), now_ms))
        self._set_conditions(now_ms)

    def _set_conditions(self, now_ms: float) -> None:
        """Work out speeds and power from what runs now, and move the ends of the running steps."""
        steps = self._steps()
        loading = any(e.ready_ms is not None for e in self._engines.values())
        self._use = _REQUESTS if steps else _OVERHEAD if loading else _IDLE
        if steps:
            self._parts_w = list(run_together(self.device, self._clock_mhz, steps, now_ms))
            self._power_w = sum(self._parts_w)
        elif self.device.has_meter:
            self._power_w = idle_power_w(self.device, "warm" if self._engines else "cold")
            self._parts_w = [self.device.static_w, self._power_w - self.device.static_w, 0.0, 0.0, 0.0]

    def _steps(self) -> list[Step]:
        return [e.step for e in self._engines.values() if e.step is not None]

    def _write_off(self, energy_j: float) -> None:
        """Move energy from requests to overhead: what it was spent on was aborted."""
        self._uses_j[_REQUESTS] -= energy_j
        self._uses_j[_OVERHEAD] += energy_j

    # ---- orders

    def _obey(self, now_ms: float, order: Order, events: list[Event]) -> None:
        """Carry out an order that has arrived; what is meant for an engine that is gone is gone with it."""
        if isinstance(order, LoadEngine):
            self._load(now_ms, order, events)
        elif isinstance(order, SetClock):
            self._clock_mhz = offered_clock_mhz(self.device, order.sm_clock_mhz)
            reason = (
                ""
                if self._clock_mhz == order.sm_clock_mhz
                else "the device does not offer the clock asked for"
            )
            events.append(
                ClockApplied(asked_mhz=order.sm_clock_mhz, applied_mhz=self._clock_mhz, reason=reason)
            )
        elif isinstance(order, UnloadEngine):
            engine = self._engines.pop(order.model, None)
            if engine is not None:
                if engine.step is not None:
                    self._write_off(engine.step.energy_j)
                events.append(EngineEnded(model=order.model))
        elif isinstance(order, RunRequest | StopRequest | SetPlan) and order.model in self._engines:
            engine = self._engines[order.model]
            if isinstance(order, RunRequest):
                length = self._output_length(order.request) if self._output_length else None
                engine.add(order.request, self._vocab, length)
            elif isinstance(order, StopRequest):
                engine.drop(order.request_id)
            else:
                engine.plan = order.plan

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
            took_ms = float(load_ms(self.device, model.weight_bytes, "host"))
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


def offered_clock_mhz(device: Device, asked_mhz: int) -> int:
    """Return the highest clock the device offers that is not above the one asked for, else its lowest."""
    return max((c for c in device.clocks_mhz if c <= asked_mhz), default=min(device.clocks_mhz))
