"""Which look-up table a scheduler decides by, and that a stored one is used as soon as it is there."""

import msgspec
import pytest

from services.global_sched.core import GlobalSchedCore
from services.global_sched.settings import GlobalSettings
from services.local_sched.core import LocalSchedCore
from services.local_sched.settings import LocalSettings
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.errors import ConfigError
from shared.lut import Lut, build, from_samples, pack
from shared.lut_samples import Sample
from shared.lut_table import Provenance
from shared.shelf import Kept, Shelf

H100 = device_for("h100-80gb")
QWEN, LLAMA = emulated_models(2)


def modelled(gpu_type: str, model) -> Lut:
    return build(device_for(gpu_type), model)


def table(clocks=(795, 1980), shares=(10, 100), model=QWEN, ms: float = 42.0) -> Lut:
    """A measured table on which everything takes `ms`."""
    samples = [
        Sample(
            phase=phase,
            sm_clock_mhz=clock,
            sm_share_pct=share,
            latency_ms=ms,
            power_w=300.0,
            input_tokens=tokens if phase == "prefill" else 0,
            batch=1 if phase == "decode" else 0,
            context_tokens=tokens if phase == "decode" else 0,
        )
        for phase in ("prefill", "decode")
        for clock in clocks
        for share in shares
        for tokens in (64, 4096)
    ]
    return from_samples(H100, model, samples, Provenance(kind="measured", device="test"))


def test_a_stored_table_wins_over_the_model() -> None:
    shelf = Shelf(modelled)
    assert shelf.get("h100-80gb", QWEN).provenance.kind == "modelled"
    assert shelf.put(table()) == ""
    assert shelf.get("h100-80gb", QWEN).ttft_ms(1005, 100, 512) == pytest.approx(42.0)
    assert shelf.get("h100-80gb", LLAMA).provenance.kind == "modelled"
    assert shelf.get("a100-80gb", QWEN).provenance.kind == "modelled"
    with pytest.raises(ConfigError):
        shelf.get("tpu", QWEN)


def test_models_of_one_shape_share_a_modelled_table_and_the_latest_are_kept(monkeypatch) -> None:
    made: list[str] = []

    def counted(gpu_type: str, model) -> Lut:
        made.append(f"{model.name} {gpu_type}")
        return modelled(gpu_type, model)

    kept = Kept(counted)
    first = kept("h100-80gb", QWEN)
    tuned = msgspec.structs.replace(QWEN, name="tuned", weights="elsewhere", keep_alive_ms=None)
    twin = kept("h100-80gb", tuned)
    assert kept("h100-80gb", QWEN) is first and twin.model == tuned and twin.block is first.block
    assert twin.ttft_ms(1005, 40, 512) == first.ttft_ms(1005, 40, 512)
    assert made == [f"{QWEN.name} h100-80gb"]
    other = msgspec.structs.replace(QWEN, vocab_tokens=QWEN.vocab_tokens + 1000)
    assert kept("h100-80gb", other).model == other and kept("a100-80gb", QWEN) is not first
    assert len(made) == 3
    monkeypatch.setattr("shared.shelf.SHAPES_KEPT", 3)
    kept("h100-80gb", QWEN)
    kept("h100-80gb", LLAMA)  # the one not asked for longest goes
    kept("h100-80gb", QWEN)
    assert len(made) == 4
    kept("h100-80gb", other)
    assert len(made) == 5
    with pytest.raises(ConfigError):
        kept("tpu", QWEN)


def test_a_model_of_another_shape_under_the_same_name_gets_no_strangers_table() -> None:
    shelf = Shelf(modelled)
    shelf.put(table())
    longer = msgspec.structs.replace(QWEN, keep_alive_ms=1.0)
    assert shelf.get("h100-80gb", longer).provenance.kind == "measured"
    bigger = msgspec.structs.replace(QWEN, layers=QWEN.layers + 1)
    assert shelf.get("h100-80gb", bigger).provenance.kind == "modelled"


def test_a_table_that_leaves_out_what_the_device_does_is_not_used() -> None:
    shelf = Shelf(modelled)
    assert "1980" in shelf.put(table(clocks=(1980,)))
    assert "100" in shelf.put(table(shares=(100,)))
    assert shelf.get("h100-80gb", QWEN).provenance.kind == "modelled"


def test_the_local_scheduler_uses_it_for_an_engine_that_runs() -> None:
    core = LocalSchedCore("g", "h", "emulated", H100, LocalSettings(), 0.0)
    core.step(0.0, ev.Load(model=QWEN, placement_version=1))
    assert core.state.engines[QWEN.name].lut.provenance.kind == "modelled"
    actions = core.step(1.0, ev.LutRead(packed=pack(table())))
    assert ev.Count(name="luts_read", labels={"model": QWEN.name, "why": ""}) in actions
    assert core.state.engines[QWEN.name].lut.ttft_ms(1005, 100, 512) == pytest.approx(42.0)
    core.step(2.0, ev.LutRead(packed=pack(table(model=LLAMA, ms=7.0))))
    assert core.state.lut(LLAMA).ttft_ms(1005, 100, 512) == pytest.approx(7.0)


def test_the_local_scheduler_leaves_other_devices_tables_alone() -> None:
    core = LocalSchedCore("g", "h", "vllm", device_for("cpu"), LocalSettings(), 0.0)
    assert [a for a in core.step(0.0, ev.LutRead(packed=pack(table()))) if isinstance(a, ev.Count)] == []


def test_the_global_scheduler_uses_it() -> None:
    core = GlobalSchedCore("s", GlobalSettings())
    core.step(0.0, ev.ModelRegistered(model=QWEN))
    (count,) = core.step(1.0, ev.LutRead(packed=pack(table())))
    assert count == ev.Count(
        name="luts_read", labels={"model": QWEN.name, "gpu_type": "h100-80gb", "why": ""}
    )
    lut = core._fleet.lut("h100-80gb", QWEN.name)
    assert lut is not None and lut.ttft_ms(1005, 100, 512) == pytest.approx(42.0)


def test_on_a_device_with_other_shares_a_stored_table_is_asked_at_those() -> None:
    device = H100.with_sm_sizes((12, 24, 48, 72, 100))
    core = LocalSchedCore("g", "h", "vllm", device, LocalSettings(), 0.0)
    core.step(0.0, ev.LutRead(packed=pack(table())))
    lut = core.state.lut(QWEN)
    assert lut.provenance.kind == "measured" and lut.shares_pct.tolist() == [12, 24, 48, 72, 100]
    assert lut.least_prefill_share_pct(1005, 512, 50.0) == 12
    assert core.state.lut(LLAMA).shares_pct.tolist() == [12, 24, 48, 72, 100]


@pytest.mark.parametrize(("shares", "used"), [((100,), True), ((10, 100), True), ((50,), False)])
def test_where_engines_have_all_sms_a_table_of_all_is_enough(shares: tuple[int, ...], used: bool) -> None:
    core = LocalSchedCore("g", "h", "vllm", H100.with_sm_sizes((100,)), LocalSettings(), 0.0)
    core.step(0.0, ev.LutRead(packed=pack(table(shares=shares))))
    assert (core.state.lut(QWEN).provenance.kind == "measured") is used
