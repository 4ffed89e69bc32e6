"""Systems by name: every tier resolves them, and the policies of each on cases worked out by hand."""

import math
from dataclasses import replace

import pytest
from local_bench import H100, MODEL, OTHER, Bench, names, of, request
from support import gpu_summary

from services.consolidator import presets as consolidator
from services.consolidator.cluster import Cluster
from services.consolidator.pressure import demand_bytes, pressure
from services.consolidator.settings import ConsolidatorSettings
from services.consolidator.window import Load as ModelLoad
from services.global_sched import presets as global_sched
from services.global_sched.choices import (
    backlog_ms,
    eco_route,
    in_time,
    joins_group,
    least_loaded,
    shortest_rounds,
    where_loaded,
)
from services.global_sched.curves import Curves
from services.global_sched.estimate import Work
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView
from services.local_sched import presets as local_sched
from services.local_sched.divide import proportional
from services.local_sched.grid import Load, Profile
from services.local_sched.policies.affinity import affinity, best_clock_mhz
from services.local_sched.policies.dilu import demand
from services.local_sched.policies.dynamollm import class_of, dynamollm
from services.local_sched.policies.ecofreq import ecofreq
from services.local_sched.policies.greenllm import greenllm
from services.local_sched.policies.muxserve import least_share_pct, static
from services.local_sched.policies.sight import Sight, at_least
from services.local_sched.settings import LocalSettings
from shared.catalog import emulated_models
from shared.config import load
from shared.engine import RunRequest, SetClock, SetPlan
from shared.errors import ConfigError
from shared.lut import lut_for
from shared.model import EngineSummary, Instance, Objectives, Prefills, StairStep
from shared.systems import SYSTEMS
from sim.systems import under

GPU = "h100-80gb"
(A,) = emulated_models(1)
LUT = lut_for(GPU, A)
ROOMY = Objectives(ttft_ms=2000.0, tbt_ms=100.0)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_tier_resolves_every_system(name):
    tiers = (
        (global_sched, GlobalSettings),
        (local_sched, LocalSettings),
        (consolidator, ConsolidatorSettings),
    )
    for module, settings in tiers:
        settings(**module.preset(name))
    assert SYSTEMS[name].about


def test_every_preset_has_a_system():
    used = [{getattr(s, tier) for s in SYSTEMS.values()} for tier in ("dispatch", "runtime", "consolidation")]
    assert [set(m.PRESETS) for m in (global_sched, local_sched, consolidator)] == used


def test_festina_is_as_shipped_and_an_unknown_name_is_an_error():
    assert under("festina").local == LocalSettings()
    with pytest.raises(ConfigError, match="no system is called 'x'; there are: festina"):
        under("x")


def test_a_setting_of_the_environment_wins_over_the_system():
    preset = local_sched.preset("festina-paper")
    settings = load(LocalSettings, "local", {"FESTINA_LOCAL_PACING": "slack"}, preset)
    assert (settings.pacing, settings.slack_headroom) == ("slack", 0.0)


def test_eq_2_word_by_word_charges_the_whole_device():
    prefill = Curves(LUT, whole=True).prefill(1095, 50)
    cell = Curves(LUT).inputs.locate(512)
    expected_j = float(LUT.prefill_power_w(1095, 50, 512) * LUT.ttft_ms(1095, 50, 512)) / 1e3
    assert prefill.energy_j(*cell) == pytest.approx(expected_j, rel=1e-3)
    part_j = Curves(LUT).prefill(1095, 50).energy_j(*cell)
    static_j = LUT.device.static_w * 0.5 * float(LUT.ttft_ms(1095, 50, 512)) / 1e3
    assert prefill.energy_j(*cell) - part_j == pytest.approx(static_j, rel=1e-3)


def views(*gpus):
    """A view per (gpu, clock, (ms until memory is free, bytes free by then), running)."""
    cluster = ClusterView("s", 1e9, 1e9, 1e9)
    for seq, (gpu, clock_mhz, steps, running) in enumerate(gpus):
        engine = EngineSummary(
            model=A.name,
            state="ready",
            running=running,
            context_tokens=1000 * running,
            sm_share_pct=10,
            tightest_tbt_ms=100.0 if running else 0.0,
        )
        staircase = tuple(StairStep(after_ms=ms, free_bytes=free, free_sm_share_pct=90) for ms, free in steps)
        said = {"seq": seq, "sm_clock_mhz": clock_mhz, "engines": (engine,), "staircase": staircase}
        cluster.hear(0.0, gpu_summary(gpu, free_bytes=steps[0][1], **said))
    return [cluster.get(gpu, 0.0) for gpu, *_ in gpus]


def curves_of(_gpu_type, _model, known=Curves(LUT)):  # noqa: B008
    return known


def test_in_time_takes_the_first_memory_and_weighs_no_energy():
    work = Work(A.name, 512, 100, 0.0, ROOMY)
    early, late = views(("a", 1635, [(0.0, 40 << 30)], 0), ("b", 1095, [(0.0, 1), (50.0, 60 << 30)], 0))
    decision = in_time([late, early], work, curves_of, 0.0, 0.02)
    assert (decision.candidate.gpu, decision.reason) == ("a", "in_time")
    hopeless = Work(A.name, 512, 100, 2000.0, ROOMY)
    assert in_time([early], hopeless, curves_of, 0.0, 0.02).reason == "best_effort"


def test_ungoverned_engines_have_all_sms_at_the_default_clock():
    bench = Bench(models=(MODEL, OTHER), **local_sched.preset("festina-stage-1"))
    bench.submit(request("r1"))
    bench.submit(request("r2", model=OTHER.name))
    bench.wait(10.0)
    assert {order.plan.sm_share_pct for order in of(bench.actions, SetPlan)} == {100}
    assert not of(bench.actions, SetClock)


def test_the_published_sweep_takes_the_least_shares_and_never_waits():
    bench = Bench(models=(MODEL,), **local_sched.preset("festina-paper"))
    bench.submit(request("r1"))
    bench.wait(10.0)
    plan = of(bench.actions, SetPlan)[-1].plan
    clock_mhz = of(bench.actions, SetClock)[-1].sm_clock_mhz
    lut = bench.state.engines[MODEL.name].lut
    # 100 tokens within 400 ms fit the smallest share at every clock; there the sweep takes the least energy
    energies_j = {
        int(mhz): float(lut.prefill_power_w(mhz, 10, 100) * lut.ttft_ms(mhz, 10, 100))
        for mhz in lut.clocks_mhz
        if lut.ttft_ms(mhz, 10, 100) <= 400.0
    }
    assert plan.sm_share_pct == 10
    assert clock_mhz == min(energies_j, key=energies_j.__getitem__)
    assert plan.step_interval_ms == 0.0


def test_least_loaded_and_eco_route_by_batches_and_clocks():
    work = Work(A.name, 512, 100, 0.0, ROOMY)
    memory = [(0.0, 60 << 30)]
    busy, idle = views(("a", 1095, memory, 9), ("b", 1635, memory, 3))
    assert least_loaded([busy, idle], work, curves_of, 0.0, 0.02).candidate.gpu == "b"
    # both batches are within a tile: the lowest clock
    assert eco_route([busy, idle], work, curves_of, 0.0, 0.02).candidate.gpu == "a"
    # 64 would begin a second tile on a; b's is begun
    full, begun = views(("a", 1095, memory, 64), ("b", 1635, memory, 3))
    assert eco_route([full, begun], work, curves_of, 0.0, 0.02).candidate.gpu == "b"


def turning(*gpus):
    """A view per (gpu, {model: (running, queued, asleep, prompts waiting)}) whose models take turns."""
    cluster = ClusterView("s", 1e9, 1e9, 1e9)
    for gpu, engines in gpus:
        told = tuple(
            EngineSummary(
                model=name,
                state="ready",
                running=running,
                queued=queued,
                prefills=(Prefills(400.0, prompts, 512 * prompts),) if prompts else (),
            )
            for name, (running, queued, _, prompts) in engines.items()
        )
        asleep = tuple(name for name, (_, _, asleep, _) in engines.items() if asleep)
        cluster.hear(0.0, gpu_summary(gpu, engines=told, asleep=asleep, switches=True))
    return [cluster.get(gpu, 0.0) for gpu, _ in gpus]


class TestTurns:
    WORK = Work(A.name, 512, 100, 0.0, ROOMY)

    def test_serverlessllm_goes_where_the_model_is_then_where_least_waits(self):
        here, free, used = turning(
            ("c", {A.name: (31, 0, False, 0), "x": (0, 5, True, 0)}),
            ("b", {A.name: (0, 0, True, 0)}),
            ("a", {A.name: (0, 0, True, 0), "x": (1, 0, False, 0)}),
        )
        assert where_loaded([here, free, used], self.WORK, curves_of, 0.0, 0.02).candidate.gpu == "c"
        assert where_loaded([free, used], self.WORK, curves_of, 0.0, 0.02).candidate.gpu == "b"
        (full,) = turning(("c", {A.name: (32, 0, False, 0)}))
        assert where_loaded([full, free, used], self.WORK, curves_of, 0.0, 0.02).candidate.gpu == "b"

    def test_prompts_join_a_group_else_the_shortest_queue_loads_counted(self):
        group, short, empty = turning(
            ("c", {A.name: (0, 7, False, 7), "x": (0, 9, True, 9)}),
            ("b", {A.name: (0, 0, True, 0), "x": (0, 1, False, 1)}),
            ("a", {A.name: (0, 0, True, 0), "x": (0, 1, True, 1)}),
        )
        assert joins_group([group, short, empty], self.WORK, curves_of, 0.0, 0.02).candidate.gpu == "c"
        # a's model has to be brought in as well
        each_ms = Curves(LUT).prefill(short.summary.sm_clock_mhz, 100).ms_at(*Curves(LUT).inputs.locate(512))
        assert backlog_ms(short, curves_of) == pytest.approx(each_ms)
        assert backlog_ms(empty, curves_of) == pytest.approx(each_ms + A.weight_bytes / 55e6)
        assert joins_group([short, empty], self.WORK, curves_of, 0.0, 0.02).candidate.gpu == "b"
        (full,) = turning(("c", {A.name: (0, 8, False, 8)}))
        assert joins_group([full, short], self.WORK, curves_of, 0.0, 0.02).candidate.gpu == "b"

    def test_decodes_join_their_largest_batch_else_where_batches_are_fewest(self):
        large, small, none = turning(
            ("c", {A.name: (5, 0, False, 0), "x": (1, 0, False, 0), "y": (1, 0, False, 0)}),
            ("b", {A.name: (0, 4, True, 0), "x": (0, 0, True, 0)}),
            ("a", {A.name: (0, 0, True, 0), "x": (9, 0, False, 0)}),
        )
        assert shortest_rounds([large, small, none], A.name, {}).gpu == "c"
        assert shortest_rounds([small, none], A.name, {}).gpu == "b"
        assert shortest_rounds([none], A.name, {}).gpu == "a"
        # what is on its way counts: one of it to a, other batches to b
        (empty,) = turning(("b", {A.name: (0, 0, True, 0), "x": (0, 0, True, 0)}))
        assert shortest_rounds([empty, none], A.name, {}).gpu == "b"
        assert shortest_rounds([empty, none], A.name, {"a": [A.name]}).gpu == "a"


def test_prism_places_by_the_pressure_on_kv_memory():
    small, large, new = emulated_models(3)
    cluster = Cluster(ConsolidatorSettings(), [small, large, new])
    for gpu, model in (("a", small), ("b", large)):
        cluster.summaries[gpu] = gpu_summary(gpu)
        cluster.add(Instance(model=model.name, gpus=(gpu,)))
    load = ModelLoad(rate_per_s=2.0, input_tokens=600.0, output_tokens=400.0, latency_ms=1.0)
    # 2 a second of 1,000 tokens each, one due every 0.1 s
    assert demand_bytes(new, load) == 2 * 1000 * new.kv_bytes_per_token / 0.1
    loads = {large.name: load, new.name: load}
    found = pressure(cluster, loads.get, new)
    total = cluster.summaries["a"].total_bytes
    both = 20_000 * (new.kv_bytes_per_token + large.kv_bytes_per_token)
    assert found["a"] == 20_000 * new.kv_bytes_per_token / (total - small.weight_bytes - new.weight_bytes)
    assert found["b"] == both / (total - large.weight_bytes - new.weight_bytes)


CLOCKS = (1635, 1335, 1095, 795)
TABLE = [[10.0, 20.0, 40.0, 80.0]]


def flat(**changes):
    """An engine on a device of one share; in `TABLE` a step takes 10 ms at 1635 MHz, 80 at 795."""
    none = [[0.0] * 4]
    found = Profile(None, none, math.inf, none, 1.0, [none], [none])
    vars(found).update(changes)
    return found


def sight(*profiles, **more):
    seen = Sight(
        device=replace(H100, sm_size_min_pct=100, sm_size_step_pct=100),
        settings=LocalSettings(),
        clocks_mhz=CLOCKS,
        loads=[Load(LUT, decodes=1)] * len(profiles),
        profiles=profiles,
        lengths=[[(512, 100)]] * len(profiles),
        steps_ms=[0.0] * len(profiles),
        residents=[LUT],
        places=[0],
        waits=False,
        free_part=1.0,
        clock_mhz=1635,
    )
    return seen._replace(**more)


class TestEcoFreq:
    def test_the_lowest_clock_in_time_of_the_most_demanding_engine(self):
        decode = flat(step_ms=TABLE, budget_ms=50.0)  # 40 ms at 1095 is in time, 80 at 795 is not
        assert CLOCKS[ecofreq(sight(decode), (100,))] == 1095
        prefill = flat(prefill_ms=TABLE, slack_ms=25.0)
        # two engines on one device, each with all of it, leave each other half: 40 ms at 1335, 20 at 1635
        assert CLOCKS[ecofreq(sight(decode, prefill), (100, 100))] == 1635

    def test_the_highest_while_one_waits_or_memory_is_full_and_never_below_the_floor(self):
        easy = flat(step_ms=TABLE, budget_ms=100.0)
        assert CLOCKS[ecofreq(sight(easy), (100,))] == 1095  # 795 would do, and is below the floor
        assert CLOCKS[ecofreq(sight(easy, waits=True), (100,))] == 1635
        assert CLOCKS[ecofreq(sight(easy, free_part=0.05), (100,))] == 1635


class TestGreenLlm:
    def test_prefills_take_the_least_energy_of_the_clocks_in_time(self):
        joules = ([[3.0, 1.0, 0.5, 0.2]],)
        prefill = flat(prefill_ms=TABLE, slack_ms=50.0, work_ms=(TABLE,), dynamic_j=joules)
        loads = [Load(LUT, prefills=((512, 50.0),))]
        # 10 ms * 70 W + 3.0 J = 3.7 J; 1.4 + 1.0 = 2.4; 2.8 + 0.5 = 3.3; 795 MHz is late
        assert CLOCKS[greenllm(sight(prefill, loads=loads), (100,))] == 1335

    def test_decodes_start_from_the_profile_and_follow_what_is_measured(self):
        decode = flat(step_ms=TABLE, budget_ms=50.0)
        loads = [Load(LUT, decodes=4, decode_budget_ms=50.0)]

        def clock(measured_ms, now_mhz):
            seen = sight(decode, loads=loads, steps_ms=[measured_ms], clock_mhz=now_mhz)
            return CLOCKS[greenllm(seen, (100,))]

        assert clock(0.0, 1635) == 1095  # the coarse loop: 40 ms of 50
        assert clock(46.0, 1095) == 1335  # over 0.9 * 50: a step up
        assert clock(20.0, 1095) == 795  # under 0.75 * 45: a step down
        assert clock(40.0, 1095) == 1095


def test_dynamollm_takes_the_class_with_the_highest_clock():
    assert class_of(200, 99) == (256, 100)
    assert class_of(1024, 351) == (1024, 1000)
    assert class_of(9000, 5000) == (8192, 1000)
    lut = lut_for(GPU, A)
    seen = sight(flat(), clocks_mhz=tuple(map(int, lut.clocks_mhz[::-1])), lengths=[[(200, 50), (5000, 50)]])
    each = [best_clock_mhz(LUT, 100, *lengths, 2) for lengths in ((256, 100), (8192, 100))]
    assert seen.clocks_mhz[dynamollm(seen, (100,))] == max(each)


def test_a_class_that_cannot_be_in_time_takes_f_max():
    assert best_clock_mhz(LUT, 10, 8192, 1000, 512) == 1635


def test_a_clock_that_the_device_cannot_hold_gives_way_to_its_highest():
    seen = sight(flat())
    assert [CLOCKS[at_least(seen, mhz)] for mhz in (500, 1095, 1100, 1980)] == [795, 1095, 1335, 1635]


def test_affinity_takes_the_clock_that_the_hungriest_model_prefers():
    big = lut_for(GPU, emulated_models(8)[-1])
    lengths = [[(500, 100)], [(3000, 400), (3100, 300)]]
    clocks = tuple(map(int, LUT.clocks_mhz[::-1]))
    seen = sight(flat(), flat(), loads=[Load(LUT), Load(big)], lengths=lengths, clocks_mhz=clocks)
    # means in round numbers: 500 -> 512, 100 -> 112; 3050 -> 3072, 350 -> 384, two requests
    each = [best_clock_mhz(LUT, 100, 512, 112, 1), best_clock_mhz(big, 100, 3072, 384, 2)]
    assert clocks[affinity(seen, (100, 100))] == max(each)


class TestShares:
    def test_static_shares_are_of_all_residents_whoever_has_work(self):
        settings = LocalSettings(clock="default", shares="static", static_rate_per_s=4.0)
        luts = [lut_for(GPU, model) for model in emulated_models(3)]
        needs = [least_share_pct(lut, settings) for lut in luts]
        seen = sight(flat(), settings=settings, residents=luts, places=[1], device=H100)
        assert static(seen) == (proportional(needs, H100.sm_sizes_pct)[1],)
        assert static(seen)[0] < 100

    def test_the_least_static_share_keeps_ttft_and_tbt_beside_the_prefills(self):
        settings = LocalSettings(clock="default", shares="static", static_rate_per_s=8.0)
        share_pct = least_share_pct(LUT, settings)

        def interval_ms(share):
            batch, left = 1.0, 1.0 - 0.008 * float(LUT.ttft_ms(1980, share, 682))
            for _ in range(4):
                interval_ms = float(LUT.tbt_ms(1980, share, batch, 682 + 148)) / left
                batch = max(1.0, 0.008 * 296 * interval_ms)
            return interval_ms if left > 0.0 else math.inf

        assert interval_ms(share_pct) <= 100.0 and LUT.ttft_ms(1980, share_pct, 682) <= 400.0
        less_pct = share_pct - 10
        assert interval_ms(less_pct) > 100.0 or LUT.ttft_ms(1980, less_pct, 682) > 400.0

    def test_shares_by_demand_follow_the_work_and_fill_the_device(self):
        sizes = H100.sm_sizes_pct
        small = flat(step_ms=[[10.0]] * len(sizes), budget_ms=50.0, prefill_ms=[[0.0]] * len(sizes))
        large = [[100.0 - size] for size in sizes]  # needs 50 % for 50 ms
        large = flat(step_ms=large, budget_ms=50.0, prefill_ms=[[0.0]] * len(sizes))
        seen = sight(small, large, device=H100)
        # needs 10 and 50 of 100 become 20 and 80
        assert demand(seen) == (20, 80)
        assert demand(sight(small, device=H100)) == (100,)


def test_first_come_first_served_lets_nobody_past():
    bench = Bench(models=(MODEL,), **local_sched.preset("dilu"), max_running=1)
    bench.submit(request("first", prompt=3000))
    bench.submit(request("second", prompt=2000))
    bench.submit(request("third", prompt=10))
    bench.wait(10.0)
    assert names(bench.actions, RunRequest) == ["first"]
    assert of(bench.actions, SetPlan)[-1].plan.chunk_tokens == 8192  # whole prompts
    bench.token("first", finish="stop")
    assert names(bench.actions, RunRequest) == ["first", "second"]
