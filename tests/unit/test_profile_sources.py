"""Where profiles come from besides an engine: kernel tables, plain kernels."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from services.local_sched import profile_aic, profile_kernels
from services.local_sched.profile_grid import DECODE, PREFILL, Point, grid_for
from services.local_sched.profile_stats import beyond_memory, samples_of
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.errors import ConfigError
from shared.lut import build, from_samples
from shared.lut_table import Provenance
from shared.silicon import step_work

H100 = device_for("h100-80gb")
QWEN = emulated_models(1)[0]


# ---- kernel tables


def test_composed_tables_scale_the_kernels_as_the_model_does() -> None:
    grid = grid_for(H100, QWEN, pool_bytes=40 * 10**9, max_batch=8)
    modelled = build(H100, QWEN)
    overhead_ms = float(step_work(H100, QWEN, decode_batch=1, decode_context_tokens=0).overhead_ms)

    def kernel_ms(point: Point) -> float:  # kernels twice as slow as the model's
        at = (1980, 100)
        if point.phase == PREFILL:
            return 2 * (modelled.ttft_ms(*at, point.tokens) - overhead_ms)
        if point.tokens == 8192:
            return math.nan  # past the table
        return 2 * (modelled.tbt_ms(*at, point.batch, point.tokens) - overhead_ms)

    found = {p: (ms, watts) for p, ms, watts in profile_aic.composed(H100, QWEN, grid, modelled, kernel_ms)}
    point = Point(PREFILL, 1024, 1, 795, 50)
    expected = 2 * (modelled.ttft_ms(795, 50, 1024) - overhead_ms) + overhead_ms
    assert found[point] == pytest.approx((expected, modelled.prefill_power_w(795, 50, 1024)))
    assert not [p for p in found if p.phase == DECODE and p.tokens == 8192]
    table = from_samples(
        H100, QWEN, samples_of(found | beyond_memory(grid, found)), Provenance(kind="modelled", device="d")
    )
    assert table.tbt_ms(1635, 100, 4, 1024) == pytest.approx(
        2 * (modelled.tbt_ms(1635, 100, 4, 1024) - overhead_ms) + overhead_ms, rel=0.03
    )


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(ConfigError, match=r"pip install 'festina\[aiconfigurator\]'"):
        profile_aic.kernel_times(H100, QWEN)


def test_real_kernel_tables_agree_with_the_device_model() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the optional extra aiconfigurator is not installed")
    kernel_ms, source = profile_aic.kernel_times(H100, QWEN)
    assert "h100_sxm" in source
    modelled = build(H100, QWEN)
    overhead_ms = float(step_work(H100, QWEN, decode_batch=1, decode_context_tokens=0).overhead_ms)
    # The package counts small kernels that the model counts as overhead, so short steps are longer in it.
    for tokens in (256, 1024, 8192):
        expected = modelled.ttft_ms(1980, 100, tokens) - overhead_ms
        assert 0.8 < kernel_ms(Point(PREFILL, tokens, 1, 1980, 100)) / expected < 1.5
    for batch in (1, 32, 128):
        expected = modelled.tbt_ms(1980, 100, batch, 1024) - overhead_ms
        assert 0.8 < kernel_ms(Point(DECODE, 1024, batch, 1980, 100)) / expected < 1.5


# ---- plain kernels


def test_the_kernel_profile_says_what_it_lacks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        profile_kernels.__file__,
        "--shape",
        "Qwen2.5-7B",
        "--out",
        str(tmp_path / "k"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("no ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "k").exists()
