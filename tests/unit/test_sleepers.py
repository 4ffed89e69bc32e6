"""Which engines sleep, within the host memory that they may take, and which of them a load wakes."""

from msgspec.structs import replace

from services.local_sched.sleepers import PROCESS_BYTES, Sleepers, need_bytes
from shared.catalog import emulated_models
from shared.engine import LoadEngine

MODEL = emulated_models(1)[0]


def load(name: str, pool_bytes: int = 1, **changes: object) -> LoadEngine:
    return LoadEngine(replace(MODEL, name=name, weights=f"/{name}", **changes), pool_bytes)


def sleepers(engines: float) -> Sleepers[str]:
    return Sleepers(int(engines * need_bytes(MODEL)))


def test_the_longest_asleep_leave_for_those_that_come() -> None:
    asleep = sleepers(2.5)
    assert asleep.add(load("a"), "A") == asleep.add(load("b"), "B") == []
    assert asleep.add(load("c"), "C") == ["A"]
    assert asleep.models == ("b", "c")
    assert asleep.add(load("b"), "B2") == ["B"]
    assert asleep.models == ("c", "b")
    assert sorted(asleep.clear()) == ["B2", "C"] and asleep.models == ()


def test_a_model_sleeps_only_where_it_has_room_for_weights_and_process() -> None:
    assert not Sleepers[str](0).may_sleep(MODEL)
    assert not Sleepers[str](MODEL.weight_bytes + PROCESS_BYTES - 1).may_sleep(MODEL)
    assert Sleepers[str](MODEL.weight_bytes + PROCESS_BYTES).may_sleep(MODEL)


def test_a_load_wakes_its_own_engine_before_one_like_it() -> None:
    asleep = sleepers(9)
    for name in "abc":
        asleep.add(load(name), name.upper())
    assert asleep.wakes(load("b")) == ("b", "B")
    assert asleep.wakes(load("b")) == ("a", "A")  # which goes on with other weights
    assert asleep.models == ("c",)


def test_an_engine_of_another_shape_or_with_another_pool_is_not_woken() -> None:
    asleep = sleepers(9)
    asleep.add(load("a"), "A")
    assert asleep.wakes(load("a", pool_bytes=2)) is None
    assert asleep.wakes(load("a", layers=MODEL.layers + 1)) is None
    assert asleep.wakes(load("b", weight_bytes=MODEL.weight_bytes + 1)) is None
    assert asleep.models == ("a",)


def test_one_that_dies_in_its_sleep_is_forgotten() -> None:
    asleep = sleepers(9)
    asleep.add(load("a"), "A")
    asleep.discard("B")
    assert asleep.models == ("a",)
    asleep.discard("A")
    assert asleep.wakes(load("a")) is None
