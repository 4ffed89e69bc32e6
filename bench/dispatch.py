"""Dispatch of one request among many GPUs (3.3), beside a linear scan in numpy over the same state.

Every GPU has the request's model ready, beside three others. The GPUs differ in clock, SM shares, what runs
and waits, and memory, of which a third has little. Between two dispatches the states of some change, and each
dispatch reserves. ``dispatch.p50_ms`` is the decision, ``dispatch.reserve_us`` its reservation on the
scheduler's own copy; the scan is its decision, too, without the upkeep of its columns. Both must choose the
same GPU. ``dispatch.update_us`` is what a GPU's summary costs a scheduler that dispatches to all four of
its models; ``dispatch.one_gpu_us`` is a whole step of the scheduler, from the gateway's message to the GPU's,
where a single GPU serves the model.

``dispatch.paper_ms`` is what the paper reports (Table 3), on another machine.
"""

import gc
import random
import statistics
import time

from bench._linear_scan import Scan
from services.global_sched.core import GlobalSchedCore
from services.global_sched.estimate import Work
from services.global_sched.fleet import Fleet
from services.global_sched.settings import GlobalSettings
from services.global_sched.view import GpuView, Reservation
from shared import events as ev
from shared.catalog import emulated_models
from shared.lut import lut_for
from shared.model import EngineSummary, GpuSummary, ModelSpec, Prefills, Request, StairStep
from shared.slo import objectives_for

PAPER_MS = {100: 0.011, 1_000: 0.103, 5_000: 0.509, 10_000: 0.988}
DISPATCHES = {100: 1000, 1_000: 1000, 10_000: 1000, 100_000: 500}
SCANS = {100: 200, 1_000: 100, 10_000: 50, 100_000: 5}
CHANGES = 3  # GPUs that tell of a new state between two dispatches, and one that was dispatched to
COUNTED_AFTER = 8  # dispatches, until a GPU's summary counts one
GPU_TYPE = "h100-80gb"
GIB = 1024**3
TIE = 0.02
MODELS = emulated_models(4)
MODEL = MODELS[0]


def run() -> dict[str, float]:
    """Return the figures by name."""
    figures: dict[str, float] = {"dispatch.one_gpu_us": one_gpu_us(), "dispatch.update_us": update_us()}
    for gpus in DISPATCHES:
        figures |= among(gpus)
    growth = figures["dispatch.p50_ms.100000"] / figures["dispatch.p50_ms.1000"]
    figures["dispatch.growth_1000_to_100000"] = growth
    return figures | {f"dispatch.paper_ms.{gpus}": ms for gpus, ms in PAPER_MS.items()}


def among(gpus: int) -> dict[str, float]:
    """Dispatch among so many GPUs, and scan them."""
    cluster = Cluster(gpus, MODELS[:1])
    scan = Scan(cluster.fleet, MODEL, lut_for(GPU_TYPE, MODEL), cluster.now_ms, TIE)
    took_ms, reserved_us, scanned_ms = [], [], []
    sent: list[int] = []
    pool = cluster.fleet.pool(cluster.now_ms, MODEL)
    assert pool is not None
    gc.collect()
    gc.freeze()
    scans_every = DISPATCHES[gpus] // SCANS[gpus]
    for index in range(DISPATCHES[gpus]):
        cluster.now_ms += 1.0
        changed = [cluster.draw.randrange(gpus) for _ in range(CHANGES)]
        for gpu in [*changed, *sent[-COUNTED_AFTER:][:1]]:
            scan.put(cluster.change(gpu))
        work = cluster.work()
        expected = None
        if index % scans_every == 0:
            started = time.perf_counter()
            expected = scan.choose(work, cluster.now_ms)
            scanned_ms.append(1e3 * (time.perf_counter() - started))
        started = time.perf_counter()
        decision = pool.decide(work, cluster.now_ms, (), TIE)
        decided = time.perf_counter()
        assert decision is not None
        view = cluster.reserve(decision.candidate.gpu, work)
        took_ms.append(1e3 * (decided - started))
        reserved_us.append(1e6 * (time.perf_counter() - decided))
        scan.put(view)
        sent.append(int(view.gpu.removeprefix("gpu-")))
        if expected is not None and decision.reason == "least_energy":
            assert decision.candidate.gpu == expected, "the scan and the search choose the same GPU"
    gc.unfreeze()
    return {
        f"dispatch.p50_ms.{gpus}": statistics.median(took_ms),
        f"dispatch.p99_ms.{gpus}": statistics.quantiles(took_ms, n=100)[98],
        f"dispatch.reserve_us.{gpus}": statistics.median(reserved_us),
        f"dispatch.linear_scan_p50_ms.{gpus}": statistics.median(scanned_ms),
    }


def update_us(gpus: int = 1000, updates: int = 3000) -> float:
    """Median time to take in a changed summary, where all four models of a GPU are dispatched to."""
    cluster = Cluster(gpus, MODELS)
    took = []
    for _ in range(updates):
        cluster.now_ms += 1.0
        summary = cluster.state(cluster.draw.randrange(gpus))
        started = time.perf_counter()
        cluster.fleet.hear(cluster.now_ms, summary)
        took.append(1e6 * (time.perf_counter() - started))
    return statistics.median(took)


def one_gpu_us(dispatches: int = 3000) -> float:
    """Median time of the scheduler's whole step for a request that one GPU can serve, its state ever new."""
    cluster = Cluster(1, ())
    core = GlobalSchedCore("bench", GlobalSettings())
    for model in MODELS:
        core.step(cluster.now_ms, ev.ModelRegistered(model=model))
    took = []
    for index in range(dispatches):
        cluster.now_ms += 10.0
        core.step(cluster.now_ms, ev.SummaryChanged(summary=cluster.state(0)))
        work = cluster.work()
        request = Request(
            request_id=f"r{index}",
            attempt=1,
            gateway="bench",
            model=MODEL.name,
            prompt_tokens=(1,) * work.input_tokens,
            max_tokens=work.output_tokens,
            objectives=work.objectives,
        )
        started = time.perf_counter()
        core.step(cluster.now_ms, ev.Dispatch(request=request))
        took.append(1e6 * (time.perf_counter() - started))
    return statistics.median(took)


class Cluster:
    """GPUs in random states, as one scheduler knows them, with pools of the models named."""

    def __init__(self, gpus: int, pooled: tuple[ModelSpec, ...] | list[ModelSpec]) -> None:
        self.draw = random.Random(gpus)
        self.now_ms = 1e12
        self.seq = 0
        self.fleet = Fleet("bench", GlobalSettings(stale_after_ms=1e12, max_queued=10**6), lut_for)
        for model in MODELS:
            self.fleet.register(model)
        for gpu in range(gpus):
            self.change(gpu)
        for model in pooled:
            assert self.fleet.pool(self.now_ms, model) is not None

    def change(self, gpu: int) -> GpuView:
        """Let a GPU tell of a new state, in which all that was sent to it is counted."""
        view = self.fleet.hear(self.now_ms, self.state(gpu))
        assert view is not None
        return view

    def reserve(self, gpu: str, work: Work) -> GpuView:
        """Count a dispatch on a GPU."""
        view = self.fleet.view.get(gpu, self.now_ms)
        assert view is not None
        kv_bytes = lut_for(GPU_TYPE, MODEL).request_bytes(work.input_tokens + work.output_tokens)
        due_ms = self.now_ms + work.left_ms
        self.fleet.reserve(view, Reservation(MODEL.name, kv_bytes, work.input_tokens, due_ms, self.now_ms))
        return view

    def work(self) -> Work:
        """Return a request: inputs and outputs spread as in chats, some long."""
        inputs = min(8000, max(4, round(self.draw.lognormvariate(5.7, 1.0))))
        outputs = min(1500, max(4, round(self.draw.lognormvariate(5.4, 0.8))))
        return Work(MODEL.name, inputs, outputs, self.draw.uniform(1.0, 10.0), objectives_for(inputs))

    def state(self, gpu: int) -> GpuSummary:
        """Return a random state."""
        draw = self.draw
        self.seq += 1
        left_pct, engines, ends = 100, [], []
        for model in MODELS:
            busy = left_pct >= 10 and draw.random() < 0.5
            running = draw.randint(1, 24) if busy else 0
            share_pct = min(left_pct, 10 * draw.randint(1, 4)) if busy else 0
            left_pct -= share_pct
            waiting = draw.choice((0, 0, 1, 2, 4)) if busy else 0
            prefills = sorted((draw.uniform(-20.0, 900.0), draw.randint(20, 1500)) for _ in range(waiting))
            engines.append(
                EngineSummary(
                    model=model.name,
                    state="ready",
                    running=running,
                    queued=waiting,
                    context_tokens=running * draw.randint(100, 1500),
                    sm_share_pct=share_pct,
                    tightest_tbt_ms=100.0 if busy else 0.0,
                    prefills=tuple(Prefills(due_ms, 1, tokens) for due_ms, tokens in prefills),
                )
            )
            if busy:
                ends.append((draw.uniform(50.0, 9000.0), running * 30 * model.kv_bytes_per_token, share_pct))
        free_bytes = draw.randrange(GIB // 4) if draw.random() < 0.33 else draw.randrange(GIB, 30 * GIB)
        steps = [StairStep(0.0, free_bytes, left_pct)]
        for after_ms, freed_bytes, share_pct in sorted(ends):
            last = steps[-1]
            steps.append(StairStep(after_ms / 2, last.free_bytes + freed_bytes // 2, last.free_sm_share_pct))
            steps.append(
                StairStep(after_ms, last.free_bytes + freed_bytes, last.free_sm_share_pct + share_pct)
            )
        return GpuSummary(
            gpu=f"gpu-{gpu}",
            host="host",
            gpu_type=GPU_TYPE,
            engine="emulated",
            started_ms=1.0,
            seq=self.seq,
            state="active",
            sm_clock_mhz=draw.choice((795, 885, 975, 1065, 1065, 1155, 1245, 1425, 1635)),
            total_bytes=80 * GIB,
            free_bytes=free_bytes,
            engines=tuple(engines),
            staircase=tuple(sorted(steps, key=lambda step: step.after_ms)),
            admitted_through={"bench": self.seq},
        )
