"""What may go wrong in a world, by the name a `Fault` has.

`crash`          the service `target` is gone for `for_ms`, its state with it; a GPU's engines end as well
`pause`          it stands still for `for_ms`; what comes meanwhile waits, its device goes on
`bus_lost`       its connection to the bus is down for `for_ms`, and it knows; then it reads the store again
`cut`            `target` and `other` do not reach each other for `for_ms`, and nobody knows
`stale`          the summaries of GPU `target` come `value` ms later, for `for_ms`
`clock_refused`  GPU `target` runs at `value` MHz whatever it is asked, for `for_ms`
`memory`         GPU `target` has `value` bytes less than its scheduler believes, for `for_ms`
`device_lost`    all engines of GPU `target` die
`engine_lost`    the engine of model `other` on GPU `target` dies
`stall`          the engine of model `other` on GPU `target` stands still; heard of if `value` > 0
`clock_step`     the wall clock of `target` is set by `value` ms
`leave`          GPU `target` is told to stop: it drains for `for_ms`, and starts again
`drain`          an administrator drains GPU `target` for `for_ms`
`move`           a scheduler asks for one more instance of model `target`, and in `for_ms` what waits for it
                 on one GPU is moved to another: one request, or with `value` below 0 each; with 2 or -2 those
                 that run as well
`lut`            a look-up table of model `target` is stored whose times are `value` times the modelled ones
`remove`         model `target` is removed, and added again after `for_ms`: with `value` < 0 as another one
`flush`          the store loses everything
`cancel`         the client of request `target` leaves
`stop`           the client of request `target` has all the text it wants
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from services.gateway.events import STOPPED, AddModel, DrainGpu, RemoveModel
from services.local_sched.work import Work
from shared import events as ev
from shared.engine import EngineEnded
from shared.lut import Lut, pack
from shared.lut_table import Provenance
from shared.subjects import ROUTES, lut_key
from sim.nodes import GpuNode, Node, lut_of
from sim.scenario import Fault

if TYPE_CHECKING:
    from sim.world import World

LAST_WORDS_MS = 200.0  # between the end of a drain and the end of its process


def happen(world: "World", fault: Fault) -> None:
    """Let a fault happen now."""
    KINDS[fault.kind](world, fault)


def _gpu(world: "World", name: str) -> GpuNode:
    node = world.by_name[name]
    assert isinstance(node, GpuNode), f"{name} is no GPU"
    return node


def _crash(world: "World", fault: Fault) -> None:
    node = world.by_name[fault.target]
    if node.core is not None:
        world.stop(node)
        world.later(fault.for_ms, lambda: world.start(node))


def _pause(world: "World", fault: Fault) -> None:
    node = world.by_name[fault.target]
    node.paused_until_ms = max(node.paused_until_ms, world.now_ms + fault.for_ms)


def _bus_lost(world: "World", fault: Fault) -> None:
    node = world.by_name[fault.target]
    if node.core is None or node.bus_lost:
        return
    life = node.life
    world.feed(node, ev.BusLost())
    node.bus_lost = True

    def restored() -> None:
        if node.life == life:
            node.bus_lost = False
            world.feed(node, ev.BusRestored())

    world.later(fault.for_ms, restored)


def _cut(world: "World", fault: Fault) -> None:
    world.bus.cut(fault.target, fault.other, world.now_ms + fault.for_ms)


def _stale(world: "World", fault: Fault) -> None:
    world.bus.hold_summaries(fault.target, world.now_ms + fault.for_ms, fault.value)


def _clock_refused(world: "World", fault: Fault) -> None:
    node = _gpu(world, fault.target)
    node.refused_mhz, node.refused_until_ms = int(fault.value), world.now_ms + fault.for_ms


def _memory(world: "World", fault: Fault) -> None:
    gpu = _gpu(world, fault.target).gpu
    if gpu is None:
        return
    device = gpu.device
    gpu.device = replace(device, total_bytes=device.total_bytes - int(fault.value))

    def back() -> None:
        gpu.device = device

    world.later(fault.for_ms, back)


def _device_lost(world: "World", fault: Fault) -> None:
    node = _gpu(world, fault.target)
    if node.core is None:
        return
    # those that wait for their turn, with their weights in host memory, are not on it
    models = [name for name, engine in node.local.state.engines.items() if engine.state != "asleep"]
    world.hardware.replace(node)
    for model in models:
        world.feed(node, EngineEnded(model=model, reason="the device is lost"))


def _engine_lost(world: "World", fault: Fault) -> None:
    node = _gpu(world, fault.target)
    if node.gpu is None or fault.other not in node.gpu.engines:
        return
    node.gpu.kill(node.clock_ms(world.now_ms), fault.other)
    world.hardware.arm(node)
    world.feed(node, EngineEnded(model=fault.other, reason="killed"))


def _stall(world: "World", fault: Fault) -> None:
    node = _gpu(world, fault.target)
    if node.gpu is None or fault.other not in node.gpu.engines:
        return
    world.hardware.advance(node)
    node.gpu.hang(node.clock_ms(world.now_ms), fault.other, heard=fault.value > 0)
    world.hardware.arm(node)


def _clock_step(world: "World", fault: Fault) -> None:
    world.by_name[fault.target].wall_ms += fault.value


def _leave(world: "World", fault: Fault) -> None:
    node = _gpu(world, fault.target)
    if node.core is None:
        return
    life = node.life

    def if_same(act: Callable[[], None]) -> Callable[[], None]:
        return lambda: act() if node.life == life else None

    world.feed(node, ev.Leaving())
    world.later(fault.for_ms, if_same(lambda: world.feed(node, ev.Leaving(at_once=True))))
    world.later(fault.for_ms + LAST_WORDS_MS, if_same(lambda: _restart(world, node)))


def _restart(world: "World", node: Node) -> None:
    world.stop(node)
    world.later(500.0, lambda: world.start(node))


def _drain(world: "World", fault: Fault) -> None:
    def order(on: bool) -> None:
        gateway = world.any_gateway()
        if gateway is not None:
            world.feed(gateway, DrainGpu(gpu=fault.target, on=on))

    order(True)
    # An administrator sees whether it took effect, and says it again.
    for again_ms in (0.0, 2_000.0, 4_000.0):
        world.later(fault.for_ms + again_ms, lambda: order(False))


def _move(world: "World", fault: Fault) -> None:
    model = fault.target
    asks = ev.ScaleOut(model=model, scheduler="scheduler-0", reason="sustained_deficit")
    world.bus.send(world.now_ms, world.by_name["scheduler-0"], model, asks)
    for again_ms in (0.0, 50.0, 400.0):
        world.later(fault.for_ms + again_ms, lambda: _move_away(world, model, fault))


def _move_away(world: "World", model: str, fault: Fault) -> None:
    """Have a model's requests moved, as a consolidator would, if two GPUs have the model."""
    up = [node for node in world.gpus if node.core is not None]
    running, each = abs(fault.value) > 1, fault.value < 0
    there_are = {n.ident: _works(n, model, running) for n in up}
    source = next((node for node in up if there_are[node.ident]), None)
    there = [n for n in up if n is not source and model in n.local.state.engines]
    if source is None or not there:
        return
    order = ev.Move(
        move_id=f"{source.ident}-{there[0].ident}-{world.now_ms:.6f}",
        request_id=("**" if running else "*") if each else there_are[source.ident][0].request.request_id,
        model=model,
        source=source.ident,
        destination=there[0].ident,
        destination_host=_other_host(source, there[0]),
    )
    world.bus.send(world.now_ms, world.by_name["consolidator-0"], source.local.state.host, order)


def _works(node: GpuNode, model: str, running: bool) -> list[Work]:
    """Return the requests of a model that wait on a GPU, or that run there, those with most KV first."""
    state = node.local.state
    if not running:
        return [work for work in state.queue.values() if work.request.model == model]
    engine = state.engines.get(model)
    return sorted(engine.running.values() if engine else (), key=lambda work: -work.context_tokens)


def _other_host(source: GpuNode, destination: GpuNode) -> str:
    host = destination.local.state.host
    return "" if host == source.local.state.host else host


def _lut(world: "World", fault: Fault) -> None:
    """Store a table as the command line does; whoever decides by tables reads it, at once or at its start."""
    spec = next(model for model in world.scenario.models if model.name == fault.target)
    device = world.scenario.made_of
    right = lut_of(device, spec)
    times = right.block.copy()
    for grid in right.axes.grids(times)[::2]:  # of prefill and decode; between them are the powers
        grid *= fault.value
    provenance = Provenance(kind="measured", device=device.name)
    packed = pack(Lut(device, spec, right.axes, times, provenance))
    world.luts[lut_key(device.name, spec.name)] = packed
    for node in world.nodes:
        if node.service in ROUTES[ev.LutStored].readers and node.hears:
            life = node.life
            world.later(
                world.scenario.network.delay_ms,
                lambda node=node, life=life: (  # type: ignore[misc]
                    world.feed(node, ev.LutRead(packed=packed)) if node.life == life else None
                ),
            )


def _remove(world: "World", fault: Fault) -> None:
    """Let an administrator remove a model, and add one of its name."""
    gateway = world.any_gateway()
    spec = next(model for model in world.scenario.models if model.name == fault.target)
    if gateway is None:
        return
    world.feed(gateway, RemoveModel(spec.name))
    again = msgspec.structs.replace(spec, layers=spec.layers + 1) if fault.value < 0 else spec

    def add() -> None:
        up = world.any_gateway()
        if up is None:
            world.later(100.0, add)
        else:
            world.feed(up, AddModel(again))

    world.later(fault.for_ms, add)


def _flush(world: "World", fault: Fault) -> None:
    world.store.flush()
    world.luts.clear()


def _cancel(world: "World", fault: Fault) -> None:
    world.clients.leave(fault.target, "the client has gone")


def _stop(world: "World", fault: Fault) -> None:
    world.clients.leave(fault.target, STOPPED)


KINDS: dict[str, Callable[["World", Fault], None]] = {
    "crash": _crash,
    "pause": _pause,
    "bus_lost": _bus_lost,
    "cut": _cut,
    "stale": _stale,
    "clock_refused": _clock_refused,
    "memory": _memory,
    "device_lost": _device_lost,
    "engine_lost": _engine_lost,
    "stall": _stall,
    "clock_step": _clock_step,
    "leave": _leave,
    "drain": _drain,
    "move": _move,
    "lut": _lut,
    "remove": _remove,
    "flush": _flush,
    "cancel": _cancel,
    "stop": _stop,
}
