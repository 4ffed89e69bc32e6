"""The profiler on the real vLLM engine on this machine's CPU, with a short grid."""

import asyncio
from pathlib import Path

import pytest
from vllm_support import MODEL, PYTHON, needs_vllm

from services.local_sched.engine_vllm import VllmEngines
from services.local_sched.profile import Bench, run_sweeps
from services.local_sched.profile_grid import Grid, Point
from services.local_sched.profile_journal import Heading, Journal
from services.local_sched.profile_lab import EngineLab
from services.local_sched.profile_stats import Effort, samples_of
from shared.devices import device_for
from shared.lut import from_samples, pack, unpack
from shared.lut_table import Provenance
from shared.shelf import Shelf

pytestmark = needs_vllm

GRID = Grid((0,), (100,), (16, 128, 512), (1, 4), (32, 256), pool_tokens=4 * (256 + 64))


async def test_a_short_profile_gives_a_table_that_serves(tmp_path: Path) -> None:
    assert MODEL is not None and PYTHON is not None
    lab = EngineLab(lambda report: VllmEngines(python=str(PYTHON), run_dir=tmp_path, report=report))
    heading = Heading(gpu_type="cpu", model=MODEL.name, source="vLLM on CPU", grid=repr(GRID))
    journal = Journal(tmp_path / "journal", heading)
    bench = Bench(lab, MODEL, Effort(precision=0.1, least=3, most=5))
    try:
        await bench.load(2 * MODEL.context_tokens * MODEL.kv_bytes_per_token)
        readings = await asyncio.wait_for(run_sweeps(bench, GRID, 0.0, journal, lambda entry: None), 300)
    finally:
        await lab.close()
    assert bench.load_ms > 1000
    assert len(readings) == 3 + 4
    newest = {entry.point: entry for entry in journal.entries}
    assert newest.keys() == readings.keys()
    for entry in newest.values():
        assert len(entry.repeats_ms) >= 3 and entry.latency_ms > 1.0
        assert entry.power_w is None  # no meter, and none made up
        assert (
            abs(entry.context_tokens - entry.tokens * (entry.phase == "decode")) <= 16 + 0.05 * entry.tokens
        )
    # a prompt 32 times as long takes many times as long, whatever else this machine does
    times = {point: ms for point, (ms, _) in readings.items()}
    assert times[Point("prefill", 512, 1, 0, 100)] > 3 * times[Point("prefill", 16, 1, 0, 100)]

    provenance = Provenance(kind="measured", device="vLLM on CPU")
    lut = unpack(pack(from_samples(device_for("cpu"), MODEL, samples_of(readings), provenance)))
    shelf = Shelf(lambda gpu_type, model: pytest.fail("the measured table covers this device"))
    assert shelf.put(lut) == ""
    assert shelf.get("cpu", MODEL).ttft_ms(0, 100, 300) > shelf.get("cpu", MODEL).tbt_ms(0, 100, 1, 64)
