"""What a scheduler keeps of many GPUs: it follows placements, tables and GPUs that go, and does not grow."""

from typing import Any

from msgspec.structs import replace
from support import gpu_summary

from services.global_sched.core import GlobalSchedCore
from services.global_sched.dispatch import decide
from services.global_sched.estimate import Work
from services.global_sched.fleet import FEW, Fleet
from services.global_sched.pools import GROUPS_PER_MEMBER, SPARE_GROUPS
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import GpuView
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.lut import build, lut_for
from shared.model import EngineSummary, Instance, ModelSpec, Objectives, Placement, StairStep

A, B = emulated_models(2)
GIB = 1024**3
NOW_MS = 1e12
MANY = FEW + 2
WORK = Work(A.name, 500, 200, 0.0, Objectives(ttft_ms=2000.0, tbt_ms=100.0))


class Lab:
    """A fleet of GPUs with model A, of which the last has the most free memory: it is chosen if it may be."""

    def __init__(self, *models: ModelSpec) -> None:
        self.fleet = Fleet("s", GlobalSettings(), lut_for)
        self.now_ms = NOW_MS
        self.seq = 0
        for model in models or (A,):
            self.fleet.register(model)
        self.tell(*range(MANY))

    def tell(
        self, *gpus: int, models: tuple[ModelSpec, ...] = (A,), running: int = 0, **changes: object
    ) -> None:
        for gpu in gpus:
            self.seq += 1
            free_bytes = (70 if gpu == MANY - 1 else 40) * GIB
            engines = tuple(
                EngineSummary(
                    model=model.name,
                    state="ready",
                    running=running,
                    context_tokens=500 * running,
                    sm_share_pct=20 if running else 0,
                    tightest_tbt_ms=100.0 if running else 0.0,
                )
                for model in models
            )
            fields: dict[str, Any] = {
                "seq": self.seq,
                "free_bytes": free_bytes,
                "staircase": (StairStep(0.0, free_bytes, 100 - (20 if running else 0)),),
                "engines": engines,
            }
            assert self.fleet.hear(self.now_ms, gpu_summary(f"g{gpu}", **(fields | changes))) is not None

    def place(self, version: int, *gpus: int, drained: tuple[str, ...] = ()) -> None:
        instances = tuple(Instance(model=A.name, gpus=(f"g{gpu}",)) for gpu in gpus)
        self.fleet.place(Placement(version=version, instances=instances, drained=drained))

    def chosen(self) -> str:
        """Return the GPU that the pool chooses; looking at each must find the same."""
        pool = self.fleet.pool(self.now_ms, A)
        assert pool is not None
        decision = pool.decide(WORK, self.now_ms, (), 0.02, told=True)
        assert decision is not None
        views = self.fleet.serving(self.now_ms, A)
        expected = decide(views, WORK, self.fleet.curves, self.now_ms, 0.02)
        assert (decision.candidate, decision.reason) == (expected.candidate, expected.reason)
        return decision.candidate.gpu


def test_a_gpu_that_is_to_give_the_model_up_gets_no_more_of_it() -> None:
    lab = Lab()
    last, others = f"g{MANY - 1}", range(MANY - 1)
    lab.place(1, *range(MANY))
    assert lab.chosen() == last
    lab.place(2, *others)
    assert lab.chosen() == "g0"
    lab.tell(MANY - 1)
    assert lab.chosen() == "g0"
    lab.place(3, *others, drained=("g0",))
    assert lab.chosen() == "g1"
    lab.place(4, MANY - 1)
    assert lab.chosen() == last


def test_until_one_that_is_to_have_it_is_heard_of_the_others_go_on() -> None:
    lab = Lab()
    lab.place(1, 3)
    assert lab.chosen() == "g3"
    lab.now_ms += 1600.0
    lab.tell(*(gpu for gpu in range(MANY) if gpu != 3))
    assert lab.chosen() == f"g{MANY - 1}"
    lab.tell(3)
    assert lab.chosen() == "g3"
    lab.tell(3, state="draining")
    assert lab.chosen() == f"g{MANY - 1}"


def test_gpus_that_are_forgotten_are_in_no_pool() -> None:
    lab = Lab()
    assert lab.chosen() == f"g{MANY - 1}"
    lab.now_ms += 700_000.0
    lab.tell(*range(MANY - 1))
    pool = lab.fleet.pool(lab.now_ms, A)
    assert pool is not None and len(pool) == MANY - 1
    lab.fleet.view.bus_lost = True  # now nobody counts as silent
    assert lab.chosen() == "g0" and lab.fleet.view.get("g0", lab.now_ms) is not None


def test_what_gpus_that_went_had_waiting_is_counted_no_more() -> None:
    lab = Lab()
    lab.chosen()
    waiting = EngineSummary(model=A.name, state="ready", queued=20)
    lab.tell(*range(100, 150), engines=(waiting,))
    pool = lab.fleet.pool(lab.now_ms, A)
    assert pool is not None and pool.queued == 1000
    lab.now_ms += 700_000.0
    lab.tell(*range(MANY))
    assert pool.queued == 0 and len(lab.fleet.view) == MANY


def test_a_gpu_of_unknown_energy_is_remembered_and_nothing_is_made_anew() -> None:
    lab = Lab()
    before = lab.fleet.pool(lab.now_ms, A)
    lab.tell(77, gpu_type="cpu", sm_clock_mhz=0, state="draining")
    assert lab.fleet.pool(lab.now_ms, A) is before is not None, "it does not serve"
    asked: list[str] = []
    serves = lab.fleet._serves

    def counted(view: GpuView, spec: ModelSpec) -> bool:
        asked.append(view.gpu)
        return serves(view, spec)

    lab.fleet._serves = counted  # type: ignore[method-assign]
    lab.tell(77, gpu_type="cpu", sm_clock_mhz=0)
    assert asked == ["g77"]
    assert lab.fleet.pool(lab.now_ms, A) is None
    assert lab.fleet.pool(lab.now_ms, A) is None and asked == ["g77"], "no GPU is looked at again"
    lab.tell(77, gpu_type="cpu", sm_clock_mhz=0, state="draining")
    assert lab.fleet.pool(lab.now_ms, A) is before


def test_another_model_leaves_pools_and_tables_as_they_are() -> None:
    lab = Lab(A)
    lab.tell(0, models=(A, B), running=4)
    pool, curves = lab.fleet.pool(lab.now_ms, A), lab.fleet.curves("h100-80gb", A.name)
    view = lab.fleet.view.known("g0")
    assert pool is not None and view is not None
    stance = pool.members("g0")[0].present
    untouched = pool.members("g1")[0].present
    tight = replace(B, layers=B.layers * 40)  # so slow that it keeps nobody's TBT
    lab.fleet.register(tight)
    assert lab.fleet.pool(lab.now_ms, A) is pool and lab.fleet.curves("h100-80gb", A.name) is curves
    assert pool.members("g1")[0].present is untouched
    now = pool.members("g0")[0].present
    assert stance.keeps_beside and now is not stance, "B's table is part of how A stands beside it"
    lab.chosen()
    lab.fleet.put_lut(build(device_for("h100-80gb"), A))
    assert lab.fleet.curves("h100-80gb", A.name) is not curves
    assert lab.fleet.pool(lab.now_ms, A) is not pool
    lab.fleet.remove(A.name)
    assert lab.fleet.curves("h100-80gb", A.name) is None and A.name not in lab.fleet._pools


def test_groups_of_states_long_past_are_given_back() -> None:
    lab = Lab()
    lab.chosen()
    most = 0
    clocks = device_for("h100-80gb").clocks_mhz[-60:]
    for turn in range(40):
        for clock in clocks:
            lab.tell(turn % MANY, running=turn + 1, sm_clock_mhz=clock)
        pool = lab.fleet.pool(lab.now_ms, A)
        assert pool is not None
        most = max(most, *map(len, pool.groups()))
    assert 1000 < most <= SPARE_GROUPS + GROUPS_PER_MEMBER * (MANY + 1) < 40 * len(clocks)
    lab.chosen()


def test_nothing_is_learnt_of_a_model_that_is_gone() -> None:
    core = GlobalSchedCore("s", GlobalSettings())
    ended = ev.RequestEnded(
        request_id="r", model=A.name, tenant="t", outcome="stop", input_tokens=10, output_tokens=10
    )
    core.step(NOW_MS, ev.ModelRegistered(model=A))
    core.step(NOW_MS, ended)
    assert core.wake_ms == NOW_MS + GlobalSettings().prediction_save_ms
    core.step(NOW_MS, ev.ModelRemoved(model=A.name))
    core.step(NOW_MS, ended)
    assert core.wake_ms is None and core.step(NOW_MS + 60_000.0, ev.Tick()) == []


def test_a_share_that_is_fixed_is_counted_on_whatever_else_runs_there() -> None:
    def shares(**changes: object) -> dict[int, tuple[float, int]]:
        lab = Lab(A, B)
        lab.tell(0, models=(A, B), running=1, **changes)
        view = next(view for view in lab.fleet.serving(NOW_MS, A) if view.gpu == "g0")
        share_pct = view.available(A.name, 0, NOW_MS)[1]
        assert share_pct in view.shares(A.name)
        return view.shares(A.name)

    full = (StairStep(0.0, GIB, 0),)
    assert list(shares()) == [100]
    assert list(shares(staircase=full)) == [20]  # what its own engine has
    assert list(shares(staircase=full, fixed_share_pct=100)) == [100]
    assert list(shares(fixed_share_pct=40)) == [40]


def test_a_model_starts_soonest_where_its_engine_is_asleep() -> None:
    lab = Lab()
    (loaded,) = lab.fleet.starts(NOW_MS, A)
    lab.tell(1, asleep=(A.name,))
    (woken,) = lab.fleet.starts(NOW_MS, A)
    assert (loaded.source, woken.source) == ("disk", "asleep")
    assert woken.after_ms == A.weight_bytes / device_for("h100-80gb").host_bytes_per_ms < loaded.after_ms
