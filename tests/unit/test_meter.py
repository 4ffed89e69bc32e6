"""The energy meter: counter and power beside each other, and a label on what they make."""

import pytest

from services.local_sched.meter import CHECK_MS, COUNTER, INTEGRATED, UNKNOWN, WRAP_J, EnergyMeter

CAP_W = 700.0


def played(meter: EnergyMeter, from_ms: int, until_ms: int, counter, power_w=400.0, every_ms=100) -> None:
    for now_ms in range(from_ms, until_ms + 1, every_ms):
        meter.read(float(now_ms), counter(now_ms), power_w)


def counting(begun_j=5_000.0, power_w=400.0):
    return lambda now_ms: begun_j + power_w * now_ms / 1000.0


def test_deltas_of_the_counter_are_the_energy():
    meter = EnergyMeter(CAP_W)
    assert meter.energy_j(0.0) is None and meter.source == UNKNOWN
    played(meter, 0, 2_000, counting())
    assert meter.energy_j(2_000.0) == pytest.approx(800.0) and meter.source == COUNTER
    assert meter.energy_j(2_050.0) == pytest.approx(820.0)  # at the power of the last reading
    assert not meter.faults


def test_a_counter_that_wraps_goes_on():
    meter = EnergyMeter(CAP_W)
    played(meter, 0, 2_000, lambda now_ms: (WRAP_J - 100.0 + 0.4 * now_ms) % WRAP_J)
    assert meter.energy_j(2_000.0) == pytest.approx(800.0)
    assert meter.faults == {"wrap": 1} and meter.source == COUNTER


@pytest.mark.parametrize("jump_j", [-4_000.0, 100_000.0])
def test_power_fills_in_where_the_counter_jumps(jump_j: float):
    meter = EnergyMeter(CAP_W)
    before, after = counting(), counting(5_000.0 + jump_j)
    played(meter, 0, 1_000, before)
    meter.read(1_100.0, after(1_100), 400.0)
    assert meter.source == INTEGRATED
    played(meter, 1_200, 2_000, after)
    assert meter.energy_j(2_000.0) == pytest.approx(800.0)
    assert meter.faults == {"jump": 1} and meter.source == COUNTER


@pytest.mark.parametrize("catches_up", [True, False])
def test_power_fills_in_while_the_counter_stands_still(catches_up: bool):
    meter = EnergyMeter(CAP_W)
    played(meter, 0, 1_000, counting())
    played(meter, 1_100, 3_000, lambda _: 5_400.0)
    assert meter.source == INTEGRATED and meter.energy_j(3_000.0) == pytest.approx(1_200.0)
    played(meter, 3_100, 4_000, counting() if catches_up else counting(5_000.0 - 800.0))
    assert meter.energy_j(4_000.0) == pytest.approx(1_600.0, rel=0.03)
    assert meter.faults == {"stall": 1} and meter.source == COUNTER


def test_without_a_counter_power_is_integrated():
    meter = EnergyMeter(CAP_W)
    for now_ms, power_w in ((0, 100.0), (1_000, 300.0), (2_000, 300.0)):
        meter.read(float(now_ms), None, power_w)
    assert meter.energy_j(2_000.0) == pytest.approx(500.0) and meter.source == INTEGRATED


def test_without_either_energy_is_unknown_and_not_zero():
    meter = EnergyMeter(CAP_W)
    meter.read(0.0, None, 100.0)
    meter.read(1_000.0, None, None)
    assert meter.energy_j(1_000.0) is None and meter.source == UNKNOWN and meter.power_w is None
    meter.read(2_000.0, None, 100.0)  # what was missed is not made up
    meter.read(3_000.0, None, 100.0)
    assert meter.energy_j(3_000.0) == pytest.approx(100.0) and meter.source == INTEGRATED


def test_a_counter_alone_is_enough():
    meter = EnergyMeter(CAP_W)
    played(meter, 0, 2_000, counting(), power_w=None)
    assert meter.energy_j(2_000.0) == pytest.approx(800.0) and meter.source == COUNTER


def test_counter_and_power_that_disagree_are_flagged():
    meter = EnergyMeter(CAP_W)
    end_ms = int(CHECK_MS) + 200
    played(meter, 0, end_ms, counting(power_w=400.0), power_w=700.0)
    assert meter.disputed and meter.faults == {"disagreement": 1}
    assert meter.energy_j(float(end_ms)) == pytest.approx(0.4 * end_ms) and meter.source == COUNTER
    played(meter, end_ms, 3 * end_ms, counting(power_w=400.0), power_w=390.0)
    assert not meter.disputed
