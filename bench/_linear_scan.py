"""A plain linear scan in numpy over what a dispatch chooses from, for `bench.dispatch` to stand beside."""

import math

import numpy as np
from numpy.typing import NDArray

from services.global_sched.estimate import Work
from services.global_sched.fleet import Fleet
from services.global_sched.view import GpuView
from shared.lut import Lut
from shared.model import ModelSpec

STEPS, PROMPTS = 10, 16  # most that a row holds; a GPU has a row for each SM share that it will have free


class Scan:
    """The same state in columns, and the same rule applied to all rows (phases one and two)."""

    def __init__(self, fleet: Fleet, model: ModelSpec, lut: Lut, now_ms: float, tie: float) -> None:
        pool = fleet.pool(now_ms, model)
        assert pool is not None
        self.pool, self.model, self.lut, self.tie = pool, model, lut, tie
        gpus = fleet.view.with_model(model.name, now_ms)
        rows = 64 + round(1.2 * sum(len(self.pool.members(view.gpu)) for view in gpus))
        self.rows_of: dict[str, list[int]] = {}
        self.names, self.unused = [""] * rows, list(range(rows))
        names = "clock share batch joining running bandwidth compute tightest keeps reserved free heard floor"
        self.of: dict[str, NDArray[np.float64]] = {name: np.ones(rows) for name in names.split()}
        self.step_ms, self.step_bytes = np.zeros((rows, STEPS)), np.zeros((rows, STEPS))
        self.due_ms, self.computed_ms = np.zeros((rows, PROMPTS)), np.zeros((rows, PROMPTS + 1))
        for view in gpus:
            self.put(view)

    def put(self, view: GpuView) -> None:
        """Write a GPU's rows."""
        for row in self.rows_of.get(view.gpu, ()):
            self.step_bytes[row] = -math.inf
            self.unused.append(row)
        members = self.pool.members(view.gpu)
        self.rows_of[view.gpu] = [self.unused.pop() for _ in members]
        engine = view.engines[self.model.name]
        own_pct = engine.sm_share_pct if engine.running else 0
        for row, member in zip(self.rows_of[view.gpu], members, strict=True):
            self.names[row] = view.gpu
            at = member.present
            values = (
                *(
                    at.clock_mhz,
                    at.share_pct,
                    at.batch,
                    at.joining,
                    at.running_tokens,
                    at.bandwidth,
                    at.compute,
                ),
                *(at.tightest_tbt_ms or math.inf, at.keeps_beside, view.reserved_bytes, view.free_bytes),
                *(view.heard_ms, member.floor_bytes + view.reserved_bytes if member.floor_bytes >= 0 else -1),
            )
            for column, value in zip(self.of.values(), values, strict=True):
                column[row] = value
            steps = [
                (view.heard_ms + step.after_ms, step.free_bytes)
                for step in view.summary.staircase
                if min(100, step.free_sm_share_pct + own_pct) == at.share_pct
            ]
            self.step_ms[row, : len(steps)], self.step_bytes[row, : len(steps)] = zip(*steps, strict=True)
            due_ms = at.due_ms
            self.due_ms[row] = math.inf
            self.due_ms[row, : len(due_ms)] = due_ms
            self.computed_ms[row] = at.computed_ms[len(due_ms)]
            self.computed_ms[row, : len(due_ms)] = at.computed_ms[: len(due_ms)]

    def choose(self, work: Work, now_ms: float) -> str | None:
        """Return the GPU of least energy, near-ties by free memory and SM share; None if none is feasible."""
        of, lut = self.of, self.lut
        needed = lut.request_bytes(work.input_tokens + work.output_tokens) + of["reserved"]
        roomy = self.step_bytes >= needed[:, None]
        step = roomy.argmax(axis=1)
        rows = np.arange(len(step))
        usable = roomy[rows, step] & (of["floor"] < needed)
        available_ms = np.maximum(0.0, self.step_ms[rows, step] - now_ms)
        prefill_ms = (
            lut.ttft_ms(of["clock"], of["share"], np.full(len(rows), work.input_tokens)) / of["compute"]
        )
        first = (self.due_ms <= now_ms + work.left_ms).sum(axis=1)
        before_ms = np.maximum(0.0, self.computed_ms[rows, first] - (now_ms - of["heard"]))
        ttft_ms = work.waited_ms + np.maximum(available_ms, before_ms) + prefill_ms
        end_ms = (
            now_ms + before_ms[:, None] + self.computed_ms[:, 1:] - self.computed_ms[rows, first][:, None]
        )
        after = (np.arange(PROMPTS) >= first[:, None]) & np.isfinite(self.due_ms)
        late = after & (end_ms <= self.due_ms) & (self.due_ms < end_ms + prefill_ms[:, None])
        batch_tokens = (of["running"] + of["joining"] * work.mean_tokens) / of["batch"]
        tbt_ms = lut.tbt_ms(of["clock"], of["share"], of["batch"], batch_tokens) / of["bandwidth"]
        usable &= (ttft_ms <= work.objectives.ttft_ms) & (tbt_ms <= work.objectives.tbt_ms)
        usable &= (tbt_ms <= of["tightest"]) & (of["keeps"] > 0) & ~late.any(axis=1)
        inputs = np.full(len(rows), work.input_tokens)
        energy_j = lut.request_energy_j(of["clock"], of["share"], inputs, work.output_tokens, of["batch"])
        energy_j = np.where(usable, energy_j, np.inf)
        if not usable.any():
            return None
        tied = np.flatnonzero(energy_j <= energy_j.min() * (1.0 + self.tie))
        best = int(tied[np.lexsort((-of["share"][tied], -of["free"][tied]))[0]])
        return self.names[best]
