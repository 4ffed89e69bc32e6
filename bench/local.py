"""The local scheduler's decision: clock, shares, chunks and turns of all engines of a GPU (3.4; Table 3).

Four models on one emulated H100, with so many requests on it at any time: whenever one has ended, the next
comes, with the lengths of ShareGPT, for a model drawn at random. Each decision is timed as it comes in
virtual time, so that no two states are alike. ``local.one_request_p50_ms`` is for one model and one request,
``local.submit_p50_us`` a whole step of the core that takes in a request, decision included. Beside the times
stand the paper's. All are processor time: a decision waits for nothing, and the machine may be shared.
"""

import math
import time
from collections.abc import Iterator

import numpy as np

from services.local_sched import plans
from services.local_sched.core import LocalSchedCore
from services.local_sched.emulated import EmulatedGpu
from services.local_sched.made_up import VocabSlice
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import device_for
from shared.model import Request
from shared.slo import objectives_for
from sim.lengths import SHAREGPT

PAPER_MS = {10: 0.0544, 25: 0.0612, 50: 0.0768, 100: 0.0942}
"""Table 3, local scheduler: latency by tasks."""
MODELS, WARM_UP, DECISIONS = 4, 500, 2000
IN_SERVICE, NEVER_MS = LocalSettings(), 1e15


class Gpu:
    """A local scheduler and its device in virtual time, kept at a number of requests.

    The core's own decisions are put off for ever, and made here at the times when they would be due.
    `decision_us` and `submit_us` are the times measured so far.
    """

    def __init__(self, tasks: int, models: int = MODELS) -> None:
        device = device_for("h100-80gb")
        self.models = sorted(emulated_models(16), key=lambda model: model.weight_bytes)[:models]
        never = LocalSettings(decision_interval_ms=NEVER_MS, replan_ms=NEVER_MS)
        self.core = LocalSchedCore("gpu", "host", "emulated", device, never, 0.0)
        self.core.state.decided_ms = 0.0
        self.device = EmulatedGpu(device, vocab=VocabSlice(token_ids=(5, 6, 7), eos_id=1))
        self.decision_us: list[float] = []
        self.submit_us: list[float] = []
        self._draw = np.random.default_rng(tasks)
        self._tasks, self._sent, self._now_ms = tasks, 0, 0.0
        self.device.advance(0.0)
        for model in self.models:
            self._feed(ev.Load(model=model, placement_version=1))

    def play(self, decisions: int) -> None:
        """Go on until so many decisions have been timed."""
        while len(self.decision_us) < decisions:
            ready = all(engine.state == "ready" for engine in self.core.state.engines.values())
            while ready and len(self.core.state.works) < self._tasks:
                self._submit()
            wakes = (self.core.wake_ms, self.device.wake_ms, self._decision_due_ms())
            self._now_ms = max(self._now_ms, min([at for at in wakes if at is not None]))
            for event in self.device.advance(self._now_ms):
                self._feed(event)
            if self.core.wake_ms is not None and self.core.wake_ms <= self._now_ms:
                self._feed(ev.Tick())
            self._decide()

    def _submit(self) -> None:
        prompt, answer = (
            int(lengths.lengths(self._draw.random()))
            for lengths in (SHAREGPT.input_tokens, SHAREGPT.output_tokens)
        )
        prompt, answer = min(prompt, 6000), min(answer, 1500)
        self._sent += 1
        request = Request(
            request_id=f"r{self._sent}",
            attempt=1,
            gateway="gateway",
            model=self.models[int(self._draw.integers(len(self.models)))].name,
            prompt_tokens=tuple(range(prompt)),
            max_tokens=answer,
            objectives=objectives_for(prompt),
            sampling={"ignore_eos": True},
        )
        submit = ev.Submit(
            request=request, scheduler="s", dispatch_seq=self._sent, predicted_output_tokens=answer
        )
        started = time.thread_time()
        self._feed(submit)
        self._decide()
        self.submit_us.append(1e6 * (time.thread_time() - started))

    def _feed(self, event: ev.Message | ev.Event) -> None:
        self._perform(self.core.step(self._now_ms, event))

    def _perform(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, en.Order):
                self.device.order(self._now_ms, action)
            elif isinstance(action, ev.Send) and isinstance(action.message, ev.Tokens):
                acks = tuple(
                    ev.AckedThrough(
                        d.request_id, d.attempt, d.first_seq + len(d.token_ids), d.end is not None
                    )
                    for d in action.message.deltas
                )
                self.core.step(self._now_ms, ev.Ack(gateway="gateway", acks=acks))

    def _decision_due_ms(self) -> float:
        """Return when `plans.decision_due_ms` would have it in service."""
        state = self.core.state
        if state.work_changed:
            return state.decided_ms + IN_SERVICE.decision_interval_ms
        running = any(engine.running for engine in state.engines.values())
        return state.decided_ms + IN_SERVICE.replan_ms if running else math.inf

    def _decide(self) -> None:
        """Decide if it is time, and time it."""
        if self._decision_due_ms() > self._now_ms:
            return
        state = self.core.state
        started = time.thread_time()
        actions = plans.decide(state, self._now_ms)
        took_us = 1e6 * (time.thread_time() - started)
        if any(engine.running for engine in state.engines.values()):
            self.decision_us.append(took_us)
        self._perform(actions)


def _played(tasks: int, models: int = MODELS) -> Gpu:
    """Return a GPU whose decisions have been timed."""
    gpu = Gpu(tasks, models)
    gpu.play(WARM_UP + DECISIONS)
    return gpu


def run() -> dict[str, float]:
    """Return the times of a decision by number of tasks, in ms."""
    return dict(_figures())


def _figures() -> Iterator[tuple[str, float]]:
    alone = _played(1, 1)
    yield "local.one_request_p50_ms", float(np.median(alone.decision_us[WARM_UP:])) / 1e3
    for tasks, paper_ms in PAPER_MS.items():
        gpu = _played(tasks)
        median, high = np.percentile(gpu.decision_us[WARM_UP:], (50, 99)) / 1e3
        yield f"local.p50_ms.{tasks}", float(median)
        yield f"local.p99_ms.{tasks}", float(high)
        yield f"local.paper_ms.{tasks}", paper_ms
    yield "local.submit_p50_us", float(np.median(gpu.submit_us[tasks:]))
