"""The profiler on the emulated device in virtual time: what it measures is what the device model says."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from services.local_sched.profile import Bench, run_sweeps
from services.local_sched.profile_grid import DECODE, PREFILL, Grid, Point
from services.local_sched.profile_journal import Heading, Journal, Measured
from services.local_sched.profile_lab import EngineLab, VirtualLab
from services.local_sched.profile_stats import Effort, samples_of
from shared import engine as en
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.errors import FestinaError, Unavailable
from shared.lut import build, from_samples, unpack
from shared.lut_table import Provenance

H100 = device_for("h100-80gb")
QWEN = emulated_models(1)[0]
GRID = Grid(
    clocks_mhz=(795, 975, 1635, 1980),
    shares_pct=(10, 50, 100),
    input_tokens=(32, 128, 256, 512, 1024, 2048, 4096, 6144),
    batches=(1, 8, 32),
    context_tokens=(64, 512, 2048),
    pool_tokens=10**6,
)
HEADING = Heading(gpu_type="h100-80gb", model=QWEN.name, source="test", grid="g")


def measured(tmp_path: Path, grid: Grid, tolerance: float = 0.0) -> tuple[dict, Journal]:
    journal = Journal(tmp_path / "j", HEADING)

    async def run() -> dict:
        bench = Bench(VirtualLab(H100), QWEN, Effort())
        await bench.load(0)
        return await run_sweeps(bench, grid, tolerance, journal, lambda entry: None)

    return asyncio.run(run()), journal


def test_the_measured_table_is_the_modelled_one(tmp_path: Path) -> None:
    readings, journal = measured(tmp_path, GRID)
    assert len(journal.entries) == len(readings) == 4 * 3 * (8 + 9)
    modelled = build(H100, QWEN)
    for point, (ms, watts) in readings.items():
        at = (point.sm_clock_mhz, point.sm_share_pct)
        if point.phase == PREFILL:
            expected = modelled.ttft_ms(*at, point.tokens), modelled.prefill_power_w(*at, point.tokens)
        else:
            batch = (point.batch, point.tokens)
            expected = modelled.tbt_ms(*at, *batch), modelled.decode_power_w(*at, *batch)
        # contexts off the table's own are interpolated there, and a batch grows a little while it is timed
        assert ms == pytest.approx(expected[0], rel=0.002), point
        assert watts == pytest.approx(expected[1], rel=0.005), point
    assert all(entry.precise and not entry.outliers for entry in journal.entries)


def test_a_table_made_of_it_answers_as_the_model_does(tmp_path: Path) -> None:
    readings, _ = measured(tmp_path, GRID)
    provenance = Provenance(kind="measured", device="emulated")
    table, modelled = from_samples(H100, QWEN, samples_of(readings), provenance), build(H100, QWEN)
    for tokens in (100, 700, 3000, 6000):  # between the lengths measured
        got, expected = (lut.ttft_ms(975, 50, tokens) for lut in (table, modelled))
        assert got == pytest.approx(expected, rel=0.05)
    assert table.tbt_ms(1635, 100, 8, 512) == pytest.approx(modelled.tbt_ms(1635, 100, 8, 512), rel=0.02)


def test_the_batch_that_runs_serves_the_smaller_ones(tmp_path: Path) -> None:
    grid = Grid((1005,), (100,), (64,), (1, 2, 4), (256,), pool_tokens=10**6)
    _, journal = measured(tmp_path, grid)
    decodes = [entry for entry in journal.entries if entry.phase == DECODE]
    assert sorted(entry.batch for entry in decodes) == [1, 2, 4]
    by_batch = {entry.batch: entry.context_tokens for entry in decodes}
    assert 256 <= by_batch[4] < by_batch[1] < 256 + 16  # its oldest request went on


def test_a_batch_that_has_outgrown_the_context_is_begun_anew() -> None:
    async def run() -> Measured:
        bench = Bench(VirtualLab(H100), QWEN, Effort(precision=0.0, least=5, most=100))
        await bench.load(0)
        return await bench.measure(Point(DECODE, 64, 4, 1005, 100))

    found = asyncio.run(run())
    assert len(found.repeats_ms) == 100
    assert 64 < found.context_tokens <= 64 + 16 + 5 / 2, "a take begins within 16 tokens of it"


def test_a_resumed_profile_measures_only_what_is_missing(tmp_path: Path) -> None:
    whole, first = measured(tmp_path, GRID)
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    (tmp_path / "j").write_bytes(b"".join(lines[:40]) + lines[40][:25])  # killed in the middle of a write
    again, second = measured(tmp_path, GRID)
    assert second.entries[:39] == first.entries[:39]
    assert len(second.entries) == len(first.entries)
    assert again.keys() == whole.keys()
    for point, (ms, _) in again.items():  # a batch may have grown to another context by then
        assert ms == pytest.approx(whole[point][0], rel=1e-3)


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j", HEADING).close()
    other = Heading(gpu_type="h100-80gb", model="Other", source="test", grid="g")
    with pytest.raises(FestinaError, match=r"another profile \(Qwen.*--fresh"):
        Journal(tmp_path / "j", other)
    (tmp_path / "k").write_text("not a journal\n")
    with pytest.raises(FestinaError, match="no journal of a profile"):
        Journal(tmp_path / "k", HEADING)


def test_an_odd_point_is_measured_again_and_the_faster_counts(tmp_path: Path) -> None:
    grid = Grid((1005,), (100,), (64, 256, 1024), (1,), (64,), pool_tokens=10**6)
    journal = Journal(tmp_path / "j", HEADING)
    disturbed = Measured("prefill", 64, 1, 1005, 100, 1005, (500.0,), 500.0, 0.0, 300.0)
    journal.append(disturbed)

    async def run() -> dict:
        bench = Bench(VirtualLab(H100), QWEN, Effort())
        await bench.load(0)
        return await run_sweeps(bench, grid, 0.0, journal, lambda entry: None)

    readings = asyncio.run(run())
    expected = build(H100, QWEN).ttft_ms(1005, 100, 64)
    assert readings[Point(PREFILL, 64, 1, 1005, 100)][0] == pytest.approx(expected, rel=0.01)


class DeadEngines:
    """Engines that end as soon as they are told to load."""

    def __init__(self, report) -> None:
        self.report = report

    async def start(self) -> None:
        pass

    def perform(self, order: en.Order) -> None:
        self.report(en.EngineEnded(model=QWEN.name, reason="no weights"))

    async def close(self) -> None:
        pass


async def test_an_engine_that_cannot_load_is_named_with_its_reason() -> None:
    with pytest.raises(Unavailable, match="no weights"):
        await Bench(EngineLab(DeadEngines), QWEN, Effort()).load(0)


def festina_profile(state: Path, *flags: str) -> list[str]:
    program = "from services.cli.main import main; main()"
    where = ["--state-dir", str(state), "--gpu", "h100-80gb", "--model", QWEN.name, "--no-store"]
    return [sys.executable, "-c", program, "profile", *where, *flags]


def test_a_killed_profile_goes_on_and_ends_at_the_same_table(tmp_path: Path) -> None:
    flags = ("--tolerance", "1")  # few points
    killed = subprocess.Popen(festina_profile(tmp_path, *flags), stdout=subprocess.DEVNULL)
    journal = tmp_path / "tables" / "h100-80gb--qwen2-5-7b-instruct.journal"
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < 30:
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    before = journal.read_bytes()
    kept = before[: before.rfind(b"\n") + 1].splitlines()
    assert all(json.loads(line) for line in kept)

    done = subprocess.run(
        festina_profile(tmp_path, *flags), capture_output=True, text=True, timeout=120, check=True
    )
    assert f"going on after {len(kept) - 1} points" in done.stdout
    assert not journal.exists()
    (table,) = journal.parent.glob("*.lut")
    resumed = table.read_bytes()
    table.unlink()
    subprocess.run(festina_profile(tmp_path, *flags), capture_output=True, timeout=120, check=True)
    # a batch that went on may have been timed at a slightly longer context
    assert np.allclose(unpack(table.read_bytes()).block, unpack(resumed).block, rtol=0.01)


def test_a_dry_run_prints_the_plan_and_measures_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        festina_profile(tmp_path, "--dry-run"), capture_output=True, text=True, timeout=60, check=True
    )
    text = " ".join(done.stdout.split())
    assert "795 885 975 1065 1155 1245 1335 1425 1515 1605 1635 1980" in text
    assert "points to measure" in text and "minutes of the device's time" in text
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize(
    ("flags", "telling"),
    [
        (("--gpu", "tpu"), "it is cpu, cuda:N, or one of"),
        (("--model", "qwen2.5"), "several models begin so"),
        (("--model", "gpt-7"), "not in the catalog"),
        (("--from", "hearsay"), "`measure` or `aiconfigurator`"),
        (("--gpu", "cuda:0", "--kernels"), "has the shapes of"),
    ],
)
def test_bad_options_get_one_line(tmp_path: Path, flags: tuple[str, ...], telling: str) -> None:
    done = subprocess.run(
        festina_profile(tmp_path, *flags), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert telling in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
