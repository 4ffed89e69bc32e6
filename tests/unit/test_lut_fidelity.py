"""The device model and its tables against measured data and the paper's points, within stated bounds."""

import csv
import json
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import lut as lut_cli
from services.cli import lut_fidelity, lut_fidelity_power, lut_fidelity_tables, lut_fidelity_time, lut_paper
from services.cli.lut_fidelity import Check
from services.cli.main import app
from shared.catalog import entries
from shared.devices import device_for

SHIPPED = Path(__file__).resolve().parents[1] / "data"
BESIDE = Path(__file__).resolve().parents[3] / "shared/data/calibration"
MODELS = {entry.name: entry.spec() for entry in entries()}
H100 = device_for("h100-80gb")


@cache
def rows(name: str, folder: Path = SHIPPED) -> list[dict[str, str]]:
    if not (folder / name).is_file():
        pytest.skip(f"{name} may not be redistributed, and {folder} does not have it")
    with (folder / name).open(newline="") as lines:
        return list(csv.DictReader(lines))


def by_subject(checks: list[Check]) -> dict[str, Check]:
    return {c.subject: c for c in checks}


def test_kernel_latencies_of_the_h100() -> None:
    found = by_subject(
        lut_fidelity_time.kernels(rows("composed_step_latency_h100_h200.csv"), MODELS, H100, "h100_sxm")
    )
    assert found["all"].n == 511
    assert found["all"].mean_pct <= 6.0
    assert found["all"].verdict == "within"
    assert found["prefill"].mean_pct <= 6.0


def test_an_engine_that_nothing_was_fitted_to() -> None:
    checks = lut_fidelity_time.aegaeon(rows("aegaeon_profiles.csv"), MODELS)
    found = {(c.check.split(", ", 1)[1], c.subject): c for c in checks}
    assert len(found) == 4 * 3 * 2
    assert all(c.n == 67 for c in checks)
    for subject in {c.subject for c in checks}:
        unfitted = found["power cap, unfitted", subject]
        assert unfitted.bias_pct < 0.0, "an older engine has overheads that ours does not"
        assert found["power cap, engine overhead", subject].mean_pct < unfitted.mean_pct
        assert found["power cap, overhead of the others", subject].mean_pct < unfitted.mean_pct


def test_serving_power_and_the_sampling_that_no_table_has() -> None:
    checks = lut_fidelity_power.mlenergy(rows("mlenergy_llm_steady_state.csv"), MODELS)
    assert {c.n for c in checks} == {44}
    formula, table, *_, unfitted, sampled = checks
    assert formula.mean_pct <= 8.0
    assert 8.0 < table.mean_pct < 9.5, "a known miss, told in docs/fidelity.md"
    assert unfitted.bias_pct < -15.0, "the modelled step is shorter than a served one"
    assert sampled.mean_pct < 5.0, "sampling explains it, also of models that it was not fitted to"


def test_speed_on_part_of_the_sms() -> None:
    found = by_subject(lut_fidelity_time.muxserve(rows("muxserve_a100_latency_vs_sm.csv", BESIDE), MODELS))
    assert found["decode, batch <= 128"].mean_pct <= 6.0
    assert found["prefill, batch <= 128"].mean_pct <= 6.0
    assert found["decode, batch >= 256"].mean_pct > 6.0, "said to be slower than modelled"


def test_kernel_latencies_of_the_h200_and_the_voltage_curve() -> None:
    composed = rows("composed_step_latency_h100_h200.csv", BESIDE)
    assert (
        lut_fidelity_time.kernels(composed, MODELS, device_for("h200-141gb"), "h200_sxm")[0].mean_pct <= 6.0
    )
    (curve,) = lut_fidelity_power.voltage(rows("h100_firestarter_dgemm_power_vs_clock.csv", BESIDE))
    assert curve.mean_pct <= 4.0


def test_interpolation_between_lengths() -> None:
    for c in lut_fidelity_tables.interpolation([MODELS[name] for name in lut_paper.FIGURE_MODELS]):
        assert c.mean_pct <= 1.0, c.subject
        assert c.worst_pct <= 5.0, c.subject


def test_errors_are_summed_up_as_said() -> None:
    c = lut_fidelity.check_of("a", "b", [0.1, -0.3, 0.2, 0.0], 20.0, 25.0)
    assert (c.n, c.mean_pct, c.bias_pct, c.worst_pct) == (4, 15.0, 0.0, 30.0)
    assert c.verdict == "over", "worst over its bound"
    assert lut_fidelity.check_of("a", "b", [0.1]).verdict == "reported"


def test_both_phases_are_u_shaped_and_save_what_the_paper_says() -> None:
    points = lut_paper.figure_3_points([MODELS[name] for name in lut_paper.FIGURE_MODELS])
    assert len(points) == 12
    assert [p.subject for p in points if not p.meets] == []


def test_settings_use_less_energy_one_after_another_and_keep_the_objectives() -> None:
    models = [MODELS[name] for name in lut_paper.FIGURE_MODELS]
    for tokens in ((512, 128), (4096, 512)):
        s1, s2, s3 = lut_paper.figure_4(models, *tokens, 1635)
        assert s1.energy_j > s2.energy_j >= s3.energy_j
        assert s1.shares_pct == s2.shares_pct
        assert s1.round_ms <= s2.round_ms
        assert max(sum(s.shares_pct) for s in (s1, s2, s3)) <= 100


def test_the_knee_of_the_bandwidth_is_the_assumption_that_matters() -> None:
    found = {p.subject.split(",")[0]: p.ours for p in lut_paper.bands(MODELS["Llama-2-13B-chat"])}
    assert "decode 705 MHz" in found["bandwidth_knee_mhz"]
    assert "activation_ms" not in found


def test_data_is_found_beside_the_repository_or_in_it() -> None:
    assert lut_cli.DATA_FOLDERS == (BESIDE, SHIPPED)


def test_check_says_what_it_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lut_cli, "DATA_FOLDERS", (SHIPPED,))
    result = CliRunner().invoke(app, ["lut", "check", "--json"])
    checks = json.loads(result.stdout)["checks"]
    assert [c for c in checks if c["verdict"] == "over"] == []
    assert result.exit_code == 0
    power = {c["subject"]: c for c in checks if c["check"] == "ML.ENERGY H100, power"}
    assert power["formula at the measured rate"]["verdict"] == "within"
    assert "as a table has it" in power, "its larger error is shown beside"
    skipped = {c["check"]: c["skipped"] for c in checks if c["verdict"] == "skipped"}
    assert set(skipped) == {
        "kernels on h200_sxm, composed",
        "MuxServe A100, SM share",
        "H100 power at locked clocks",
    }
    assert "--data" in skipped["MuxServe A100, SM share"]


def test_show_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    drawn = tmp_path / "u.svg"
    result = CliRunner().invoke(app, ["lut", "show", "qwen3-8b", "--plot", str(drawn), "--json"])
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert view["model"] == "Qwen3-8B"
    assert {curve["best_mhz"] for curve in view["prefill"] + view["decode"]} == {975}
    assert drawn.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "no model 'nothing'"),
        (["qwen3-8b", "--gpu-type", "b300"], "unknown GPU type"),
        (["qwen3-8b", "--gpu-type", "cpu"], "no power meter"),
        (["qwen3-8b", "--plot", "u.pdf"], "png or .svg"),
        (["qwen3-8b", "--file", "/no/such/table"], "cannot be read"),
    ],
)
def test_show_refuses_with_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["lut", "show", *arguments])
    assert result.exit_code == 1
    assert said in str(result.exception)


def test_drawing_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["lut", "show", "qwen3-8b", "--plot", str(tmp_path / "u.png")])
    assert result.exit_code == 1
    assert "pip install 'festina[plots]'" in str(result.exception)
