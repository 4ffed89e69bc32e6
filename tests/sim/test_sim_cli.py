"""`festina sim` and `festina plan` as a person starts them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from shared.catalog import pool_models
from shared.errors import FestinaError
from sim import cli, tables
from sim.workload import Workload

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
        (("--system", "other"), "no system is called 'other'; there are: festina, festina-paper"),
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
    arguments = ("--trace", trace(tmp_path), "--llms", "1", "--gpus", "1..2", "--target", "0.5")
    answer = json.loads(festina("plan", *arguments, "--json"))
    assert answer["needed_gpus"] == 1 and answer["sure"]
    assert [one["changed"] for one in answer["bands"]][:2] == [
        "bandwidth_knee_mhz = 700",
        "bandwidth_knee_mhz = 1400",
    ]
    assert answer["chosen"]["whole"]  # it is short
    energy, sampled = answer["energy_kwh"], answer["chosen"]["energy_kwh"]
    assert sampled["low"] == sampled["value"] == sampled["high"] == energy["value"] > 0.0
    assert energy["least"] < energy["value"] < energy["most"]
    assert len(answer["chosen"]["active_gpus"]) == answer["windows"]
    said = festina("plan", *arguments, "--price", "0.5")
    assert "1 x h100-80gb are the fewest tried that bring 50% of the requests on time" in said
    assert "cold (70 W)" in said and "Sampled" not in said


def test_models_past_the_ranked_ones_are_copies_under_other_names() -> None:
    models = pool_models(70)
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
