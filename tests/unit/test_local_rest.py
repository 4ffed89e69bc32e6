"""A device without engines: how deeply it rests, after how long, and what waking it costs."""

import pytest
from local_bench import H100, MODEL, OTHER, Bench, of
from msgspec.structs import replace

from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice
from services.local_sched.summary import summarize
from shared import engine as en
from shared import events as ev
from shared.devices import DEVICES
from shared.silicon import load_ms

VLLM = replace(MODEL, engine="vllm", weight_bytes=1 << 30, params=1 << 29)


def rests(actions):
    return [order.state for order in of(actions, en.RestDevice)]


def unloaded(bench):
    bench.do(ev.Unload(model=MODEL.name, placement_version=2))
    bench.do(en.EngineEnded(model=MODEL.name))


def test_a_device_rests_deeper_the_longer_it_is_without_engines():
    bench = Bench(models=[MODEL], cold_after_ms=10_000.0, off_after_ms=60_000.0)
    assert rests(bench.wait(100_000.0)) == []
    unloaded(bench)
    assert rests(bench.wait(9_900.0)) == []
    assert rests(bench.wait(1_500.0)) == ["cold"]
    assert rests(bench.wait(48_000.0)) == []
    assert rests(bench.wait(2_000.0)) == ["off"]
    assert rests(bench.wait(100_000.0)) == []
    bench.do(ev.Load(model=MODEL, placement_version=3))
    bench.do(en.EngineReady(model=MODEL.name, kv_pool_bytes=0, block_tokens=16, load_ms=1.0))
    unloaded(bench)
    assert rests(bench.wait(20_000.0)) == ["cold"]  # from the beginning


def test_by_default_it_is_never_switched_off():
    assert rests(Bench().wait(1e7)) == ["cold"]


def test_one_whose_engines_leave_nothing_behind_is_cold_at_once():
    assert rests(Bench(kind="vllm", device=DEVICES["cpu"]).wait(100_000.0)) == []


def test_a_failed_load_leaves_it_without_engines():
    bench = Bench()
    bench.do(ev.Load(model=MODEL, placement_version=1))
    bench.do(en.EngineEnded(model=MODEL.name, reason="out of memory"))
    assert rests(bench.wait(11_000.0)) == ["cold"]


class Device:
    """An emulated H100; orders take no time to reach it."""

    def __init__(self):
        self.gpu = EmulatedGpu(H100, vocab=VocabSlice(token_ids=(1, 2), eos_id=0), control_delay_ms=0.0)

    def do(self, now_ms, order):
        self.gpu.order(now_ms, order)
        return self.gpu.advance(now_ms)

    def loaded_ms(self, now_ms, model=MODEL):
        """Load a model and return how long that takes."""
        self.do(now_ms, en.LoadEngine(model=model))
        (ready,) = self.gpu.advance(now_ms + 100_000.0)
        return ready.load_ms


@pytest.mark.parametrize(
    ("state", "watts", "more_ms"), [("sleeping", 110, 0), ("cold", 70, 3_000), ("off", 0, 33_000)]
)
def test_what_a_state_draws_and_how_much_later_it_wakes(state, watts, more_ms):
    device = Device()
    device.gpu.advance(0.0)
    if state != "sleeping":
        device.do(0.0, en.RestDevice(state=state))
    sample = device.gpu.sample(1_000.0)
    assert (sample.state, sample.power_w, sample.energy_j) == (state, watts, watts)
    assert device.loaded_ms(1_000.0) == more_ms + load_ms(H100, MODEL.weight_bytes, "host")
    device.do(200_000.0, en.RestDevice(state="off"))  # it has an engine
    assert device.gpu.state == "warm"
    device.do(200_000.0, en.UnloadEngine(model=MODEL.name))
    assert device.gpu.state == "sleeping"


def test_two_loads_wait_for_one_context():
    device = Device()
    device.do(0.0, en.RestDevice(state="cold"))
    device.do(0.0, en.LoadEngine(model=MODEL))
    device.do(1_000.0, en.LoadEngine(model=OTHER))
    took_ms = {ready.model: ready.load_ms for ready in device.gpu.advance(100_000.0)}
    assert took_ms[MODEL.name] == 3_000 + load_ms(H100, MODEL.weight_bytes)
    assert took_ms[OTHER.name] == 2_000 + load_ms(H100, OTHER.weight_bytes)


def sleepy(device=H100):
    bench = Bench(kind="vllm", device=device, models=[VLLM], sleeps=True)
    bench.do(ev.Unload(model=VLLM.name, placement_version=2))
    bench.do(en.EngineEnded(model=VLLM.name))
    bench.do(en.DeviceSampled("sleeping", 0, None, None, asleep=(VLLM.name,)))
    return bench


def test_engines_asleep_are_told_of_and_leave_when_the_device_goes_cold():
    bench = sleepy()
    assert (summarize(bench.state, bench.now_ms).state, summarize(bench.state, bench.now_ms).asleep) == (
        "sleeping",
        (VLLM.name,),
    )
    assert rests(bench.wait(11_000.0)) == ["cold"]
    bench.do(en.DeviceSampled("cold", 0, None, None))
    assert summarize(bench.state, bench.now_ms).asleep == ()


def test_before_its_first_engine_has_left_it_is_cold():
    assert rests(Bench(kind="vllm", sleeps=True).wait(100_000.0)) == []


def test_without_a_meter_nothing_is_saved_by_going_cold():
    assert rests(sleepy(DEVICES["cpu"]).wait(100_000.0)) == []


def test_a_load_that_wakes_an_engine_is_counted_as_such():
    bench = sleepy()
    (order,) = of(bench.do(ev.Load(model=VLLM, placement_version=3)), en.LoadEngine)
    assert order.source == "asleep"
    done = bench.do(en.EngineReady(model=VLLM.name, kv_pool_bytes=1 << 30, block_tokens=16, load_ms=1.0))
    assert ev.Count(name="loads", labels={"model": VLLM.name, "source": "asleep"}) in done
