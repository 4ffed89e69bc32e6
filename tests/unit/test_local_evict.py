"""Requests that make room for others: their KV in host memory, when it is worth that, and the end of it."""

import pytest
from local_bench import MODEL, Bench, deltas, name_of, of, request

from services.local_sched import evict as evicting
from services.local_sched import running
from services.local_sched.energy import REQUESTS
from services.local_sched.presets import preset
from shared import engine as en
from shared import events as ev
from shared.systems import SYSTEMS

LONG = 1_590  # tokens of a prompt: to compute them again takes longer than to copy their KV twice
KEPT = 1_600  # in full blocks, once it has grown a little


def evicted_bench(prompt=LONG, link_bytes_s=None, **settings):
    """A bench on which ``short`` was evicted for ``long``, and stays out for there is no room."""
    bench = Bench(models=[MODEL], **settings)
    bench.state.host_bytes_s = link_bytes_s or bench.state.host_bytes_s
    for request_id, tokens in (("long", prompt + 160), ("short", prompt)):
        bench.submit(request(request_id, prompt=tokens, max_tokens=200), predicted=1)
    bench.token("long", "short")
    bench.state.ledger.capacity_bytes -= bench.state.ledger.free_bytes
    while "short" not in bench.state.queue:
        bench.token("long", "short")
    return bench


def labels_of(actions, name):
    return [count.labels for count in of(actions, ev.Count) if count.name == name]


def resume(bench, reason=""):
    """Let the evicted request go on, once its KV is copied if that was ordered; returns the order."""
    for export in of(bench.actions, en.ExportKv):
        bench.copied("short", 0 if reason else export.blocks * 16, reason=reason)
    bench.token("long", finish="stop")
    return of(bench.actions, en.RunRequest)[-1]


def test_its_full_blocks_are_copied_to_host_memory_before_it_is_stopped():
    bench = evicted_bench()
    orders = of(bench.actions, (en.ExportKv, en.StopRequest))
    export, stop = orders
    assert isinstance(export, en.ExportKv) and isinstance(stop, en.StopRequest)
    assert export.request_id == stop.request_id == export.stage == bench.runs["short"]
    work = bench.state.queue["short"]
    assert export.blocks == (work.context_tokens - 1) // 16 == KEPT // 16 and export.first_block == 0
    assert export.room_blocks >= export.blocks and bench.state.offload.stages == (export.stage,)
    assert bench.state.offload.used_bytes == export.blocks * 16 * MODEL.kv_bytes_per_token
    assert work.prefill_tokens == work.context_tokens - KEPT
    assert labels_of(bench.actions, "offloads") == [{"model": MODEL.name, "outcome": "kept"}]


def test_its_next_run_takes_the_kv_and_the_slabs_are_free():
    bench = evicted_bench()
    stage = bench.runs["short"]
    run = resume(bench)
    assert name_of(run) == "short" and (run.stage, run.kv_tokens, run.own_stage) == (stage, KEPT, True)
    bench.do(
        en.KvImported(
            model=MODEL.name, request_id=run.request.request_id, tokens=KEPT, took_ms=3.0, own_stage=True
        )
    )
    assert bench.state.offload.stages == () and bench.state.works["short"].prefilled_tokens == KEPT
    assert of(bench.actions, en.FreeStage) == []  # the engine has dropped it itself
    assert labels_of(bench.actions, "offload_imports") == [{"model": MODEL.name, "outcome": "taken"}]


def test_kv_that_is_not_to_be_had_is_computed_again():
    bench = evicted_bench()
    run = resume(bench, reason="no memory")
    bench.do(
        en.KvImported(
            model=MODEL.name,
            request_id=run.request.request_id,
            tokens=0,
            took_ms=0.0,
            reason="gone",
            own_stage=True,
        )
    )
    work = bench.state.works["short"]
    assert bench.state.offload.stages == () and work.prefill_tokens == work.context_tokens
    assert labels_of(bench.actions, "offload_imports") == [{"model": MODEL.name, "outcome": "computed"}]


def test_a_token_of_the_step_in_which_it_was_evicted_is_told_and_its_next_run_goes_on_from_there():
    bench = evicted_bench()
    bench.do(en.DeviceSampled(state="active", used_bytes=0, power_w=300.0, energy_j=0.0))
    work = bench.state.queue["short"]
    count, joules = work.output_count, work.energy_j
    told = deltas(bench.token("short", token=9, energy_j=0.25))
    assert [(delta.first_seq, delta.token_ids, delta.end) for delta in told] == [(count, (9,), None)]
    assert work.energy_j == joules + 0.25 and bench.state.energy.uses_j[REQUESTS] == 0.25
    run = resume(bench)
    assert run.request.output_tokens[count:] == (9,)
    assert (run.stage, run.kv_tokens) == (work.arrival.stage, KEPT)
    assert work.prefill_tokens == LONG + count + 1 - KEPT


def test_it_begins_no_other_run_before_its_engine_has_told_all_of_the_old_one():
    bench = evicted_bench()
    count = len(of(bench.actions, en.RunRequest))
    bench.token("long", finish="stop")  # there would be room
    assert len(of(bench.actions, en.RunRequest)) == count
    bench.token("short", token=9)
    bench.copied("short", KEPT)
    (run,) = of(bench.actions, en.RunRequest)[count:]
    assert run.request.output_tokens[-1] == 9


def test_if_it_was_the_last_it_needed_it_has_ended():
    bench = evicted_bench()
    stage = bench.runs["short"]
    done = bench.token("short", finish="length")
    assert [delta.end.finish_reason for delta in deltas(done)] == ["length"]
    assert "short" not in bench.state.works and bench.state.queue == {}
    assert bench.state.offload.stages == () and of(done, en.FreeStage) == [
        en.FreeStage(model=MODEL.name, stage=stage)
    ]


def test_tokens_of_a_run_before_its_present_one_are_too_late():
    bench = evicted_bench()
    late = bench.runs["short"]
    resume(bench)
    count = bench.state.works["short"].output_count
    bench.runs["short"] = late
    assert deltas(bench.token("short")) == [] and bench.state.works["short"].output_count == count


NOT_KEPT = {
    "no room": ("full", {"offload_bytes": 64 << 20}),
    "none wanted": ("full", {"offload_bytes": 0}),
    "a slow link": ("slower", {"link_bytes_s": 1e9}),
}


@pytest.mark.parametrize(("why", "given"), NOT_KEPT.values(), ids=NOT_KEPT)
def test_without_room_or_where_computing_is_faster_all_is_as_without_host_memory(why, given):
    bench = evicted_bench(**given)
    assert of(bench.actions, en.ExportKv) == [] and bench.state.offload.stages == ()
    assert labels_of(bench.actions, "offloads") == [{"model": MODEL.name, "outcome": why}]
    run = resume(bench)
    assert run.stage == "" and run.kv_tokens == 0 and not run.own_stage


def test_it_is_evicted_again_with_what_it_has_then_and_not_before_it_has_it():
    bench = evicted_bench()
    run = resume(bench)
    assert bench.state.works["short"].arrival is not None
    actions = evicting.evict(bench.state, bench.now_ms, bench.state.works["short"])
    assert of(actions, en.ExportKv) == [] and bench.state.offload.stages == ()
    assert labels_of(actions, "offloads")[0]["outcome"] == "not_there"
    assert of(bench.do(ev.Tick()), en.FreeStage) == [en.FreeStage(model=MODEL.name, stage=run.stage)]


def cancelled(bench):
    return bench.do(ev.Abort(request_id="short", attempt=1, reason="the client has gone"))


def overtaken(bench):
    return bench.submit(request("short", attempt=2, prompt=LONG))


def engine_dies(bench):
    return bench.do(en.EngineEnded(model=MODEL.name, reason="killed"))


def handed_back(bench):
    return bench.do(ev.Leaving(at_once=True))


def moved_away(bench):
    bench.do(ev.Release(move_id="m", request_id="short", migrator="host0", model=MODEL.name))
    assert bench.state.offload.stages, "an abort of the move would need it"
    return bench.do(ev.CommitMove(move_id="m"))


ENDS = (cancelled, overtaken, engine_dies, handed_back, moved_away)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_whatever_becomes_of_it_the_slabs_are_free_and_the_engine_is_told(end):
    bench = evicted_bench()
    stage = bench.runs["short"]
    done = end(bench)
    assert bench.state.offload.stages == () and bench.state.offload.taken_bytes == 0
    assert of(done, en.FreeStage) == [en.FreeStage(model=MODEL.name, stage=stage)]


def test_a_move_that_is_given_up_leaves_it_its_kv():
    bench = evicted_bench()
    bench.do(ev.Release(move_id="m", request_id="short", migrator="host0", model=MODEL.name))
    bench.do(ev.AbortMove(move_id="m", reason="no memory there"))
    assert resume(bench).kv_tokens == KEPT


def test_nobody_else_is_evicted_while_the_copy_still_holds_the_memory():
    bench = evicted_bench()
    copy_ms = evicting._copy_ms(bench.state, MODEL.name, KEPT)
    left_ms = bench.state.evicted_ms
    assert copy_ms > 1.5 and left_ms == pytest.approx(bench.now_ms + copy_ms)
    bench.submit(request("other", prompt=1), predicted=1)
    bench.do(en.OutOfMemory(model=MODEL.name, request_id=bench.runs["long"]))
    assert running.relief_due_ms(bench.state) == left_ms + bench.state.settings.oom_grace_ms


def test_the_speed_of_copies_is_measured():
    bench = evicted_bench()
    before = bench.state.host_bytes_s
    done = bench.copied("short", KEPT, n_bytes=10**9, took_ms=1000.0)
    assert bench.state.host_bytes_s == pytest.approx(0.7 * before + 0.3 * 1e9)
    assert [c.value for c in of(done, ev.Count) if c.name == "offload_energy_j"] == [0.25]


def test_only_festina_at_its_best_keeps_kv_in_host_memory():
    assert [name for name in SYSTEMS if preset(name).get("offload_bytes") != 0] == ["festina"]
