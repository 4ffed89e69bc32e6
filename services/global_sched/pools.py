"""Dispatch among many GPUs (3.3): what `dispatch.decide` finds, without looking at each GPU.

A `Pool` keeps the GPUs that serve one model in groups of those that are alike (`alike.py`), and puts a GPU
into its new groups when its state changes. Each phase takes the groups in the order of its own rule, looks
into the first, and stops where what is left cannot be better even at its bounds. So the result is that of
`decide` over all of them. Only a request that nobody can serve in time may, at worst, look at them all.
"""

import math
from collections.abc import Callable, Container, Iterator

import numpy as np
from numpy.typing import NDArray

from services.global_sched.alike import BOOSTED, PRESENT, ROUNDING, SLACK, Asked, Groups, Member
from services.global_sched.curves import curves_of
from services.global_sched.dispatch import Decision, late_rank
from services.global_sched.estimate import (
    Candidate,
    LutOf,
    Stance,
    Work,
    feasible,
    meet,
    queue,
    stance,
)
from services.global_sched.view import GpuView
from shared.lut import Lut
from shared.model import ModelSpec

ONE_BY_ONE = 8  # so many groups are tried in vain before all are weeded out at once
MOST_TOLD = 32  # of the members looked at


class Pool:
    """The GPUs that serve one model.

    Args:
        is_silent: says whether a GPU has been silent for too long at a time.
        max_queued: an engine with so many waiting is full.
    """

    def __init__(
        self,
        spec: ModelSpec,
        lut_of: LutOf,
        is_silent: Callable[[GpuView, float], bool],
        max_queued: int,
    ) -> None:
        self._spec = spec
        self._lut_of = lut_of
        self._is_silent = is_silent
        self._max_queued = max_queued
        self._groups: dict[str, Groups] = {}  # by GPU type
        self._members: dict[str, tuple[Groups, list[Member]]] = {}  # by GPU
        self._queued: dict[str, int] = {}  # by GPU
        self.queued = 0

    def __len__(self) -> int:
        return len(self._members)

    # ---- state

    def put(self, view: GpuView) -> None:
        """Take in how a GPU that serves the model stands now."""
        self.remove(view.gpu)
        lut = self._lut_of(view.summary.gpu_type, self._spec.name)
        assert lut is not None and lut.device.has_meter, "only GPUs whose energy is known are compared by it"
        groups = self._groups.get(lut.device.name)
        if groups is None:
            groups = self._groups[lut.device.name] = Groups(curves_of(lut))
        members = self._made(view, groups, lut)
        for member in members:
            groups.add(member)
        self._members[view.gpu] = groups, members
        self._queued[view.gpu] = queued = view.engines[self._spec.name].queued
        self.queued += queued

    def remove(self, gpu: str) -> None:
        """Forget a GPU."""
        if gpu in self._members:
            groups, members = self._members.pop(gpu)
            for member in members:
                groups.remove(member)
            self.queued -= self._queued.pop(gpu)

    def _made(self, view: GpuView, groups: Groups, lut: Lut) -> list[Member]:
        """Return a GPU's members: one per SM share that the largest request could find free there."""
        model, made = self._spec.name, []
        largest_bytes = lut.request_bytes(self._spec.context_tokens)
        floor_bytes = -1
        for share_pct, (from_ms, most_bytes) in view.shares(model).items():
            if floor_bytes >= largest_bytes:
                break
            present = stance(view, model, share_pct, self._lut_of, boost=False)
            if math.isfinite(present.prefill.ms[0]):
                group = groups.group_of(present)
                made.append(
                    Member(
                        view, group, view.free_bytes, from_ms, floor_bytes, most_bytes, present, self._boosted
                    )
                )
            floor_bytes = max(floor_bytes, most_bytes)
        return made

    def _boosted(self, view: GpuView, share_pct: int) -> Stance:
        return stance(view, self._spec.name, share_pct, self._lut_of, boost=True)

    # ---- decisions

    def decide(
        self, work: Work, now_ms: float, skipped: Container[str], tie: float, told: bool = False
    ) -> Decision | None:
        """Return what the three phases choose among all GPUs but those `skipped`; None if there is none.

        With `told`, the decision says what was looked at.
        """
        search = _Search(self, work, now_ms, skipped)
        reason, chosen = "least_energy", search.least_energy(tie)
        if chosen is None:
            reason, chosen = "f_max", search.first_in_time()
        if chosen is None:
            reason, chosen = "best_effort", search.soonest()
        if chosen is None:
            return None
        return Decision(chosen, reason, search.seen() if told else ())

    def members(self, gpu: str) -> list[Member]:
        """Return a GPU's members, by the time from which their share is free."""
        return self._members[gpu][1]

    def groups(self) -> list[Groups]:
        """Return the groups, one object per GPU type."""
        return list(self._groups.values())

    def usable(self, member: Member, now_ms: float) -> bool:
        """Say whether a GPU is heard of and not full."""
        view = member.view
        return view.queued(self._spec.name) < self._max_queued and not self._is_silent(view, now_ms)


class _Search:
    """One request's way through a pool, phase by phase."""

    def __init__(self, pool: Pool, work: Work, now_ms: float, skipped: Container[str]) -> None:
        self._pool = pool
        self._work = work
        self._now_ms = now_ms
        self._skipped = skipped
        self._tables = [(groups, Asked(groups.curves, work, now_ms)) for groups in pool.groups()]
        self._clock = PRESENT
        self._looked_at: list[Member] = []

    def seen(self) -> tuple[Candidate, ...]:
        """Return the last members looked at as candidates, as long as there is memory for the request."""
        members = self._looked_at[-MOST_TOLD:]
        kv_bytes = {id(groups.curves): asked.kv_bytes for groups, asked in self._tables}
        found = [self._meet(member, kv_bytes[id(member.present.curves)]) for member in members]
        return tuple([candidate for candidate in found if candidate is not None])

    def _meet(self, member: Member, kv_bytes: int) -> Candidate | None:
        """Return what the request would meet at a member; None if its memory comes with another share."""
        at = member.stance(self._clock)
        available_ms, share_pct = member.view.available(self._work.model, kv_bytes, self._now_ms)
        if share_pct != at.share_pct:
            return None
        return meet(member.view, at, self._work, self._now_ms, available_ms)

    def _usable(self, member: Member, kv_bytes: int) -> bool:
        return (
            member.most_bytes >= kv_bytes
            and member.floor_bytes - member.view.reserved_bytes < kv_bytes
            and self._pool.usable(member, self._now_ms)
            and member.view.gpu not in self._skipped
        )

    def _fitting(self, groups: Groups, asked: Asked, group: int) -> Iterator[Candidate]:
        """Yield the feasible candidates of a group, the most free memory first."""
        work, now_ms = self._work, self._now_ms
        for member in groups.in_order(group):
            if not self._usable(member, asked.kv_bytes):
                continue
            self._looked_at.append(member)
            at = member.stance(self._clock)
            prefill_ms = at.prefill.ms_at(*asked.cell) / at.compute
            queue_ms, in_time = queue(at, work.left_ms, prefill_ms, now_ms)
            if in_time and queue_ms + prefill_ms <= work.left_ms + SLACK:
                candidate = self._meet(member, asked.kv_bytes)
                if candidate is not None and feasible(candidate, work.objectives):
                    yield candidate

    def least_energy(self, tie: float) -> Candidate | None:
        """Phases one and two: as `dispatch.least_energy`."""
        if self._work.left_ms <= 0.0:
            return None
        costs, firsts, least_j = [], [], math.inf
        for groups, asked in self._tables:
            cost_j = groups.energies_j(asked)
            costs.append((groups, asked, cost_j))
            in_vain = 0
            while len(cost_j) and cost_j[group := int(cost_j.argmin())] < least_j * ROUNDING:
                cost_j[group] = math.inf  # it is looked into now
                if groups.may_serve(asked, group, PRESENT):
                    found = next(self._fitting(groups, asked, group), None)
                    if found is not None and found.energy_j is not None:
                        firsts.append((found.energy_j, found))
                        least_j = min(least_j, found.energy_j)
                        continue
                    groups.tighten(group, PRESENT)
                in_vain += 1
                if in_vain == ONE_BY_ONE:
                    cost_j[~groups.that_may_serve(asked, PRESENT)] = math.inf
        if not firsts:
            return None
        bound_j = least_j * (1.0 + tie)
        best = min((found for energy_j, found in firsts if energy_j <= bound_j), key=_roomier)
        return self._roomiest(costs, best, bound_j)

    def _roomiest(
        self, costs: list[tuple[Groups, Asked, NDArray[np.float32]]], best: Candidate, bound_j: float
    ) -> Candidate:
        """Return the feasible candidate with the most free memory of those that take at most so much.

        Args:
            best: that of the groups looked into already.
        """
        for groups, asked, cost_j in costs:
            for most_bytes, group in groups.by_memory(np.flatnonzero(cost_j <= bound_j * ROUNDING)):
                if most_bytes < best.free_bytes:
                    break
                if groups.may_serve(asked, group, PRESENT):
                    found = next(self._fitting(groups, asked, group), None)
                    if found is not None and found.energy_j is not None and found.energy_j <= bound_j:
                        best = min(best, found, key=_roomier)
        return best

    def first_in_time(self) -> Candidate | None:
        """Phase three, as `dispatch.first_in_time`."""
        self._clock = BOOSTED
        self._looked_at.clear()
        best: Candidate | None = None
        for groups, asked in self._tables if self._work.left_ms > 0.0 else ():
            for most_bytes, group in groups.by_memory(np.flatnonzero(groups.that_may_serve(asked, BOOSTED))):
                if best is not None and best.available_ms == 0.0 and most_bytes < best.free_bytes:
                    break
                found = None
                for found in self._fitting(groups, asked, group):
                    best = found if best is None else min(best, found, key=_earlier)
                    if found.available_ms == 0.0:
                        break
                if found is None:
                    groups.tighten(group, BOOSTED)
        return best

    def soonest(self) -> Candidate | None:
        """As `dispatch.soonest`; None where no GPU can ever take it."""
        self._clock = BOOSTED
        self._looked_at.clear()
        best: Candidate | None = None
        least: tuple[bool, bool, bool, float, int, str] | None = None
        heads = [
            (first_ms, group, groups, asked)
            for groups, asked in self._tables
            for group, first_ms in enumerate(groups.first_tokens_ms(asked, BOOSTED).tolist())
            if groups.members[group]
        ]
        heads.sort(key=lambda head: head[:2])
        for first_ms, group, groups, asked in heads:
            ttft_ms = self._work.waited_ms + first_ms - self._now_ms
            if least is not None and not any(least[:3]) and ttft_ms > least[3] + SLACK:
                break
            for member in groups.in_order(group):
                found = self._meet(member, asked.kv_bytes) if self._usable(member, asked.kv_bytes) else None
                if found is None:
                    continue
                self._looked_at.append(member)
                rank = late_rank(found, self._work.objectives)
                if least is None or rank < least:
                    best, least = found, rank
        return best


def _roomier(candidate: Candidate) -> tuple[int, int, str]:
    return -candidate.free_bytes, -candidate.sm_share_pct, candidate.gpu


def _earlier(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.available_ms, -candidate.free_bytes, candidate.gpu
