"""Systems by name: every tier resolves them, and the policies of each on cases worked out by hand."""

import pytest

from services.consolidator import presets as consolidator
from services.consolidator.settings import ConsolidatorSettings
from services.global_sched import presets as global_sched
from services.global_sched.choices import in_time
from services.global_sched.curves import Curves
from services.global_sched.estimate import Work
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import ClusterView
from services.local_sched import presets as local_sched
from services.local_sched.settings import LocalSettings
from shared.catalog import emulated_models
from shared.config import load
from shared.engine import SetClock, SetPlan
from shared.errors import ConfigError
from shared.lut import lut_for
from shared.model import EngineSummary, GpuSummary, Objectives, StairStep
from shared.systems import SYSTEMS
from sim.systems import under
from tests.unit.local_bench import MODEL, OTHER, Bench, of, request

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
        summary = GpuSummary(
            gpu=gpu,
            host="h",
            gpu_type=GPU,
            engine="emulated",
            started_ms=0.0,
            seq=seq,
            state="active",
            sm_clock_mhz=clock_mhz,
            total_bytes=80 << 30,
            free_bytes=steps[0][1],
            engines=(engine,),
            staircase=staircase,
        )
        cluster.hear(0.0, summary)
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
