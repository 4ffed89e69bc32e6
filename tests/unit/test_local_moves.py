"""The local scheduler's core: both sides of a request's move."""

import msgspec
from local_bench import MODEL, Bench, deltas, of, request, sent, wire

from services.local_sched.outbox import Outbox
from shared import engine as en
from shared import events as ev


def reserve(context_tokens=100, move_id="m", partial=False):
    return ev.Reserve(
        move_id=move_id,
        request_id="r1",
        model=MODEL.name,
        migrator="host0",
        context_tokens=context_tokens,
        partial=partial,
    )


def adopt(asked=None, move_id="m"):
    return ev.Adopt(
        move_id=move_id,
        request=asked or request(),
        predicted_output_tokens=20,
        migrator="host0",
        source="gpu9",
    )


def release(request_id="r1", model="", move_id="m"):
    return ev.Release(move_id=move_id, request_id=request_id, migrator="host0", model=model)


COMMIT, ABORT = ev.CommitMove(move_id="m"), ev.AbortMove(move_id="m", reason="")


def source(*request_ids):
    """A GPU where requests wait for their model to load."""
    bench = Bench()
    bench.do(ev.Load(model=MODEL, placement_version=1))
    for request_id in request_ids or ("r1",):
        bench.submit(request(request_id, waited_ms=30.0))
    return bench


def load_ends(bench):
    return bench.do(en.EngineReady(model=MODEL.name, kv_pool_bytes=0, block_tokens=16, load_ms=1.0))


def holders(bench):
    return bench.state.ledger.pools[MODEL.name].holders


def test_destination_reserves_adopts_and_starts():
    bench = Bench(models=[MODEL])
    for _ in range(2):
        (granted,) = sent(bench.do(reserve()), ev.Granted)
        assert granted.credit_bytes == 7 * 16 * MODEL.kv_bytes_per_token  # 101 tokens
        assert holders(bench) == {"move:m": 7}
    for _ in range(2):
        assert sent(bench.do(adopt()), ev.Adopted) == [ev.Adopted(move_id="m")]
    assert bench.state.works == {}
    done = bench.do(COMMIT, 40.0)
    assert sent(done, ev.Moved) == [ev.Moved(request_id="r1", attempt=1, source="gpu9", destination="gpu0")]
    assert sent(done, ev.Adopted) == [ev.Adopted(move_id="m", started=True)]
    (run,) = of(done, en.RunRequest)
    assert run.request.waited_ms == 40.0
    again = bench.do(COMMIT)
    assert sent(again, ev.Moved) and sent(again, ev.Adopted)[0].started and not of(again, en.RunRequest)
    bench.do(ABORT)
    assert list(bench.state.works) == ["r1"] and list(holders(bench)) == ["r1"]
    bench.token("r1", finish="stop")
    assert holders(bench) == {}


def test_a_call_for_more_memory_that_comes_after_the_request_takes_none():
    bench = Bench(models=[MODEL])
    bench.do(reserve(partial=True))
    bench.do(reserve(110, partial=True))
    assert holders(bench) == {"move:m": 7}
    for step in (adopt(), COMMIT):
        bench.do(step)
        held = holders(bench).copy()
        bench.do(reserve(500, partial=True))
        assert holders(bench) == held


def test_destination_tells_the_gateway_all_that_the_source_had_made():
    bench = Bench(models=[MODEL])
    bench.do(adopt(request(output_tokens=(1, 2, 3))))
    done = bench.do(COMMIT)
    assert sent(done, ev.Moved)[0].next_seq == 3
    (so_far,) = deltas(done)
    assert (so_far.first_seq, so_far.token_ids, so_far.moved_from) == (0, (1, 2, 3), "gpu9")
    assert deltas(bench.do(COMMIT)) == []  # the outbox sends it again until it is acknowledged
    (fresh,) = deltas(bench.token("r1"))
    assert (fresh.first_seq, fresh.moved_from) == (3, "gpu9")
    (again,) = deltas(bench.do(ev.BusRestored()))
    assert (again.first_seq, again.token_ids, again.moved_from) == (0, (1, 2, 3, 7), "gpu9")
    bench.do(ev.Ack(gateway="g1", acks=(ev.AckedThrough("r1", 1, 4, False),)))
    (fresh,) = deltas(bench.token("r1"))
    assert (fresh.first_seq, fresh.moved_from) == (4, "")


def test_destination_tells_of_a_move_until_it_is_confirmed_though_there_are_no_tokens():
    bench = Bench(models=[MODEL])
    bench.do(adopt())
    (told,) = deltas(bench.do(COMMIT))
    assert (told.first_seq, told.token_ids, told.end, told.moved_from) == (0, (), None, "gpu9")
    bench.do(ev.GatewayAlive(gateway="g1"), 2_000.0)
    assert told in deltas(bench.wait(2_000.0))
    bench.do(ev.Ack(gateway="g1", acks=(ev.AckedThrough("r1", 1, 0, False),)))
    bench.do(ev.GatewayAlive(gateway="g1"), 2_000.0)
    assert deltas(bench.wait(2_000.0)) == []


def test_an_attempt_that_has_ended_here_is_not_begun_again_by_a_move_of_a_copy_that_lags():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.token("r1", token=7)
    bench.token("r1", token=8, finish="stop")
    bench.do(reserve())
    bench.do(adopt(request(output_tokens=(7,))))
    done = bench.do(COMMIT)
    assert sent(done, ev.Adopted)[0].started and of(done, en.RunRequest) == []
    assert bench.state.works == {} and holders(bench) == {}
    (whole,) = deltas(bench.do(ev.BusRestored()))
    assert (whole.token_ids, whole.end.finish_reason) == ((7, 8), "stop")


def test_what_is_sent_again_after_a_long_cut_comes_in_messages_that_the_bus_takes():
    outbox = Outbox("gpu0", 100)
    for number in range(5):
        tokens = tuple(range(200_000, 260_000))
        outbox.send(0.0, [("g1", ev.TokenDelta(f"r{number}", 1, 0, tokens))])
    again = outbox.resend(1.0)
    assert [delta.request_id for delta in deltas(again)] == [f"r{number}" for number in range(5)]
    assert max(len(payload) for payload in wire(again)) < 1 << 20


def test_destination_says_why_it_grants_nothing():
    bench = Bench()
    (granted,) = sent(bench.do(reserve()), ev.Granted)
    assert granted.credit_bytes == 0 and "not loaded" in granted.reason
    bench = Bench(models=[MODEL])
    (granted,) = sent(bench.do(reserve(10**9)), ev.Granted)
    assert granted.credit_bytes == 0 and "no memory" in granted.reason
    assert bench.state.moves.transfers == {}


def test_destination_gives_back_what_it_promised():
    for ending in (ABORT, ev.Abort(request_id="r1", attempt=1, reason="")):
        bench = Bench(models=[MODEL])
        bench.do(reserve())
        bench.do(adopt())
        bench.do(ending)
        assert holders(bench) == {} and bench.state.moves.transfers == {}
        assert sent(bench.do(COMMIT), ev.Moved) == [] and bench.state.works == {}


def test_source_hands_out_a_waiting_request_and_forgets_it():
    bench = source()
    bench.now_ms += 50.0
    for _ in range(2):
        (released,) = sent(bench.do(release()), ev.Released)
        assert released.request.waited_ms == 80.0 and released.predicted_output_tokens == 20
    assert of(load_ends(bench), en.RunRequest) == []  # held still
    bench.do(COMMIT)
    assert bench.state.works == {} and bench.state.moves.open == 0
    assert of(bench.submit(request()), en.RunRequest) == []  # a late repeat
    bench.submit(request("r2"))
    assert sent(bench.do(release("*")), ev.Released) == []  # nor does one of the release take another
    bench.do(COMMIT)
    assert list(bench.state.works) == ["r2"]
    bench.wait(bench.state.settings.move_ttl_ms + 1.0)
    assert bench.state.moves.transfers == {}


def test_source_releases_nothing_that_has_started_or_is_unknown():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    for request_id in ("r1", "nobody"):
        (released,) = sent(bench.do(release(request_id)), ev.Released)
        assert released.request is None
    assert list(bench.state.works) == ["r1"] and bench.state.moves.transfers == {}


def test_source_gives_out_any_waiting_request_of_the_model_once():
    bench = source("r1", "r2")
    given = []
    for move_id in ("m1", "m2", "m3", "m1"):
        done = bench.do(release("*", MODEL.name, move_id))
        (released,) = sent(done, ev.Released)
        given.append(released.request and released.request.request_id)
    assert given == ["r1", "r2", None, "r1"]


def test_source_goes_on_after_an_abort_or_silence():
    bench = source()
    bench.do(release())
    bench.do(ABORT)
    assert list(bench.state.queue) == ["r1"]
    bench.do(release())
    bench.do(ev.GatewayAlive(gateway="g1"), 4_000.0)
    bench.wait(990.0)
    assert bench.state.queue == {}
    bench.wait(20.0)
    assert list(bench.state.queue) == ["r1"]
    assert len(of(load_ends(bench), en.RunRequest)) == 1


def test_destination_drops_a_move_it_hears_no_more_of_later_than_the_source():
    bench = Bench(models=[MODEL])
    bench.do(reserve())
    bench.do(adopt())
    bench.wait(5_100.0)
    assert holders(bench)
    bench.wait(5_000.0)
    assert holders(bench) == {} and bench.state.moves.transfers == {}


def test_a_request_moves_from_one_core_to_another_and_back():
    here, there = source(), Bench(models=[MODEL])
    (released,) = sent(here.do(release()), ev.Released)
    there.do(reserve(released.request.context_tokens))
    there.do(adopt(released.request))
    there.do(COMMIT)
    here.do(COMMIT)
    assert list(there.state.works) == ["r1"] and here.state.works == {}
    load_ends(here)
    here.do(reserve(100, "m2"))
    here.do(adopt(released.request, "m2"))
    assert of(here.do(ev.CommitMove(move_id="m2")), en.RunRequest)


def test_the_late_commit_of_an_earlier_move_is_void():
    """A GPU that still holds what it handed out gets it back, and only then hears that it was started."""
    here, there = source(), source("r2")
    (out,) = sent(here.do(release()), ev.Released)
    there.do(adopt(out.request))
    there.do(COMMIT)
    (back,) = sent(there.do(release(move_id="m2")), ev.Released)
    assert (out.request.moves, back.request.moves) == (0, 1)
    here.do(adopt(back.request, "m2"))
    for _ in range(2):
        here.do(ev.CommitMove(move_id="m2", moves=1))
    there.do(ev.CommitMove(move_id="m2", moves=1))
    assert "r1" not in there.state.works and here.state.works["r1"].request.moves == 2
    here.do(COMMIT)
    assert list(here.state.queue) == list(holders(here)) == ["r1"]
    here.do(release())  # a repeat that was long on its way
    here.do(COMMIT)
    assert list(here.state.queue) == ["r1"]
    assert len(of(load_ends(here), en.RunRequest)) == 1


def test_an_older_state_of_a_request_does_not_replace_a_newer():
    bench = Bench(models=[MODEL])
    bench.submit(request(attempt=2))
    for move_id, asked in (("m1", request()), ("m2", request(attempt=2)), ("m3", request(attempt=2))):
        bench.do(adopt(asked, move_id))
        bench.do(ev.CommitMove(move_id=move_id))
    assert bench.state.works["r1"].request.attempt == 2 and bench.state.works["r1"].request.moves == 1
    assert len(of(bench.actions, en.RunRequest)) == 2, (
        "as it was submitted, and as the second move brought it"
    )
    assert list(holders(bench)) == ["r1"]


def test_a_repeated_commit_claims_nothing_that_is_gone():
    bench = Bench(models=[MODEL])
    bench.do(adopt())
    bench.do(COMMIT)
    bench.token("r1", finish="stop")
    again = bench.do(COMMIT)
    assert sent(again, ev.Adopted)[0].started and sent(again, ev.Moved) == []


def test_the_energy_of_a_request_goes_with_it():
    here, there = Bench(models=[MODEL]), Bench(models=[MODEL])
    for request_id, prompt in (("r1", 50), ("r2", 100)):
        here.submit(request(request_id, prompt=prompt))
    here.token("r1", "r2", energy_j=1.5)
    ledger = here.state.ledger
    ledger.capacity_bytes -= ledger.free_bytes + 16 * MODEL.kv_bytes_per_token  # it is not to come back
    here.do(en.OutOfMemory(model=MODEL.name, request_id=here.runs["r2"]))
    (released,) = sent(here.do(release()), ev.Released)
    assert released.energy_j == 1.5
    there.do(msgspec.structs.replace(adopt(released.request), energy_j=released.energy_j))
    there.do(COMMIT)
    (end,) = [delta.end for delta in deltas(there.token("r1", finish="stop", energy_j=0.25)) if delta.end]
    assert end.energy_j == 1.75


def test_energy_that_was_not_metered_elsewhere_stays_unknown():
    bench = Bench(models=[MODEL])
    bench.do(msgspec.structs.replace(adopt(), energy_j=None))
    bench.do(COMMIT)
    (end,) = [delta.end for delta in deltas(bench.token("r1", finish="stop")) if delta.end]
    assert end.energy_j is None


def test_a_higher_attempt_ends_a_move():
    bench = source()
    bench.do(release())
    bench.submit(request(attempt=2))
    assert bench.state.moves.transfers == {} and bench.state.works["r1"].request.attempt == 2
    bench.do(COMMIT)
    assert "r1" in bench.state.works


def test_an_engine_that_dies_takes_its_moves_along():
    bench = Bench(models=[MODEL])
    bench.do(reserve())
    bench.do(adopt())
    bench.do(en.EngineEnded(model=MODEL.name, reason="x"))
    assert bench.state.moves.transfers == {}
    bench = source()
    bench.do(release())
    bench.do(en.EngineEnded(model=MODEL.name, reason="x"))
    assert bench.state.moves.transfers == {} and bench.state.works == {}
