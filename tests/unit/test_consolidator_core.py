"""The consolidator against small models of GPUs that carry out its orders."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from services.consolidator.core import ConsolidatorCore
from services.consolidator.settings import ConsolidatorSettings
from shared import events as ev
from shared.errors import ConfigError
from shared.model import EngineSummary, GpuSummary, Instance, ModelSpec, Placement, digest
from shared.subjects import PLACEMENT_KEY

SETTINGS = ConsolidatorSettings(min_kv_bytes=10, min_kv_tokens=0)
START_MS = 1_000_000.0


def spec(name: str, weight_bytes: int = 30, **fields: Any) -> ModelSpec:
    shape = {"params": 1, "layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
    fields = {"engine": "emulated", "kv_bytes_per_token": 1, **shape, **fields}
    return ModelSpec(name=name, weight_bytes=weight_bytes, **fields)


@dataclass
class FakeGpu:
    """Loads and unloads at the next heartbeat; takes 100 bytes, of which placement may use 95."""

    name: str
    host: str = "h1"
    engine: str = "emulated"
    started_ms: float = 0.0
    engines: dict[str, EngineSummary] = field(default_factory=dict)
    next_engines: dict[str, EngineSummary] = field(default_factory=dict)
    seq: int = 0
    alive: bool = True
    obeys: bool = True
    fails: bool = False
    state: str = "active"
    kv_pool_bytes: int = 0
    asleep: tuple[str, ...] = ()
    fixed_share_pct: int = 0

    def hear(self, message: ev.Message) -> None:
        if not self.obeys:
            return
        if isinstance(message, ev.Load) and message.model.name not in self.engines:
            self.next_engines[message.model.name] = EngineSummary(
                model=message.model.name,
                state="failed" if self.fails else "ready",
                free_kv_bytes=10,
                spec=digest(message.model),
            )
        if isinstance(message, ev.Unload) and message.model in self.engines:
            engine = self.engines[message.model]
            if not engine.running and not engine.queued and engine.idle_ms >= message.if_idle_ms:
                self.next_engines.pop(message.model, None)

    def set(self, model: str, **fields: Any) -> None:
        self.engines[model] = self.next_engines[model] = EngineSummary(
            model=model, **{"state": "ready", **fields}
        )

    def summary(self) -> ev.SummaryChanged:
        self.seq += 1
        self.engines = dict(self.next_engines)
        summary = GpuSummary(
            gpu=self.name,
            host=self.host,
            gpu_type="h100-80gb",
            engine=self.engine,
            started_ms=self.started_ms,
            seq=self.seq,
            state=self.state,
            sm_clock_mhz=0,
            total_bytes=100,
            free_bytes=0,
            engines=tuple(self.engines.values()),
            kv_pool_bytes=self.kv_pool_bytes,
            asleep=self.asleep,
            fixed_share_pct=self.fixed_share_pct,
        )
        return ev.SummaryChanged(summary=summary)


class Lab:
    """The core, some GPUs, and time: every 250 ms a heartbeat of each GPU and a tick."""

    def __init__(
        self,
        models: list[ModelSpec],
        gpus: list[FakeGpu],
        placement: Placement | None = None,
        settings: ConsolidatorSettings = SETTINGS,
    ) -> None:
        self.core = ConsolidatorCore("c1", settings, placement, tuple(models))
        self.gpus = {gpu.name: gpu for gpu in gpus}
        self.now_ms = START_MS
        self.log: list[tuple[float, str, ev.Message]] = []
        self.puts: list[Placement] = []
        self.do(ev.Tick())

    def do(self, event: ev.Message | ev.Event) -> list[ev.Action]:
        actions = self.core.step(self.now_ms, event)
        for action in actions:
            if isinstance(action, ev.Put):
                assert action.key == PLACEMENT_KEY
                assert isinstance(action.value, Placement)
                self.puts.append(action.value)
            elif isinstance(action, ev.Send) and isinstance(action.message, ev.ConsolidatorAlive):
                self.do(action.message)  # it hears itself
            elif isinstance(action, ev.Send):
                self.log.append((self.now_ms, action.to, action.message))
                if action.to in self.gpus:
                    self.gpus[action.to].hear(action.message)
        return actions

    def run(self, duration_ms: float = 2_000.0) -> "Lab":
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            for gpu in self.gpus.values():
                if gpu.alive:
                    self.do(gpu.summary())
            wake_ms = self.core.wake_ms
            if wake_ms is not None and wake_ms <= self.now_ms:
                self.do(ev.Tick())
            self.now_ms += 250.0
        return self

    @property
    def placed(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for instance in self.core.placement.instances:
            found[instance.model] = found.get(instance.model, ()) + instance.gpus
        return found

    def sent(self, kind: type[ev.Message]) -> list[tuple[float, str, Any]]:
        return [entry for entry in self.log if isinstance(entry[2], kind)]


def where(lab: Lab) -> dict[str, list[str]]:
    return {name: sorted(gpu.engines) for name, gpu in lab.gpus.items()}


def test_it_waits_for_summaries_then_places_worst_fit_by_engine_kind() -> None:
    models = [spec("a", 40), spec("b", 30), spec("c", 20), spec("v", 5, engine="vllm")]
    lab = Lab(models, [FakeGpu("g1"), FakeGpu("g2"), FakeGpu("cpu", engine="vllm")])
    lab.run(1_500)
    assert lab.log == []
    lab.run(1_000)
    # a (50 with KV) takes g1; b (40) the emptier g2; c (30) g2 again, with 55 left against 45
    assert lab.placed == {"a": ("g1",), "b": ("g2",), "c": ("g2",), "v": ("cpu",)}
    assert where(lab) == {"g1": ["a"], "g2": ["b", "c"], "cpu": ["v"]}
    assert lab.puts == [lab.core.placement]
    version = lab.core.placement.version
    assert version > START_MS
    assert {order.placement_version for _, _, order in lab.sent(ev.Load)} == {version}
    first = [type(message) for _, _, message in lab.log[:2]]
    assert first == [ev.PlacementChanged, ev.Load]


def test_nothing_more_is_ordered_once_all_is_as_it_should_be() -> None:
    lab = Lab([spec("a"), spec("b")], [FakeGpu("g1"), FakeGpu("g2")]).run()
    before = len(lab.log)
    lab.run(20_000)
    assert len(lab.log) == before


def test_the_margin_and_the_kv_floor_hold_and_what_does_not_fit_waits_for_a_gpu() -> None:
    lab = Lab([spec("a", 85), spec("b", 76)], [FakeGpu("g1")]).run()
    assert lab.placed == {"a": ("g1",)}  # 85 + 10 is 95 % exactly; b needs a GPU of its own
    lab.gpus["g2"] = FakeGpu("g2")
    lab.run()
    assert lab.placed == {"a": ("g1",), "b": ("g2",)}


def test_a_model_registered_later_is_placed_and_one_removed_is_unloaded_everywhere() -> None:
    lab = Lab([], [FakeGpu("g1")]).run()
    lab.do(ev.ModelRegistered(model=spec("a")))
    lab.run()
    assert where(lab) == {"g1": ["a"]}
    lab.do(ev.ModelRemoved(model="a"))
    lab.run()
    assert lab.placed == {} and where(lab) == {"g1": []}


def test_models_registered_one_after_another_are_placed_together() -> None:
    """One by one, worst fit would spread the small ones and leave no gap for the last and largest."""
    lab = Lab([], [FakeGpu("g1"), FakeGpu("g2")]).run()
    for name, weight_bytes in (("small", 20), ("smaller", 15), ("large", 70)):
        lab.do(ev.ModelRegistered(model=spec(name, weight_bytes)))
        lab.run(500)
    lab.run()
    assert where(lab) == {"g1": ["large"], "g2": ["small", "smaller"]}


def test_a_lost_load_is_repeated_once_a_second() -> None:
    gpu = FakeGpu("g1", obeys=False)
    lab = Lab([spec("a")], [gpu]).run(6_000)
    times = [at for at, _, _ in lab.sent(ev.Load)]
    assert len(times) >= 4
    assert all(1_000 <= later - earlier <= 1_250 for earlier, later in pairwise(times))


def test_a_failing_load_is_repeated_ever_more_slowly() -> None:
    gpu = FakeGpu("g1", fails=True)
    lab = Lab([spec("a")], [gpu]).run(2_000)
    gpu.fails, gpu.obeys = True, False
    lab.run(30_000)
    times = [at for at, _, _ in lab.sent(ev.Load)]
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert waits[:4] == pytest.approx([1_000, 2_000, 4_000, 8_000], abs=250)


def test_a_restarted_gpu_gets_its_models_again() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")]).run()
    lab.gpus["g1"] = FakeGpu("g1", started_ms=5.0)
    lab.run(500)
    assert where(lab) == {"g1": ["a"]}


def test_summaries_out_of_order_are_ignored() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")])
    old = lab.gpus["g1"].summary()
    lab.run()
    loads = len(lab.sent(ev.Load))
    lab.do(old)
    assert len(lab.sent(ev.Load)) == loads


def test_keep_alive_unloads_and_only_a_request_brings_the_model_back() -> None:
    lab = Lab([spec("a", keep_alive_ms=5_000.0), spec("b", keep_alive_ms=None)], [FakeGpu("g1")]).run()
    lab.gpus["g1"].set("a", idle_ms=5_100.0)
    lab.gpus["g1"].set("b", idle_ms=1e9)
    lab.run()
    [(_, gpu, order)] = lab.sent(ev.Unload)
    assert (gpu, order.model, order.if_idle_ms) == ("g1", "a", 5_000.0)
    assert where(lab) == {"g1": ["b"]}
    lab.gpus["g2"] = FakeGpu("g2")
    lab.run(5_000)
    assert lab.placed == {"b": ("g1",)}
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="no instance"))
    lab.run(500)
    assert lab.placed == {"a": ("g2",), "b": ("g1",)} and where(lab)["g2"] == ["a"]


def test_fixed_pools_count_with_their_whole_size() -> None:
    models = [spec(name, 10) for name in "abc"]
    lab = Lab(models, [FakeGpu("g1", kv_pool_bytes=30)]).run(5_000)
    assert where(lab) == {"g1": ["a", "b"]}  # 40 each, of 95; with the least KV memory all three would fit
    assert len(lab.sent(ev.Load)) == 2
    for name in "ab":
        lab.gpus["g1"].set(name, idle_ms=900.0 if name == "a" else 600.0)
    lab.do(ev.ScaleOut(model="c", scheduler="s", reason="no instance"))
    lab.run()
    assert where(lab) == {"g1": ["b", "c"]}


def test_a_model_registered_anew_with_another_specification_is_loaded_anew_once_idle() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")]).run()
    gpu = lab.gpus["g1"]
    gpu.set("a", running=1, queued=1, spec=digest(spec("a")))
    lab.do(ev.ModelRemoved(model="a"))
    lab.do(ev.ModelRegistered(model=spec("a", 40)))
    loads, unloads = len(lab.sent(ev.Load)), len(lab.sent(ev.Unload))
    lab.run(3_000)
    assert lab.placed == {"a": ("g1",)} and lab.sent(ev.Move) == []
    assert len(lab.sent(ev.Unload)) == unloads  # it is busy
    gpu.set("a", idle_ms=100.0, spec=digest(spec("a")))
    lab.run()
    assert [order.if_idle_ms for _, _, order in lab.sent(ev.Unload)[unloads:]] == [0.0]
    assert [order.model.weight_bytes for _, _, order in lab.sent(ev.Load)[loads:]] == [40]
    assert gpu.engines["a"].spec == digest(spec("a", 40))
    before = len(lab.log)
    lab.run(10_000)
    assert len(lab.log) == before


def test_an_outdated_engine_that_has_failed_is_loaded_anew_and_not_unloaded_again() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")]).run()
    lab.gpus["g1"].obeys = False
    lab.gpus["g1"].set("a", state="failed", spec="other")
    lab.run(1_000)
    assert lab.sent(ev.Unload) == [] and len(lab.sent(ev.Load)) == 2


def test_a_change_of_keep_alive_loads_nothing_anew() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")]).run()
    before = len(lab.log)
    lab.do(ev.ModelRegistered(model=spec("a", keep_alive_ms=None, tenants=("t",))))
    lab.run()
    assert len(lab.log) == before


def test_of_a_model_that_stays_loaded_only_the_last_instance_does() -> None:
    lab = Lab([spec("p", keep_alive_ms=None)], [FakeGpu("g1"), FakeGpu("g2")]).run()
    lab.do(ev.ScaleOut(model="p", scheduler="s", reason="deficit"))
    lab.run()
    assert lab.placed == {"p": ("g1", "g2")}
    for gpu in lab.gpus.values():
        gpu.set("p", idle_ms=59_000.0)
    lab.run(1_000)
    assert lab.placed == {"p": ("g1", "g2")}
    for gpu in lab.gpus.values():
        gpu.set("p", idle_ms=61_000.0)
    lab.run(5_000)
    assert lab.placed == {"p": ("g2",)} and where(lab) == {"g1": [], "g2": ["p"]}


def test_the_only_working_instance_of_a_model_that_stays_loaded_is_kept() -> None:
    placement = Placement(version=7, instances=tuple(Instance(model="p", gpus=(g,)) for g in ("g1", "g2")))
    gpus = [FakeGpu("g1"), FakeGpu("g2", fails=True)]
    gpus[0].set("p", idle_ms=1e9)
    lab = Lab([spec("p", keep_alive_ms=None)], gpus, placement).run(5_000)
    assert "p" in where(lab)["g1"] and lab.sent(ev.Unload) == []


def test_a_further_instance_of_a_model_that_stays_loaded_makes_room_and_the_last_does_not() -> None:
    models = [spec("p", 60, keep_alive_ms=None), spec("x", 60), spec("y", 60)]
    placement = Placement(version=7, instances=tuple(Instance(model="p", gpus=(g,)) for g in ("g1", "g2")))
    gpus = [FakeGpu("g1"), FakeGpu("g2")]
    for gpu in gpus:
        gpu.set("p", idle_ms=5_000.0)
    lab = Lab(models, gpus, placement).run()
    for name in "xy":
        lab.do(ev.ScaleOut(model=name, scheduler="s", reason="no instance"))
    lab.run(3_000)
    assert lab.placed == {"p": ("g2",), "x": ("g1",)}


def test_a_drain_is_always_answered_by_the_placement() -> None:
    lab = Lab([], [FakeGpu("g1")]).run()
    for _ in range(2):  # the second changes nothing
        before = len(lab.sent(ev.PlacementChanged))
        lab.do(ev.Drain(gpu="g1", on=True))
        assert [m.placement.drained for _, _, m in lab.sent(ev.PlacementChanged)[before:]] == [("g1",)]


def test_a_request_that_races_the_unload_keeps_the_model_placed() -> None:
    lab = Lab([spec("a", keep_alive_ms=5_000.0)], [FakeGpu("g1")]).run()
    gpu = lab.gpus["g1"]
    gpu.obeys = False
    gpu.set("a", idle_ms=5_100.0)
    lab.run(750)
    assert lab.placed == {}
    gpu.set("a", running=1)
    lab.run(750)
    assert lab.placed == {"a": ("g1",)}
    gpu.set("a", idle_ms=300.0)
    unloads = len(lab.sent(ev.Unload))
    lab.run()
    assert lab.placed == {"a": ("g1",)} and len(lab.sent(ev.Unload)) == unloads


def test_a_request_for_a_model_being_unloaded_loads_it_again() -> None:
    lab = Lab([spec("a", keep_alive_ms=5_000.0)], [FakeGpu("g1")]).run()
    lab.gpus["g1"].set("a", state="unloading")
    lab.run(250)
    lab.do(ev.PlacementChanged(placement=Placement(version=2**50, parked=("a",))))
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="no instance"))
    lab.run(750)
    assert lab.placed == {}
    lab.gpus["g1"].next_engines.clear()
    lab.run(1_000)
    assert lab.placed == {"a": ("g1",)} and where(lab) == {"g1": ["a"]}


def test_scale_out_adds_an_instance_only_for_a_deficit_of_a_ready_model_and_not_in_a_row() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1"), FakeGpu("g2"), FakeGpu("g3")]).run()
    assert lab.placed == {"a": ("g1",)}
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="no instance"))
    assert lab.placed == {"a": ("g1",)}
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="deficit"))
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="deficit"))
    lab.run()
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="deficit"))
    assert lab.placed == {"a": ("g1", "g2")}
    lab.run(5_000)
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="deficit"))
    assert lab.placed == {"a": ("g1", "g2", "g3")}


def test_scale_out_evicts_the_longest_idle_and_neither_busy_nor_pinned_nor_fresh_ones() -> None:
    models = [spec("a", 25), spec("b", 25), spec("p", 5, keep_alive_ms=None), spec("new", 25)]
    placement = Placement(version=7, instances=tuple(Instance(model=m, gpus=("g1",)) for m in "abp"))
    gpu = FakeGpu("g1")
    gpu.set("a", idle_ms=400.0)
    gpu.set("b", running=1)
    gpu.set("p", idle_ms=9_000.0)
    lab = Lab(models, [gpu], placement).run()
    lab.do(ev.ScaleOut(model="new", scheduler="s", reason="no instance"))
    lab.run(500)
    assert lab.placed == {"a": ("g1",), "b": ("g1",), "p": ("g1",)}
    gpu.set("a", idle_ms=600.0)  # the request is remembered
    lab.run(1_000)
    assert lab.placed == {"b": ("g1",), "new": ("g1",), "p": ("g1",)}
    assert where(lab) == {"g1": ["b", "new", "p"]}
    [(unload_ms, _, unload)] = lab.sent(ev.Unload)
    [(load_ms, _, load)] = lab.sent(ev.Load)
    assert (unload.model, unload.if_idle_ms, load.model.name) == ("a", 600.0, "new")
    assert load_ms > unload_ms  # only once the memory is there


def test_it_is_told_that_a_model_waits_for_room_until_that_is_a_while_ago() -> None:
    gpu = FakeGpu("g1")
    gpu.set("a", running=1)
    placement = Placement(version=7, instances=(Instance(model="a", gpus=("g1",)),))
    lab = Lab([spec("a", 60), spec("new", 60)], [gpu], placement, replace(SETTINGS, room_short_ms=5_000.0))
    lab.run()
    assert not lab.core.placement.room_short
    lab.do(ev.ScaleOut(model="new", scheduler="s", reason="no_instance"))
    lab.run(4_500)
    assert not lab.core.placement.room_short
    lab.run(1_500)
    assert lab.core.placement.room_short and lab.placed == {"a": ("g1",)}
    gpu.set("a", idle_ms=600.0)
    lab.run(2_000)
    assert lab.core.placement.room_short and lab.placed == {"new": ("g1",)}
    lab.run(5_000)
    assert not lab.core.placement.room_short


def test_a_large_model_is_passed_over_for_a_time_only() -> None:
    """Small ones take what gets idle; once the large one has waited 5 s, that is left for it."""
    gpu = FakeGpu("g1")
    small = [spec(name, 20) for name in ("a", "b", "c", "d")]
    gpu.set("a", running=1)
    gpu.set("b", idle_ms=600.0)
    placement = Placement(version=7, instances=tuple(Instance(model=m, gpus=("g1",)) for m in "ab"))
    lab = Lab([*small, spec("large", 70)], [gpu], placement, replace(SETTINGS, min_kv_bytes=25))
    lab.run(1_750)
    lab.do(ev.ScaleOut(model="large", scheduler="s", reason="no_instance"))
    lab.do(ev.ScaleOut(model="c", scheduler="s", reason="no_instance"))
    lab.run(1_000)
    assert lab.placed == {"a": ("g1",), "c": ("g1",)}
    lab.run(4_000)
    gpu.set("c", idle_ms=600.0)
    for name in ("large", "d"):
        lab.do(ev.ScaleOut(model=name, scheduler="s", reason="no_instance"))
    lab.run(1_000)
    assert lab.placed == {"a": ("g1",), "c": ("g1",)}
    gpu.set("a", idle_ms=600.0)
    lab.run(1_000)
    assert lab.placed == {"large": ("g1",)}


def test_a_victim_that_is_used_again_stays_and_the_other_model_waits() -> None:
    gpu = FakeGpu("g1")
    gpu.set("a", idle_ms=600.0)
    placement = Placement(version=7, instances=(Instance(model="a", gpus=("g1",)),))
    lab = Lab([spec("a", 60), spec("new", 60)], [gpu], placement).run()
    gpu.obeys = False
    lab.do(ev.ScaleOut(model="new", scheduler="s", reason="no instance"))
    assert lab.placed == {"new": ("g1",)}
    gpu.set("a", queued=1)
    lab.run(1_000)
    assert lab.placed == {"a": ("g1",)}
    gpu.obeys = True
    gpu.set("a", idle_ms=700.0)
    lab.run(1_500)
    assert lab.placed == {"new": ("g1",)} and where(lab) == {"g1": ["new"]}


def test_a_model_that_fails_to_load_goes_to_another_gpu_on_request() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1", fails=True), FakeGpu("g2")]).run(2_500)
    assert lab.placed == {"a": ("g1",)}
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="no instance"))
    lab.run(500)
    assert lab.placed == {"a": ("g2",)} and where(lab) == {"g1": [], "g2": ["a"]}


def test_drain_places_models_elsewhere_moves_what_is_there_and_unloads_when_idle() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1", host="h1"), FakeGpu("g2", host="h2")]).run()
    lab.gpus["g1"].set("a", running=1, queued=2)
    lab.run(500)
    lab.do(ev.Drain(gpu="g1", on=True))
    assert lab.puts[-1].drained == ("g1",)
    assert lab.placed == {"a": ("g2",)}
    lab.run(1_000)
    [(_, host, move)] = lab.sent(ev.Move)
    assert (host, move.request_id, move.model, move.source, move.destination) == ("h1", "**", "a", "g1", "g2")
    assert move.destination_host == "h2"
    assert lab.sent(ev.Unload) == []
    lab.do(ev.MoveEnded(move_id=move.move_id, request_id="**", outcome="aborted"))
    lab.run(1_500)
    assert [m.move_id for _, _, m in lab.sent(ev.Move)] == [move.move_id, move.move_id[:-1] + "2"]
    lab.gpus["g1"].set("a", idle_ms=10.0)
    lab.run(500)
    assert where(lab) == {"g1": [], "g2": ["a"]}
    lab.do(ev.Drain(gpu="g1", on=False))
    assert lab.core.placement.drained == ()


def test_a_model_that_fits_nowhere_else_leaves_a_drained_gpu_and_comes_back() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")]).run()
    lab.gpus["g1"].set("a", queued=1)
    lab.run(250)
    lab.do(ev.Drain(gpu="g1", on=True))
    lab.run(3_000)
    assert lab.placed == {} and lab.sent(ev.Unload) == [] and lab.sent(ev.Move) == []
    lab.do(ev.Drain(gpu="g1", on=False))
    assert lab.placed == {"a": ("g1",)}


def test_a_gone_gpu_is_replaced_but_not_while_the_own_bus_is_down() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1"), FakeGpu("g2")]).run()
    lab.gpus["g1"].alive = lab.gpus["g2"].alive = False
    lab.do(ev.BusLost())
    assert lab.core.wake_ms is None
    lab.run(20_000)
    lab.do(ev.BusRestored())
    assert lab.placed == {"a": ("g1",)}
    lab.gpus["g2"].alive = True
    lab.run(2_500)
    assert lab.placed == {"a": ("g1",)}
    lab.run(1_500)
    assert lab.placed == {"a": ("g2",)} and where(lab)["g2"] == ["a"]


def test_the_placement_is_announced_again_when_the_bus_is_back() -> None:
    lab = Lab([spec("a")], [FakeGpu("g1")]).run()
    lab.do(ev.BusLost())
    actions = lab.do(ev.BusRestored())
    assert ev.Send(to="current", message=ev.PlacementChanged(placement=lab.core.placement)) in actions
    assert len(set(lab.puts)) == 1


def test_a_stored_placement_stays_in_force_over_a_restart() -> None:
    placement = Placement(version=7, instances=(Instance(model="a", gpus=("g2",)),), drained=("g1",))
    gpus = [FakeGpu("g1"), FakeGpu("g2")]
    gpus[1].set("a")
    lab = Lab([spec("a")], gpus, placement).run(5_000)
    # but under a version above all that GPUs may have seen since it was stored
    assert lab.core.placement == replace(placement, version=int(START_MS) + 1_500)
    assert lab.puts == [lab.core.placement]
    assert [type(message) for _, _, message in lab.log] == [ev.PlacementChanged]


def test_loaded_models_are_kept_when_the_store_has_lost_the_placement() -> None:
    gpus = [FakeGpu("g1"), FakeGpu("g2")]
    gpus[1].set("a", idle_ms=100.0)
    lab = Lab([spec("a")], gpus).run(5_000)
    assert lab.placed == {"a": ("g2",)}
    assert lab.sent(ev.Load) == [] and lab.sent(ev.Unload) == []


def test_a_gpu_that_leaves_gives_its_models_away_and_gets_models_when_it_is_back() -> None:
    gpus = [FakeGpu("g1"), FakeGpu("g2")]
    lab = Lab([spec("a", 40), spec("b", 30)], gpus).run(5_000)
    assert lab.placed == {"a": ("g1",), "b": ("g2",)}
    gpus[0].state = "draining"
    lab.run()
    assert lab.placed == {"a": ("g2",), "b": ("g2",)} and where(lab) == {"g1": [], "g2": ["a", "b"]}
    gpus[1].state = "draining"
    lab.run()
    assert lab.placed == {}
    gpus[0].state = "active"
    lab.run()
    assert lab.placed == {"a": ("g1",), "b": ("g1",)}


def test_a_model_nobody_knows_is_left_alone_until_long_idle() -> None:
    gpu = FakeGpu("g1")
    gpu.set("stranger", idle_ms=59_000.0)
    lab = Lab([], [gpu]).run()
    assert lab.sent(ev.Unload) == []
    gpu.set("stranger", idle_ms=60_000.0)
    lab.run()
    assert where(lab) == {"g1": []}


def test_a_peers_newer_placement_wins_and_an_older_one_does_not() -> None:
    lab = Lab([spec("a"), spec("b")], [FakeGpu("g1"), FakeGpu("g2")]).run()
    ours = lab.core.placement
    lab.do(ev.PlacementChanged(placement=Placement(version=ours.version - 1)))
    assert lab.core.placement == ours
    there = (Instance(model="a", gpus=("g2",)),)
    theirs = Placement(version=ours.version + 5, instances=there, parked=("b",))
    lab.do(ev.PlacementChanged(placement=theirs))
    lab.run()
    assert lab.core.placement == theirs and lab.puts == [ours, ours, theirs]  # the older one was overwritten
    assert where(lab) == {"g1": [], "g2": ["a"]}


def test_a_model_that_a_peers_placement_does_not_have_yet_is_placed_again_where_it_is_loaded() -> None:
    """The peer began to lead before it had heard of us, and of the model."""
    lab = Lab([spec("a"), spec("b")], [FakeGpu("g1"), FakeGpu("g2")]).run()
    assert lab.placed == {"a": ("g1",), "b": ("g2",)}
    theirs = Placement(version=lab.core.placement.version + 5, instances=(Instance(model="a", gpus=("g1",)),))
    lab.do(ev.PlacementChanged(placement=theirs))
    lab.run()
    assert lab.placed == {"a": ("g1",), "b": ("g2",)} and lab.sent(ev.Unload) == []


def test_a_model_let_go_at_the_very_look_that_tries_all_again_is_not_placed_again() -> None:
    lab = Lab([spec("a", keep_alive_ms=5_000.0)], [FakeGpu("g1")]).run()
    lab.gpus["g1"].set("a", idle_ms=5_100.0)
    lab.do(lab.gpus["g1"].summary())
    theirs = replace(lab.core.placement, version=lab.core.placement.version + 5)
    lab.do(ev.PlacementChanged(placement=theirs))
    assert lab.placed == {} and lab.core.placement.parked == ("a",)


def test_what_was_let_go_is_told_and_stays_so_over_a_restart_until_it_is_asked_for() -> None:
    models, gpu = [spec("a", keep_alive_ms=5_000.0), spec("b")], FakeGpu("g1")
    lab = Lab(models, [gpu]).run()
    gpu.set("a", idle_ms=5_100.0)
    lab.run()
    assert lab.core.placement.parked == ("a",) and where(lab) == {"g1": ["b"]}
    again = Lab([], [gpu], lab.core.placement)
    for model in models:  # read from the store
        again.do(ev.ModelRegistered(model=model))
    again.run(5_000)
    assert again.core.placement.parked == ("a",) and where(again) == {"g1": ["b"]}
    again.do(ev.ScaleOut(model="a", scheduler="s", reason="no instance"))
    again.run()
    assert again.core.placement.parked == () and where(again) == {"g1": ["a", "b"]}
    again.gpus["g1"].set("a", idle_ms=5_100.0)
    again.run()
    again.do(ev.ModelRemoved(model="a"))
    again.run()
    assert again.core.placement.parked == ()
    again.do(ev.ModelRegistered(model=models[0]))  # registered anew it is loaded, as any
    again.run()
    assert where(again) == {"g1": ["a", "b"]}


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="safety_margin"):
        ConsolidatorSettings(safety_margin=1.0)
    with pytest.raises(ConfigError, match="min_kv_bytes"):
        ConsolidatorSettings(min_kv_bytes=-1)
    with pytest.raises(ConfigError, match="settle_ms"):
        ConsolidatorSettings(settle_ms=0.0)


def test_a_model_that_failed_to_load_beside_one_kept_after_all_gives_up_its_place() -> None:
    lab = Lab([spec("a", 60, keep_alive_ms=5_000.0), spec("b", 50)], [FakeGpu("g1")]).run()
    gpu = lab.gpus["g1"]
    assert lab.placed == {"a": ("g1",)}
    gpu.obeys = False
    gpu.set("a", idle_ms=2_000.0)
    lab.run(250)
    lab.do(ev.ScaleOut(model="b", scheduler="s", reason="no instance"))
    assert lab.placed == {"b": ("g1",)}
    gpu.set("a", running=1)  # used again before the order came, so there was no room for the other
    gpu.set("b", state="failed")
    lab.run(750)
    assert lab.placed == {"a": ("g1",)}
