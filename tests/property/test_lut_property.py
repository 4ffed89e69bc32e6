"""The look-up table's interpolation and choices against the device model and brute force."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import devices, lut, silicon
from shared.catalog import entries
from shared.errors import LutRefused
from shared.lut_points import best_point
from shared.model import Objectives

H100 = devices.device_for("h100-80gb")
# How far interpolation may be off at shares that can be given. Times are convex in clock, length and batch,
# so they err on the slow side; power bends where the power cap sets in.
TIME_BOUND = (-0.015, 0.05)
POWER_BOUND = 0.10

MODELS = st.integers(0, len(entries()) - 1)
CLOCKS = st.sampled_from(H100.clocks_mhz)
SHARES = st.sampled_from(H100.sm_sizes_pct)
TOKENS = st.integers(1, 32768)
BATCHES = st.integers(1, 512)
CONTEXTS = st.integers(0, 32768)


@cache
def table(model: int) -> lut.Lut:
    return lut.build(H100, entries()[model].spec())


def check(ms: float, watts: float, exact: tuple[float, float, int]) -> None:
    low, high = TIME_BOUND
    assert low <= ms / exact[0] - 1 <= high
    assert abs(watts / exact[1] - 1) <= POWER_BOUND


@settings(max_examples=150, deadline=None)
@given(MODELS, CLOCKS, SHARES, TOKENS)
def test_prefill_is_close_to_the_device_model(model: int, clock: int, share: int, tokens: int) -> None:
    spec = entries()[model].spec()
    work = silicon.step_work(H100, spec, decode_batch=0, decode_context_tokens=0, prefill_tokens=tokens)
    exact = silicon.step_alone(H100, work, clock, share / 100)
    entry = table(model)
    check(entry.ttft_ms(clock, share, tokens), entry.prefill_power_w(clock, share, tokens), exact)


@settings(max_examples=150, deadline=None)
@given(MODELS, CLOCKS, SHARES, BATCHES, CONTEXTS)
def test_decode_is_close_to_the_device_model(
    model: int, clock: int, share: int, batch: int, context: int
) -> None:
    spec = entries()[model].spec()
    work = silicon.step_work(H100, spec, decode_batch=batch, decode_context_tokens=batch * context)
    exact = silicon.step_alone(H100, work, clock, share / 100)
    entry = table(model)
    ms, watts = entry.tbt_ms(clock, share, batch, context), entry.decode_power_w(clock, share, batch, context)
    check(ms, watts, exact)
    assert watts <= H100.power_cap_w


@settings(max_examples=100, deadline=None)
@given(MODELS, CLOCKS, CLOCKS, SHARES, SHARES, TOKENS, BATCHES)
def test_no_slower_with_clock_and_share(
    model: int, clock: int, clock_2: int, share: int, share_2: int, tokens: int, batch: int
) -> None:
    entry = table(model)
    slow, fast = (min(clock, clock_2), min(share, share_2)), (max(clock, clock_2), max(share, share_2))
    # Under the power cap the clock moves in steps of 15 MHz, about 1 %.
    assert entry.ttft_ms(*fast, tokens) <= entry.ttft_ms(*slow, tokens) * 1.015
    assert entry.tbt_ms(*fast, batch, 1000) <= entry.tbt_ms(*slow, batch, 1000) * 1.015


@settings(max_examples=100, deadline=None)
@given(MODELS, CLOCKS, SHARES, TOKENS, TOKENS, BATCHES, BATCHES)
def test_no_faster_with_more_work(
    model: int, clock: int, share: int, tokens: int, tokens_2: int, batch: int, batch_2: int
) -> None:
    entry = table(model)
    few, many = sorted((tokens, tokens_2))
    assert entry.ttft_ms(clock, share, few) <= entry.ttft_ms(clock, share, many)
    few, many = sorted((batch, batch_2))
    assert entry.tbt_ms(clock, share, few, 1000) <= entry.tbt_ms(clock, share, many, 1000)


@settings(max_examples=60, deadline=None)
@given(
    MODELS,
    st.integers(1, 8192),
    st.integers(1, 2000),
    st.floats(10, 3000),
    st.floats(5, 200),
    st.integers(1, 64),
)
def test_best_point_is_the_best_of_all_points(
    model: int, input_tokens: int, output_tokens: int, ttft_ms: float, tbt_ms: float, batch: int
) -> None:
    entry = table(model)
    context = input_tokens + output_tokens / 2
    energies = {
        (clock, share): entry.request_energy_j(clock, share, input_tokens, output_tokens, batch)
        for clock in entry.clocks_mhz.tolist()
        for share in entry.shares_pct.tolist()
        if entry.ttft_ms(clock, share, input_tokens) <= ttft_ms
        and entry.tbt_ms(clock, share, batch, context) <= tbt_ms
    }
    best = best_point(entry, input_tokens, output_tokens, Objectives(ttft_ms=ttft_ms, tbt_ms=tbt_ms), batch)
    if best is None:
        assert not energies
    else:
        assert energies[best] <= min(energies.values()) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(MODELS, st.integers(0, 40_000), st.integers(0, 40_000))
def test_memory_of_a_request_grows_with_its_length(model: int, tokens: int, tokens_2: int) -> None:
    entry = table(model)
    few, many = sorted((tokens, tokens_2))
    assert entry.request_bytes(few) <= entry.request_bytes(many)
    assert entry.request_bytes(many) >= many * entry.model.kv_bytes_per_token


@settings(max_examples=100, deadline=None)
@given(MODELS, CLOCKS, CLOCKS, st.integers(10, 100), st.integers(10, 100), BATCHES, BATCHES, CONTEXTS)
def test_arrays_and_numbers_agree_anywhere(
    model: int, clock: int, clock_2: int, share: int, share_2: int, batch: int, batch_2: int, context: int
) -> None:
    entry = table(model)
    clocks, shares = np.array([clock, clock_2]), np.array([share, share_2])
    many = entry.tbt_ms(clocks[:, None], shares, np.array([batch, batch_2]), context)
    for i, j in ((0, 0), (0, 1), (1, 1)):
        one = entry.tbt_ms(int(clocks[i]), int(shares[j]), (batch, batch_2)[j], context)
        assert math.isclose(many[i, j], one, rel_tol=1e-6)


@settings(max_examples=20, deadline=None)
@given(MODELS)
def test_a_stored_table_is_the_same_table(model: int) -> None:
    entry = table(model)
    again = lut.unpack(lut.pack(entry))
    assert np.array_equal(again.block, entry.block)
    assert (again.sha256, again.axes, again.model) == (entry.sha256, entry.axes, entry.model)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_a_changed_byte_never_passes(place: int, change: int) -> None:
    packed = bytearray(lut.pack(table(0)))
    packed[place % len(packed)] ^= change
    with pytest.raises(LutRefused):
        lut.unpack(bytes(packed))
