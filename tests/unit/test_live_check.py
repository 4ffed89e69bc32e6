"""What `make live-check` concludes from its runs; the runs themselves take minutes and are not made here."""

from pathlib import Path

import msgspec
import pytest

from shared.catalog import pool_models
from shared.model import Objectives
from sim.consolidate_check import bound, outcome
from sim.live_check import answered, compared, figures, savings
from sim.live_plot import plot
from sim.live_pool import GpuSample, Live
from sim.scenario import RequestRecord
from sim.workload import Arrival


def record(index: int, first_ms: float, tokens: int, energy_j: float = 10.0) -> RequestRecord:
    """Return a request that came at 1,000 ms a piece and got a token each 10 ms."""
    return RequestRecord(
        request_id=f"r{index}",
        model="m",
        tenant="default",
        objectives=Objectives(ttft_ms=250.0, tbt_ms=100.0),
        arrived_ms=1_000.0 * index,
        input_tokens=10,
        expected_tokens=tokens,
        token_ms=[1_000.0 * index + first_ms + 10.0 * i for i in range(tokens)],
        outcome="stop",
        energy_j=energy_j,
    )


def live(energy_j: float, requests: list[RequestRecord]) -> Live:
    samples = [
        GpuSample(at_s=0.5 * i, gpu=gpu, sm_clock_mhz=1065 + 90 * (i % 2), power_w=200.0, running=i % 3)
        for i in range(20)
        for gpu in ("gpu-0", "gpu-1")
    ]
    return Live(energy_j=energy_j, requests=requests, samples=samples, machine_cores=1.0)


ON_TIME = [record(0, 100.0, 50), record(1, 200.0, 30), record(2, 240.0, 20)]
ONE_LATE = [record(0, 100.0, 50), record(1, 200.0, 30), record(2, 260.0, 20)]


def test_a_run_is_summed_up() -> None:
    found = figures(200.0, ONE_LATE)
    assert (found.output_tokens, found.j_per_token, found.charged_j_per_token) == (100, 2.0, 0.3)
    assert found.attainment == pytest.approx(2 / 3)
    assert found.ttft_p50_ms == 200.0


def test_live_and_simulated_agree_within_their_bounds_only() -> None:
    assert compared("x", live(104.9, ON_TIME), 100.0, ON_TIME).agrees == (True, True, True)
    assert compared("x", live(94.9, ON_TIME), 100.0, ON_TIME).agrees == (False, True, True)
    assert compared("x", live(100.0, ON_TIME), 100.0, ONE_LATE).agrees == (True, False, True)
    shorter = [*ON_TIME[:2], record(2, 240.0, 19)]
    pair = compared("x", live(100.0, ON_TIME), 100.0, shorter)
    assert pair.agrees == (True, True, False) and pair.requests_with_other_tokens == 1


def test_what_is_saved_is_a_part_of_what_the_default_takes() -> None:
    ours = compared("governed", live(150.0, ONE_LATE), 150.0, ONE_LATE)
    theirs = compared("fixed", live(200.0, ON_TIME), 200.0, ON_TIME)
    saved = savings([ours, theirs])
    assert (saved["energy"], saved["j_per_token"], saved["charged_j_per_token"]) == (0.25, 0.25, 0.0)
    assert saved["attainment"] == pytest.approx(-1 / 3)
    assert savings([ours]) == {}


def test_arrivals_get_the_length_of_their_answers() -> None:
    models = pool_models(2)
    asked = tuple(
        Arrival(at_ms=float(i), model=models[i % 2].name, input_tokens=9, output_tokens=1) for i in range(40)
    )
    lengths = [one.output_tokens for one in answered(asked, models)]
    assert min(lengths) >= 16 and len(set(lengths)) > 20


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    runs = [("governed", live(150.0, ON_TIME)), ("fixed at 1980 MHz", live(200.0, ONE_LATE))]
    plot(runs, "title", tmp_path / "live.png")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_consolidates_is_summed_up_by_thirds_and_by_what_empty_gpus_take() -> None:
    """Two GPUs for 60 s; the second is empty in the middle 20 s, and 5 s of the last third."""
    samples = []
    for at_s in range(61):
        second = () if 20 <= at_s < 40 or 50 <= at_s < 55 else ("b",)
        for gpu, models in (("gpu-0", ("a",)), ("gpu-1", second)):
            samples.append(GpuSample(float(at_s), gpu, 1065, 200.0, 0, models))
    models = [
        msgspec.structs.replace(model, name=name) for name, model in zip("ab", pool_models(2), strict=True)
    ]
    run = Live(energy_j=10_000.0, requests=ON_TIME, samples=samples, machine_cores=1.0)
    found = outcome("x", run, gpus=2, minutes=1.0, models=models)
    assert [(third.active_mean, third.active_last) for third in found.thirds] == [(2, 2), (1, 1), (1.5, 2)]
    assert [third.changes for third in found.thirds] == [0, 0, 1] and found.thirds[0].bound == 1
    assert found.empty_gpu_s == 25.0
    # a modelled H100 takes 110 W with a context, 70 W without
    assert found.energy_kj == pytest.approx({"warm": 11.0, "cold": 10.0, "off": 8.25})


def test_the_least_gpus_are_those_that_best_fit_decreasing_takes() -> None:
    models = {f"m{i}": msgspec.structs.replace(pool_models(1)[0], weight_bytes=30 * 10**9) for i in range(5)}
    assert [bound(list(models)[:count], models) for count in (0, 2, 3, 5)] == [0, 1, 2, 3]
    assert bound(["m0", "m0", "m1"], models) == 1  # a copy needs no place of its own
