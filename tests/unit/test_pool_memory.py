"""Consolidator and local scheduler must agree on what fits: what the one places, the other can load."""

import dataclasses
from typing import Any

import msgspec
import pytest

from services.consolidator.core import ConsolidatorCore
from services.consolidator.settings import ConsolidatorSettings
from services.local_sched.core import LocalSchedCore
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.model import EngineSummary

GB = 10**9
START_MS = 1_000_000.0
CPU = dataclasses.replace(DEVICES["cpu"], total_bytes=64 << 30)
SIX = [
    msgspec.structs.replace(model, engine="vllm", weights="folder", weight_bytes=GB, keep_alive_ms=None)
    for model in emulated_models(6)
]


class Pool:
    """One device and a consolidator; engines load at once."""

    def __init__(self, **settings: Any) -> None:
        self.now_ms = START_MS
        self.local = LocalSchedCore("cpu-0", "h", "vllm", CPU, LocalSettings(**settings), START_MS)
        self.consolidator = ConsolidatorCore("c", ConsolidatorSettings(), None, tuple(SIX))
        self.loads = 0

    def carry(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, en.LoadEngine):
                pool_bytes = action.kv_pool_bytes
                ready = en.EngineReady(
                    model=action.model.name, kv_pool_bytes=pool_bytes, block_tokens=16, load_ms=1.0
                )
                self.carry(self.local.step(self.now_ms, ready))
            elif isinstance(action, en.UnloadEngine):
                self.carry(self.local.step(self.now_ms, en.EngineEnded(model=action.model)))
            elif isinstance(action, ev.Send) and isinstance(action.message, ev.Load | ev.Unload):
                self.loads += isinstance(action.message, ev.Load)
                self.carry(self.local.step(self.now_ms, action.message))
            elif isinstance(action, ev.Send) and isinstance(
                action.message, ev.SummaryChanged | ev.ConsolidatorAlive
            ):
                self.carry(self.consolidator.step(self.now_ms, action.message))

    def run(self, for_ms: float) -> None:
        end_ms = self.now_ms + for_ms
        while self.now_ms < end_ms:
            self.carry(self.local.step(self.now_ms, ev.Tick()))
            self.carry(self.consolidator.step(self.now_ms, ev.Tick()))
            self.now_ms += 250.0

    def engines(self) -> list[EngineSummary]:
        return list(self.consolidator._cluster.summaries["cpu-0"].engines)


@pytest.mark.parametrize(
    ("settings", "fit"),
    [
        ({}, 3),  # 65.3 GB / (1 GB + 16.3 GB)
        ({"fixed_pool_share": 0.1}, 6),
        ({"kv_pool_bytes": 12 * GB}, 5),
    ],
)
def test_every_load_that_is_ordered_succeeds(settings: dict[str, Any], fit: int) -> None:
    pool = Pool(**settings)
    pool.run(10_000.0)
    assert [engine.state for engine in pool.engines()] == ["ready"] * fit
    assert pool.loads == fit  # none of them twice, none in vain
