"""How the consolidator looks at the whole: a step at a time, and without what is unsettled."""

from typing import Any

import pytest
from msgspec.structs import replace
from support import gpu_summary
from test_consolidator_changes import SETTINGS, apart, pinned
from test_consolidator_core import FakeGpu, Lab, spec

from services.consolidator import consolidate
from services.consolidator import plan as plan_module
from services.consolidator.capacity import Capacity
from services.consolidator.cluster import Cluster
from services.consolidator.demand import Demand
from services.consolidator.moves import Held, stages
from services.consolidator.pack import Packing, pack
from services.consolidator.plan import Plan, groupings
from services.consolidator.settings import ConsolidatorSettings
from services.consolidator.survey import Survey
from services.consolidator.window import Windows
from shared import events as ev
from shared.catalog import emulated_models
from shared.lut import lut_for
from shared.model import EngineSummary, Instance, ModelSpec, Objectives, Placement
from shared.shelf import Shelf

GIB = 1 << 30


def homes(lab: Lab) -> set[str]:
    return {gpu for gpus in lab.placed.values() for gpu in gpus}


def placement(**models_of: str) -> Placement:
    """Instances by GPU; each letter is a model."""
    pairs = [(model, gpu) for gpu, models in models_of.items() for model in models]
    return Placement(version=5, instances=tuple(Instance(model=m, gpus=(gpu,)) for m, gpu in pairs))


def counts_of(lab: Lab) -> list[ev.Count]:
    """The list into which from here on every count goes."""
    told: list[ev.Count] = []
    do = lab.core.step

    def step(now_ms: float, event: ev.Message | ev.Event) -> list[ev.Action]:
        actions = do(now_ms, event)
        told.extend(action for action in actions if isinstance(action, ev.Count))
        return actions

    lab.core.step = step  # type: ignore[method-assign]
    return told


def ended(model: str) -> ev.RequestEnded:
    return ev.RequestEnded(
        request_id="r", model=model, tenant="t", outcome="stop", input_tokens=300, output_tokens=200
    )


# ---- a step at a time


def looking() -> Lab:
    """A laboratory in which a look has begun, and takes a model at each step."""
    one_by_one = replace(SETTINGS, survey_models=1)
    lab = apart(one_by_one).run(4_750)
    for _ in range(10):
        if not lab.core._consolidation.at_work:
            lab.run(250)
    assert lab.core._consolidation.at_work
    return lab


def test_a_look_is_made_in_steps_that_leave_time_for_other_work() -> None:
    lab = looking()
    look = lab.core._consolidation
    ticks = 1
    while look.at_work:
        assert len(homes(lab)) == 3 and lab.core.wake_ms is not None
        lab.now_ms = lab.core.wake_ms
        sent = lab.do(ev.Tick())
        assert not any(isinstance(a, ev.Send) for a in sent) or not look.at_work
        ticks += 1
    assert ticks >= 3  # some of three models one by one, one number of GPUs, the plan
    assert len(homes(lab)) == 1


def test_a_look_is_left_when_there_proves_to_be_too_little_or_another_leads() -> None:
    for event in (
        ev.ScaleOut(model="a", scheduler="s", reason="sustained_deficit"),
        ev.ConsolidatorAlive(consolidator="c0", placement_version=0),
    ):
        lab = looking()
        lab.do(event)
        assert not lab.core._consolidation.at_work


def test_a_plan_is_made_again_if_a_gpu_was_given_a_model_meanwhile() -> None:
    lab = looking()
    lab.do(ev.ModelRegistered(model=pinned("x", 5)))
    lab.run(3_000)
    assert "x" in lab.placed
    lab.run(5_000)
    assert "x" in lab.placed and len(homes(lab)) < 3


def counted(demands: list[Demand], most: int, capacity: Capacity, least_served: float) -> tuple[int, int]:
    """Return (packings made, GPUs of the answer; 0 for none)."""
    calls = []

    def counting(*args: object) -> Packing:
        calls.append(args)
        return pack(*args)  # type: ignore[arg-type]

    plan_module.pack = counting  # type: ignore[assignment]
    try:
        *_, groups = groupings(demands, most, capacity, least_served)
    finally:
        plan_module.pack = pack
    return len(calls), len(groups or [])


def test_the_fewest_gpus_are_searched_for_by_halves() -> None:
    """64 models of which one GPU could take 8, but each half of the time needs 60 % of the SMs."""
    capacity = Capacity(95.0, 80)
    demands = [Demand(f"m{i}", 0, 10.0, 10, 1000.0, 0.5, 60.0) for i in range(64)]
    assert counted(demands, 64, capacity, 0.0) == (1, 8)
    packs, gpus = counted(demands, 64, capacity, 0.99)
    assert gpus == 64 and packs <= 24  # by twos they find 92 %; one number after another it would be 113
    packs, gpus = counted(demands, 64, capacity, 0.80)
    assert 16 < gpus <= 32 and packs <= 24
    packs, gpus = counted(demands, 40, capacity, 0.99)
    assert (packs, gpus) == (4, 0)  # not on all 40 either: that is asked first


# ---- what is left out


def test_a_gpu_that_does_not_settle_is_waited_for_and_then_left_out() -> None:
    lab = apart()
    lab.gpus["gc"].set("stranger", running=1)  # it is not the consolidator's to unload
    lab.run(6_000)
    assert homes(lab) == {"ga", "gb", "gc"}
    lab.run(SETTINGS.trigger_gap_ms + 2_000)
    assert lab.placed["c"] == ("gc",) and lab.placed["a"] == lab.placed["b"] and len(homes(lab)) == 2


CATALOG = emulated_models(2)


def survey(
    models: tuple[ModelSpec, ...],
    kinds: dict[str, str],
    instances: list[tuple[str, str]],
    per_s: float,
    kv_pool_gib: dict[str, int] | None = None,
) -> tuple[Survey, dict[str, list[str]]]:
    """A survey of the H100s among these GPUs, after 100 s of the same load of each model."""
    cluster = Cluster(ConsolidatorSettings(), models)
    for gpu, kind in kinds.items():
        cluster.summaries[gpu] = gpu_summary(
            gpu, gpu_type=kind, kv_pool_bytes=(kv_pool_gib or {}).get(gpu, 0) * GIB
        )
    for model, gpu in instances:
        cluster.add(Instance(model=model, gpus=(gpu,)))
    windows = Windows(300_000.0)
    windows.listen(0.0)
    for model in models:
        for number in range(int(100 * per_s)):
            windows.note(1_000.0 * number / per_s, ended(model.name))
    gpus = [gpu for gpu, kind in kinds.items() if kind == "h100-80gb"]
    capacity = Capacity(95.0, 76 * GIB)
    shelf = Shelf(lut_for)
    found = Survey(ConsolidatorSettings(), cluster, shelf, windows, gpus, capacity)
    return found, {gpu: cluster.placed_on(gpu) for gpu in gpus}


def test_a_model_on_two_kinds_of_gpu_has_a_part_of_its_load_on_each() -> None:
    [model] = models = CATALOG[:1]
    kinds = {"g1": "h100-80gb", "g2": "a100-80gb"}
    alone, holds = survey(models, kinds, [(model.name, "g1")], per_s=0.2)
    both, _ = survey(models, kinds, [(model.name, "g1"), (model.name, "g2")], per_s=0.2)
    half, _ = survey(models, kinds, [(model.name, "g1")], per_s=0.1)
    busy = [found.needs(100_000.0, holds)[model.name].now.busy for found in (alone, both, half)]  # type: ignore[index]
    assert busy[1] < 0.9 * busy[0] and busy[1] == pytest.approx(busy[2], rel=0.05)


def test_a_model_that_is_late_with_any_number_of_copies_keeps_those_it_has() -> None:
    late = replace(CATALOG[0], objectives=Objectives(ttft_ms=1.0, tbt_ms=0.5))
    models = (late, CATALOG[1])
    kinds = {"g1": "h100-80gb", "g2": "h100-80gb"}
    instances = [(late.name, "g1"), (late.name, "g2"), (CATALOG[1].name, "g1")]
    found, holds = survey(models, kinds, instances, per_s=1.0)
    needs = found.needs(100_000.0, holds)
    assert needs is not None
    assert [len(needs[model.name].demands) for model in models] == [2, 1]
    demands = [demand for need in needs.values() for demand in need.demands]
    *_, groups = groupings(demands, 2, found.capacity, 0.0)
    assert groups is not None


def test_each_copy_is_to_find_the_kv_memory_of_whatever_gpu_it_comes_to() -> None:
    [model] = models = CATALOG[:1]
    kinds = {"g1": "h100-80gb", "g2": "h100-80gb"}
    found, holds = survey(models, kinds, [(model.name, "g1")], 1.0, {"g1": 2, "g2": 40})
    needs = found.needs(100_000.0, holds)
    assert needs is not None and needs[model.name].now.need_bytes == model.weight_bytes + 40 * GIB


def test_needs_are_found_some_at_a_time_and_again_if_the_model_has_changed() -> None:
    found, holds = survey(CATALOG, {"g1": "h100-80gb"}, [(model.name, "g1") for model in CATALOG], 0.1)
    found._set = ConsolidatorSettings(survey_models=1)
    assert found.needs(100_000.0, holds) is None
    needs = found.needs(100_000.0, holds)
    assert needs is not None and set(needs) == {model.name for model in CATALOG}
    again = found.needs(200_000.0, holds)
    assert again == needs
    found._cluster.add(Instance(model=CATALOG[0].name, gpus=("elsewhere",)))
    changed = found.needs(100_000.0, holds)
    assert changed is not None and changed[CATALOG[0].name].now.busy < needs[CATALOG[0].name].now.busy


# ---- whether a plan can be carried out


HOLDS = {"g1": ["A", "c"], "g2": ["B", "d"], "g3": ["e"]}
SIZE = {"A": 60, "B": 60, "c": 30, "d": 30, "e": 30}


def way(on_gpu: dict[str, list[str]], leave: tuple[str, ...] = (), **free: int) -> list[dict[str, list[str]]]:
    """The placements from `HOLDS`, where each GPU has 5 bytes to spare or as many as said."""
    free_bytes = {"g1": 5, "g2": 5, "g3": 5} | free
    return stages(HOLDS, on_gpu, free_bytes, lambda gpu, model: SIZE[model], leave)


def test_a_plan_is_one_placement_where_no_gpu_waits_for_another() -> None:
    swapped = {"g1": ["A", "d"], "g2": ["B", "c"], "g3": ["e"]}
    assert way(swapped, g1=30) == [swapped]  # d goes first, then c
    assert way(swapped, leave=("c",)) == [swapped]  # idle, or served elsewhere: d takes its room
    ring = {"g1": ["A", "d"], "g2": ["B", "e"], "g3": ["c"]}
    assert way(ring) == [] and way(ring, g3=30) == [ring]
    grown = {"g1": ["A", "c", "e"], "g2": ["B", "d"], "g3": []}
    assert way(grown) == [] and way(grown, g1=30) == [grown]
    both = {"g1": ["A", "c"], "g2": ["B", "c"], "g3": ["d", "e"]}
    assert way(both, g3=30) == [both]  # c on both: d goes first


def test_two_full_gpus_exchange_models_by_way_of_a_third() -> None:
    swapped = {"g1": ["A", "d"], "g2": ["B", "c"], "g3": ["e"]}
    assert way(swapped) == []
    assert way(swapped, g3=30) == [
        {"g1": ["A"], "g2": ["B", "d"], "g3": ["c", "e"]},
        swapped,
    ]


def test_no_further_gpu_is_used_as_a_way_station() -> None:
    holds, plan = HOLDS | {"g3": []}, {"g1": ["A", "d"], "g2": ["B", "c"], "g3": []}
    free_bytes = {"g1": 5, "g2": 5, "g3": 95}
    assert stages(holds, plan, free_bytes, lambda gpu, model: SIZE[model], ()) == []
    holds, emptied = HOLDS | {"g4": ["f"]}, plan | {"g1": ["A", "d"], "g3": [], "g4": ["e", "f"]}
    free_bytes = {"g1": 5, "g2": 5, "g3": 5, "g4": 30}
    assert stages(holds, emptied, free_bytes, lambda gpu, model: SIZE.get(model, 60), ()) == [
        {"g1": ["A", "c"], "g2": ["B", "d"], "g3": [], "g4": ["e", "f"]},
        {"g1": ["A"], "g2": ["B", "d"], "g3": ["c"], "g4": ["e", "f"]},  # no more than at first
        emptied,
    ]


def test_of_a_plan_without_a_way_the_part_that_can_be_carried_out_is_told() -> None:
    """g1 and g2 cannot exchange c and d; e goes to g4 all the same, and i, which is idle, waits there."""
    holds = HOLDS | {"g3": ["e", "g"], "g4": ["f", "i"]}
    plan = {"g1": ["A", "d"], "g2": ["B", "c", "i"], "g3": ["g"], "g4": ["e", "f"]}
    free_bytes = {"g1": 5, "g2": 5, "g3": 5, "g4": 30}
    sizes = SIZE | {"f": 50, "g": 50, "i": 6}
    found = stages(holds, plan, free_bytes, lambda gpu, model: sizes[model], ("i",))
    part = {"g1": ["A", "c"], "g2": ["B", "d"], "g3": ["g"], "g4": ["e", "f"]}
    assert found == [part | {"g4": ["e", "f", "i"]}]


def test_a_plan_that_cannot_be_carried_out_is_refused_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consolidate, "stages_of", lambda *_: [])
    lab = apart()
    told = counts_of(lab)
    lab.run(8_000)
    assert len(homes(lab)) == 3 and "consolidations_refused" in {count.name for count in told}


def test_a_part_of_a_plan_is_put_in_force_if_it_saves_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three models would fit on one GPU; as if the third could not be moved, two GPUs are left."""
    models = apart().run(250).placed
    first, second, third = sorted(models)
    part = {gpu: [] for gpus in models.values() for gpu in gpus}
    part[models[first][0]], part[models[third][0]] = [first, second], [third]
    monkeypatch.setattr(consolidate, "stages_of", lambda *_: [part])
    lab = apart()
    told = counts_of(lab)
    lab.run(8_000)
    assert len(homes(lab)) == 2 and "consolidations" in {count.name for count in told}


def in_two_stages(monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A laboratory that has put the first of two placements in force."""
    real = consolidate.stages_of

    def stages_of(cluster: Cluster, holds: Held, needs: Any, plan: Plan) -> list[dict[str, list[str]]]:
        [goal] = real(cluster, holds, needs, plan)
        [home] = [gpu for gpu, models in goal.items() if models]
        mover, stays = [(gpu, held[0]) for gpu, held in holds.items() if gpu != home]
        between = {home: sorted([*holds[home], mover[1]]), mover[0]: [], stays[0]: [stays[1]]}
        return [between, goal]

    monkeypatch.setattr(consolidate, "stages_of", stages_of)
    lab = apart()
    for _ in range(40):
        if len(homes(lab.run(250))) == 2:
            return lab
    raise AssertionError("nothing was put in force")


def test_the_next_placement_waits_until_the_one_before_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_two_stages(monkeypatch)
    for gpu in lab.gpus.values():
        gpu.obeys = False
    lab.run(5_000)
    assert len(homes(lab)) == 2
    for gpu in lab.gpus.values():
        gpu.obeys = True
    assert len(homes(lab.run(5_000))) == 1


def test_the_rest_of_a_plan_is_given_up_when_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_two_stages(monkeypatch)
    lab.core._consolidation.disturbed(lab.now_ms)
    assert len(homes(lab.run(5_000))) == 2


def test_the_rest_of_a_plan_is_given_up_when_a_gpu_gets_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = in_two_stages(monkeypatch)
    lab.do(ev.ModelRegistered(model=spec("late", 1)))
    lab.run(5_000)
    assert "late" in lab.placed and len(homes(lab)) >= 2


# ---- what is told, and to whom it is handed on


def test_a_consolidation_tells_both_objectives_before_and_after() -> None:
    lab = apart()
    told = counts_of(lab)
    lab.run(8_000)
    assert [count.labels["reason"] for count in told if count.name == "consolidations"] == ["fewer_gpus"]
    counts = {(c.name, c.labels["placement"]): c.value for c in told if "placement" in c.labels}
    assert counts["consolidation_ewr", "left"] == counts["consolidation_ewr", "planned"] == 0.0  # all idle
    assert counts["consolidation_power_w", "planned"] < counts["consolidation_power_w", "left"]


def test_a_new_leader_knows_which_gpus_rest_and_relieves_crowded_ones() -> None:
    gpus = [FakeGpu(f"g{m}") for m in "abc"]
    for model in "abc":
        gpus[0].set(model, running=1, sm_share_pct=40)
    lab = Lab([pinned(m) for m in "abc"], gpus, placement(ga="abc"), SETTINGS).run(5_000)
    assert len(homes(lab)) == 2


def test_spreading_that_moves_nothing_says_so_and_leaves_the_gpu_resting() -> None:
    g1, g2 = FakeGpu("g1"), FakeGpu("g2")
    for model in "ab":
        g1.set(model, running=1, sm_share_pct=60)
    for model in "zy":  # on their way out, but busy: they fill the GPU
        g2.set(model, running=1)
    lab = Lab([spec(model, 30) for model in "abzy"], [g1, g2], placement(g1="ab")).run(250)
    lab.core._cluster.resting = {"g2"}
    before = lab.core._cluster.instances()
    assert not lab.core._consolidation.spread(lab.now_ms, "g1")
    assert lab.core._cluster.instances() == before and lab.core._cluster.resting == {"g2"}


def test_a_follower_and_one_that_never_consolidates_know_rates_from_the_start() -> None:
    for settings, peer in ((SETTINGS, "c0"), (ConsolidatorSettings(consolidation="none"), "c1")):
        lab = Lab([spec("a")], [FakeGpu("g1")], settings=settings)
        for _ in range(100):
            lab.do(ev.ConsolidatorAlive(consolidator=peer, placement_version=0))
            lab.do(ended("a"))
            lab.run(1_000)
        load = lab.core._consolidation.windows.load(lab.now_ms, "a")
        assert load is not None and load.rate_per_s == pytest.approx(1.0, rel=0.1)


# ---- a process that stood still; models that are gone


def test_one_that_stood_still_does_not_take_its_unread_post_for_silence() -> None:
    for first in (ev.Tick(), ev.ConsolidatorAlive(consolidator="c1", placement_version=0)):
        lab = Lab([spec(name, 30) for name in "abcdef"], [FakeGpu(f"g{i}") for i in range(4)]).run(4_000)
        before = lab.placed
        lab.now_ms += 4_000
        lab.do(first)
        lab.do(ev.ConsolidatorAlive(consolidator="c1", placement_version=lab.core.placement.version))
        assert lab.placed == before
        lab.run(4_000)
        assert lab.placed == before
        lab.gpus["g0"].alive = False
        lab.run(4_000)
        assert "g0" not in homes(lab)


def test_a_removed_model_in_the_stored_placement_is_dropped_wherever_it_runs() -> None:
    for drained in ((), ("g1",)):
        busy = FakeGpu("g1")
        busy.set("gone", running=1)
        stored = Placement(version=5, instances=(Instance(model="gone", gpus=("g1",)),), drained=drained)
        lab = Lab([spec("a")], [busy, FakeGpu("g2")], placement=stored)
        lab.run(4_000)
        assert set(lab.placed) == {"a"}


def test_help_for_a_removed_model_is_not_given() -> None:
    ready = FakeGpu("g1")
    ready.engines["gone"] = ready.next_engines["gone"] = EngineSummary(model="gone", state="ready", running=1)
    stored = Placement(version=5, instances=(Instance(model="gone", gpus=("g1",)),))
    lab = Lab([spec("a")], [ready, FakeGpu("g2")], placement=stored)
    for gpu in lab.gpus.values():
        lab.do(gpu.summary())
    lab.now_ms += 1_600
    lab.do(ev.ScaleOut(model="gone", scheduler="s", reason="sustained_deficit"))
    assert "gone" not in lab.placed


@pytest.mark.parametrize("consolidation", ["ewr", "demand"])
def test_a_plan_made_without_clocks_is_judged_by_those_that_models_want(
    consolidation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, judged, grouped, assign = [], [], consolidate.groupings, consolidate.assigned
    monkeypatch.setattr(consolidate, "groupings", lambda *a: packed.extend(a[0]) or grouped(*a))
    monkeypatch.setattr(consolidate, "assigned", lambda *a: judged.extend(a[0]) or assign(*a))
    lab = apart(replace(SETTINGS, consolidation=consolidation)).run(12_000)
    assert len(homes(lab)) == 1
    wanted = {demand.clock_mhz for group in judged for demand in group}
    assert 1635 not in wanted
    assert {demand.clock_mhz for demand in packed} == ({1635} if consolidation == "demand" else wanted)
