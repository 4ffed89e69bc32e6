"""The services of a world, each a core that may stop and start again, and their devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from services.consolidator.core import ConsolidatorCore
from services.gateway.core import GatewayCore
from services.global_sched import predict_standin
from services.global_sched.core import GlobalSchedCore
from services.global_sched.predict import Predict
from services.local_sched.core import LocalSchedCore
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice
from services.migrator.core import MigratorCore
from shared import events as ev
from shared.devices import Device
from shared.engine import ClockApplied, SetClock
from shared.known_models import KnownModels
from shared.lut import Lut, build
from shared.model import ModelSpec, Placement, Request
from shared.subjects import CONSOLIDATOR, GATEWAY, GLOBAL, LOCAL, MIGRATOR
from sim.scenario import Scenario

VOCAB = VocabSlice(token_ids=tuple(range(1000, 1512)), eos_id=2)
START_MS = 1e6  # what every clock shows when the world begins, where it is not set to be off

CoreType = TypeVar("CoreType", bound=ev.Core)


class Make(Protocol):
    """Makes a service's core anew.

    Not a Callable: mypyc counts an inherited field of that type twice, and the node would never be freed.
    """

    def __call__(
        self, now_ms: float, models: tuple[ModelSpec, ...], placement: Placement | None, /
    ) -> ev.Core:
        """Return it, given its clock's time and what the store holds."""


@dataclass(slots=True, eq=False)
class Node:
    """One service.

    Args:
        index: place among all nodes.
        make: makes its core anew.
        core: None while it is down.
        wall_ms: its wall clock minus the time of the world. A process reads it once, at its start.
        offset_ms: the same as of its start: what its monotonic clock is off.
        armed_ms: the earliest tick in the world's heap.
        paused_until_ms: it stands still until then; what comes meanwhile waits.
        life: number of its present process; what was meant for an earlier one is dropped.
        models, rereads: what its core knows of models, and how often its bus was back (`sim/shells.py`).
    """

    index: int
    service: str
    ident: str
    make: Make
    wall_ms: float = START_MS
    offset_ms: float = START_MS
    core: ev.Core | None = None
    bus_lost: bool = False
    armed_ms: float = math.inf
    paused_until_ms: float = -math.inf
    life: int = 0
    ticks_at_once: int = 0
    ticked_ms: float = -math.inf
    last_ms: float = -math.inf
    models: KnownModels = field(default_factory=KnownModels)
    rereads: int = 0

    @property
    def hears(self) -> bool:
        """Whether a message reaches it now."""
        return self.core is not None and not self.bus_lost

    def clock_ms(self, now_ms: float) -> float:
        """Return what its clock shows; it never runs back, whatever rounding does."""
        shown_ms = now_ms + self.offset_ms
        if shown_ms > self.last_ms:
            self.last_ms = shown_ms
        return self.last_ms


@dataclass(slots=True, eq=False)
class GpuNode(Node):
    """A local scheduler with the device and engines it owns, which end with it.

    Args:
        gpu: None while it is down.
        device_armed_ms: the earliest wake-up of the device in the world's heap.
        refused_mhz, refused_until_ms: the device runs at that clock whatever it is asked, until then.
        past_parts_j, past_uses_j, past_ms: totals of the devices it had before.
    """

    make_gpu: Callable[[], EmulatedGpu] = field(kw_only=True)
    gpu: EmulatedGpu | None = None
    device_armed_ms: float = math.inf
    refused_mhz: int = 0
    refused_until_ms: float = -math.inf
    asked_mhz: list[int] = field(default_factory=list)
    past_parts_j: tuple[float, ...] = (0.0,) * 5
    past_uses_j: tuple[float, ...] = (0.0,) * 3
    past_ms: tuple[float, ...] = (0.0,) * 5

    @property
    def local(self) -> LocalSchedCore:
        """Its core, which is up."""
        assert isinstance(self.core, LocalSchedCore)
        return self.core

    def order(self, now_ms: float, clock_ms: float, order: ev.Action) -> None:
        """Give the device an order; a refused clock is another one."""
        assert self.gpu is not None
        if isinstance(order, SetClock) and now_ms < self.refused_until_ms:
            self.asked_mhz.append(order.sm_clock_mhz)
            order = SetClock(sm_clock_mhz=self.refused_mhz)
        elif isinstance(order, SetClock):
            self.asked_mhz.append(order.sm_clock_mhz)
        self.gpu.order(clock_ms, order)  # type: ignore[arg-type]

    def reported(self, event: ev.Event) -> ev.Event:
        """Return an event of the device as the scheduler hears it: an applied clock names what was asked."""
        if not isinstance(event, ClockApplied):
            return event
        asked_mhz = self.asked_mhz.pop(0)
        reason = event.reason if asked_mhz == event.asked_mhz else "the driver refuses the clock"
        return ClockApplied(asked_mhz=asked_mhz, applied_mhz=event.applied_mhz, reason=reason)

    def end_device(self, clock_ms: float) -> None:
        """Take the device away with all its engines, and keep what it has used."""
        gpu = self.gpu
        if gpu is None:
            return
        gpu.advance(clock_ms)
        gpu.sample(clock_ms)
        self.past_parts_j, self.past_uses_j, self.past_ms = self.parts_j, self.uses_j, self.spent_ms
        self.gpu, self.asked_mhz, self.device_armed_ms = None, [], math.inf

    @property
    def parts_j(self) -> tuple[float, ...]:
        """Energy so far: (floor, context, clock, HBM, compute)."""
        now = self.gpu.energy_parts_j if self.gpu else (0.0,) * 5
        return tuple(map(float.__add__, self.past_parts_j, now))

    @property
    def uses_j(self) -> tuple[float, ...]:
        """Energy so far: (requests, overhead, idle)."""
        gpu = self.gpu
        now = (gpu.request_energy_j, gpu.overhead_energy_j, gpu.idle_energy_j) if gpu else (0.0,) * 3
        return tuple(map(float.__add__, self.past_uses_j, now))

    @property
    def spent_ms(self) -> tuple[float, ...]:
        """Time so far: active, or idle and (warm, sleeping, cold, off)."""
        now = self.gpu.state_ms if self.gpu else (0.0,) * 5
        return tuple(map(float.__add__, self.past_ms, now))


_LUTS: dict[tuple[str, str], Lut] = {}  # by the device's digest and the model's name


def lut_of(device: Device, model: ModelSpec) -> Lut:
    """Return a modelled look-up table, built once in this process."""
    key = (device.digest, model.name)
    found = _LUTS.get(key)
    if found is None or (found.model is not model and found.model != model):
        found = _LUTS[key] = build(device, model)
    return found


def predict_of(scenario: Scenario, true_tokens: Callable[[Request], int]) -> Predict | None:
    """Return the prediction that the scenario names; None for what a scheduler learns itself."""
    if scenario.predictor == "live":
        return None
    errors = {
        "oracle": predict_standin.ORACLE,
        "paper": predict_standin.PAPER,
        "measured": predict_standin.MEASURED,
    }[scenario.predictor]
    return predict_standin.stand_in(true_tokens, errors, scenario.settings.scheduler.margin)


def build_nodes(scenario: Scenario, true_tokens: Callable[[Request], int]) -> list[Node]:
    """Return all services of a scenario, none of them started, in the order in which they are to be."""
    settings = scenario.settings
    predict = predict_of(scenario, true_tokens)
    device = scenario.made_of
    if scenario.default_clock_mhz is not None:
        device = device.at_default_clock(scenario.default_clock_mhz)
    nodes: list[Node] = []

    def node(service: str, ident: str, make: Callable[..., ev.Core]) -> None:
        nodes.append(Node(len(nodes), service, ident, make))

    for i in range(scenario.gateways):
        name = f"gateway-{i}"
        node(GATEWAY, name, lambda now_ms, *_, name=name: GatewayCore(name, settings.gateway))
    for i in range(scenario.schedulers):
        name = f"scheduler-{i}"

        def scheduler(now_ms: float, *_: object, name: str = name) -> GlobalSchedCore:
            luts = lambda gpu_type, model: lut_of(device, model)  # noqa: E731
            return GlobalSchedCore(name, settings.scheduler, luts, predict)

        node(GLOBAL, name, scheduler)
    for i in range(scenario.consolidators):
        name = f"consolidator-{i}"
        node(
            CONSOLIDATOR,
            name,
            lambda now_ms, models, placement, name=name: ConsolidatorCore(
                name, settings.consolidator, placement, models, lambda gpu_type, model: lut_of(device, model)
            ),
        )
    for i in range(scenario.hosts):
        name = f"host-{i}"
        node(MIGRATOR, name, lambda now_ms, *_, name=name: MigratorCore(name, settings.migrator))
    for i in range(scenario.gpus):
        name, host = f"gpu-{i}", f"host-{i * scenario.hosts // scenario.gpus}"

        def local(now_ms: float, *_: object, name: str = name, host: str = host) -> LocalSchedCore:
            return LocalSchedCore(
                name, host, "emulated", device, settings.local, now_ms, lut_of, scenario.elastic_kv
            )

        def gpu() -> EmulatedGpu:
            return EmulatedGpu(
                device,
                elastic_kv=scenario.elastic_kv,
                vocab=VOCAB,
                output_length=true_tokens,
                report_steps=settings.local.report_steps,
            )

        nodes.append(GpuNode(len(nodes), LOCAL, name, local, make_gpu=gpu))
    for each in nodes:
        each.wall_ms = START_MS + scenario.clock_offsets_ms.get(each.ident, 0.0)
    return nodes
