"""Tables as bytes and from samples: what is refused, what is missed, and that equal content stays equal."""

import math

import msgspec
import numpy as np
import pytest

from shared import lut, lut_table
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.errors import LutMiss, LutRefused
from shared.lut_points import best_point, least_point
from shared.lut_samples import Sample, regress
from shared.lut_table import Provenance
from shared.model import Objectives

H100 = device_for("h100-80gb")
CPU = device_for("cpu")
MODEL = emulated_models(1)[0]
TABLE = lut.build(H100, MODEL)
PACKED = lut.pack(TABLE)
MEASURED = Provenance(
    kind="measured", device="H100 number 3", driver="570.1", engine_version="0.9", date="2026-01-02"
)


def samples(
    clocks: tuple[int, ...] = (975, 1635), shares: tuple[int, ...] = (50, 100), power_w: float | None = 300.0
) -> list[Sample]:
    """TTFT = tokens / (clock * share) scaled; TBT = (10 + batch + context / 1024) likewise."""
    found = []
    for clock in clocks:
        for share in shares:
            slow = 163_500 / (clock * share)
            for tokens in (256, 512, 1024, 2048, 4096):
                found.append(
                    Sample("prefill", clock, share, slow * tokens / 20, power_w, input_tokens=tokens)
                )
            for batch in (1, 8):
                for context in (0, 512, 1024, 2048):
                    ms = slow * (10 + batch + context / 1024)
                    found.append(
                        Sample("decode", clock, share, ms, power_w, batch=batch, context_tokens=context)
                    )
    return found


def measured(**changes: object) -> lut.Lut:
    return lut.from_samples(H100, MODEL, samples(**changes), MEASURED)  # type: ignore[arg-type]


def test_a_stored_table_comes_back_equal() -> None:
    for table in (TABLE, measured()):
        again = lut.unpack(lut.pack(table))
        assert np.array_equal(again.block, table.block)
        assert (again.axes, again.model, again.device) == (table.axes, table.model, table.device)
        assert (again.provenance, again.prefill_fit) == (table.provenance, table.prefill_fit)
        assert again.sha256 == table.sha256
        assert again.ttft_ms(1005, 50, 700) == table.ttft_ms(1005, 50, 700)


def test_the_hash_tells_tables_apart() -> None:
    other = lut.build(H100, emulated_models(2)[1])
    assert len({TABLE.sha256, other.sha256, measured().sha256}) == 3
    assert lut.build(H100, MODEL).sha256 == TABLE.sha256


def test_damaged_bytes_are_refused() -> None:
    for damaged in (b"", b"not a table", PACKED[:-10], PACKED[: len(PACKED) // 2]):
        with pytest.raises(LutRefused, match="damaged"):
            lut.unpack(damaged)
    flipped = bytearray(PACKED)
    flipped[-1000] ^= 1
    with pytest.raises(
        LutRefused, match=r"Qwen2.5-7B-Instruct on h100-80gb is damaged.*hash.*build it again"
    ):
        lut.unpack(bytes(flipped))


def test_a_block_that_does_not_fill_its_axes_is_refused() -> None:
    stored = msgspec.msgpack.decode(PACKED, type=lut_table.Stored)
    short = lut_table.encode(msgspec.structs.replace(stored, block=stored.block[:-4]))
    with pytest.raises(LutRefused, match="do not fill its axes"):
        lut.unpack(short)


def test_another_schema_is_refused_by_its_number() -> None:
    stored = msgspec.msgpack.decode(PACKED)
    with pytest.raises(LutRefused, match=r"schema 0, this version reads 1; profile or build"):
        lut.unpack(msgspec.msgpack.encode({**stored, "schema": 0}))
    with pytest.raises(LutRefused, match="schema 2"):
        lut.unpack(msgspec.msgpack.encode({"schema": 2, "a new field": 1}))


def test_a_modelled_table_of_other_parameters_or_an_unknown_device_is_refused() -> None:
    stored = msgspec.msgpack.decode(PACKED, type=lut_table.Stored)
    stale = msgspec.structs.replace(stored.provenance, parameters_digest="0" * 64)
    with pytest.raises(LutRefused, match="other parameters"):
        lut.unpack(lut_table.encode(msgspec.structs.replace(stored, provenance=stale)))
    with pytest.raises(LutRefused, match=r"unknown GPU type 'b300'"):
        lut.unpack(lut_table.encode(msgspec.structs.replace(stored, gpu_type="b300")))


def test_samples_give_their_own_numbers_back() -> None:
    table = measured()
    assert table.ttft_ms(1635, 100, 1024) == pytest.approx(51.2, rel=0.01)
    assert table.tbt_ms(1635, 100, 8, 1024) == pytest.approx(19.0, rel=0.01)
    assert table.ttft_ms(975, 50, 700) == pytest.approx(35.0 * 163_500 / (975 * 50), rel=0.01)
    assert table.prefill_power_w(1635, 100, 700) == pytest.approx(300.0, rel=1e-5)
    assert table.clocks_mhz.tolist() == [975, 1635]
    assert table.shares_pct.tolist() == [50, 100]
    assert table.prefill_fit is not None and table.prefill_fit.worst_pct < 1.0


def test_repeats_of_a_point_give_their_median() -> None:
    noisy = samples() + [Sample("prefill", 975, 50, ms, 300.0, input_tokens=1024) for ms in (1.0, 9e9)]
    assert lut.from_samples(H100, MODEL, noisy, MEASURED).block == pytest.approx(measured().block, rel=1e-6)


def test_between_measured_points_a_hole_is_filled_and_beside_them_it_is_a_miss() -> None:
    clocks = (975, 1305, 1635)
    whole = samples(clocks)
    holed = [s for s in whole if (s.sm_clock_mhz, s.sm_share_pct) != (1305, 50)]
    table = lut.from_samples(H100, MODEL, holed, MEASURED)
    between = table.ttft_ms(1305, 50, 1024)
    assert table.ttft_ms(1635, 50, 1024) < between < table.ttft_ms(975, 50, 1024)
    cornered = [s for s in whole if (s.sm_clock_mhz, s.sm_share_pct) != (1635, 50)]
    with pytest.raises(LutMiss, match=r"prefill has no sample at 1635 MHz, 50 % of the SMs.*profile them"):
        lut.from_samples(H100, MODEL, cornered, MEASURED)


def test_a_phase_without_samples_is_a_miss() -> None:
    with pytest.raises(LutMiss, match="no decode samples; profile that phase"):
        lut.from_samples(H100, MODEL, [s for s in samples() if s.phase == "prefill"], MEASURED)


def test_a_measured_table_answers_only_where_it_was_measured() -> None:
    table = measured(shares=(100,))
    assert table.tbt_ms(1305, 100, 1, 100) > 0
    for clock, share in ((1305, 50), (1980, 100), (345, 100)):
        with pytest.raises(
            LutMiss, match=rf"975-1635 MHz and 100 % of the SMs, not at {clock} MHz and {share} %"
        ):
            table.tbt_ms(clock, share, 1, 100)
        with pytest.raises(LutMiss, match="profile there"):
            table.ttft_ms(clock, share, 100)
    at = np.array([345, 975, 1635, 1980])
    assert np.isinf(table.ttft_ms(at, 100, 300)).tolist() == [True, False, False, True]
    for clock, share in ((1305, 50), (1980, 100)):
        for ms, _ in (table.prefill_curves(clock, share), table.decode_curves(clock, share, 1)):
            assert set(ms) == {math.inf}
    assert math.inf not in table.prefill_curves(1305, 100)[0]
    assert best_point(table, 300, 10, Objectives(ttft_ms=1e4, tbt_ms=1e4)) == (1635, 100)


def test_dimensions_that_could_not_be_moved_have_one_value() -> None:
    found = samples(clocks=(1980,), shares=(100,), power_w=None)
    table = lut.from_samples(H100, MODEL, found, MEASURED)
    assert (table.clocks_mhz.tolist(), table.shares_pct.tolist()) == ([1980], [100])
    assert math.isnan(table.prefill_power_w(1980, 100, 300))
    one = [
        Sample("prefill", 0, 100, 30.0, input_tokens=64),
        Sample("decode", 0, 100, 9.0, batch=1, context_tokens=64),
    ]
    least = lut.from_samples(CPU, MODEL, one, MEASURED)
    assert least.ttft_ms(0, 100, 5000) == pytest.approx(30.0)
    assert least.extrapolates(input_tokens=65)
    assert lut.unpack(lut.pack(least)).tbt_ms(0, 100, 1, 64) == pytest.approx(9.0)


def test_what_lies_beyond_the_sweep_is_flagged() -> None:
    assert not TABLE.extrapolates(8192, 512, 32768)
    assert TABLE.extrapolates(8193)
    assert TABLE.extrapolates(batch=513)
    assert TABLE.extrapolates(mean_context_tokens=32769)
    assert not measured().extrapolates(4096, 8, 2048)
    assert measured().extrapolates(4097)


def test_the_published_form_charges_the_whole_device_to_each_request() -> None:
    at = (975, 50, 100, 41)
    prefill_j = TABLE.prefill_power_w(975, 50, 100) * TABLE.ttft_ms(975, 50, 100) / 1000
    step_j = TABLE.decode_power_w(975, 50, 4, 120.5) * TABLE.tbt_ms(975, 50, 4, 120.5) / 1000
    assert TABLE.request_energy_j(*at, batch=4, published=True) == pytest.approx(prefill_j + 40 * step_j)
    assert TABLE.request_energy_j(*at, batch=4, published=True) > TABLE.request_energy_j(*at, batch=4)


def test_the_least_point_is_the_lowest_clock_then_the_smallest_share() -> None:
    ttft_ms = TABLE.ttft_ms(1065, 30, 2000)
    point = least_point(TABLE, 2000, 100, Objectives(ttft_ms=ttft_ms, tbt_ms=1000.0))
    assert point is not None
    meets = [
        (clock, share)
        for clock in TABLE.clocks_mhz.tolist()
        for share in TABLE.shares_pct.tolist()
        if TABLE.ttft_ms(clock, share, 2000) <= ttft_ms
    ]
    assert point == min(meets)
    assert least_point(TABLE, 2000, 100, Objectives(ttft_ms=0.1, tbt_ms=1000.0)) is None


def test_a_polynomial_is_found_again_with_its_degree() -> None:
    lengths = np.array([256, 512, 1024, 2048, 4096, 8192])
    x = np.log(lengths + 128)
    rows = np.array([0.5 * x**2 - 4.0 * x, x, np.full(6, 3.0)])
    at = np.array([300, 5000])
    fitted, degree, left_out = regress(lengths, rows, at)
    assert degree >= 2
    assert np.abs(left_out).max() < 1e-6
    y = np.log(at + 128)
    assert fitted == pytest.approx(np.array([0.5 * y**2 - 4.0 * y, y, [3.0, 3.0]]), abs=1e-6)
