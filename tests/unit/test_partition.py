"""How engines share the SMs of a GPU: what works where, the sizes, who gets which; the change of streams."""

from itertools import combinations_with_replacement

import msgspec
import pytest

from services.local_sched.host_facts import EngineFacts, GpuFacts, HostFacts, MpsFacts
from services.local_sched.partition import (
    Part,
    Partition,
    Parts,
    SmFacts,
    cut_of,
    layout,
    partition_for,
    sm_facts,
)
from services.local_sched.vllm_ext.sms import SmStreams
from services.local_sched.vllm_ext.wire import SmCut
from shared.devices import DEVICES
from shared.errors import ConfigError, FestinaError

H100, CPU = DEVICES["h100-80gb"], DEVICES["cpu"]
GPUS = [name for name, device in DEVICES.items() if device.sm_count]
ALL_WELL = SmFacts("", "")


def sms_of(gpu: str) -> list[int]:
    cut = cut_of(DEVICES[gpu])
    return [size * cut.unit_groups * cut.group_sms for size in cut.sizes[:-1]]


def test_each_device_has_about_five_sizes() -> None:
    assert {gpu: (sms_of(gpu), cut_of(DEVICES[gpu]).sizes_pct) for gpu in GPUS} == {
        "h100-80gb": ([16, 32, 64, 96], (12, 24, 48, 72, 100)),
        "h200-141gb": ([16, 32, 64, 96], (12, 24, 48, 72, 100)),
        "a100-80gb": ([12, 24, 48, 72], (11, 22, 44, 66, 100)),
        "l40s-48gb": ([20, 40, 80, 120], (14, 28, 56, 84, 100)),
    }


@pytest.mark.parametrize("gpu", GPUS)
def test_a_part_is_never_less_than_the_share_that_it_stands_for(gpu: str) -> None:
    device, cut = DEVICES[gpu], cut_of(DEVICES[gpu])
    for sms, share_pct in zip(sms_of(gpu), cut.sizes_pct, strict=False):
        assert sms % device.sm_group == 0
        assert share_pct / 100 <= sms / device.sm_count < share_pct / 100 + 0.01


@pytest.mark.parametrize("gpu", GPUS)
def test_shares_of_up_to_100_pct_get_parts_that_have_streams_and_do_not_overlap(gpu: str) -> None:
    cut = cut_of(DEVICES[gpu])
    made = {*cut.parts, Part(0, cut.units)}
    tried = 0
    for engines in range(1, cut.units + 1):
        for shares in combinations_with_replacement(cut.sizes_pct, engines):
            if sum(shares) > 100:
                continue
            parts = layout(cut, {f"m{i}": share for i, share in enumerate(shares)})
            units = [unit for part in parts.values() for unit in range(part.first, part.first + part.units)]
            assert len(units) == len(set(units)) and max(units) < cut.units, shares
            assert made.issuperset(parts.values()), shares
            tried += 1
    assert tried > 20


def test_a_share_between_two_sizes_is_rounded_down_and_one_below_all_is_the_smallest() -> None:
    cut = cut_of(H100)
    assert [cut.size_of(share) for share in (1, 12, 23, 24, 50, 99, 100)] == [1, 1, 1, 2, 4, 6, 8]


def test_more_than_there_is_begins_anew_rather_than_outside() -> None:
    cut = cut_of(H100)
    assert layout(cut, {"a": 100, "b": 72, "c": 12}) == {"a": (0, 8), "b": (0, 6), "c": (6, 1)}


def test_engines_are_told_of_parts_that_change_and_of_no_others() -> None:
    parts = Parts(cut_of(H100))
    parts.plan("a", 48)
    assert parts.moved({"a"}) == {"a": (0, 4)}
    parts.plan("b", 24)
    assert parts.moved({"a", "b"}) == {"b": (4, 2)}
    parts.plan("b", 72)
    parts.plan("a", 24)
    assert parts.moved({"a", "b"}) == {"b": (0, 6), "a": (6, 2)}
    assert parts.moved({"a", "b"}) == {}
    assert parts.moved({"a"}) == {"a": (0, 2)}  # one that does not compute takes no room
    parts.forget("b")
    parts.forget("a")
    parts.plan("a", 24)
    assert parts.moved({"a", "b"}) == {"a": (0, 2)}  # a new process begins on all SMs


# ---- which way


def test_the_best_way_that_works_is_taken() -> None:
    def found(facts: SmFacts, asked: str = "auto") -> Partition:
        return partition_for(asked, 40, H100, facts)

    green = found(ALL_WELL)
    assert (green.means, green.device.sm_sizes_pct, green.shared_fate) == (
        "green",
        (12, 24, 48, 72, 100),
        True,
    )
    assert green.environment == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    }
    mps = found(SmFacts("", "an old driver"))
    assert (mps.means, mps.device.sm_sizes_pct, mps.cut, mps.shared_fate) == ("mps", (40,), None, True)
    assert mps.environment == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"} and "an old driver" in mps.why
    none = found(SmFacts("no daemon", ""))
    assert (none.means, none.device.sm_sizes_pct, none.shared_fate) == ("none", (100,), False)
    assert none.environment == {} and "no daemon" in none.why
    assert found(ALL_WELL, "mps").means == "mps"
    asked_none = found(ALL_WELL, "none")
    assert (asked_none.means, asked_none.device.sm_sizes_pct) == ("none", (100,))
    assert asked_none.shared_fate  # whoever finds the daemon is its client, whatever share it gets


@pytest.mark.parametrize(
    ("asked", "facts", "why"),
    [
        ("green", SmFacts("no daemon", ""), "no daemon"),
        ("green", SmFacts("", "an old driver"), "an old driver"),
        ("mps", SmFacts("no daemon", ""), "no daemon"),
    ],
)
def test_what_is_asked_and_does_not_work_is_refused_with_the_reason(
    asked: str, facts: SmFacts, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"SM_PARTITION={asked}.*{why}.*doctor"):
        partition_for(asked, 100, H100, facts)


def test_a_daemon_counts_that_is_seen_or_that_a_folder_of_pipes_was_named_of() -> None:
    seen = MpsFacts(owner_uid=0, daemon=True)
    hosts = {
        mps: HostFacts(
            cuda=1300, gpus=(GpuFacts(index=0),), mps=mps, engine=EngineFacts(torch="2", torch_cuda="13")
        )
        for mps in (seen, MpsFacts(named=True, owner_uid=0), MpsFacts(owner_uid=0), MpsFacts(named=True))
    }
    assert [sm_facts(host).no_mps == "" for host in hosts.values()] == [True, True, False, False]
    assert "cuda-bindings" in sm_facts(hosts[seen]).no_green
    engine = EngineFacts(torch="2.13.0", torch_cuda="13.0", cuda_bindings="13.0")
    assert sm_facts(msgspec.structs.replace(hosts[seen], engine=engine)) == ALL_WELL
    assert "no NVIDIA GPU" in sm_facts(HostFacts(mps=seen)).no_mps


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="MPS_SHARE_PCT=0"):
        partition_for("auto", 0, H100, ALL_WELL)


def test_a_cpu_has_no_sms() -> None:
    assert partition_for("auto", 100, CPU, ALL_WELL)[::2] == ("none", CPU, False)
    with pytest.raises(ConfigError, match="cpu has no SMs"):
        partition_for("green", 100, CPU, ALL_WELL)


# ---- inside the engine's process, with a recorder in the place of the CUDA driver


class Recorder:
    """Notes what is asked of the driver; its streams are named by their groups."""

    def __init__(self, sm_count: int = 132, groups: int = 16) -> None:
        self.sm_count, self._groups = sm_count, groups
        self.split_by = 0
        self.made: list[range] = []
        self.switched: list[object] = []

    def split(self, group_sms: int) -> int:
        self.split_by = group_sms
        return self._groups

    def stream(self, groups: range) -> object:
        self.made.append(groups)
        return groups

    def ordinary(self) -> object:
        return "ordinary"

    def switch(self, stream: object) -> None:
        self.switched.append(stream)


def sm_cut() -> SmCut:
    cut = cut_of(H100)
    return SmCut(*cut, parts=cut.parts)


def test_streams_are_made_once_and_changed_only_when_the_part_is_another() -> None:
    driver = Recorder()
    streams = SmStreams(sm_cut(), driver)
    assert driver.split_by == 8 and len(driver.made) == 8 + 4 + 2 + 1
    assert {len(groups) * 8 for groups in driver.made} == {16, 32, 64, 96}
    for part in [(0, 8), (4, 2), (4, 2), (0, 4), (0, 8)]:
        streams.use(*part)
    assert driver.switched == [range(8, 12), range(8), "ordinary"]
    assert len(driver.made) == 15


def test_every_part_that_a_scheduler_gives_has_a_stream() -> None:
    streams = SmStreams(sm_cut(), Recorder())
    cut = cut_of(H100)
    for shares in [(12,) * 8, (48, 24, 12, 12), (72, 24), (48, 48), (100,)]:
        for part in layout(cut, {f"m{i}": share for i, share in enumerate(shares)}).values():
            streams.use(*part)


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (Recorder(sm_count=66), "66 SMs, and its scheduler counts 132.*GPU_TYPE"),
        (Recorder(groups=15), "15 groups of 8 SMs, and 16 are needed.*mps or none"),
    ],
)
def test_a_gpu_that_cannot_be_cut_so_is_refused(driver: Recorder, why: str) -> None:
    with pytest.raises(FestinaError, match=why):
        SmStreams(sm_cut(), driver)
    assert driver.made == []
