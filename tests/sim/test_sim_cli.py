"""`festina sim` and `festina plan` as a person starts them."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.main import app
from shared.devices import device_for
from shared.errors import FestinaError
from sim import cli, tables
from sim.plan import Case, Outcome, banded_cases, plan
from sim.report import Attainment, Clocks, Energy, EnergyParts, Latency, Report
from sim.workload import Arrival, Workload

KEYS = {
    "energy_j": {"warm", "cold", "off"},
    "energy_parts_j": {"floor", "context", "clock", "hbm", "compute"},
    "output_tokens": None,
    "j_per_token": None,
    "attainment": {"request", "strict", "token"},
    "ttft_ms": {"p50", "p99"},
    "tbt_ms": {"p50", "p99"},
    "clock_mhz": {"p10", "p50", "p90"},
    "active_gpus_mean": None,
    "loads": None,
    "migrations": None,
    "clock_switches": None,
    "wall_s": None,
    "trace_hash": None,
}
SMALL = ("--llms", "2", "--rps", "0.3", "--gpus", "1", "--minutes", "0.3")


def festina(*arguments: str) -> str:
    """Run a command; an error that it makes on purpose is raised."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def trace(folder: Path, seconds: int = 12) -> str:
    path = folder / "trace.csv"
    path.write_text("time,input,output\n" + "".join(f"{s},200,40\n" for s in range(seconds)))
    return str(path)


def test_sim_prints_exactly_the_promised_keys_and_repeats_itself() -> None:
    first, second = (json.loads(festina("sim", *SMALL, "--seed", "3", "--json")) for _ in range(2))
    assert {key: set(value) if isinstance(value, dict) else None for key, value in first.items()} == KEYS
    assert sum(first["energy_parts_j"].values()) == pytest.approx(first["energy_j"]["cold"])
    assert (
        first["output_tokens"] > 0 and 0.0 <= first["attainment"]["strict"] <= first["attainment"]["request"]
    )
    assert first.pop("wall_s") > 0.0 and second.pop("wall_s") > 0.0
    assert first == second
    other = json.loads(festina("sim", *SMALL, "--seed", "4", "--json"))
    assert other["trace_hash"] != first["trace_hash"]


def test_sim_shows_a_summary_of_a_trace_and_draws_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    said = festina("sim", "--workload", trace(tmp_path), "--llms", "2", "--gpus", "1", "--plot", str(picture))
    assert "12 of 12 requests finished" in said
    assert "attainment by strict" in said and "cold (70 W)" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--system", "other"), "no system is called 'other'; there are: festina"),
        (("--workload", "other"), "no workload is called 'other'; there are: sharegpt"),
        (("--workload", "missing.csv"), "missing.csv cannot be read"),
        (("--default-clock", "1981"), "has no clock of 1981 MHz; it has 345 to 1980 in steps of 15"),
        (("--predictor", "other"), "no predictor is called 'other'; there are: live"),
        (("--gpu-type", "other"), "unknown GPU type 'other'"),
        (("--gpu-type", "cpu"), "no power meter"),
        (("--plot", "run.pdf"), "a figure is .png or .svg"),
    ],
)
def test_sim_errors_are_one_line(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(FestinaError, match=message.replace("(", r"\(")):
        festina("sim", *SMALL, *arguments)


def test_plan_answers_for_a_trace(tmp_path: Path) -> None:
    answer = json.loads(
        festina(
            "plan", "--trace", trace(tmp_path), "--llms", "1", "--gpus", "1..2", "--target", "0.5", "--json"
        )
    )
    assert answer["needed_gpus"] == 1
    assert [one["changed"] for one in answer["banded"]][:2] == [
        "bandwidth_knee_mhz = 700",
        "bandwidth_knee_mhz = 1400",
    ]
    energy = answer["energy_kwh"]
    assert 0.0 < energy["least"] <= energy["value"] <= energy["most"]
    assert energy["least"] < energy["most"]
    assert len(answer["chosen"]["active_gpus"]) == 12


def outcome(case: Case) -> Outcome:
    """As if each GPU brought a quarter of the requests on time, and drew 1 kJ."""
    share = min(1.0, case.gpus / 4)
    numbers = Report(
        energy_j=Energy(warm=0.0, cold=1000.0 * case.gpus, off=0.0),
        energy_parts_j=EnergyParts(floor=0.0, context=0.0, clock=0.0, hbm=0.0, compute=0.0),
        output_tokens=1,
        j_per_token=None,
        attainment=Attainment(request=share, strict=share, token=share),
        ttft_ms=Latency(p50=None, p99=None),
        tbt_ms=Latency(p50=None, p99=None),
        clock_mhz=Clocks(p10=None, p50=None, p90=None),
        active_gpus_mean=1.0,
        loads=0,
        migrations=0,
        clock_switches=0,
        wall_s=0.0,
        trace_hash="",
    )
    return Outcome(gpus=case.gpus, changed=case.changed, report=numbers, active_gpus=(1.0,))


@pytest.mark.parametrize(
    ("counts", "target", "needed", "chosen"),
    [(range(1, 9), 0.7, 3, 3), (range(1, 9), 1.0, 4, 4), (range(1, 3), 0.9, None, 2), ([5], 0.9, 5, 5)],
)
def test_the_search_finds_the_fewest_gpus(
    counts: list[int], target: float, needed: int | None, chosen: int
) -> None:
    arrivals = (Arrival(at_ms=60_000.0, model="m", input_tokens=1, output_tokens=1),)
    base = Case(models=(), arrivals=arrivals, gpus=1, device=device_for("h100-80gb"))
    answer = plan(base, list(counts), target, lambda cases: [outcome(case) for case in cases])
    assert (answer.needed_gpus, answer.chosen.gpus) == (needed, chosen)
    assert len(answer.tried) <= 4
    assert answer.energy_kwh.value == pytest.approx(chosen / 3600)
    console = Console(width=120, record=True)
    for part in tables.planned(answer, base, price=0.5):
        console.print(part)
    said = console.export_text()
    assert f"{chosen} x h100-80gb" in said and "cold (70 W)" in said
    assert ("No number of GPUs that was tried" in said) == (needed is None)


def test_bands_change_one_number_each() -> None:
    device = device_for("h100-80gb")
    cases = banded_cases(Case(models=(), arrivals=(), gpus=1, device=device))
    changed = [
        (c.device.bandwidth_knee_mhz, c.device.step_overhead_ms, c.device.context_idle_w) for c in cases
    ]
    assert changed == [
        (700, 1.0, 110),
        (1400, 1.0, 110),
        (1100, 0.5, 110),
        (1100, 2.0, 110),
        (1100, 1.0, 90),
        (1100, 1.0, 130),
    ]


def test_models_past_the_ranked_ones_are_copies_under_other_names() -> None:
    models = cli.pool_models(70)
    assert len({m.name for m in models}) == 70
    assert models[32].name == f"{models[0].name} (2)" and models[64].name == f"{models[0].name} (3)"
    assert models[32].weight_bytes == models[0].weight_bytes


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("1..3", [1, 2, 3])])
def test_numbers_of_gpus(text: str, counts: list[int]) -> None:
    assert cli.gpu_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "3..1", "a..b", "1..", "-1", "1..2000"])
def test_numbers_of_gpus_that_are_none(text: str) -> None:
    if text == "1..":
        assert cli.gpu_counts(text) == [1]
        return
    with pytest.raises(FestinaError, match=r"give a number, or a range such as 1\.\.8"):
        cli.gpu_counts(text)


def test_what_was_left_out_is_said() -> None:
    assert tables.said(Workload(arrivals=())) == ""
    said = tables.said(Workload(arrivals=(), left_out=1234, shortened=1))
    assert said == (
        "Left out, over 8,192 tokens: 1,234 requests. Shortened to their model's context: 1 requests."
    )
