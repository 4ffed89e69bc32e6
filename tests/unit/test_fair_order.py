"""Whose work goes first when several tenants wait on one GPU, and who may wait at all."""

from hypothesis import given
from hypothesis import strategies as st
from local_bench import MODEL, OTHER, Bench, deltas, names, of, request, sent

from services.local_sched.batch import Task, fair_order, order
from shared import engine as en
from shared import events as ev


def task(key, tenant, score, late=False, cost=10.0):
    return Task(key, score, tenant=tenant, late=late, cost=cost)


def keys(tasks, served):
    return [each.key for each in fair_order(tasks, served)]


def test_what_is_on_time_goes_by_eq_4_whoever_had_more():
    tasks = [task("f1", "flood", 0.9), task("o1", "other", 0.1), task("f2", "flood", 0.5)]
    assert keys(tasks, {"flood": 1e6}) == ["f1", "f2", "o1"]


def test_late_work_of_who_had_most_waits_for_everyone():
    tasks = [
        task("f1", "flood", 0.9, late=True),
        task("o1", "other", 0.1),
        task("o2", "other", 0.05, late=True),
    ]
    assert keys(tasks, {"flood": 100.0, "other": 50.0}) == ["o1", "o2", "f1"]
    assert keys(tasks, {"flood": 0.0, "other": 50.0}) == ["f1", "o1", "o2"]


def test_late_work_is_shared_turn_by_turn():
    late = [task(f"f{i}", "flood", 0.9 - i / 10, True) for i in range(4)]
    late += [task(f"o{i}", "other", 0.3 - i / 10, True) for i in range(2)]
    assert keys(late, {"flood": 0.0, "other": 5.0}) == ["f0", "o0", "f1", "o1", "f2", "f3"]


def test_a_tenant_alone_keeps_eq_4():
    tasks = [task("a", "t", 0.1), task("b", "t", 0.9, late=True), task("c", "t", float("inf"), late=True)]
    assert fair_order(tasks, {"t": 1e9}) == order(tasks)


@given(
    st.lists(
        st.builds(
            Task,
            key=st.uuids().map(str),
            score=st.floats(0.0, 10.0),
            tenant=st.sampled_from("abc"),
            late=st.booleans(),
            cost=st.floats(1.0, 100.0),
        ),
        max_size=30,
    ),
    st.dictionaries(st.sampled_from("abc"), st.floats(0.0, 500.0)),
)
def test_the_order_is_whole_and_keeps_eq_4_among_equals(tasks, served):
    found = fair_order(tasks, served)
    assert sorted(t.key for t in found) == sorted(t.key for t in tasks)
    place = {t.key: i for i, t in enumerate(found)}
    ranked = order(tasks)
    for i, first in enumerate(ranked):
        for second in ranked[i + 1 :]:
            if not first.late and not second.late:
                assert place[first.key] < place[second.key]
            if first.tenant == second.tenant and first.late == second.late:
                assert place[first.key] < place[second.key]


# ---- on a GPU


def test_a_nearly_full_queue_refuses_first_who_holds_more_than_its_share():
    bench = Bench(models=[MODEL], max_queue=16)
    bench.do(ev.Load(model=OTHER, placement_version=1))  # still loading: everything waits
    for i in range(14):
        assert sent(bench.submit(request(f"f{i}", model=OTHER.name, tenant="flood")), ev.Admitted)
    (refused,) = sent(bench.submit(request("f14", model=OTHER.name, tenant="flood")), ev.Refused)
    assert refused.full and "14 of them of tenant flood" in refused.reason
    for i in range(2):
        assert sent(bench.submit(request(f"o{i}", model=OTHER.name, tenant="other")), ev.Admitted)
    assert sent(bench.submit(request("o2", model=OTHER.name, tenant="other")), ev.Refused)[0].full
    (nowhere,) = sent(bench.submit(request("x", model="nowhere", tenant="other")), ev.Refused)
    assert not nowhere.full
    engine = bench.engine(OTHER.name)
    assert engine.queued == 16 and engine.queued_of == {"flood": 14, "other": 2}


def test_a_flood_that_is_late_does_not_keep_another_waiting():
    bench = Bench(models=[MODEL], max_running=2)
    for i in range(8):
        bench.submit(request(f"f{i}", tenant="flood"))
    bench.wait(3000.0)  # two run, six are late by far, and passed over for long
    bench.submit(request("o0", tenant="other"))
    started = names(bench.token("f0", "f1", finish="stop"), en.RunRequest)
    assert started[0] == "o0" and started[1].startswith("f")


def test_a_tenant_that_was_away_gets_no_credit_for_it():
    bench = Bench(models=[MODEL])
    for i in range(3):
        bench.submit(request(f"a{i}", tenant="a"))
    bench.submit(request("b0", tenant="b"))
    each = 100 + 20  # tokens of prompt and predicted output
    assert bench.state.served == {"a": 3 * each, "b": 4 * each}
    bench.submit(request("c0", tenant="c"))
    assert bench.state.served["c"] == 4 * each
    for name in ("a0", "a1", "a2", "b0", "c0"):
        bench.token(name, finish="stop")
    bench.submit(request("d0", tenant="d"))
    assert set(bench.state.served) == {"d"}  # nobody has work: all start again


# ---- a stop string


def test_a_request_stopped_by_a_stop_string_reports_what_it_took():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.token("r1", energy_j=0.5)
    bench.token("r1", energy_j=0.25)
    done = bench.do(ev.Abort(request_id="r1", attempt=1, reason=ev.STOPPED))
    (delta,) = deltas(done)
    assert (delta.first_seq, delta.token_ids) == (2, ())
    assert (delta.end.finish_reason, delta.end.energy_j) == ("stop", 0.75)
    assert names(done, en.StopRequest) == ["r1"] and bench.state.works == {}
    assert [c.labels["outcome"] for c in of(done, ev.Count) if c.name == "requests"] == ["stop"]
    assert deltas(bench.do(ev.Abort(request_id="r1", attempt=1, reason=ev.STOPPED))) == []
    other = bench.submit(request("r2"))
    assert names(other, en.RunRequest) == ["r2"]
    assert deltas(bench.do(ev.Abort(request_id="r2", attempt=1, reason="the client has gone"))) == []
