"""The local scheduler's core: both sides of the move of a request that runs."""

import msgspec
import pytest
from local_bench import LUTS, MODEL, Bench, deltas, names, of, request, sent

from services.local_sched.move_mode import KV, STAY, TOKENS, move_mode
from shared import engine as en
from shared import events as ev

BLOCK_BYTES = 16 * MODEL.kv_bytes_per_token


def prepare(request_id="r1", bandwidth=1e12, move_id="m"):
    return ev.Prepare(
        move_id=move_id,
        request_id=request_id,
        migrator="host0",
        model=MODEL.name,
        bandwidth_bytes_s=bandwidth,
    )


def freeze(first_block=0, blocks=100, stage="s", move_id="m"):
    return ev.Release(
        move_id=move_id,
        request_id="r1",
        migrator="host0",
        freeze=True,
        first_block=first_block,
        blocks=blocks,
        stage=stage,
    )


def exported(first_block=0, blocks=7, tokens=101, move_id="m", reason=""):
    return en.KvExported(
        model=MODEL.name,
        request_id="",
        move_id=move_id,
        first_block=first_block,
        blocks=blocks,
        total_blocks=first_block + blocks,
        n_bytes=blocks * BLOCK_BYTES,
        checksum=5,
        took_ms=2.0,
        tokens=tokens,
        reason=reason,
        energy_j=0.25,
    )


COMMIT, ABORT = ev.CommitMove(move_id="m"), ev.AbortMove(move_id="m", reason="")


def source(*request_ids, prompt=100, **settings):
    """A GPU on which requests have made two tokens each."""
    bench = Bench(models=[MODEL], **settings)
    for request_id in request_ids or ("r1",):
        bench.submit(request(request_id, prompt=prompt, max_tokens=900), predicted=600)
    bench.wait(10.0)
    for _ in range(2):
        bench.token(*(request_ids or ("r1",)))
    return bench


def held(bench):
    """The runs that the plan in force holds."""
    return bench.state.engines[MODEL.name].plan.held


def test_source_says_how_a_request_had_better_move():
    bench = source(prompt=3_000)
    for _ in range(2):
        (prepared,) = sent(bench.do(prepare()), ev.Prepared)
        assert (prepared.mode, prepared.context_tokens, prepared.block_tokens) == ("kv", 3_002, 16)
        assert prepared.kv_bytes == 188 * BLOCK_BYTES and prepared.block_stage_bytes == 0
    (prepared,) = sent(bench.do(prepare(bandwidth=0.0, move_id="m2")), ev.Prepared)
    assert prepared.mode == "stay"  # it is moving already
    bench.do(ABORT)
    (prepared,) = sent(bench.do(prepare(bandwidth=0.0, move_id="m2")), ev.Prepared)
    assert prepared.mode == "tokens"


def test_what_is_decided_by():
    lut, clock_mhz = LUTS[MODEL.name], 1980
    compute_ms = float(lut.ttft_ms(clock_mhz, 100, 4_000))
    kv_bytes = 4_000 * MODEL.kv_bytes_per_token
    as_fast_bytes_s = kv_bytes / (compute_ms - 2 * lut.device.link_setup_ms) * 1000
    decide = lambda left_ms, bytes_s: move_mode(lut, 4_000, kv_bytes, left_ms, bytes_s, clock_mhz).mode  # noqa: E731
    assert decide(10_000.0, 1.01 * as_fast_bytes_s) == KV
    assert decide(10_000.0, 0.99 * as_fast_bytes_s) == TOKENS
    assert decide(10_000.0, 0.0) == TOKENS
    assert decide(0.99 * compute_ms, 0.0) == STAY
    assert decide(1.01 * compute_ms, 0.0) == TOKENS


def test_source_chooses_the_request_that_has_most_left():
    bench = Bench(models=[MODEL])
    for request_id, predicted in (("r1", 300), ("r2", 600), ("r3", 5)):
        bench.submit(request(request_id, prompt=7_000, max_tokens=900), predicted=predicted)
    bench.wait(10.0)
    for _ in range(4):
        bench.token("r1", "r2", "r3")
    chosen = []
    for move_id in ("m1", "m2", "m3"):
        (prepared,) = sent(bench.do(prepare("*", 0.0, move_id)), ev.Prepared)
        chosen.append((prepared.request_id, prepared.mode != "stay"))
    assert chosen == [("r2", True), ("r1", True), ("*", False)]


def test_a_vllm_request_with_a_state_of_its_own_stays():
    for sampling, mode in (({"temperature": 0.9}, "stay"), ({"temperature": 0.0}, "tokens")):
        bench = Bench(models=[msgspec.structs.replace(MODEL, engine="vllm")], kind="vllm")
        bench.do(en.EngineReady(model=MODEL.name, kv_pool_bytes=10**9, block_tokens=16, load_ms=1.0))
        bench.submit(request(max_tokens=900, sampling=sampling), predicted=600)
        bench.wait(10.0)
        bench.token("r1")
        (prepared,) = sent(bench.do(prepare(bandwidth=0.0)), ev.Prepared)
        assert prepared.mode == mode


def test_kv_is_staged_while_the_request_goes_on():
    bench = source()
    bench.do(prepare())
    order = ev.StageKv(move_id="m", request_id="r1", first_block=0, blocks=4, stage="s")
    (export,) = of(bench.do(order), en.ExportKv)
    assert (export.request_id, export.first_block, export.blocks) == (bench.runs["r1"], 0, 4)
    (staged,) = sent(bench.do(exported(0, 4, 64)), ev.KvStaged)
    assert (staged.blocks, staged.checksum, staged.energy_j) == (4, 5, 0.25)
    assert not held(bench)
    assert sent(bench.token("r1"), ev.Tokens)


def test_a_frozen_request_is_handed_out_when_its_engine_is_done_with_it():
    bench = source()
    bench.do(prepare())
    done = bench.do(freeze())
    plan, export = of(done, en.SetPlan)[0], of(done, en.ExportKv)[0]
    assert done.index(plan) < done.index(export) and bench.runs["r1"] in plan.plan.held
    assert sent(done, ev.Released) == []
    bench.token("r1", token=9)  # of a step that ran already
    (released,) = sent(bench.do(exported()), ev.Released)
    assert released.request.output_tokens == (7, 7, 9) and released.kv_tokens == 101
    assert released.staged.n_bytes == 7 * BLOCK_BYTES
    assert sent(bench.do(freeze()), ev.Released) == [released]
    bench.wait(500.0)
    assert bench.runs["r1"] in held(bench)  # whatever is decided meanwhile
    done = bench.do(COMMIT)
    assert [o.request_id for o in of(done, en.StopRequest)] == [bench.runs["r1"]]
    assert bench.state.works == {} and bench.state.moves.open == 0
    assert bench.state.engines[MODEL.name].frozen == frozenset()
    assert bench.state.ledger.pools[MODEL.name].holders == {}


def test_a_request_that_comes_back_to_where_it_is_held_goes_on_with_its_newer_state():
    here, there = source(), Bench(models=[MODEL])
    for step in (prepare(), freeze()):
        here.do(step)
    (out,) = sent(here.do(exported()), ev.Released)
    there.do(msgspec.structs.replace(adopt(), request=out.request, stage="", kv_tokens=0))
    there.do(COMMIT)
    there.wait(10.0)
    there.token("r1", token=9)
    for step in (prepare(move_id="m2"), freeze(move_id="m2")):
        there.do(step)
    (back,) = sent(there.do(exported(move_id="m2")), ev.Released)
    here.do(msgspec.structs.replace(adopt(), move_id="m2", request=back.request, source="gpu1"))
    done = here.do(ev.CommitMove(move_id="m2", moves=1))
    assert names(done, en.StopRequest) == ["r1"]
    assert [(d.token_ids, d.moved_from) for d in deltas(done)] == [((7, 7, 9), "gpu1")]
    here.do(COMMIT)
    work = here.state.works["r1"]
    assert work.request.output_tokens == (7, 7, 9) and work.run_id in here.state.engines[MODEL.name].running
    here.wait(10.0)
    assert held(here) == frozenset() and list(here.state.ledger.pools[MODEL.name].holders) == ["r1"]


def test_repeats_that_come_after_the_commit_change_nothing():
    bench = source()
    for step in (prepare(), freeze(), exported(), COMMIT):
        bench.do(step)
    assert [bench.do(step) for step in (prepare(), freeze(), COMMIT)] == [[]] * 3


@pytest.mark.parametrize("ending", [ABORT, None])
def test_a_move_that_ends_lets_the_request_go_on_with_all_it_has(ending):
    bench = source()
    bench.do(prepare())
    bench.do(freeze())
    bench.do(exported())
    if ending is None:  # silence
        bench.do(ev.GatewayAlive(gateway="g1"), 4_000.0)
        bench.wait(1_100.0)
    else:
        bench.do(ending)
        bench.wait(20.0)
    assert not held(bench) and bench.state.moves.transfers == {}
    assert of(bench.actions, en.StopRequest) == []
    assert bench.do(COMMIT) == [] or "r1" in bench.state.works
    assert sent(bench.token("r1"), ev.Tokens)


def test_a_frozen_request_is_not_handed_out_before_all_copies_are_answered():
    bench = source()
    bench.do(prepare())
    bench.do(ev.StageKv(move_id="m", request_id="r1", first_block=0, blocks=4, stage="s"))
    bench.do(freeze(4))
    assert sent(bench.do(exported(0, 4, 64)), ev.Released) == []
    (released,) = sent(bench.do(exported(4, 3, 101)), ev.Released)
    assert released.staged.first_block == 4


def test_the_kv_of_the_latest_token_is_not_counted_on():
    """Its engine computes that in the step that makes the next one; blocks have room for it before."""
    bench = source()
    bench.do(prepare())
    bench.do(freeze())
    (released,) = sent(bench.do(exported(tokens=112)), ev.Released)
    assert (released.request.context_tokens, released.kv_tokens) == (102, 101)


def test_a_commit_before_the_engine_is_done_is_none():
    bench = source()
    bench.do(prepare())
    bench.do(freeze())
    bench.do(COMMIT)
    assert "r1" in bench.state.works


def test_the_migrator_hears_of_a_request_that_ends_or_goes_on_otherwise():
    bench = source()
    bench.do(prepare())
    bench.do(freeze())
    (gone,) = sent(bench.token("r1", finish="stop"), ev.Released)
    assert gone == ev.Released(move_id="m", request=None)
    assert bench.state.engines[MODEL.name].frozen == frozenset()
    bench = source("r1", "r2")
    bench.do(prepare())
    bench.do(freeze())
    ledger = bench.state.ledger
    ledger.capacity_bytes -= ledger.free_bytes
    bench.do(en.OutOfMemory(model=MODEL.name, request_id=bench.runs["r2"]))
    assert sent(bench.actions, ev.Released)[-1] == gone  # it was evicted
    assert bench.state.moves.transfers == {} and not bench.state.works["r1"].arrival.migrator
    bench.do(COMMIT)
    assert "r1" in bench.state.works


def test_a_late_release_of_a_waiting_request_freezes_nothing():
    bench = source()
    bench.do(prepare())
    (released,) = sent(bench.do(ev.Release(move_id="m", request_id="r1", migrator="host0")), ev.Released)
    assert released.request is None and released.running and not held(bench)


# ---- destination


def reserve(context_tokens=100, partial=True):
    return ev.Reserve(
        move_id="m",
        request_id="r1",
        model=MODEL.name,
        migrator="host0",
        context_tokens=context_tokens,
        partial=partial,
    )


def adopt(kv_tokens=101):
    asked = request(output_tokens=(1, 2), max_tokens=900)
    return ev.Adopt(
        move_id="m",
        request=asked,
        predicted_output_tokens=600,
        migrator="host0",
        source="gpu9",
        stage="s",
        kv_tokens=kv_tokens,
    )


def narrow(blocks):
    """A GPU with memory for so many blocks."""
    bench = Bench(models=[MODEL])
    ledger = bench.state.ledger
    ledger.capacity_bytes -= ledger.free_bytes - blocks * BLOCK_BYTES
    return bench


def credits(actions):
    return [granted.credit_bytes // BLOCK_BYTES for granted in sent(actions, ev.Granted)]


def test_destination_grants_what_there_is_and_more_as_memory_frees():
    bench = narrow(10)
    bench.submit(request("r2", prompt=90, max_tokens=5), predicted=6)
    bench.wait(10.0)
    assert credits(bench.do(reserve(140))) == [4]  # of nine; six are taken
    assert credits(bench.do(reserve(140))) == [4]
    assert credits(bench.token("r2", finish="stop")) == [9]
    assert bench.state.ledger.pools[MODEL.name].holders == {"move:m": 9}
    assert credits(bench.do(reserve(158))) == [10]
    bench.do(ABORT)
    assert bench.state.ledger.pools[MODEL.name].holders == {}


def test_what_waits_at_the_destination_has_its_memory_first():
    bench = narrow(10)
    bench.submit(request("r2", prompt=90, max_tokens=5), predicted=6)
    bench.submit(request("r3", prompt=90, max_tokens=5), predicted=6)  # has to wait
    bench.wait(10.0)
    assert credits(bench.do(reserve(30))) == [0]
    assert credits(bench.token("r2", finish="stop")) == [2]


def test_what_can_never_fit_is_refused():
    (granted,) = sent(narrow(10).do(reserve(160)), ev.Granted)
    assert granted.credit_bytes == 0 and "no memory" in granted.reason


def test_destination_does_not_take_what_has_grown_beyond_its_memory():
    bench = narrow(6)
    bench.do(reserve(90))
    assert sent(bench.do(adopt()), ev.Adopted) == []
    bench = narrow(7)
    bench.do(reserve(90))
    assert sent(bench.do(adopt()), ev.Adopted) == [ev.Adopted(move_id="m")]
    assert bench.state.ledger.pools[MODEL.name].holders == {"move:m": 7}


def test_destination_starts_a_request_with_its_kv():
    bench = Bench(models=[MODEL])
    bench.do(reserve(102))
    bench.do(adopt())
    (run,) = of(bench.do(COMMIT, 10.0), en.RunRequest)
    assert (run.stage, run.kv_tokens) == ("s", 101)
    work = bench.state.works["r1"]
    assert work.prefill_tokens == 1 and work.prefill_ms < 20.0
    taken = en.KvImported(
        model=MODEL.name, request_id=run.request.request_id, tokens=101, took_ms=3.0, energy_j=0.5
    )
    done = bench.do(taken)
    assert sent(done, ev.KvLoaded) == [ev.KvLoaded(move_id="m", tokens=101, took_ms=3.0)]
    assert sent(bench.do(taken), ev.KvLoaded) == []
    counts = {a.name: a.value for a in done if isinstance(a, ev.Count)}
    assert counts["move_energy_j"] == 0.5


def test_destination_computes_what_its_engine_could_not_take():
    bench = Bench(models=[MODEL])
    bench.do(reserve(102))
    bench.do(adopt())
    (run,) = of(bench.do(COMMIT, 10.0), en.RunRequest)
    failed = en.KvImported(
        model=MODEL.name, request_id=run.request.request_id, tokens=0, took_ms=0.0, reason="damaged"
    )
    (loaded,) = sent(bench.do(failed), ev.KvLoaded)
    assert (loaded.tokens, loaded.reason) == (0, "damaged")
    work = bench.state.works["r1"]
    assert work.prefill_ms == float(LUTS[MODEL.name].ttft_ms(bench.state.clock_mhz, 100, 102))
    assert bench.state.works["r1"].prefill_tokens == 102


def test_a_stage_is_let_go_with_the_request_that_was_to_read_it():
    bench = Bench(models=[MODEL])
    bench.do(reserve(102))
    bench.do(adopt())
    bench.do(COMMIT, 10.0)
    done = bench.do(ev.Abort(request_id="r1", attempt=1, reason=""))
    assert [loaded.move_id for loaded in sent(done, ev.KvLoaded)] == ["m"]
