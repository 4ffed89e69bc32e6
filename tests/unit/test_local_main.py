"""What a local scheduler's shell makes of its host: the SM shares of its engines, and what follows."""

import pytest
from local_bench import Bench, of, request

from services.local_sched import main
from services.local_sched.host_facts import EngineFacts, GpuFacts, HostFacts, MpsFacts
from services.local_sched.main import DeviceSettings, shares_here, sleep_bytes_of
from services.local_sched.presets import patience
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared.catalog import emulated_models
from shared.devices import DEVICES

ENGINE = EngineFacts(torch="2.13.0", torch_cuda="13.0", cuda_bindings="13.0")
WELL = HostFacts(cuda=1300, gpus=(GpuFacts(index=0),), mps=MpsFacts(owner_uid=0, daemon=True), engine=ENGINE)
VLLM = DeviceSettings(engine="vllm")


@pytest.mark.parametrize(
    ("host", "sizes_pct", "shared_fate"),
    [(WELL, (12, 24, 48, 72, 100), True), (HostFacts(), (100,), False)],
)
def test_the_device_has_the_shares_that_its_host_can_give(
    monkeypatch: pytest.MonkeyPatch, host: HostFacts, sizes_pct: tuple[int, ...], shared_fate: bool
) -> None:
    monkeypatch.setattr(main, "probe", lambda **asked: host)
    device, partition, settings = shares_here(VLLM, LocalSettings())
    assert partition is not None
    assert (device.sm_sizes_pct, settings.shared_fate) == (sizes_pct, shared_fate)
    assert shares_here(VLLM, LocalSettings(shared_fate=True))[2].shared_fate  # who says so is believed


@pytest.mark.parametrize("where", [DeviceSettings(), DeviceSettings(engine="vllm", gpu_type="cpu")])
def test_emulated_engines_and_those_on_a_cpu_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, where: DeviceSettings
) -> None:
    monkeypatch.setattr(main, "probe", lambda **asked: pytest.fail("there is nothing to look for"))
    device, _, settings = shares_here(where, LocalSettings())
    assert (device, settings) == (where.device, LocalSettings())


def test_only_vllm_on_a_cpu_is_given_long_to_be_heard() -> None:
    for where in (DeviceSettings(), DeviceSettings(gpu_type="cpu"), VLLM):
        assert patience(where.engine, where.gpu_type) == {}
    settings = LocalSettings(**patience("vllm", "cpu"))
    assert (settings.stall_ms, settings.silence_ms) == (10_000.0, 10_000.0)


@pytest.mark.parametrize("sizes_pct", [(12, 24, 48, 72, 100), (40,), (100,)])
def test_plans_name_no_other_share(sizes_pct: tuple[int, ...]) -> None:
    models = emulated_models(5)[2:]  # tables of the others are kept for the whole list
    bench = Bench(device=DEVICES["h100-80gb"].with_sm_sizes(sizes_pct), models=models[:2])
    given: set[int] = set()
    for number in range(4):
        bench.submit(request(f"r{number}", model=models[number % 2].name, prompt=300 * number + 1))
        given |= {order.plan.sm_share_pct for order in of(bench.wait(20.0), en.SetPlan)}
        running = [each for each in bench.state.engines.values() if each.running and each.plan]
        if len(sizes_pct) > 1:
            assert sum(each.plan.sm_share_pct for each in running if each.plan) <= 100
    assert given and given <= set(sizes_pct)


def test_only_vllm_engines_sleep_and_by_default_in_much_memory_beside_a_gpu() -> None:
    cpu = DeviceSettings(engine="vllm", gpu_type="cpu")
    assert [sleep_bytes_of(each) >> 30 for each in (VLLM, cpu, DeviceSettings())] == [64, 8, 0]
    assert sleep_bytes_of(DeviceSettings(engine="vllm", sleep_bytes=5)) == 5
    assert sleep_bytes_of(DeviceSettings(engine="vllm", sleep_bytes=0)) == 0
