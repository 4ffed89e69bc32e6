"""Several consolidators on one bus: one leads, and whatever stops it, soon another does."""

from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_consolidator_core import FakeGpu, spec

from services.consolidator.core import ConsolidatorCore
from services.consolidator.election import Election
from services.consolidator.settings import ConsolidatorSettings
from shared import events as ev
from shared.model import Placement

SETTINGS = ConsolidatorSettings(min_kv_bytes=10, min_kv_tokens=0)
MODELS = (spec("a", 40), spec("b", 30), spec("c", 20))
START_MS, STEP_MS = 1_000_000.0, 250.0


class Replica:
    """One consolidator, which may stand still (and read all it missed later), be cut off, or be killed."""

    def __init__(self, name: str, stored: Placement | None) -> None:
        self.name = name
        self.core = ConsolidatorCore(name, SETTINGS, stored, MODELS)
        self.unread: deque[ev.Message | ev.Event] = deque([ev.Tick()])
        self.still_until_ms = self.cut_until_ms = 0.0


class Cluster:
    """Replicas and GPUs on one bus, and a store."""

    def __init__(self, names: str) -> None:
        self.now_ms = START_MS
        self.stored: Placement | None = None
        self.gpus = {name: FakeGpu(name) for name in ("g1", "g2")}
        self.seen: dict[str, int] = {}  # highest version each GPU was ordered under
        self.replicas = {name: Replica(name, None) for name in names}

    @property
    def leaders(self) -> list[str]:
        return [name for name, replica in self.replicas.items() if replica.core.leading]

    def kill(self, name: str, restart: bool) -> None:
        del self.replicas[name]
        if restart:
            self.replicas[name] = Replica(name, self.stored)

    def run(self, for_ms: float) -> None:
        end_ms = self.now_ms + for_ms
        while self.now_ms < end_ms:
            self.now_ms += STEP_MS
            for gpu in self.gpus.values():
                self._tell(gpu.summary())
            for replica in list(self.replicas.values()):
                if self.now_ms >= replica.still_until_ms:
                    wake_ms = replica.core.wake_ms
                    if wake_ms is not None and wake_ms <= self.now_ms:
                        replica.unread.append(ev.Tick())
                    while replica.unread:
                        self._step(replica, replica.unread.popleft())

    def _tell(self, message: ev.Message) -> None:
        for replica in self.replicas.values():
            if self.now_ms >= replica.cut_until_ms:
                replica.unread.append(message)

    def _step(self, replica: Replica, event: ev.Message | ev.Event) -> None:
        for action in replica.core.step(self.now_ms, event):
            if isinstance(action, ev.Put):
                assert isinstance(action.value, Placement)
                self.stored = action.value
            if not isinstance(action, ev.Send) or self.now_ms < replica.cut_until_ms:
                continue
            message = action.message
            if isinstance(message, ev.PlacementChanged | ev.ConsolidatorAlive):
                self._tell(message)
            elif isinstance(message, ev.Load | ev.Unload) and message.placement_version >= self.seen.get(
                action.to, 0
            ):
                self.seen[action.to] = message.placement_version
                self.gpus[action.to].hear(message)


def settled(cluster: Cluster) -> None:
    """One leads; all agree with it, the store as well; and what it has placed is loaded."""
    assert cluster.leaders == [min(cluster.replicas)]
    placement = cluster.replicas[cluster.leaders[0]].core.placement
    assert {replica.core.placement for replica in cluster.replicas.values()} == {placement}
    assert cluster.stored == placement
    assert sorted(i.model for i in placement.instances) == ["a", "b", "c"]
    for name, gpu in cluster.gpus.items():
        assert sorted(gpu.engines) == sorted(i.model for i in placement.instances if name in i.gpus)


def test_the_first_by_name_leads_and_the_next_takes_over_within_seconds() -> None:
    cluster = Cluster("xyz")
    cluster.run(5_000)
    settled(cluster)
    before = cluster.stored
    cluster.kill("x", restart=False)
    cluster.run(3_000)
    settled(cluster)
    assert cluster.leaders == ["y"] and cluster.stored.version > before.version
    assert cluster.stored.instances == before.instances  # nothing is moved for it


def test_a_replica_that_is_cut_off_from_the_bus_concludes_nothing() -> None:
    cluster = Cluster("xy")
    cluster.run(5_000)
    cut = cluster.replicas["y"]
    cut.cut_until_ms = cluster.now_ms + 10_000  # without a word from the bus
    cluster.run(9_000)
    assert cluster.leaders == ["x"]
    assert sorted(i.model for i in cut.core.placement.instances) == ["a", "b", "c"]  # no GPU is gone for it
    cluster.run(5_000)
    settled(cluster)


def test_an_order_to_scale_out_that_the_dead_leader_heard_is_carried_out_by_the_next() -> None:
    cluster = Cluster("xy")
    cluster.run(5_000)
    for replica in cluster.replicas.values():
        replica.core._upkeep._park(next(i for i in replica.core.placement.instances if i.model == "c"))
    cluster.run(1_000)
    assert "c" not in {i.model for i in cluster.stored.instances}
    cluster._tell(ev.ScaleOut(model="c", scheduler="s", reason="no_instance"))
    cluster.kill("x", restart=False)
    cluster.run(4_000)
    settled(cluster)


FAULTS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from(["kill", "still", "cut"]), st.integers(0, 24)),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(FAULTS)
@example([("x", "kill", 0), ("x", "still", 16), ("y", "still", 16)])  # y wakes up and stores what is old
def test_whatever_happens_one_leads_in_the_end_and_all_agree(faults: list[tuple[str, str, int]]) -> None:
    cluster = Cluster("xyz")
    cluster.run(3_000)
    for name, fault, steps in faults:
        replica = cluster.replicas[name]
        if fault == "kill":
            cluster.kill(name, restart=True)
        elif fault == "still":
            replica.still_until_ms = cluster.now_ms + steps * STEP_MS
        else:
            replica.cut_until_ms = cluster.now_ms + steps * STEP_MS
        cluster.run(steps * 100.0)
    cluster.run(15_000)
    settled(cluster)


def test_election_by_hand() -> None:
    election = Election("b", 2_000.0)
    assert election.leads(0.0)  # alone
    for peer in "aab":
        election.hear(1_500.0, peer)
    assert not election.leads(3_499.0) and election.leads(3_500.0)
    election.hear(4_000.0, "a")  # it is back
    election.excuse(9_000.0)
    assert not election.leads(10_999.0) and election.leads(11_000.0)
    election.hear(11_000.0, "c")
    assert election.leads(11_000.0)


def test_one_that_was_cut_off_or_stood_still_takes_nobody_for_gone() -> None:
    for attribute in ("cut_until_ms", "still_until_ms"):
        for name in "xy":
            cluster = Cluster("xy")
            cluster.run(5_000)
            before = cluster.stored
            setattr(cluster.replicas[name], attribute, cluster.now_ms + 4_000)
            cluster.run(12_000)
            settled(cluster)
            assert cluster.stored.instances == before.instances
