"""The local scheduler of one GPU: decides which requests run, on how many SMs, and at which clock (3.4).

`LocalSchedCore` owns the state and says which function takes which event; the functions are beside it:
`admission` (coming in), `running` (what engines report), `ends`, `engines` (loading), `transfer`, `grants`
and `live` (moves), `plans` (clock, shares, chunks) and `summary`. `batch`, `tune` and `ledger` are the
policies they use.
"""

from collections.abc import Callable
from typing import Any

from services.local_sched import (
    admission,
    ends,
    engines,
    grants,
    live,
    plans,
    rest,
    running,
    summary,
    switching,
    transfer,
    watch,
)
from services.local_sched.energy import EnergyBook
from services.local_sched.ledger import Ledger
from services.local_sched.outbox import Outbox
from services.local_sched.settings import LocalSettings
from services.local_sched.state import EMULATED, State
from shared import engine as en
from shared import events as ev
from shared.devices import Device
from shared.lut import Lut, build, unpack
from shared.model import ModelSpec
from shared.shelf import Shelf


class LocalSchedCore:
    """The pure core. `step` takes one event and returns what is to be done; `wake_ms` is when to tick.

    Args:
        gpu: id of the GPU on the bus.
        host: id of its host's migrator.
        engine: kind of engine it runs, ``emulated`` or ``vllm``.
        device: row of the device table.
        started_ms: when this process started; tells its summaries from an earlier one's.
        lut_for: makes the look-up table of a model that has none in the store; by default it is modelled.
        elastic_kv: whether emulated engines share the free memory for KV; vLLM's never do.
        sleeps: whether vLLM engines that are unloaded go to sleep; emulated ones leave a process that does.
    """

    def __init__(
        self,
        gpu: str,
        host: str,
        engine: str,
        device: Device,
        settings: LocalSettings,
        started_ms: float,
        lut_for: Callable[[Device, ModelSpec], Lut] = build,
        elastic_kv: bool = True,
        sleeps: bool = False,
    ) -> None:
        self.state = State(
            gpu=gpu,
            host=host,
            engine_kind=engine,
            device=device,
            settings=settings,
            started_ms=started_ms,
            shelf=Shelf(lambda gpu_type, model: lut_for(device, model)),
            ledger=Ledger(
                int(device.total_bytes * (1.0 - settings.memory_margin)),
                switches=settings.switching != "off" and engine == EMULATED,
            ),
            outbox=Outbox(gpu, settings.max_unacknowledged),
            clock_mhz=device.default_clock_mhz,
            elastic_kv=elastic_kv and engine == EMULATED,
            sleeps=sleeps or engine == EMULATED,
            energy=EnergyBook(device.power_cap_w, device.static_w),
            empty_ms=started_ms,
        )
        rest.note(self.state, started_ms)
        handlers: dict[type, Callable[[State, float, Any], list[ev.Action]]] = {
            ev.Submit: admission.submit,
            ev.Abort: ends.abort,
            ev.Load: engines.load,
            ev.Unload: engines.unload,
            ev.HostWeights: engines.hear_weights,
            ev.Prepare: live.prepare,
            ev.StageKv: live.stage,
            ev.Reserve: grants.reserve,
            ev.Adopt: transfer.adopt,
            ev.Release: transfer.release,
            ev.CommitMove: transfer.commit,
            ev.AbortMove: transfer.abort_move,
            ev.Ack: _acknowledged,
            ev.GatewayAlive: _gateway_alive,
            ev.PlacementChanged: _placement_changed,
            ev.LutRead: _lut_read,
            ev.Leaving: _leaving,
            ev.BusLost: _bus_lost,
            ev.BusRestored: _bus_restored,
            en.EngineReady: engines.ready,
            en.EngineEnded: engines.ended,
            en.StepDone: running.step_done,
            en.OutOfMemory: running.out_of_memory,
            en.KvExported: live.exported,
            en.KvImported: live.imported,
            en.ClockApplied: _clock_applied,
            en.DeviceSampled: _device_sampled,
        }
        self._handlers = handlers

    @property
    def idle(self) -> bool:
        """Whether no work is here, and gateways have all that was made."""
        return not self.state.works and not self.state.outbox.pending

    @property
    def wake_ms(self) -> float | None:
        """When the core next wants a tick; there is always a heartbeat to come."""
        state, settings = self.state, self.state.settings
        wake_ms = state.heartbeat_ms + settings.heartbeat_ms
        if state.summary_due:
            wake_ms = min(wake_ms, state.summarized_ms + settings.summary_interval_ms)
        for due_ms in (
            plans.decision_due_ms(state),
            state.moves.next_expiry_ms(settings.move_ttl_ms) if state.moves.transfers else None,
            running.relief_due_ms(state),
            state.rota.ends_ms,
        ):
            if due_ms is not None and due_ms < wake_ms:
                wake_ms = due_ms
        return wake_ms if wake_ms > state.started_ms else state.started_ms

    def step(self, now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        """Take one event, then do whatever has come due: expiries, admissions, a decision, a summary."""
        state, settings = self.state, self.state.settings
        handler = self._handlers.get(type(event))
        actions = handler(state, now_ms, event) if handler else []
        if state.starved:
            actions += running.relieve(state, now_ms)
        if state.moves.transfers or state.moves.notices:
            actions += transfer.expire(state, now_ms)
        if now_ms >= state.looked_ms + settings.look_ms:
            actions += watch.look(state, now_ms)
        heartbeat = now_ms >= state.heartbeat_ms + settings.heartbeat_ms
        if heartbeat:
            actions += _beat(state, now_ms)
        admitted = []
        if state.switches and (state.admit_due or now_ms >= state.rota.ends_ms):
            actions += switching.look(state, now_ms)
        if state.admit_due:
            admitted = admission.admit_waiting(state, now_ms)
            actions += [*admitted, *grants.grant_more(state)]
        # Tokens do not wait for a decision; the tick that follows at once takes it. A request given to its
        # engine does: the plan that it is to run under must get there with it.
        at_once = bool(admitted) or not isinstance(event, en.StepDone)
        due_ms = plans.decision_due_ms(state)
        if at_once and due_ms is not None and now_ms >= due_ms:
            actions += plans.decide(state, now_ms)
        changed = state.summary_due and now_ms >= state.summarized_ms + settings.summary_interval_ms
        if heartbeat or changed:
            actions += summary.publish(state, now_ms)
        return actions


def _beat(state: State, now_ms: float) -> list[ev.Action]:
    """Once per heartbeat: send again what may have been lost, and look for who is gone."""
    state.heartbeat_ms = now_ms
    for scheduler, heard_ms in list(state.schedulers.items()):
        if now_ms - heard_ms >= state.settings.scheduler_lease_ms:
            del state.schedulers[scheduler], state.admitted_through[scheduler]
    actions = [*watch.give_up_loading(state, now_ms), *rest.deepen(state, now_ms)]
    if state.bus_lost:
        return actions  # nobody else's silence means anything now
    actions += state.outbox.resend(now_ms, state.settings.resend_ms)
    lease_ms = state.settings.gateway_lease_ms
    for gateway in [g for g, heard_ms in state.gateways.items() if now_ms - heard_ms >= lease_ms]:
        actions += ends.give_up_gateway(state, now_ms, gateway)
    state.outbox.forget_silent(now_ms, state.settings.gateway_forget_ms)
    return actions


def _acknowledged(state: State, now_ms: float, event: ev.Ack) -> list[ev.Action]:
    state.gateways[event.gateway] = now_ms
    state.outbox.acknowledge(event.acks)
    return [*state.outbox.hear(event.gateway, now_ms)]


def _gateway_alive(state: State, now_ms: float, event: ev.GatewayAlive) -> list[ev.Action]:
    state.gateways[event.gateway] = now_ms
    return [*state.outbox.hear(event.gateway, now_ms)]


def _placement_changed(state: State, now_ms: float, event: ev.PlacementChanged) -> list[ev.Action]:
    """Take no new work while the placement in force says that this GPU is drained; hurry while it says so."""
    if event.placement.version < state.placement_version:
        return []
    state.placement_version = event.placement.version
    state.order_version = max(state.order_version, state.placement_version)  # no order is older than this
    drained = state.gpu in event.placement.drained
    state.summary_due = state.summary_due or drained != state.drained
    state.drained = drained
    state.room_short = event.placement.room_short
    prefill = event.placement.prefill
    state.role = "both" if not prefill else "prefill" if state.gpu in prefill else "decode"
    return []


def _leaving(state: State, now_ms: float, event: ev.Leaving) -> list[ev.Action]:
    """Take no new work; what still runs at the deadline is handed back to its gateways."""
    state.leaving = state.summary_due = True
    works = list(state.works.values()) if event.at_once else []
    return ends.fail(state, now_ms, works, f"{state.gpu} is being stopped")


def _lut_read(state: State, now_ms: float, event: ev.LutRead) -> list[ev.Action]:
    """Decide by a stored table from now on, also for an engine that runs already."""
    lut = unpack(event.packed)
    if lut.device.name != state.device.name:
        return []
    unusable = state.shelf.put(lut.on(state.device))
    state.luts.pop(lut.model.name, None)
    engine = state.engines.get(lut.model.name)
    if engine is not None:
        engine.lut = state.lut(engine.spec)
        engine.tally = None
        state.changed()
    return [ev.Count(name="luts_read", labels={"model": lut.model.name, "why": unusable})]


def _bus_lost(state: State, now_ms: float, event: ev.BusLost) -> list[ev.Action]:
    state.bus_lost = True
    return []


def _bus_restored(state: State, now_ms: float, event: ev.BusRestored) -> list[ev.Action]:
    """Send again all that may have been lost; every gateway's lease starts anew."""
    state.bus_lost = False
    state.gateways = dict.fromkeys(state.gateways, now_ms)
    state.summary_due = True
    return [*state.outbox.resend(now_ms)]


def _clock_applied(state: State, now_ms: float, event: en.ClockApplied) -> list[ev.Action]:
    """Go by the clock that runs. One that the device cannot hold, or does not give, is decided without."""
    state.summary_due = state.summary_due or event.applied_mhz != state.clock_mhz
    state.clock_mhz = event.applied_mhz
    if event.limited == "capped":
        state.limit_mhz, state.limited_ms = event.applied_mhz, now_ms
    refused, state.clock_refused = state.clock_refused, event.limited == "refused"
    if event.limited or refused:
        state.work_changed = True
    return [ev.Count(name="clock_limits", labels={"why": event.limited})] if event.limited else []


def _device_sampled(state: State, now_ms: float, event: en.DeviceSampled) -> list[ev.Action]:
    was, state.asleep = (state.device_state, state.asleep), event.asleep
    state.summary_due = state.summary_due or (event.state, event.asleep) != was
    state.device_state, state.power_w, state.energy_j = event.state, event.power_w, event.energy_j
    under_way_ms = [now_ms - engine.stepped_ms for engine in state.engines.values() if engine.running]
    unexplained_j = state.energy.read(now_ms, event.energy_j, max(under_way_ms, default=0.0))
    counted = ev.Count(name="unexplained_energy_j", value=abs(unexplained_j))
    return [*([counted] if unexplained_j else []), *watch.listen(state, now_ms, event.unheard_ms)]
