"""All that one GPU's local scheduler knows: its engines, the requests on it, memory, clock and promises."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from services.local_sched.energy import EnergyBook
from services.local_sched.grid import Load, Profile
from services.local_sched.ledger import Ledger
from services.local_sched.moves import Moves
from services.local_sched.outbox import Outbox
from services.local_sched.policies.turns import NOBODY, Rota
from services.local_sched.settings import LocalSettings
from services.local_sched.tune import Candidate, Stretch, candidates
from services.local_sched.work import Inside, Tally, Work
from shared.devices import Device
from shared.lut import Lut
from shared.model import ModelSpec, Plan
from shared.shelf import Shelf
from shared.slabs import SlabPool
from shared.weights import HostCaches

EMULATED = "emulated"  # kind of engines


@dataclass(slots=True)
class Engine:
    """One model on this GPU. `state` and `reason` are those of its summary, but
    for one that is ``asleep``.

    Args:
        running: requests given to it, in that order, by the id of their run.
        frozen: runs that are held for a move, whatever else is decided.
        leaving: runs that were evicted, and whose KV it has not said to have copied.
        used_ms: when it last had work, or became ready.
        stepped_ms: when a step of it last ended, or the first of its requests was given to it.
        plan: the plan in force, None before the first.
        tally: of what runs; None once that has changed, until the next decision.
        inside: what the last summary found to run in it, after the tally and the pace of then.
        least_share_pct: the least SM share that meets its deadlines, as of the last decision.
        step_ms: smoothed time of its decode steps; 0 before the first.
        source: where its weights were loaded from, as in `LoadEngine`.
        load_again: it is to be loaded again as soon as it is unloaded.
        on_turn: its requests may run; `parting`: those that do are leaving, for it has lost its turn;
            `to_sleep`: it is unloaded for others, and stays here in host memory (`switching.py`).
        load_due_ms: when it counts as hung if it is still loading.
        progress_ms: when it last got on, or had nothing to get on with.
        looks_stuck, seems_silent: it did at the last look, and by the last reading (`watch.py`).
    """

    spec: ModelSpec
    lut: Lut
    used_ms: float
    stepped_ms: float = 0.0
    state: str = "loading"
    reason: str = ""
    running: dict[str, Work] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    leaving: set[str] = field(default_factory=set)
    plan: Plan | None = None
    tally: Tally | None = None
    inside: tuple[Tally | None, float, Inside] | None = None
    least_share_pct: int = 0
    step_ms: float = 0.0
    source: str = "disk"
    load_again: bool = False
    on_turn: bool = True
    parting: bool = False
    to_sleep: bool = False
    load_due_ms: float = math.inf
    progress_ms: float = -math.inf
    looks_stuck: bool = False
    seems_silent: bool = False

    @property
    def takes_work(self) -> bool:
        """Whether requests of its model may come here: it serves, or will."""
        return self.state in ("loading", "ready", "asleep") or self.to_sleep

    @property
    def pace_ms(self) -> float:
        """Time from one decode step to the next, as it is now; 0 before the first."""
        interval_ms = self.plan.step_interval_ms if self.plan else 0.0
        return max(self.step_ms, interval_ms) if self.step_ms else 0.0


class Decision(NamedTuple):
    """What clock and shares were chosen from, for the next decision and whoever asks why (`festina explain`).

    Args:
        models: whose shares are named, in this order.
        clocks_mhz: clocks of the sweep, from the highest down.
        loads: what each engine had to do.
        budget_pct: what shares may add up to.
        memory_short: only the widest shares were considered, for requests to leave sooner.
        memory_awaited: a request waits for memory, which is not let wait for a sweep.
        profiles: what the loads take.
        found: the outcome of the sweep; empty if `memory_awaited`.
        chosen: the one taken; None: it is the highest clock, with shares in proportion to need.
    """

    models: tuple[str, ...]
    clocks_mhz: tuple[int, ...]
    loads: list[Load]
    budget_pct: int
    memory_short: bool
    memory_awaited: bool
    profiles: list[Profile] = []
    found: list[Stretch] = []
    chosen: Candidate | None = None

    @property
    def points(self) -> list[Candidate]:
        """All candidates of the sweep; one without a share, at the end, is where a deadline is missed."""
        return candidates(self.found, self.clocks_mhz)


@dataclass(slots=True)
class State:
    """Everything, with one owner: `LocalSchedCore`. The modules beside it are functions over it.

    Args:
        works: every live attempt by request id; `queue` holds those that wait.
        gone: highest attempt per request that ended, was aborted or was moved away; bounded, oldest first.
        gateways: when each gateway was last heard.
        admitted_through: by scheduler, the last dispatch number seen.
        schedulers: when each scheduler was last heard.
        starved: by run that its engine has no memory for, when to look at that again.
        served: by tenant, tokens of the work started for it, by its weight; see `batch.fair_order`.
        looked_ms: when it was last looked at whether engines get on.
        decision: the one in force; None before the first.
        asked_mhz, clock_mhz: the clock last asked for, and the one the device runs at.
        clock_refused: the device keeps its own clock, whatever is asked.
        limit_mhz, limited_ms: the highest clock that power and heat have allowed, and when; None: any.
        work_changed: the set of running work changed since the last decision.
        elastic_kv: its engines can share the free memory for KV; a fixed `kv_pool_bytes` overrides it.
        sleeps: without engines it has a process that stands ready, for a while.
        asleep: models whose engines do so, with their weights in host memory.
        rest: the state in which the device is without engines; `empty_ms` is since when it has none.
        offload: host memory that engines keep KV of evicted requests in, by their last run (`evict.py`).
        host_bytes_s: how fast KV is copied there, as measured lately.
        evicted_ms: when what was evicted last has left, copies of KV included.
        to_load: models to be loaded once engines are gone, in that order.
        clearing: one has died that takes all others with it, and they are not all gone yet.
        drained, room_short: the placement in force says so; `role`: which phases it leaves to this GPU.
        rota: whose turn it is, where models take turns.
        leaving: this process has been told to stop.
        admit_due: something changed that may let a waiting request start.
        summary_due: something changed that the summary tells.
    """

    gpu: str
    host: str
    engine_kind: str
    device: Device
    settings: LocalSettings
    started_ms: float
    shelf: Shelf
    ledger: Ledger
    outbox: Outbox
    clock_mhz: int
    elastic_kv: bool
    sleeps: bool
    energy: EnergyBook
    offload: SlabPool = field(init=False)
    host_bytes_s: float = field(init=False)
    moves: Moves = field(default_factory=Moves)
    caches: HostCaches = field(default_factory=HostCaches)
    engines: dict[str, Engine] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    queue: dict[str, Work] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    gateways: dict[str, float] = field(default_factory=dict)
    admitted_through: dict[str, int] = field(default_factory=dict)
    schedulers: dict[str, float] = field(default_factory=dict)
    starved: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    luts: dict[str, Lut] = field(default_factory=dict)
    order_version: int = -1
    placement_version: int = -1
    to_load: dict[str, ModelSpec] = field(default_factory=dict)
    clearing: bool = False
    drained: bool = False
    room_short: bool = False
    role: str = "both"
    rota: Rota = NOBODY
    leaving: bool = False
    bus_lost: bool = False
    decision: Decision | None = None
    asked_mhz: int | None = None
    clock_refused: bool = False
    limit_mhz: int | None = None
    limited_ms: float = -math.inf
    switched_ms: float = -math.inf
    evicted_ms: float = -math.inf
    decided_ms: float = -math.inf
    next_plan_id: int = 1
    runs: int = 0
    seq: int = 0
    summarized_ms: float = -math.inf
    heartbeat_ms: float = -math.inf
    looked_ms: float = -math.inf
    device_state: str = "cold"
    asleep: tuple[str, ...] = ()
    rest: str = field(init=False)
    empty_ms: float | None = 0.0
    power_w: float | None = None
    energy_j: float | None = None
    work_changed: bool = False
    admit_due: bool = False
    summary_due: bool = True

    def __post_init__(self) -> None:
        self.rest = "sleeping" if self.engine_kind == EMULATED else "cold"  # no engine has left yet
        self.offload = SlabPool(self.settings.offload_bytes, self.settings.offload_slab_bytes)
        self.host_bytes_s = 1000.0 * self.device.host_bytes_per_ms

    @property
    def first_rest(self) -> str:
        """How the device rests when its last engine has left."""
        return "sleeping" if self.sleeps else "cold"

    @property
    def switches(self) -> bool:
        """Whether models take turns here: then more are assigned than its memory holds."""
        return self.ledger.switches

    @property
    def kv_pool_bytes(self) -> int:
        """The fixed KV pool that each engine gets; 0 if they share what is free."""
        if self.settings.kv_pool_bytes or self.elastic_kv:
            return self.settings.kv_pool_bytes
        return int(self.settings.fixed_pool_share * self.ledger.capacity_bytes)

    @property
    def memory_awaited(self) -> bool:
        """Whether a request waits because there is no memory for it."""
        return any(work.passed_over_ms is not None for work in self.queue.values())

    @property
    def draining(self) -> bool:
        """Whether it takes no new work."""
        return self.drained or self.leaving

    def lut(self, spec: ModelSpec) -> Lut:
        """Return the look-up table of a model on this device, built once per specification."""
        found = self.luts.get(spec.name)
        if found is None or found.model != spec:
            found = self.luts[spec.name] = self.shelf.get(self.device.name, spec)
        return found

    def changed(self) -> None:
        """Note that work started, ended or moved on: look at queue, plans and summary again."""
        self.work_changed = self.admit_due = self.summary_due = True

    def remember(self, request_id: str, attempt: int) -> None:
        """Note that this attempt, and every lower one, is never to run here again."""
        highest = max(attempt, self.gone.pop(request_id, 0))
        self.gone[request_id] = highest
        if len(self.gone) > self.settings.max_remembered:
            del self.gone[next(iter(self.gone))]
