"""The fluid lower bound against a case worked out by hand."""

import pytest
from by_hand import MODEL

from shared.devices import device_for
from sim.bound import bound, fewest_steps
from sim.workload import Arrival

H100 = device_for("h100-80gb")


def asked(at_ms: float, input_tokens: int, output_tokens: int) -> Arrival:
    return Arrival(at_ms=at_ms, model="m", input_tokens=input_tokens, output_tokens=output_tokens)


def test_requests_that_cannot_meet_share_no_step() -> None:
    # 1,000 tokens in: 400 ms to the first token, then 100 ms each: until 10.4 s, 25.4 s and 70.4 s.
    first, second, third = asked(0.0, 1000, 101), asked(5_000.0, 1000, 201), asked(60_000.0, 1000, 101)
    assert fewest_steps([first, third], 100.0, MODEL) == (202, 200)
    assert fewest_steps([first, second], 100.0, MODEL) == (201, 200)  # the first rides in the second's
    assert fewest_steps([first, second, third], 100.0, MODEL) == (302, 300)
    assert fewest_steps([first, second], 40.0, MODEL) == (302, 300)  # until 4.4 s, so they do not overlap


def test_two_requests_that_do_not_overlap() -> None:
    # 202 steps, all at 795 MHz on 10 % of the SMs, where each part of a step takes least: weights
    # 202 * 16e9 = 3.232e12 B; KV 2 * (1001 + ... + 1100) * 1e5 = 2.101e10 B; products 2 * 8e9 * 2200 =
    # 3.52e13 FLOP; attention 2 * 4 * 32 * 32 * 128 * 1000^2 / 2 = 5.24288e11 FLOP.
    # b(0.1) = 0.336350 / 0.983427 = 0.342018; m = (795 / 1100)^0.75 = 0.783845; c(0.1) = 0.173780;
    # f / 1830 = 0.434426. Weights 4275.06 ms and products 565.85 ms make 4297.71 ms at p = 2.2; KV 27.50 ms,
    # attention 19.03 ms, overhead 202 * 1.864 = 376.53 ms: 4720.8 ms.
    # psi = 1 / 1.65325^2 = 0.365865: SMs 268 * 795 / 1980 * 0.365865 * 0.1 * 4.7208 = 18.585 J;
    # HBM 55.5 * 3.25301 = 180.542 J; computing 1.14 * 0.365865 * 35.7243 = 14.900 J; 214.03 J above static.
    least = bound([MODEL], [asked(0.0, 1000, 101), asked(60_000.0, 1000, 101)], H100, 1, 100_000.0)
    assert least.energy_j is not None and least.output_tokens == 202
    assert least.energy_j.cold == pytest.approx(70 * 100 + 214.03, abs=0.05)
    assert least.energy_j.warm == pytest.approx(110 * 100)  # idle power is more than what is above static
    # Off: on while it reads, 1471.6 ms at 795 MHz and 1153.5 at 1100 and above, or takes what it takes there.
    assert 70 * 1.1535 + 214.0 < least.energy_j.off < 70 * 1.4716 + 214.1
    assert least.kv_bytes == pytest.approx(2.101e10 * 0.1 / 100)


def test_what_does_not_fit_has_no_bound() -> None:
    busy = [asked(100.0 * i, 4000, 400) for i in range(600)]  # some 50 GB of KV at 100 ms
    assert bound([MODEL], busy, H100, 2, 100_000.0).energy_j is not None
    assert bound([MODEL], [asked(a.at_ms / 100, 8000, 190) for a in busy], H100, 1, 6_000.0).energy_j is None


def test_more_work_takes_more_and_an_idle_pool_its_idle_power() -> None:
    none = bound([MODEL], [], H100, 3, 10_000.0)
    assert none.energy_j is not None
    assert (none.energy_j.warm, none.energy_j.cold, none.energy_j.off) == (3300.0, 2100.0, 0.0)
    one, two = (
        bound([MODEL], [asked(200.0 * i, 500, 100) for i in range(n)], H100, 1, 20_000.0) for n in (20, 40)
    )
    assert one.energy_j and two.energy_j and one.energy_j.cold < two.energy_j.cold
