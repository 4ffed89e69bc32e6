"""Where a model is loaded: on a host that has its weights in memory; an awaited one where it is soonest."""

import pytest
from test_consolidator_core import FakeGpu, Lab, spec, where

from shared import events as ev
from shared.model import digest

LARGE = spec("large", 50)
SMALL = spec("small", 20, keep_alive_ms=1_000.0)


def test_a_host_that_has_the_weights_comes_before_one_with_more_room() -> None:
    lab = Lab([LARGE], [FakeGpu("g1", host="h1"), FakeGpu("g2", host="h2")]).run()
    lab.do(ev.HostWeights(host="h1", specs=(digest(SMALL),)))
    lab.do(ev.ModelRegistered(model=SMALL))
    assert where(lab.run()) == {"g1": ["large", "small"], "g2": []}


def test_but_news_of_a_silent_host_are_forgotten() -> None:
    lab = Lab([LARGE], [FakeGpu("g1", host="h1"), FakeGpu("g2", host="h2")]).run()
    lab.do(ev.HostWeights(host="h1", specs=(digest(SMALL),)))
    lab.run(15_000)
    lab.do(ev.ModelRegistered(model=SMALL))
    assert where(lab.run()) == {"g1": ["large"], "g2": ["small"]}


@pytest.mark.parametrize(
    ("state", "gpu"), [("warm", "g2"), ("sleeping", "g2"), ("cold", "g1"), ("off", "g1")]
)
def test_an_awaited_model_is_loaded_where_no_context_has_to_be_made(state: str, gpu: str) -> None:
    """The emptier GPU is the better one, unless it has to be woken while a request waits."""
    first, second = FakeGpu("g1"), FakeGpu("g2")
    lab = Lab([LARGE, SMALL], [first, second]).run()
    assert where(lab) == {"g1": ["large"], "g2": ["small"]}
    second.set("small", idle_ms=1_000.0)
    second.state = state
    assert where(lab.run()) == {"g1": ["large"], "g2": []}
    lab.do(ev.ScaleOut(model="small", scheduler="s", reason="no_instance"))
    assert "small" in where(lab.run())[gpu]


def test_room_is_made_on_the_host_that_has_the_weights() -> None:
    """Both GPUs are full of models that are as dispensable."""
    other, awaited = spec("other", 60), spec("awaited", 60)
    lab = Lab([spec("large", 60), other], [FakeGpu("g1", host="h1"), FakeGpu("g2", host="h2")]).run()
    for gpu in lab.gpus.values():
        gpu.set(*gpu.engines, idle_ms=5_000.0)
    lab.do(ev.ModelRegistered(model=awaited))
    lab.do(ev.HostWeights(host="h2", specs=(digest(awaited),)))
    lab.run()
    assert "awaited" not in lab.placed
    lab.do(ev.ScaleOut(model="awaited", scheduler="s", reason="no_instance"))
    assert where(lab.run())["g2"] == ["awaited"]


def test_a_model_goes_where_its_engine_is_asleep() -> None:
    first, second = FakeGpu("g1"), FakeGpu("g2")
    lab = Lab([LARGE], [first, second]).run()
    first.asleep = ("small",)
    lab.run()
    lab.do(ev.ModelRegistered(model=SMALL))
    assert where(lab.run()) == {"g1": ["large", "small"], "g2": []}


def test_an_awaited_model_is_woken_rather_than_loaded_elsewhere() -> None:
    first, second = FakeGpu("g1", host="h1"), FakeGpu("g2", host="h2")
    lab = Lab([LARGE, SMALL], [first, second]).run()
    second.set("small", idle_ms=1_000.0)
    first.asleep = ("small",)
    first.state = second.state = "sleeping"
    assert where(lab.run()) == {"g1": ["large"], "g2": []}
    lab.do(ev.HostWeights(host="h2", specs=(digest(SMALL),)))
    lab.do(ev.ScaleOut(model="small", scheduler="s", reason="no_instance"))
    assert where(lab.run())["g1"] == ["large", "small"]
