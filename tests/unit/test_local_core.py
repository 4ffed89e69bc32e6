"""The local scheduler's core: requests from submission to end."""

from local_bench import H100, MODEL, OTHER, Bench, deltas, name_of, names, of, request, sent, wire

from shared import engine as en
from shared import events as ev
from shared.model import Placement
from shared.subjects import gpu_key

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_from_submission_to_end():
    bench = Bench(models=[MODEL])
    done = bench.submit(request(traceparent=TRACE))
    assert sent(done, ev.Admitted) == [ev.Admitted(request_id="r1", attempt=1, gpu="gpu0")]
    assert names(done, en.RunRequest) == ["r1"]
    assert len(of(bench.actions, en.SetPlan)) == 0  # decided 5 ms after the engine was ready, at the earliest
    bench.wait(5.0)
    assert len(of(bench.actions, en.SetPlan)) == 1 and len(of(bench.actions, en.SetClock)) == 1
    first = bench.token("r1", after_ms=20.0)
    assert deltas(first) == [ev.TokenDelta(request_id="r1", attempt=1, first_seq=0, token_ids=(7,))]
    bench.token("r1", token=8)
    last = bench.token("r1", token=9, finish="stop")
    (delta,) = deltas(last)
    assert delta.first_seq == 2 and delta.token_ids == (9,)
    end = delta.end
    assert (end.finish_reason, end.queue_ms, end.prefill_ms, end.decode_ms) == ("stop", 0.0, 25.0, 20.0)
    assert end.energy_j == 1.5 and end.energy_source == "modelled: emulated h100-80gb"
    assert end.sm_share_pct > 0
    spans = of(bench.actions, ev.Span)
    assert [span.name for span in spans] == ["local.queue", "local.prefill", "local.decode"]
    assert [span.end_ms - span.start_ms for span in spans] == [0.0, 25.0, 20.0]
    assert spans[2].attributes["festina.energy_j"] == 1.5
    assert spans[2].attributes["festina.output_tokens"] == 3
    assert bench.state.works == {} and bench.state.ledger.pools[MODEL.name].holders == {}
    assert wire(bench.actions)


def test_one_message_per_step_and_gateway():
    bench = Bench(models=[MODEL])
    for i, gateway in enumerate(["g1", "g2", "g1"]):
        bench.submit(request(f"r{i}", gateway=gateway))
    done = bench.token("r0", "r1", "r2")
    messages = [a for a in of(done, ev.Send) if isinstance(a.message, ev.Tokens)]
    assert [(m.to, [d.request_id for d in m.message.deltas]) for m in messages] == [
        ("g1", ["r0", "r2"]),
        ("g2", ["r1"]),
    ]


def test_a_later_attempt_goes_on_with_the_index_of_its_next_token():
    bench = Bench(models=[MODEL])
    bench.submit(request(attempt=3, output_tokens=(1, 2, 3)))
    assert deltas(bench.token("r1"))[0].first_seq == 3


def test_a_repeat_is_answered_and_not_run_again():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    done = bench.submit(request())
    assert sent(done, ev.Admitted) and not of(done, en.RunRequest)
    assert bench.submit(request(attempt=2)) and bench.state.works["r1"].request.attempt == 2
    late = bench.submit(request(attempt=1))
    assert not sent(late, ev.Admitted) and not sent(late, ev.Refused) and not of(late, en.RunRequest)


def test_a_higher_attempt_replaces_the_old_one():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    done = bench.submit(request(attempt=2))
    assert [type(a) for a in done if isinstance(a, en.Order)][:2] == [en.StopRequest, en.RunRequest]
    assert sent(done, ev.Admitted)[0].attempt == 2
    assert list(bench.state.ledger.pools[MODEL.name].holders) == ["r1"]


def test_late_reports_on_an_earlier_run_are_not_taken_for_the_present_one():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    old = bench.runs["r1"]
    bench.submit(request(attempt=2))
    late = en.StepOutput(request_id=old, token_ids=(7,))
    assert deltas(bench.do(en.StepDone(model=MODEL.name, plan_id=0, duration_ms=1.0, outputs=(late,)))) == []
    assert deltas(bench.token("r1"))[0].first_seq == 0


def test_a_repeat_of_an_ended_attempt_gets_its_tokens_again_until_acknowledged():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.token("r1", finish="length")
    again = bench.submit(request())
    assert sent(again, ev.Admitted) and deltas(again)[0].end.finish_reason == "length"
    ack = ev.AckedThrough(request_id="r1", attempt=1, next_seq=1, ended=True)
    bench.do(ev.Ack(gateway="g1", acks=(ack,)))
    assert not sent(bench.submit(request()), ev.Admitted)


def refusal(bench, asked, predicted=20):
    (refused,) = sent(bench.submit(asked, predicted), ev.Refused)
    return refused.reason


def test_refusals_say_why_and_are_counted():
    bench = Bench(models=[MODEL], max_queue=1)
    assert "not loaded" in refusal(bench, request(model="nowhere"))
    assert "no room in the context" in refusal(bench, request(prompt=MODEL.context_tokens))
    bench.do(ev.Load(model=OTHER, placement_version=1))
    bench.submit(request("waits", model=OTHER.name))
    assert "queue of gpu0 is full" in refusal(bench, request("next", model=OTHER.name))
    bench.do(en.EngineEnded(model=OTHER.name, reason="broken"))
    assert "broken" in refusal(bench, request("later", model=OTHER.name))
    assert bench.summary().admitted_through == {"s1": 5}


def test_what_never_fits_is_refused_for_good():
    bench = tight_bench(160)
    for prompt, never in ((159, False), (160, True), (MODEL.context_tokens, True)):
        done = bench.submit(request(f"r{prompt}", prompt=prompt, max_tokens=500), predicted=500)
        refused = sent(done, ev.Refused)
        assert [r.never for r in refused] == ([True] if never else [])
        assert not any(r.full for r in refused)
        bench.do(ev.Abort(request_id=f"r{prompt}", attempt=1, reason="x"))
    assert not sent(bench.submit(request("r1", model="nowhere")), ev.Refused)[0].never


def test_schedulers_that_are_gone_are_dropped_from_the_summary():
    bench = Bench(models=[MODEL])
    bench.submit(request("r1"), scheduler="old")
    bench.wait(200_000.0)
    bench.submit(request("r2"), scheduler="new")
    assert bench.summary().admitted_through == {"old": 1, "new": 2}
    bench.wait(100_000.0)
    assert bench.summary().admitted_through == {"new": 2}


def test_a_drained_gpu_takes_no_new_work_and_ends_what_it_has():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.do(ev.PlacementChanged(placement=Placement(version=2, drained=("gpu0",))))
    assert "draining" in refusal(bench, request("r2"))
    assert bench.summary().state == "draining"
    assert deltas(bench.token("r1", finish="stop"))
    bench.do(ev.PlacementChanged(placement=Placement(version=1)))  # older than one seen
    assert "draining" in refusal(bench, request("r3"))
    bench.do(ev.PlacementChanged(placement=Placement(version=3)))
    assert sent(bench.submit(request("r4")), ev.Admitted)


def test_abort_in_every_stage():
    bench = Bench(models=[MODEL])
    bench.do(ev.Load(model=OTHER, placement_version=1))
    bench.submit(request("queued", model=OTHER.name))
    bench.submit(request("prefilling"))
    bench.submit(request("decoding"))
    bench.token("decoding")
    bench.submit(request("moving", model=OTHER.name))
    bench.do(ev.Release(move_id="m", request_id="moving", migrator="host0"))
    for request_id in ("queued", "prefilling", "decoding", "moving"):
        done = bench.do(ev.Abort(request_id=request_id, attempt=1, reason="cancelled"))
        stopped = names(done, en.StopRequest)
        assert stopped == ([request_id] if request_id in ("prefilling", "decoding") else [])
        assert deltas(done) == []
    assert bench.state.works == {} and bench.state.queue == {} and bench.state.moves.transfers == {}
    assert all(not pool.holders for pool in bench.state.ledger.pools.values())
    assert bench.state.outbox.entries == {}
    assert deltas(bench.token("decoding")) == []  # a step that was under way


def test_an_abort_that_overtakes_its_request():
    bench = Bench(models=[MODEL])
    bench.do(ev.Abort(request_id="r1", attempt=2, reason="cancelled"))
    for attempt in (1, 2):
        done = bench.submit(request(attempt=attempt))
        assert not of(done, en.RunRequest) and not sent(done, ev.Admitted)
    assert of(bench.submit(request(attempt=3)), en.RunRequest)
    bench.do(ev.Abort(request_id="r1", attempt=2, reason="late"))  # of a lower attempt
    assert "r1" in bench.state.works


def test_work_of_a_silent_gateway_is_aborted_after_its_lease():
    bench = Bench(models=[MODEL])
    bench.submit(request("r1", gateway="g1"))
    bench.submit(request("r2", gateway="g2"))
    for _ in range(12):
        bench.wait(500.0)
        bench.do(ev.GatewayAlive(gateway="g2"))
    assert list(bench.state.works) == ["r2"]
    assert names(bench.actions, en.StopRequest) == ["r1"]


def cut_off_bench():
    """A bench whose gateway has been silent for longer than its lease while a request of it was running."""
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.token("r1")
    bench.wait(6_000.0)
    assert bench.state.works == {}
    return bench


def test_a_gateway_that_was_cut_off_is_told_what_has_ended_as_soon_as_it_is_back():
    bench = cut_off_bench()
    assert bench.core.idle  # nobody waits for a gateway that may never come back
    assert deltas(bench.wait(20_000.0)) == []
    (delta,) = deltas(bench.do(ev.GatewayAlive(gateway="g1")))
    assert (delta.first_seq, delta.token_ids, delta.end.finish_reason) == (0, (7,), "error")
    assert "heard nothing of gateway g1 for 5 s" in delta.end.error
    assert deltas(bench.do(ev.GatewayAlive(gateway="g1"))) == []  # once is enough
    assert len(deltas(bench.wait(3_500.0))) == 1  # unless it is not acknowledged
    ack = ev.AckedThrough(request_id="r1", attempt=1, next_seq=1, ended=True)
    bench.do(ev.Ack(gateway="g1", acks=(ack,)))
    assert not bench.state.outbox.entries


def test_an_acknowledgement_shows_as_well_that_a_gateway_is_back():
    bench = cut_off_bench()
    ack = ev.AckedThrough(request_id="r1", attempt=1, next_seq=1, ended=False)
    (delta,) = deltas(bench.do(ev.Ack(gateway="g1", acks=(ack,))))
    assert (delta.first_seq, delta.token_ids, delta.end.finish_reason) == (1, (), "error")


def test_what_a_gateway_never_comes_back_for_is_forgotten():
    bench = cut_off_bench()
    bench.wait(121_000.0)
    assert not bench.state.outbox.entries and not bench.state.outbox.silent
    assert deltas(bench.do(ev.GatewayAlive(gateway="g1"))) == []


def test_no_gateway_is_silent_while_the_bus_is_down():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.do(ev.BusLost())
    bench.wait(60_000.0)
    assert "r1" in bench.state.works
    bench.do(ev.BusRestored())
    bench.wait(4_000.0)
    assert "r1" in bench.state.works
    bench.wait(1_600.0)
    assert bench.state.works == {}


def test_after_a_cut_of_the_bus_everything_unacknowledged_is_sent_again():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    for token in (5, 6, 7):
        bench.token("r1", token=token)
    bench.do(
        ev.Ack(gateway="g1", acks=(ev.AckedThrough(request_id="r1", attempt=1, next_seq=1, ended=False),))
    )
    bench.do(ev.BusLost())
    bench.token("r1", token=8, finish="stop")
    (again,) = deltas(bench.do(ev.BusRestored()))
    assert (again.first_seq, again.token_ids, again.end.finish_reason) == (1, (6, 7, 8), "stop")


def test_what_stays_unacknowledged_is_sent_again_in_time():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    bench.token("r1", finish="stop")
    bench.do(ev.GatewayAlive(gateway="g1"))
    assert deltas(bench.wait(2_500.0)) == []
    bench.do(ev.GatewayAlive(gateway="g1"))
    assert [delta.first_seq for delta in deltas(bench.wait(1_100.0))] == [0]


# ---- memory


def tight_bench(free_tokens, models=(MODEL,), **settings):
    """A bench whose ledger has room for just so many tokens of KV beside the weights."""
    bench = Bench(models=models, **settings)
    ledger = bench.state.ledger
    ledger.capacity_bytes -= ledger.free_bytes - free_tokens * MODEL.kv_bytes_per_token
    return bench


def test_a_request_waits_for_memory_and_a_smaller_one_passes_it():
    bench = tight_bench(400)
    bench.submit(request("first", prompt=200))
    bench.submit(request("large", prompt=250))
    bench.submit(request("small", prompt=100))
    assert names(bench.actions, en.RunRequest) == ["first", "small"]
    assert list(bench.state.queue) == ["large"]
    done = bench.token("first", "small", finish="stop")
    assert names(done, en.RunRequest) == ["large"]


def test_nobody_passes_a_request_that_has_waited_long_enough():
    for waited_ms, passes in ((1_000.0, True), (2_500.0, False)):
        bench = tight_bench(400)
        bench.submit(request("first", prompt=200))
        bench.submit(request("large", prompt=250))
        bench.wait(waited_ms)
        # The late prefill is behind in the order as long as it has not aged much; it is first by its wait.
        bench.submit(request("small", prompt=60))
        assert ("small" in bench.runs) == passes


def test_memory_pressure_raises_the_clock_to_its_highest():
    bench = tight_bench(400)
    bench.submit(request("first", prompt=200))
    bench.wait(10.0)
    assert bench.state.asked_mhz < H100.f_max_mhz
    bench.submit(request("large", prompt=250))
    bench.wait(10.0)
    assert bench.state.asked_mhz == H100.f_max_mhz


def test_a_request_that_outgrows_its_memory_evicts_the_one_cheapest_to_compute_again():
    bench = tight_bench(16 * 27)
    for request_id, prompt in (("grows", 143), ("middle", 120), ("short", 60)):  # 9 + 8 + 4 blocks
        bench.submit(request(request_id, prompt=prompt, max_tokens=200), predicted=1)
    bench.token("short", "middle", "grows")
    assert [w.stage.value for w in bench.state.works.values()] == ["running"] * 3
    evicted = []
    for _ in range(150):
        done = bench.token("grows", "middle", "short")
        evicted += names(done, en.StopRequest)
        if evicted:
            break
    assert evicted == ["short"]
    back = bench.state.queue["short"]
    assert len(back.request.output_tokens) > 1 and back.tokens == []
    bench.copied("short", 64)
    done = bench.token("grows", "middle", finish="stop")
    (run,) = of(done, en.RunRequest)
    assert name_of(run) == "short" and run.request.output_tokens == back.request.output_tokens
    assert deltas(bench.token("short"))[0].first_seq == len(run.request.output_tokens)


def test_a_request_alone_that_outgrows_the_device_has_reached_its_length():
    bench = tight_bench(16 * 8)
    bench.submit(request("r1", prompt=100, max_tokens=500), predicted=1)
    done = []
    for _ in range(40):
        done += bench.token("r1")
    (end,) = [delta.end for delta in deltas(done) if delta.end]
    assert end.finish_reason == "length" and end.error == ""
    tokens = [delta for delta in deltas(done) if delta.token_ids]
    assert [delta.first_seq for delta in deltas(done)] == [*range(len(tokens)), len(tokens)]
    assert 100 + len(tokens) == 16 * 8 + 1  # the last one's own KV has no room
    assert names(done, en.StopRequest) == ["r1"]
    assert bench.state.works == {}


def test_the_end_by_want_of_memory_comes_after_the_token_it_came_with_also_when_sent_again():
    bench = tight_bench(112)
    bench.submit(request("r1", prompt=111, max_tokens=500), predicted=1)
    bench.token("r1")
    done = bench.token("r1")
    assert [(d.first_seq, d.token_ids, d.end is not None) for d in deltas(done)] == [
        (1, (7,), False),
        (2, (), True),
    ]
    bench.do(ev.BusLost())
    (again,) = deltas(bench.do(ev.BusRestored()))
    assert (again.first_seq, again.token_ids, again.end.finish_reason) == (0, (7, 7), "length")


def test_memory_is_reserved_for_what_is_predicted_and_no_more():
    bench = Bench(models=[MODEL])
    bench.submit(request("r1", prompt=160, max_tokens=4000), predicted=448)  # 38 blocks of 16
    assert bench.state.ledger.held_tokens(MODEL.name, "r1") == 160 + 448


def test_the_device_is_right_when_it_says_it_has_no_memory():
    bench = Bench(models=[MODEL])
    bench.submit(request("r1", prompt=100))
    bench.submit(request("r2", prompt=50))
    bench.do(en.OutOfMemory(model=MODEL.name, request_id=bench.runs["r1"]))
    assert bench.state.works["r1"].urgent
    assert names(bench.actions, en.StopRequest) == ["r2"]
    bench.do(
        en.OutOfMemory(model=MODEL.name, request_id=bench.runs["r1"]), 5.0
    )  # the eviction is still on its way
    assert len(of(bench.actions, en.StopRequest)) == 1


def starved_bench():
    bench = Bench(models=[MODEL])
    for request_id, prompt in (("r1", 300), ("r2", 200), ("r3", 50), ("r4", 100)):
        bench.submit(request(request_id, prompt=prompt))
    bench.do(en.OutOfMemory(model=MODEL.name, request_id=bench.runs["r1"]))
    assert names(bench.actions, en.StopRequest) == ["r3"]
    return bench


def test_a_report_within_the_grace_of_an_eviction_is_looked_at_after_it():
    bench = starved_bench()
    bench.do(en.OutOfMemory(model=MODEL.name, request_id=bench.runs["r2"]), 5.0)
    bench.wait(14.0)
    assert names(bench.actions, en.StopRequest) == ["r3"]
    bench.wait(2.0)
    # r3 has come back meanwhile, for the ledger has room; the one that costs least has to go again.
    assert len(of(bench.actions, en.StopRequest)) == 2


def test_one_that_has_run_meanwhile_is_starved_no_more():
    bench = starved_bench()
    bench.do(en.OutOfMemory(model=MODEL.name, request_id=bench.runs["r2"]), 5.0)
    bench.token("r1", "r2")
    bench.wait(1_000.0)
    assert names(bench.actions, en.StopRequest) == ["r3"]
    assert bench.state.starved == {}


def test_one_that_still_has_no_memory_long_after_an_eviction_causes_another():
    bench = starved_bench()
    bench.wait(190.0)
    assert names(bench.actions, en.StopRequest) == ["r3"]
    bench.wait(20.0)
    assert len(of(bench.actions, en.StopRequest)) == 2


# ---- summaries, plans


def test_summaries_on_change_not_more_often_than_allowed_and_each_heartbeat():
    bench = Bench(models=[MODEL])
    before = len(sent(bench.actions, ev.SummaryChanged))
    for i in range(10):
        bench.submit(request(f"r{i}"))
    bench.wait(19.0)
    assert len(sent(bench.actions, ev.SummaryChanged)) - before <= 1
    bench.wait(5_000.0)
    puts = of(bench.actions, ev.Put)
    assert len(puts) == len(sent(bench.actions, ev.SummaryChanged))
    assert 10 <= len(puts) - before <= 25
    assert puts[-1].key == gpu_key("gpu0") and puts[-1].ttl_ms == 1500.0
    assert [put.value.seq for put in puts] == list(range(1, len(puts) + 1))


def test_the_summary_tells_what_runs_and_when_memory_comes_free():
    bench = Bench(models=[MODEL], pacing="off")
    bench.submit(request("r1", prompt=100), predicted=30)
    bench.token("r1", after_ms=10.0)
    bench.token("r1", after_ms=10.0)
    bench.do(en.DeviceSampled(state="active", used_bytes=1, power_w=300.0, energy_j=5.0))
    summary = bench.summary()
    (engine,) = summary.engines
    assert (engine.running, engine.queued, engine.context_tokens, engine.idle_ms) == (1, 0, 102, 0.0)
    assert engine.tightest_tbt_ms == 100.0 and engine.sm_share_pct > 0
    assert (summary.state, summary.power_w, summary.energy_j) == ("active", 300.0, 5.0)
    now, later = summary.staircase
    assert now.after_ms == 0.0 and now.free_bytes == summary.free_bytes
    assert later.after_ms == 28 * 10.0  # 28 tokens to come, 10 ms a step
    assert later.free_bytes - now.free_bytes == 9 * 16 * MODEL.kv_bytes_per_token  # 132 tokens in 9 blocks
    assert later.free_sm_share_pct == 100


def test_a_plan_is_sent_only_when_it_differs():
    bench = Bench(models=[MODEL])
    bench.submit(request("r1", max_tokens=500), predicted=400)
    bench.wait(10.0)
    bench.token("r1")
    bench.wait(10.0)
    plans = len(of(bench.actions, en.SetPlan))
    for _ in range(50):
        bench.token("r1", after_ms=15.0)
    assert len(of(bench.actions, en.SetPlan)) == plans
    assert len(of(bench.actions, en.SetClock)) == 1


def test_the_clock_can_be_pinned():
    bench = Bench(models=[MODEL], fixed_clock_mhz=1635)
    bench.submit(request())
    bench.wait(10.0)
    assert [order.sm_clock_mhz for order in of(bench.actions, en.SetClock)] == [1635]


def test_prefills_that_no_clock_can_save_are_held_behind_the_more_urgent():
    bench = Bench(models=[MODEL])
    for i in range(40):
        bench.submit(request(f"r{i:02}", prompt=4000))
    bench.wait(10.0)
    plan = of(bench.actions, en.SetPlan)[-1].plan
    assert plan.held and len(plan.held) < 40
    assert bench.state.asked_mhz == H100.f_max_mhz


def test_one_that_leaves_takes_nothing_new_lets_what_runs_end_and_gives_the_rest_back():
    bench = Bench(models=[MODEL])
    bench.submit(request("r1"))
    bench.submit(request("r2"))
    bench.do(ev.Leaving())
    assert bench.summary().state == "draining"
    (refused,) = sent(bench.submit(request("r3")), ev.Refused)
    assert "draining" in refused.reason
    bench.token("r1", finish="stop")
    assert list(bench.state.works) == ["r2"] and not bench.core.idle
    (given_back,) = deltas(bench.do(ev.Leaving(at_once=True)))
    assert given_back.end.finish_reason == "error" and "stopped" in given_back.end.error
    assert bench.state.works == {} and not bench.core.idle
    bench.do(
        ev.Ack(gateway="g1", acks=(ev.AckedThrough("r1", 1, 1, True), ev.AckedThrough("r2", 1, 0, True)))
    )
    assert bench.core.idle


def test_an_order_older_than_the_placement_in_force_is_dropped():
    bench = Bench()
    bench.do(ev.PlacementChanged(placement=Placement(version=9)))
    assert of(bench.do(ev.Load(model=MODEL, placement_version=8)), en.LoadEngine) == []
    assert len(of(bench.do(ev.Load(model=MODEL, placement_version=9)), en.LoadEngine)) == 1
