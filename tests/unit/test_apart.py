"""Prefill and decode on different GPUs (4.4, PD-D): who does what, and how a request gets across."""

from local_bench import MODEL, Bench, of, request, sent
from support import gpu_summary

from services.consolidator import apart
from services.consolidator.cluster import Cluster
from services.consolidator.settings import ConsolidatorSettings
from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared import events as ev
from shared.model import EngineSummary, Instance


def test_half_of_the_gpus_compute_prompts_and_keep_doing_so():
    gpus = ["a", "b", "c", "d"]
    assert apart.prefill_gpus(set(), gpus, 0.5) == {"a", "b"}
    assert apart.prefill_gpus({"b", "d"}, gpus, 0.5) == {"b", "d"}
    assert apart.prefill_gpus({"b", "d"}, ["a", "b", "c"], 0.5) == {"a", "b"}  # 1.5 is rounded to 2
    assert apart.prefill_gpus(set(), ["a", "b"], 0.9) == {"a"}  # one is left for decodes
    assert apart.prefill_gpus(set(), ["a"], 0.5) == set()


def test_a_model_in_use_gets_an_instance_of_the_other_kind_and_an_idle_one_does_not():
    cluster = Cluster(ConsolidatorSettings(prefill_part=0.5), [MODEL])
    cluster.prefill = {"p"}

    def engine(idle_ms):
        return EngineSummary(model=MODEL.name, state="ready", idle_ms=idle_ms)

    cluster.summaries["d"] = gpu_summary("d")
    cluster.add(Instance(model=MODEL.name, gpus=("p",)))
    cluster.summaries["p"] = gpu_summary("p", engines=(engine(0.0),))
    assert apart.partners(cluster) == {MODEL.name: "d"}
    cluster.summaries["p"] = gpu_summary("p", engines=(engine(5_000.0),))
    assert apart.partners(cluster) == {}


def handed_off(bench):
    return sent(bench.actions, ev.HandOff)


def test_the_first_token_hands_the_request_off_and_only_the_first():
    bench = Bench(models=(MODEL,))
    submit = ev.Submit(request("r1"), "s", 1, 20, decode_gpu="gpu1", decode_host="host1")
    bench.do(submit)
    bench.token("r1")
    [message] = handed_off(bench)
    assert (message.request_id, message.source, message.destination) == ("r1", "gpu0", "gpu1")
    assert message.destination_host == "host1"
    bench.token("r1")
    assert len(handed_off(bench)) == 1


def test_a_request_that_ends_with_its_first_token_or_decodes_here_is_not_handed_off():
    bench = Bench(models=(MODEL,))
    bench.do(ev.Submit(request("r1"), "s", 1, 20, decode_gpu="gpu1"))
    bench.token("r1", finish="stop")
    bench.submit(request("r2"))
    bench.token("r2")
    assert not handed_off(bench)


def test_a_migrator_takes_a_hand_off_as_a_move_of_one_request():
    core = MigratorCore("host0", MigratorSettings())
    actions = core.step(0.0, ev.HandOff("m", "r1", MODEL.name, "gpu0", "gpu1"))
    [asked] = of(actions, ev.Send)
    assert (asked.to, asked.message.request_id) == ("gpu0", "r1")
