"""The devices of a world: when they report, what schedulers read of them, and the series of the result."""

import math
from typing import TYPE_CHECKING

from shared import engine as en
from sim.nodes import GpuNode, Node
from sim.scenario import DeviceRecord, DeviceSample

if TYPE_CHECKING:
    from sim.world import World


class Hardware:
    """All devices of one world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.records = {node.ident: DeviceRecord(node.ident) for node in world.gpus}

    def replace(self, node: GpuNode) -> None:
        """Give a GPU a new device, without engines, in place of the one it has."""
        node.end_device(node.clock_ms(self._world.now_ms))
        self.make(node)

    def make(self, node: GpuNode) -> None:
        """Give a GPU a device."""
        node.gpu = node.make_gpu()
        node.gpu.advance(node.clock_ms(self._world.now_ms))

    def order(self, node: Node, order: en.Order) -> None:
        """Give a device an order of its scheduler."""
        assert isinstance(node, GpuNode)
        now_ms = self._world.now_ms
        if self._world.story is not None:
            self._world.story.add(now_ms, node.ident, order)
        node.order(now_ms, node.clock_ms(now_ms), order)
        self.arm(node)

    def report_each_step(self) -> None:
        """Let all engines report every step from now on."""
        for node in self._world.gpus:
            if node.gpu is not None and self._world.now_ms >= node.paused_until_ms:
                self.advance(node)
                node.gpu.report_each_step(node.clock_ms(self._world.now_ms))
                self.arm(node)

    def arm(self, node: GpuNode) -> None:
        """See to it that a device reports when something is due on it."""
        assert node.gpu is not None
        wake_ms = node.gpu.wake_ms
        if wake_ms is not None:
            at_ms = max(self._world.now_ms, wake_ms - node.offset_ms)
            if at_ms < node.device_armed_ms:
                node.device_armed_ms = at_ms
                self._world.at_device(at_ms, node)

    def due(self, node: GpuNode, life: int) -> None:
        """Let a device report; one whose scheduler stands still, when that goes on."""
        now_ms = self._world.now_ms
        if life != node.life or now_ms != node.device_armed_ms:
            return
        if now_ms < node.paused_until_ms:
            node.device_armed_ms = node.paused_until_ms
            self._world.at_device(node.device_armed_ms, node)
        else:
            self.advance(node)

    def advance(self, node: GpuNode) -> None:
        """Let a device go on to now, and its scheduler hear of it."""
        assert node.gpu is not None
        now_ms = self._world.now_ms
        node.device_armed_ms = math.inf
        wake_ms = node.gpu.wake_ms
        if wake_ms is not None and wake_ms - node.offset_ms <= now_ms:
            node.last_ms = max(node.last_ms, wake_ms)
            for event in node.gpu.advance(node.clock_ms(now_ms)):
                self._world.feed(node, node.reported(event))
        self.arm(node)

    def read(self, node: GpuNode, life: int) -> None:
        """Let a scheduler read its device, and regularly from then on for as long as it lives."""
        world = self._world
        if life != node.life:
            return
        if node.core is not None and node.gpu is not None and world.now_ms >= node.paused_until_ms:
            self.advance(node)
            world.feed(node, node.gpu.sample(node.clock_ms(world.now_ms)))
        world.at_end(world.scenario.device_sample_ms, lambda: self.read(node, life))

    def record(self, node: GpuNode, period_ms: float = 0.0) -> None:
        """Add to the series of the result, and again after each period unless that is 0."""
        world, gpu, running, waiting = self._world, node.gpu, 0, 0
        if gpu is not None:
            if world.now_ms >= node.paused_until_ms:
                self.advance(node)
            running = sum(len(engine.sequences) for engine in gpu.engines.values())
            waiting = len(node.local.state.queue) if node.core else 0
        parts_j = node.parts_j
        active_ms, warm_ms, sleeping_ms, cold_ms, off_ms = node.spent_ms
        record = self.records[node.ident]
        record.request_j, record.overhead_j, record.idle_j = node.uses_j
        record.samples.append(
            DeviceSample(
                at_ms=world.now_ms,
                clock_mhz=gpu.sm_clock_mhz if gpu else 0,
                power_w=gpu.power_w if gpu else 0.0,
                residents=len(gpu.engines) if gpu else 0,
                running=running,
                waiting=waiting,
                energy_j=sum(parts_j),
                parts_j=parts_j,  # type: ignore[arg-type]
                busy_ms=active_ms,
                warm_ms=warm_ms,
                empty_ms=sleeping_ms + cold_ms + off_ms,
                sleeping_ms=sleeping_ms,
                off_ms=off_ms,
            )
        )
        if period_ms:
            world.at_end(period_ms, lambda: self.record(node, period_ms))
