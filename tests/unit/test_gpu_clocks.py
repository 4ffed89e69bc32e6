"""A GPU's clock: what was asked, written and runs; and what a local scheduler makes of it."""

from local_bench import H100, MODEL, Bench, of, request

from services.local_sched.clocks import ClockKeeper
from shared import engine as en

OFFERED = range(345, 1981, 15)


def written(keeper: ClockKeeper, now_ms: float, refused: str = "") -> int | None:
    clock_mhz = keeper.wanted(now_ms)
    if clock_mhz is not None:
        keeper.answered(now_ms, clock_mhz, refused)
    return clock_mhz


def test_a_clock_is_snapped_written_and_told_once_it_runs():
    keeper = ClockKeeper(OFFERED)
    assert written(keeper, 0.0) is None and keeper.read(0.0, 1980, (), True) is None
    keeper.ask(1_000.0, 1012)
    assert written(keeper, 1_000.0) == 1005
    assert keeper.read(1_050.0, 1980, (), False) is None  # it takes a while
    news = keeper.read(1_100.0, 1005, (), False)
    assert (news.asked_mhz, news.applied_mhz, news.limited) == (1012, 1005, "")
    assert "does not offer" in news.reason
    assert keeper.read(1_200.0, 1005, (), False) is None  # no news
    assert keeper.read(1_300.0, 345, (), True) is None  # it rests, and clocks up when there is work


def test_writes_keep_their_distance_and_the_last_wish_counts():
    keeper = ClockKeeper(OFFERED)
    keeper.ask(0.0, 1005)
    assert written(keeper, 0.0) == 1005
    keeper.ask(20.0, 1500)
    keeper.ask(30.0, 1635)
    assert written(keeper, 30.0) is None and keeper.due_ms == 100.0
    assert written(keeper, 100.0) == 1635 and keeper.due_ms is None


def test_a_wish_that_comes_during_a_write_is_written_next():
    keeper = ClockKeeper(OFFERED)
    keeper.ask(0.0, 1005)
    clock_mhz = keeper.wanted(0.0)
    keeper.ask(5.0, 1635)
    keeper.answered(10.0, clock_mhz, "")
    assert keeper.due_ms == 110.0 and written(keeper, 110.0) == 1635


def test_a_cap_is_told_with_the_clock_that_runs():
    keeper = ClockKeeper(OFFERED)
    keeper.ask(0.0, 1785)
    written(keeper, 0.0)
    assert keeper.read(100.0, 1308, ("power cap",), False) is None
    news = keeper.read(400.0, 1308, ("power cap",), False)
    assert (news.applied_mhz, news.limited) == (1308, "capped") and "power cap" in news.reason
    assert keeper.read(500.0, 1290, ("power cap",), False) is None  # it wavers
    assert keeper.read(600.0, 1200, ("power cap", "heat"), False).applied_mhz == 1200
    assert keeper.read(700.0, 1785, (), False).limited == ""


def test_a_refusal_is_told_and_tried_again():
    keeper = ClockKeeper(OFFERED)
    keeper.ask(0.0, 1005)
    written(keeper, 0.0, "not permitted")
    news = keeper.read(10.0, 1980, (), False)
    assert (news.asked_mhz, news.applied_mhz, news.reason, news.limited) == (
        1005,
        1980,
        "not permitted",
        "refused",
    )
    assert keeper.read(20.0, 1980, (), False) is None
    assert written(keeper, 999.0) is None and written(keeper, 1_000.0) == 1005
    assert keeper.read(1_100.0, 1005, (), False).limited == ""


# ---- the scheduler decides with the clock that runs


def asked(actions) -> list[int]:
    return [action.sm_clock_mhz for action in of(actions, en.SetClock)]


def busy(bench: Bench) -> list:
    """Give it so much to do that it wants its highest clock."""
    actions = []
    for i in range(24):
        actions += bench.submit(request(f"r{i}", prompt=3_000))
    return [*actions, *bench.wait(50.0)]


def test_a_capped_clock_is_the_highest_for_a_while():
    bench = Bench(models=[MODEL], clock_limit_ms=1_000.0)
    assert asked(busy(bench))[-1] == H100.f_max_mhz == 1635
    capped = en.ClockApplied(asked_mhz=1635, applied_mhz=1308, reason="power cap", limited="capped")
    actions = [*bench.do(capped), *bench.wait(10.0)]
    assert asked(actions) == [1245] and bench.state.clock_mhz == 1308  # the next lower of the table's clocks
    bench.do(en.ClockApplied(asked_mhz=1245, applied_mhz=1245))
    assert asked(bench.wait(900.0)) == []  # not tried at once
    assert asked(bench.wait(300.0))[0] > 1308


def test_a_clock_that_is_refused_is_not_decided_upon():
    bench = Bench(models=[MODEL])
    bench.submit(request("a"))
    bench.wait(10.0)
    refused = en.ClockApplied(
        asked_mhz=bench.state.asked_mhz, applied_mhz=1980, reason="not permitted", limited="refused"
    )
    actions = [*bench.do(refused), *bench.wait(10.0), *busy(bench), *bench.wait(500.0)]
    assert asked(actions) == [] and bench.state.decision.clocks_mhz == (1980,)
    asked_mhz = bench.state.asked_mhz
    bench.do(en.ClockApplied(asked_mhz=asked_mhz, applied_mhz=asked_mhz))
    bench.wait(10.0)
    assert len(bench.state.decision.clocks_mhz) > 1
