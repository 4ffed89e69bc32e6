"""`festina compare` and `festina paper`: what is played and kept, and what is made of it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.progress import Progress
from typer.testing import CliRunner

from services.cli.main import app, main
from shared.errors import ConfigError
from shared.systems import SYSTEMS
from sim.cells import Cell, Played, Trace, models_of, play, settings_of
from sim.compare import grid, rows, sections, ungoverned
from sim.grid import OF_SIM, ROOT, Grid, version
from sim.page import html
from sim.paper.build import FIGURES, cells
from sim.paper.build import sections as paper_sections
from sim.paper.entry import FULL, REDUCED, Results, claim
from sim.paper.pooling import active_models, highest_rate
from sim.report import Attainment

SMALL = Cell(system="festina", llms=1, rps=0.5, gpus=1, minutes=0.1)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(replace(SMALL, traced=True))


def as_if(one: Played, cell: Cell, on_time: float = 1.0, energy: float = 1.0) -> Played:
    """Return a result for another cell, without playing it."""
    report = one.report
    joules = {name: energy * getattr(report.energy_j, name) for name in ("warm", "cold", "off")}
    report = replace(
        report, attainment=Attainment(on_time, on_time, on_time), energy_j=replace(report.energy_j, **joules)
    )
    requests = tuple((model.name, s, over) for model in models_of(cell) for _, s, over in one.trace.requests)
    return Played(cell, report, Trace(one.trace.clock_mhz, requests) if cell.traced else Trace())


def festina(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_only_what_is_missing_is_played(tmp_path: Path) -> None:
    base = (
        "compare",
        "--llms",
        "1",
        "--gpus",
        "1",
        "--rps",
        "0.5",
        "--minutes",
        "0.1",
        "--out",
        str(tmp_path),
    )
    one = (*base, "--systems", "festina", "--reference", "festina")
    assert "1 cells, 1 played now" in festina(*one)
    [kept] = (tmp_path / "cells").glob("*.json")
    before = kept.stat().st_mtime_ns
    assert "2 cells, 1 played now" in festina(*base, "--systems", "festina,muxserve")
    assert kept.stat().st_mtime_ns == before
    kept.write_text("cut o")  # as a run that was killed might leave it
    assert "1 cells, 1 to play" in festina(*one, "--dry-run")
    found = json.loads(festina(*one, "--json"))
    assert (
        found[0]["name"] == "festina"
        and found[0]["ratio"]["mean"] == 1.0
        and found[0]["to_bound"]["mean"] > 1
    )
    page = (tmp_path / "index.html").read_text()
    assert "<svg" in page and not re.search(r"(src|href)=\"(?!#)", page)  # nothing is fetched
    assert (tmp_path / "summary.csv").read_text().count("\n") == 2
    assert (tmp_path / "cells.csv").read_text().startswith("system,workload,llms,rps")


def test_a_key_is_of_every_setting_and_of_what_plays(tmp_path: Path) -> None:
    others = [replace(SMALL, seed=1), replace(SMALL, knobs={"consolidator.safety_margin": 0.1})]
    keys = {cell.key("v1") for cell in (SMALL, *others)} | {SMALL.key("v2")}
    assert len(keys) == 4 and SMALL.key("v1") == replace(SMALL).key("v1")
    assert Grid(tmp_path).missing([SMALL, SMALL, others[0]]) == [SMALL, others[0]]


def test_an_old_copy_of_the_sources_has_another_version(tmp_path: Path) -> None:
    assert version(tmp_path) != version()
    for name in ("services", "shared", "sim"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert version(tmp_path) == version()


def test_the_version_is_of_all_that_plays_a_cell() -> None:
    code = "import sys, sim.cells; print(*(name[4:] for name in sys.modules if name.startswith('sim.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    watching = {"check", "faults", "story"}  # they only look on, or make what no cell has
    assert set(done.stdout.split()) - watching == set(OF_SIM.split())


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"seed": -1}, {"workload": "none"}])
def test_a_cell_that_cannot_be_played_is_refused_before_any_is(tmp_path: Path, wrong: dict[str, Any]) -> None:
    cells = [SMALL, replace(SMALL, **wrong)]
    with Progress(disable=True) as bar, pytest.raises(ConfigError):
        Grid(tmp_path).play(cells, bar)
    assert len(Grid(tmp_path).missing(cells)) == 2


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "[taken]").touch()
    monkeypatch.setattr(sys, "argv", ["festina", "paper", "table1", "--out", str(file)])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.strip().startswith(f"error: {file}")


def test_a_grid_has_default_clocks_only_where_they_matter() -> None:
    found = grid(["festina", "muxserve"], [1635, 1980], [0, 1], llms=[16, 24])
    assert len(found) == 4 + 8 and not ungoverned("festina") and ungoverned("muxserve")
    assert {cell.default_clock_mhz for cell in found if cell.system == "festina"} == {None}


def test_knobs_reach_the_settings_they_name() -> None:
    knobs = {"consolidator.safety_margin": 0.15, "local.report_steps": 4.0}
    made = settings_of(replace(SMALL, knobs=knobs))
    assert made.consolidator.safety_margin == 0.15
    assert made.local.report_steps == 4 and isinstance(made.local.report_steps, int)
    with pytest.raises(ConfigError, match=r"consolidator\.marge"):
        settings_of(replace(SMALL, knobs={"consolidator.marge": 0.1}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "festnia"), "no system is called 'festnia'"),
        (("--rps", "fast"), "--rps fast"),
        (("--accounting", "hot"), "cold, warm, off"),
        (("--set", "consolidator.safety_margin"), r"service\.field=number"),
        (("--systems", "dilu", "--default-clocks", "1981"), "has no clock of 1981 MHz"),
        (("--workloads", "sharegtp"), "no workload is called 'sharegtp'"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        festina("compare", *arguments, "--out", str(tmp_path))


def test_spread_ratios_and_settings_that_nobody_serves(played: Played) -> None:
    low, high = replace(SMALL, rps=0.5), replace(SMALL, rps=1.0)
    results = [
        *(as_if(played, replace(low, system="festina-paper", seed=s), energy=2.0) for s in (0, 1)),
        *(as_if(played, replace(low, seed=s), energy=e, on_time=0.5) for s, e in ((0, 1.0), (1, 3.0))),
        as_if(played, high, on_time=0.89),
    ]
    found = rows(results, "festina-paper")
    assert [(row.name, row.setting.rps, row.served) for row in found] == [
        ("festina-paper", 0.5, True),
        ("festina", 0.5, True),
        ("festina", 1.0, False),
    ]
    ratio = found[1].ratio
    assert ratio is not None and (ratio.mean, ratio.low, ratio.high) == pytest.approx((1.0, 0.5, 1.5))
    assert str(ratio) == "1 ± 0.5" and found[2].ratio is None
    page = html("a <title>", ["i"], sections(found, "festina-paper", "cold"))
    assert "no policy serves this" in page and "a &lt;title&gt;" in page


def test_an_empty_gpu_of_stage_six_is_off(played: Played) -> None:
    cells_ = [replace(SMALL, system=name) for name in ("festina-stage-5", "festina-stage-6")]
    five, six = rows([as_if(played, cell) for cell in cells_], "festina-stage-5")
    assert six.energy_kj.mean == pytest.approx(played.report.energy_j.off / 1000)
    assert five.energy_kj.mean == pytest.approx(played.report.energy_j.cold / 1000)


@pytest.mark.parametrize("scale", [REDUCED, FULL], ids=["reduced", "full"])
def test_every_figure_is_made_of_cells_that_can_be_played(scale, played: Played) -> None:  # type: ignore[no-untyped-def]
    asked = cells(FIGURES, scale)
    assert {cell.system for cell in asked} <= set(SYSTEMS)
    for cell in {(cell.system, str(cell.knobs)): cell for cell in asked}.values():
        settings_of(cell)
    if scale is REDUCED:
        made = paper_sections(FIGURES, Results(as_if(played, cell) for cell in asked), scale)
        assert [section.name for section in made] == [figure.name for figure in FIGURES]
        assert all(section.sheets or section.notes for section in made)


def test_claims_agree_or_say_by_how_much() -> None:
    assert claim("x", 1.3, 1.25, "x").verdict == "agrees"
    assert claim("x", 1.3, 2.6, "x").verdict == "differs by +100%"
    assert claim("x", 12.0, 8.5, " %", within=3.0).verdict == "differs by -3.5 %"
    assert claim("x", 12.0, None).verdict == "cannot be said"


def test_the_second_seeds_arithmetic() -> None:
    assert active_models(100, 0.037, 16.79) == pytest.approx(46.27, abs=0.005)
    assert highest_rate((1.0, 2.0, 4.0), (1.0, 0.95, 0.75), 0.9) == pytest.approx(2.5)
    assert highest_rate((1.0, 2.0), (0.8, 0.7), 0.9) == 0.0
