"""The device model against numbers worked out by hand from its formulas."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from by_hand import MODEL

from shared import devices, silicon
from shared.errors import ConfigError
from shared.model import ModelSpec

H100 = devices.device_for("h100-80gb")
CPU = devices.device_for("cpu")
OVERHEAD_MS = 1.864


def decode(batch: int, context_tokens: int) -> silicon.StepWork:
    return silicon.step_work(H100, MODEL, decode_batch=batch, decode_context_tokens=batch * context_tokens)


def prefill(tokens: int, past_tokens: int = 0) -> silicon.StepWork:
    return silicon.step_work(
        H100,
        MODEL,
        decode_batch=0,
        decode_context_tokens=0,
        prefill_tokens=tokens,
        prefill_past_tokens=past_tokens,
    )


def test_decode_step_time_at_full_share_and_reference_clock() -> None:
    # Weights: 16e9 / 2.82e9 = 5.67376 ms. Products: 2 * 8e9 * 10 / 824e9 = 0.194175 ms. KV: 10 * 1000 * 1e5 /
    # 2.85e9 = 0.350877 ms. (5.67376^2.2 + 0.194175^2.2)^(1/2.2) = 5.67376 * (1 + 0.034223^2.2)^(1/2.2), where
    # 0.034223^2.2 = 0.000596: 5.67530 ms.
    assert silicon.step_ms(H100, decode(10, 1000), 1830, 1.0) == pytest.approx(
        5.67530 + 0.350877 + OVERHEAD_MS, abs=2e-4
    )


def test_decode_step_time_at_half_the_knee_clock_and_a_small_share() -> None:
    # b(0.5) = (1 - e^-2.05) / (1 - e^-4.1) = 0.871265 / 0.983427 = 0.885948; m(550) = 0.5^0.75 = 0.594604;
    # together 0.526788. c(0.5) * 550 / 1830 = 0.590496 * 0.300546 = 0.177471.
    weights_ms, products_ms, kv_ms = 5.67376 / 0.526788, 0.194175 / 0.177471, 0.350877 / 0.526788
    step_ms = (weights_ms**2.2 + products_ms**2.2) ** (1 / 2.2)
    assert silicon.step_ms(H100, decode(10, 1000), 550, 0.5) == pytest.approx(
        step_ms + kv_ms + OVERHEAD_MS, rel=1e-4
    )


def test_prefill_step_time() -> None:
    # Products: 2 * 8e9 * 1000 / 824e9 = 19.41748 ms. Weights: (5.67376 / 19.41748 = 0.292199)^2.2 = 0.066747;
    # 19.41748 * 1.066747^(1/2.2) = 19.41748 * 1.029806 = 19.99624 ms. Attention: 4 * 32 * 32 * 128 * 1000 *
    # 500 / 365e9 = 262.144e9 / 365e9 = 0.718203 ms.
    assert silicon.step_ms(H100, prefill(1000), 1830, 1.0) == pytest.approx(
        19.99624 + 0.718203 + OVERHEAD_MS, abs=2e-3
    )


def test_chunks_attend_to_what_came_before() -> None:
    # The second half of a prompt attends to three times as many pairs as the first; together, to all of them.
    first, second, whole = prefill(500), prefill(500, past_tokens=500), prefill(1000)
    assert second.attn_flops == 3 * first.attn_flops
    assert first.attn_flops + second.attn_flops == whole.attn_flops
    assert first.matmul_flops + second.matmul_flops == whole.matmul_flops


def test_a_mixed_step_does_both_works_and_reads_weights_once() -> None:
    mixed = silicon.step_work(H100, MODEL, decode_batch=10, decode_context_tokens=10_000, prefill_tokens=1000)
    assert mixed.matmul_flops == decode(10, 1000).matmul_flops + prefill(1000).matmul_flops
    assert (mixed.kv_bytes, mixed.attn_flops) == (decode(10, 1000).kv_bytes, prefill(1000).attn_flops)
    assert mixed.weight_bytes == 16e9
    assert mixed.overhead_ms == pytest.approx(OVERHEAD_MS)
    apart_ms = silicon.step_ms(H100, decode(10, 1000), 1005, 1.0) + silicon.step_ms(
        H100, prefill(1000), 1005, 1.0
    )
    assert silicon.step_ms(H100, mixed, 1005, 1.0) < apart_ms


def test_power_of_a_decode_below_the_voltage_knee() -> None:
    # V(1980) = 1 + 0.67 * 0.975 = 1.65325; psi(990) = 1 / 1.65325^2 = 0.365868; phi = psi / 2 = 0.182934.
    # P = 70 + 268 * 0.182934 * 0.5 + 55.5 * 2 + 1.14 * 0.365868 * 100 = 70 + 24.5132 + 111 + 41.7090.
    assert silicon.power_w(H100, 990, 0.5, 2.0, 100.0) == pytest.approx(247.222, abs=1e-2)


def test_power_at_the_reference_clock_and_at_idle() -> None:
    # There psi = phi = 1: 70 + 268 + 55.5 + 1.14 * 100.
    assert silicon.power_w(H100, 1980, 1.0, 1.0, 100.0) == pytest.approx(507.5)
    assert silicon.power_w(H100, 345, 0.0, 0.0, 0.0) == 110.0


def test_rates_are_what_the_step_did_by_its_time() -> None:
    tb_per_s, tflop_per_s = silicon.rates(decode(10, 1000), 10.0)
    assert tb_per_s == pytest.approx((16e9 + 1e9) / 10e-3 / 1e12)
    assert tflop_per_s == pytest.approx(160e9 / 10e-3 / 1e12)


def test_the_cap_lowers_the_clock_to_the_highest_that_holds_it() -> None:
    assert silicon.capped_clock_mhz(H100, 1005, 1.0, 2.0, 200.0) == 1005
    capped = silicon.capped_clock_mhz(H100, 1980, 1.0, 1.0, 800.0)
    assert capped in H100.clocks_mhz

    def watts(clock: int) -> float:
        return float(silicon.power_w(H100, clock, 1.0, 1.0, 800.0 * clock / 1980))

    assert watts(capped) <= 690.0 < watts(capped + 15)


def test_the_cap_holds_for_arrays_and_for_any_step_alone() -> None:
    tokens = np.array([64, 512, 2048, 8192])
    asked = np.array(H100.clocks_mhz)[:, None]
    _, watts, clocks = silicon.step_alone(H100, prefill(tokens), asked, 1.0)  # type: ignore[arg-type]
    assert watts.max() <= 690.0
    assert np.all(clocks <= asked)
    assert np.any(clocks < asked)
    assert np.all(clocks[asked[:, 0] <= 1005] == asked[asked[:, 0] <= 1005])


def test_engines_side_by_side_share_what_the_card_has() -> None:
    bandwidth_scale, compute_scale = silicon.contention(H100, [0.25] * 4)
    # b(0.25) = (1 - e^-1.025) / 0.983427 = 0.651993: four would read 2.608 times the card. c: 4 * 0.348686.
    assert bandwidth_scale == pytest.approx(1 / 2.60797, rel=1e-4)
    assert compute_scale == pytest.approx(1 / 1.39474, rel=1e-4)
    work = decode(1, 0)
    ms = silicon.step_ms(H100, work, 1830, 0.25, bandwidth_scale, compute_scale) - OVERHEAD_MS
    assert 4 * work.weight_bytes / ms <= H100.weight_bytes_per_ms
    assert silicon.contention(H100, [0.1, 0.1]) == (1.0, 1.0)
    assert silicon.contention(H100, []) == (1.0, 1.0)


def test_a_step_gets_no_slower_with_clock_or_share() -> None:
    clocks = np.array(H100.clocks_mhz)[:, None]
    shares = np.array(H100.sm_sizes_pct) / 100
    for work in (decode(1, 100), decode(256, 2000), prefill(100), prefill(4000)):
        ms = silicon.step_ms(H100, work, clocks, shares)
        assert np.all(np.diff(ms, axis=0) <= 0.0)
        assert np.all(np.diff(ms, axis=1) < 0.0)


def test_idle_power_by_state() -> None:
    states = ("active", "warm", "sleeping", "draining", "cold", "off")
    assert [silicon.idle_power_w(H100, state) for state in states] == [110, 110, 110, 110, 70, 0]
    assert math.isnan(silicon.idle_power_w(CPU, "warm"))
    with pytest.raises(ConfigError, match=r"hot.*warm"):
        silicon.idle_power_w(H100, "hot")


def test_load_time_by_source() -> None:
    # 200 ms to put the model to work, and 16 GB at 6, 55 and 400 GB/s; of what is read from disk the last
    # 64 MiB are copied to the device once all is read.
    assert silicon.load_ms(H100, 16_000_000_000, "disk") == pytest.approx(200 + 2666.67 + 1.22, abs=0.1)
    assert silicon.load_ms(H100, 6_000_000, "disk") == pytest.approx(200 + 1 + 6 / 55)
    assert silicon.load_ms(H100, 16_000_000_000) == pytest.approx(200 + 290.91, abs=0.1)
    assert silicon.load_ms(H100, 16_000_000_000, "peer") == pytest.approx(200 + 40.0)
    with pytest.raises(ConfigError, match=r"tape.*disk"):
        silicon.load_ms(H100, 1, "tape")


def test_the_cpu_reproduces_the_two_points_it_was_fitted_to() -> None:
    smollm2 = ModelSpec(
        name="SmolLM2-135M-Instruct",
        engine="vllm",
        params=134_515_008,
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        weight_bytes=269_030_016,
        kv_bytes_per_token=23_040,
    )
    for batch, tokens_per_s in ((1, 19.0), (8, 143.0)):
        work = silicon.step_work(CPU, smollm2, decode_batch=batch, decode_context_tokens=64 * batch)
        ms, watts, clock_mhz = silicon.step_alone(CPU, work, 0, 1.0)
        assert batch / ms * 1000 == pytest.approx(tokens_per_s, rel=0.01)
        assert math.isnan(watts)
        assert clock_mhz == 0


def test_devices_offer_their_clocks_and_sizes() -> None:
    assert H100.clocks_mhz[:2] == (345, 360)
    assert H100.clocks_mhz[-1] == H100.default_clock_mhz == 1980
    assert H100.f_max_mhz in H100.clocks_mhz
    assert H100.sm_sizes_pct == (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    assert (CPU.clocks_mhz, CPU.sm_sizes_pct, CPU.has_meter) == ((0,), (100,), False)


def test_every_number_of_a_device_has_a_source_and_a_status() -> None:
    for name, device in devices.DEVICES.items():
        numbers = {field.name for field in dataclasses.fields(device)} - {"name", "given_sizes_pct"}
        assert numbers == devices.PARAMETERS[name].keys()
        for parameter in devices.PARAMETERS[name].values():
            assert parameter.source
            assert parameter.status in ("measured", "fitted", "assumed")


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"a100'.*cpu, h100-80gb"):
        devices.device_for("a100")


def test_logits_and_the_embedding_are_counted_as_they_are_computed() -> None:
    # 4096 x 100,000 = 0.4096e9 parameters in each of the two tables: 7.1808e9 are multiplied for every token,
    # the output head for those that get logits, and the input table is only looked up.
    model = msgspec.structs.replace(MODEL, vocab_tokens=100_000)
    works = {
        "decode": silicon.step_work(H100, model, decode_batch=10, decode_context_tokens=0),
        "prefill": silicon.step_work(
            H100, model, decode_batch=0, decode_context_tokens=0, prefill_tokens=1000
        ),
    }
    assert works["decode"].matmul_flops == pytest.approx(2 * (7.1808e9 + 0.4096e9) * 10)
    assert works["prefill"].matmul_flops == pytest.approx(2 * (7.1808e9 * 1000 + 0.4096e9))
    assert works["decode"].weight_bytes == pytest.approx(16e9 - 2 * 0.4096e9)
    tied = msgspec.structs.replace(model, tied_embeddings=True)
    work = silicon.step_work(H100, tied, decode_batch=10, decode_context_tokens=0)
    assert (work.weight_bytes, work.matmul_flops) == (16e9, pytest.approx(2 * 8e9 * 10))


def test_transfer_time_by_link() -> None:
    # 1 ms to set up, then 400, 55 and 11 GB/s.
    assert silicon.transfer_ms(H100, 4e9, "nvlink") == pytest.approx(1 + 10)
    assert silicon.transfer_ms(H100, 4e9, "pcie") == pytest.approx(1 + 72.727, abs=0.01)
    assert silicon.transfer_ms(H100, np.array([0, 4e9]), "tcp") == pytest.approx([1, 1 + 363.636], abs=0.01)
    with pytest.raises(ConfigError, match=r"l40s-48gb has no link 'nvlink'.*pcie, tcp"):
        silicon.transfer_ms(devices.device_for("l40s-48gb"), 1, "nvlink")


def test_wake_up_time_by_state() -> None:
    states = ("active", "warm", "draining", "sleeping", "cold", "off")
    assert [silicon.wake_ms(H100, state) for state in states] == [0, 0, 0, 0, 3_000, 33_000]
    with pytest.raises(ConfigError, match=r"hot.*warm"):
        silicon.wake_ms(H100, "hot")


def test_faster_devices_are_faster() -> None:
    work = decode(16, 1000)
    ms = {
        name: float(silicon.step_alone(device, work, device.default_clock_mhz, 1.0)[0])
        for name, device in devices.DEVICES.items()
        if name != "cpu"
    }
    assert sorted(ms, key=lambda name: ms[name]) == ["h200-141gb", "h100-80gb", "a100-80gb", "l40s-48gb"]


def test_bands_hold_their_value_and_only_what_is_assumed_has_one() -> None:
    for parameters in devices.PARAMETERS.values():
        for parameter in parameters.values():
            if parameter.band is not None:
                assert parameter.status == "assumed"
                assert parameter.band[0] <= parameter.value <= parameter.band[1]


def test_the_digest_tells_numbers_apart() -> None:
    moved = dataclasses.replace(H100, sm_w=269.0)
    assert moved.digest != H100.digest == dataclasses.replace(H100).digest
