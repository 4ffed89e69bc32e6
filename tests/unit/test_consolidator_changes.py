"""When the consolidator changes the placement as a whole, against the small GPUs of the core's tests."""

import pytest
from test_consolidator_core import FakeGpu, Lab, spec, where

from services.consolidator.settings import ConsolidatorSettings
from shared import events as ev
from shared.errors import ConfigError
from shared.model import Instance, ModelSpec, Placement

SETTINGS = ConsolidatorSettings(
    min_kv_bytes=10,
    min_kv_tokens=0,
    observe_ms=5_000.0,
    consolidate_ms=5_000.0,
    dwell_ms=10_000.0,
    window_ms=30_000.0,
)
APART = Placement(version=7, instances=tuple(Instance(model=m, gpus=(f"g{m}",)) for m in "abc"))


def pinned(name: str, weight_bytes: int = 20, **more: float | None) -> ModelSpec:
    return spec(name, weight_bytes, **{"keep_alive_ms": None, **more})


def apart(settings: ConsolidatorSettings = SETTINGS, weight_bytes: int = 20) -> Lab:
    """Three models that stay loaded, each on a GPU of its own; 100 bytes each, and 30 of them needed."""
    gpus = [FakeGpu(f"g{m}") for m in "abc"]
    for gpu, model in zip(gpus, "abc", strict=True):
        gpu.set(model, idle_ms=1_000.0)
    return Lab([pinned(m, weight_bytes) for m in "abc"], gpus, APART, settings)


def test_models_that_fit_on_one_gpu_get_one_and_nothing_is_unloaded_before_it_serves_there() -> None:
    lab = apart().run(4_000)
    assert lab.placed == {"a": ("ga",), "b": ("gb",), "c": ("gc",)}
    lab.run(8_000)
    assert len({gpu for gpus in lab.placed.values() for gpu in gpus}) == 1
    [home] = lab.placed["a"]
    assert where(lab) == {gpu: (["a", "b", "c"] if gpu == home else []) for gpu in lab.gpus}
    loads = [(to, order.model.name) for _, to, order in lab.sent(ev.Load)]
    assert len(loads) == 2 and {to for to, _ in loads} == {home}  # the third was there
    assert min(at for at, _, _ in lab.sent(ev.Unload)) > max(at for at, _, _ in lab.sent(ev.Load))
    before = len(lab.log)
    lab.run(60_000)
    assert len(lab.log) == before


def test_nothing_changes_without_consolidation_or_where_no_gpu_is_saved() -> None:
    never = ConsolidatorSettings(min_kv_bytes=10, min_kv_tokens=0, observe_ms=5_000.0, consolidation="none")
    for lab in (apart(never), apart(weight_bytes=60)):
        lab.run(70_000)
        assert lab.placed == {"a": ("ga",), "b": ("gb",), "c": ("gc",)} and lab.sent(ev.Load) == []


def test_a_saving_that_the_moves_would_cost_is_left() -> None:
    kept_warm = ConsolidatorSettings(
        min_kv_bytes=10, min_kv_tokens=0, observe_ms=5_000.0, consolidate_ms=5_000.0, empty_state="warm"
    )
    lab = apart(kept_warm).run(70_000)
    assert lab.placed == {"a": ("ga",), "b": ("gb",), "c": ("gc",)}


def test_the_end_of_a_keep_alive_is_followed_by_a_look_long_before_the_slow_period() -> None:
    slow = ConsolidatorSettings(
        min_kv_bytes=10, min_kv_tokens=0, observe_ms=5_000.0, consolidate_ms=3_600_000.0
    )
    lab = apart(slow)
    lab.gpus["ga"].set("a", idle_ms=1_000.0)
    lab.gpus["gx"] = FakeGpu("gx")
    lab.do(ev.ModelRegistered(model=pinned("x", 70, keep_alive_ms=20_000.0)))
    lab.run(4_000)
    assert where(lab)["gx"] == ["x"]
    lab.gpus["gb"].set("b", running=1)  # nothing is settled at the one look that is due
    lab.gpus["gb"].next_engines["y"] = lab.gpus["gb"].engines["b"]
    lab.run(2_000)
    lab.gpus["gb"].next_engines.pop("y")
    lab.gpus["gx"].set("x", idle_ms=20_000.0)
    lab.run(20_000)
    assert "x" not in lab.placed
    assert len({gpu for gpus in lab.placed.values() for gpu in gpus}) == 1


def test_an_emptied_gpu_is_used_last() -> None:
    lab = apart().run(12_000)
    [home] = lab.placed["a"]
    lab.do(ev.ModelRegistered(model=pinned("small", 0)))
    lab.run(2_000)
    assert lab.placed["small"] != (home,)  # 3 * 30 of 95 are taken: there is no room
    lab = apart(weight_bytes=10).run(12_000)
    [home] = lab.placed["a"]
    lab.do(ev.ModelRegistered(model=pinned("small", 5)))
    lab.run(2_000)
    assert lab.placed["small"] == (home,)


def test_a_deficit_after_a_change_spreads_the_models_again_and_is_remembered() -> None:
    lab = apart().run(12_000)
    lab.do(ev.ScaleOut(model="a", scheduler="s", reason="sustained_deficit"))
    assert len({gpu for gpus in lab.placed.values() for gpu in gpus}) == 2
    assert sorted(map(len, lab.placed.values())) == [1, 1, 1]
    lab.run(3_000)
    assert sorted(map(len, where(lab).values())) == [0, 1, 2]
    lab.run(5_000)
    assert len({gpu for gpus in lab.placed.values() for gpu in gpus}) == 2  # not before the dwell is over


@pytest.mark.parametrize(("fixed_pct", "shares"), [(0, [1, 2]), (40, [3])])
def test_a_crowded_gpu_is_relieved_while_others_rest(fixed_pct: int, shares: list[int]) -> None:
    """Shares that are fixed say nothing of what is needed."""
    lab = apart().run(12_000)
    [home] = lab.placed["a"]
    lab.gpus[home].fixed_share_pct = fixed_pct
    for model in "abc":
        lab.gpus[home].set(model, running=1, sm_share_pct=30)
    lab.gpus[home].set("a", running=1, sm_share_pct=40)  # all of it, and no more
    lab.run(2_500)
    assert {gpu for gpus in lab.placed.values() for gpu in gpus} == {home}
    lab.gpus[home].set("b", running=1, sm_share_pct=40)
    lab.run(500)
    assert {gpu for gpus in lab.placed.values() for gpu in gpus} == {home}
    lab.run(2_000)
    used = [gpu for gpus in lab.placed.values() for gpu in gpus]
    assert sorted(used.count(gpu) for gpu in set(used)) == shares


def test_settings_of_consolidation_are_checked() -> None:
    for wrong in ({"consolidation": "all"}, {"empty_state": "hot"}, {"caution": 2.0}, {"least_saving": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ConsolidatorSettings(**wrong)  # type: ignore[arg-type]
