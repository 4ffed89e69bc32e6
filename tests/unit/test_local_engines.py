"""The local scheduler's core: loading, unloading, and engines that die."""

import msgspec
from local_bench import H100, LUTS, MODEL, OTHER, Bench, deltas, of, request, sent

from shared import engine as en
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.model import digest, is_outdated


def load(model=MODEL, version=1):
    return ev.Load(model=model, placement_version=version)


def unload(version=2, if_idle_ms=0.0):
    return ev.Unload(model=MODEL.name, placement_version=version, if_idle_ms=if_idle_ms)


def ready(model=MODEL):
    return en.EngineReady(model=model.name, kv_pool_bytes=0, block_tokens=16, load_ms=1.0)


def test_load_is_idempotent_and_a_request_waits_for_it():
    bench = Bench()
    assert of(bench.do(load()), en.LoadEngine) == [en.LoadEngine(model=MODEL, source="disk")]
    assert of(bench.do(load()), en.Order) == []
    assert bench.engine().state == "loading"
    assert of(bench.submit(request()), en.RunRequest) == []
    assert len(of(bench.do(ready()), en.RunRequest)) == 1
    assert of(bench.do(load()), en.Order) == []


def test_weights_that_the_host_has_in_memory_are_loaded_from_there():
    bench = Bench()
    bench.do(ev.HostWeights(host="another", specs=(digest(MODEL),)))
    assert of(bench.do(load()), en.LoadEngine)[0].source == "disk"
    assert ev.Send(to="host0", message=ev.WeightsUsed(model=MODEL)) in bench.do(ready())
    bench.do(unload())
    bench.do(en.EngineEnded(model=MODEL.name))
    bench.do(ev.HostWeights(host="host0", specs=(digest(MODEL),)))
    assert of(bench.do(load(OTHER, 3)), en.LoadEngine)[0].source == "disk"
    assert of(bench.do(load(MODEL, 3)), en.LoadEngine)[0].source == "host"
    bench.do(ready())
    bench.do(unload(4))
    bench.do(en.EngineEnded(model=MODEL.name))
    bench.wait(15_000.0)  # three of the host's heartbeats: its migrator is gone, and what it kept
    assert of(bench.do(load(MODEL, 5)), en.LoadEngine)[0].source == "disk"


def test_orders_older_than_one_seen_are_dropped():
    bench = Bench()
    bench.do(load(OTHER, 5))
    assert of(bench.do(load(MODEL, 4)), en.Order) == []
    assert of(bench.do(load(MODEL, 5)), en.LoadEngine)
    bench.do(ready())
    assert of(bench.do(unload(4)), en.Order) == []
    assert of(bench.do(unload(5)), en.UnloadEngine)


def test_weights_that_do_not_fit_fail_with_a_reason():
    bench = Bench(memory_margin=0.95)  # 4 GB
    assert of(bench.do(load()), en.Order) == []
    engine = bench.engine()
    assert engine.state == "failed" and "has 40" in engine.reason
    bench.state.ledger.capacity_bytes *= 10
    assert of(bench.do(load()), en.LoadEngine)  # the order is repeated, and now it fits


def test_a_model_for_another_kind_of_engine_fails():
    bench = Bench(kind="vllm", device=DEVICES["cpu"])
    bench.do(load())
    assert "needs a emulated engine" in bench.engine().reason


def test_a_fixed_pool_is_ordered_and_has_the_size_that_the_engine_says():
    bench = Bench(kv_pool_bytes=10**9)
    (order,) = of(bench.do(load()), en.LoadEngine)
    assert order.kv_pool_bytes == 10**9
    bench.do(en.EngineReady(model=MODEL.name, kv_pool_bytes=9 * 10**8, block_tokens=32, load_ms=1.0))
    assert bench.engine().free_kv_bytes == 9 * 10**8
    bench.submit(request(prompt=100), predicted=20)
    assert bench.engine().free_kv_bytes == 9 * 10**8 - 4 * 32 * MODEL.kv_bytes_per_token


def test_without_elastic_memory_an_emulated_engine_gets_a_share_of_it():
    bench = Bench(elastic_kv=False)
    (order,) = of(bench.do(load()), en.LoadEngine)
    assert order.kv_pool_bytes == int(0.25 * int(0.95 * H100.total_bytes)) > 0
    assert bench.summary().kv_pool_bytes == order.kv_pool_bytes
    bench.do(
        en.EngineReady(model=MODEL.name, kv_pool_bytes=order.kv_pool_bytes, block_tokens=16, load_ms=1.0)
    )
    assert bench.engine().free_kv_bytes == order.kv_pool_bytes
    assert Bench().summary().kv_pool_bytes == 0
    assert Bench(kv_pool_bytes=10**9).summary().kv_pool_bytes == 10**9


def test_the_summary_tells_by_which_specification_an_engine_was_loaded():
    bench = Bench(models=[MODEL])
    assert bench.engine().spec == digest(MODEL)
    longer = msgspec.structs.replace(MODEL, context_tokens=2 * MODEL.context_tokens)
    assert is_outdated(bench.engine(), longer)
    assert not is_outdated(bench.engine(), msgspec.structs.replace(MODEL, keep_alive_ms=None, tenants=("t",)))


def test_an_engine_that_hangs_while_it_loads_is_ended_and_has_failed():
    bench = Bench()
    bench.do(load())
    assert of(bench.wait(179_000.0), en.UnloadEngine) == []
    bench.submit(request())
    done = bench.wait(1_600.0)
    assert of(done, en.UnloadEngine) == [en.UnloadEngine(model=MODEL.name, at_once=True)]
    (end,) = [delta.end for delta in deltas(done)]
    assert end.finish_reason == "error" and "not loaded after 180 s" in end.error
    assert bench.engine().state == "unloading"
    assert of(bench.do(load()), en.Order) == []  # not before it is gone
    bench.do(en.EngineEnded(model=MODEL.name))
    engine = bench.engine()
    assert engine.state == "failed" and "not loaded after" in engine.reason
    assert bench.state.ledger.pools == {}
    assert of(bench.do(load()), en.LoadEngine)


def test_a_large_model_may_take_longer_to_load():
    bench = Bench(load_timeout_ms=1_000.0)
    needed_ms = LUTS[MODEL.name].load_ms("disk")
    assert needed_ms > 200.0
    bench.do(load())
    assert of(bench.wait(10.0 * needed_ms - 500.0), en.UnloadEngine) == []
    assert of(bench.wait(1_001.0), en.UnloadEngine)


def test_unload_waits_for_work_and_for_idleness():
    bench = Bench(models=[MODEL])
    bench.submit(request())
    assert of(bench.do(unload()), en.Order) == []  # it runs
    bench.token("r1", finish="stop")
    assert of(bench.do(unload(if_idle_ms=1_000.0), 500.0), en.Order) == []  # used 500 ms ago
    assert 0.0 < bench.engine().idle_ms <= 1_100.0
    assert of(bench.do(unload(if_idle_ms=1_000.0), 600.0), en.UnloadEngine)
    assert bench.engine().state == "unloading"
    (refused,) = sent(bench.submit(request("r2")), ev.Refused)
    assert "unloading" in refused.reason
    bench.do(en.EngineEnded(model=MODEL.name))
    assert bench.engine() is None and bench.state.ledger.pools == {}


def test_a_model_is_not_unloaded_while_a_move_to_it_is_promised():
    bench = Bench(models=[MODEL])
    bench.do(ev.Reserve(move_id="m", request_id="r", model=MODEL.name, migrator="host0", context_tokens=10))
    assert of(bench.do(unload()), en.Order) == []
    bench.do(ev.AbortMove(move_id="m", reason=""))
    assert of(bench.do(unload()), en.UnloadEngine)


def test_unloaded_before_it_was_ready_and_loaded_again_while_it_unloads():
    bench = Bench()
    bench.do(load())
    assert of(bench.do(unload(2)), en.UnloadEngine)
    bench.do(ready())
    assert bench.engine().state == "unloading"
    assert of(bench.do(load(MODEL, 3)), en.Order) == []
    assert of(bench.do(en.EngineEnded(model=MODEL.name)), en.LoadEngine)
    bench.do(ready())
    assert bench.engine().state == "ready"


def test_requests_of_a_dead_engine_end_with_an_error_and_may_come_again():
    bench = Bench(models=[MODEL, OTHER])
    bench.submit(request("r1"))
    bench.submit(request("r2", gateway="g2"))
    bench.submit(request("r3", model=OTHER.name))
    bench.token("r1")
    done = bench.do(en.EngineEnded(model=MODEL.name, reason="signal 9"))
    ends = {delta.request_id: delta for delta in deltas(done)}
    assert set(ends) == {"r1", "r2"} and ends["r1"].first_seq == 1
    assert ends["r2"].end.finish_reason == "error" and ends["r2"].end.error == "engine died: signal 9"
    assert of(done, en.StopRequest) == []
    engine = bench.engine()
    assert engine.state == "failed" and engine.reason == "engine died: signal 9"
    assert list(bench.state.works) == ["r3"]
    assert of(bench.do(load()), en.LoadEngine)
    bench.do(ready())
    assert of(bench.submit(request("r1", attempt=2, output_tokens=(7,))), en.RunRequest)


def test_an_engine_that_never_started_fails_what_waits_for_it():
    bench = Bench()
    bench.do(load())
    bench.submit(request())
    (delta,) = deltas(bench.do(en.EngineEnded(model=MODEL.name, reason="no weights")))
    assert delta.end.error == "engine died: no weights" and delta.end.decode_ms == 0.0


def test_without_a_meter_there_is_no_energy():
    cpu = DEVICES["cpu"]
    small = emulated_models(1)[0].__class__(
        name="tiny", engine="vllm", params=10**8, layers=12, hidden=768, heads=12, kv_heads=3, head_dim=64,
        weight_bytes=2 * 10**8, kv_bytes_per_token=9216,
    )  # fmt: skip
    bench = Bench(device=cpu, kind="vllm")
    (order,) = of(bench.do(load(small)), en.LoadEngine)
    assert order.kv_pool_bytes == int(0.25 * int(0.95 * cpu.total_bytes))
    pool_bytes = order.kv_pool_bytes
    bench.do(en.EngineReady(model="tiny", kv_pool_bytes=pool_bytes, block_tokens=16, load_ms=1.0))
    bench.submit(request(model="tiny"))
    bench.wait(10.0)
    bench.token("r1", model="tiny", energy_j=None)
    (delta,) = deltas(bench.token("r1", model="tiny", finish="stop", energy_j=None))
    assert delta.end.energy_j is None and delta.end.energy_source == "no meter on this device"
    assert of(bench.actions, en.SetClock) == []
    assert of(bench.actions, en.SetPlan)[0].plan.sm_share_pct == 100


def test_an_engine_that_makes_no_step_is_ended_and_its_requests_go_on_elsewhere():
    bench = Bench(models=[MODEL], stall_ms=1_000.0)
    bench.submit(request())
    bench.token("r1")  # it decodes: a step takes some 8 ms, so that the second is what counts
    assert of(bench.wait(1_000.0), en.UnloadEngine) == []
    done = bench.wait(300.0)  # two looks
    assert of(done, en.UnloadEngine) == [en.UnloadEngine(model=MODEL.name, at_once=True)]
    (end,) = [delta.end for delta in deltas(done)]
    assert end.finish_reason == "error" and "made no step for 1." in end.error
    bench.do(en.EngineEnded(model=MODEL.name))
    assert bench.engine().state == "failed"


def test_a_step_may_take_five_times_what_the_table_says_of_it():
    bench = Bench(models=[MODEL], stall_ms=1_000.0)
    bench.state.clock_mhz = 345
    bench.submit(request(prompt=6_000))
    bench.wait(10.0)
    share_pct = bench.state.engines[MODEL.name].plan.sm_share_pct
    prefill_ms = LUTS[MODEL.name].ttft_ms(345, share_pct, 6_000)
    assert prefill_ms > 250.0
    assert of(bench.wait(5.0 * prefill_ms - 100.0), en.UnloadEngine) == []
    assert of(bench.wait(500.0), en.UnloadEngine)


def test_nothing_to_get_on_with_is_no_stall():
    bench = Bench(models=[MODEL], stall_ms=1_000.0)
    bench.submit(request())
    bench.token("r1")
    bench.state.starved[bench.runs["r1"]] = 1e9  # nobody is to be evicted for it yet
    assert of(bench.wait(3_000.0), en.UnloadEngine) == []
    bench.state.starved.clear()
    assert of(bench.wait(900.0), en.UnloadEngine) == []  # from now on it counts
    assert of(bench.wait(400.0), en.UnloadEngine)


def test_a_scheduler_that_stood_still_hears_first_what_its_engines_did_meanwhile():
    bench = Bench(models=[MODEL], stall_ms=1_000.0)
    bench.submit(request())
    bench.token("r1")
    assert of(bench.do(ev.Tick(), 10_000.0), en.UnloadEngine) == []
    bench.token("r1", after_ms=0.0)
    assert of(bench.wait(900.0), en.UnloadEngine) == []


def test_an_engine_of_which_nothing_is_heard_is_ended_though_it_has_no_work():
    bench = Bench(models=[MODEL, OTHER])
    sample = en.DeviceSampled("warm", 0, None, None, unheard_ms={MODEL.name: 600.0, OTHER.name: 100.0})
    assert of(bench.do(sample), en.UnloadEngine) == []
    well = en.DeviceSampled("warm", 0, None, None)
    assert of(bench.do(well, 250.0), en.UnloadEngine) == []  # it was this scheduler that stood still
    assert of(bench.do(sample, 250.0), en.UnloadEngine) == []
    assert of(bench.do(sample, 250.0), en.UnloadEngine) == [en.UnloadEngine(MODEL.name, at_once=True)]
    assert "nothing was heard" in bench.engine().reason
    assert bench.engine(OTHER.name).state == "ready"


def test_where_engines_share_their_fate_all_are_ended_and_loaded_again_once_all_are_gone():
    third = emulated_models(3)[2]
    bench = Bench(models=[MODEL, OTHER], shared_fate=True)
    bench.do(load(third))
    bench.submit(request(model=OTHER.name))
    done = bench.do(en.EngineEnded(model=MODEL.name, reason="CUDA error"))
    assert of(done, en.UnloadEngine) == [
        en.UnloadEngine(OTHER.name, at_once=True),
        en.UnloadEngine(third.name, at_once=True),
    ]
    (end,) = [delta.end for delta in deltas(done)]
    assert end.finish_reason == "error" and "takes all others" in end.error
    bench.do(en.EngineEnded(model=OTHER.name))
    assert of(bench.do(load(MODEL, 2)), en.LoadEngine) == []  # MPS would refuse it
    done = bench.do(en.EngineEnded(model=third.name, reason="killed"))
    assert [order.model.name for order in of(done, en.LoadEngine)] == [OTHER.name, MODEL.name, third.name]
    assert not bench.state.clearing and bench.state.to_load == {}


def test_where_they_do_not_the_others_run_on():
    bench = Bench(models=[MODEL, OTHER])
    assert of(bench.do(en.EngineEnded(model=MODEL.name, reason="x")), en.UnloadEngine) == []
    assert bench.engine(OTHER.name).state == "ready"
