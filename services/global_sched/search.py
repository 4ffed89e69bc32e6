"""One request's way through the groups of a pool (3.3): it finds what `dispatch.decide` finds over all GPUs.

Each phase takes the groups in the order of its own rule, looks into the first, and stops where what is left
cannot be better even at its bounds. Only a request that nobody can serve in time may, at worst, look at all.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.global_sched.alike import BOOSTED, PRESENT, ROUNDING, SLACK, Asked, Groups, Member
from services.global_sched.dispatch import Decision, earlier, late_rank, roomier
from services.global_sched.estimate import Candidate, Work, feasible, meet, queue

ONE_BY_ONE = 8  # so many groups are tried in vain before all are weeded out at once
MOST_TOLD = 32  # of the members looked at


class Search:
    """A search for one request, phase by phase.

    Args:
        groups: one object per GPU type.
        is_usable: says whether a member may be chosen at all.
    """

    def __init__(
        self, groups: Sequence[Groups], work: Work, now_ms: float, is_usable: Callable[[Member], bool]
    ) -> None:
        self._work = work
        self._now_ms = now_ms
        self._is_usable = is_usable
        self._tables = [(each, Asked(each.curves, work, now_ms)) for each in groups]
        self._clock = PRESENT
        self._looked_at: list[Member] = []

    def decide(self, tie: float, told: bool = False) -> Decision | None:
        """Run the three phases; with `told`, the decision says what was looked at.

        Returns None if no member can ever take the request.
        """
        reason, chosen = "least_energy", self.least_energy(tie)
        if chosen is None:
            reason, chosen = "f_max", self.first_in_time()
        if chosen is None:
            reason, chosen = "best_effort", self.soonest()
        if chosen is None:
            return None
        return Decision(chosen, reason, self.seen() if told else ())

    def seen(self) -> tuple[Candidate, ...]:
        """Return the last members looked at as candidates, as long as there is memory for the request."""
        members = self._looked_at[-MOST_TOLD:]
        kv_bytes = {groups.curves.lut.device.name: asked.kv_bytes for groups, asked in self._tables}
        found = [self._meet(member, kv_bytes[member.present.curves.lut.device.name]) for member in members]
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
            and self._is_usable(member)
        )

    def _best_of(self, groups: Groups, asked: Asked, group: int, earliest: bool = False) -> Candidate | None:
        """Return the feasible candidate of a group with the most free memory; or the earliest, of these."""
        work, now_ms, best, place = self._work, self._now_ms, None, 0
        while (member := groups.member_at(group, place)) is not None:
            place += 1
            if not self._usable(member, asked.kv_bytes):
                continue
            self._looked_at.append(member)
            at = member.stance(self._clock)
            prefill_ms = at.prefill.ms_at(*asked.cell) / at.compute
            queue_ms, in_time = queue(at, work.left_ms, prefill_ms, now_ms)
            if in_time and queue_ms + prefill_ms <= work.left_ms + SLACK:
                candidate = self._meet(member, asked.kv_bytes)
                if candidate is not None and feasible(candidate, work.objectives):
                    if not earliest or candidate.available_ms == 0.0:
                        return candidate
                    best = candidate if best is None else min(best, candidate, key=earlier)
        return best

    def least_energy(self, tie: float) -> Candidate | None:
        """Phases one and two: as `dispatch.least_energy`."""
        if self._work.left_ms <= 0.0:
            return None
        costs, firsts, least_j = [], [], math.inf
        for groups, asked in self._tables:
            cost_j = groups.energies_j(asked)
            costs.append((groups, asked, cost_j))
            in_vain = 0
            while len(cost_j) and cost_j.item(group := int(cost_j.argmin())) < least_j * ROUNDING:
                cost_j[group] = math.inf  # it is looked into now
                if groups.may_serve(asked, group, PRESENT):
                    found = self._best_of(groups, asked, group)
                    if found is not None and found.energy_j is not None:
                        firsts.append(found)
                        least_j = min(least_j, found.energy_j)
                        continue
                    groups.tighten(group, PRESENT)
                in_vain += 1
                if in_vain == ONE_BY_ONE:
                    cost_j[~groups.that_may_serve(asked, PRESENT)] = math.inf
        if not firsts:
            return None
        return self._roomiest(costs, firsts, least_j * (1.0 + tie))

    def _roomiest(
        self,
        costs: list[tuple[Groups, Asked, NDArray[np.float32]]],
        firsts: list[Candidate],
        bound_j: float,
    ) -> Candidate:
        """Return the feasible candidate with the most free memory of those that take at most so much.

        Args:
            firsts: those of the groups looked into already, at least one within the bound.
        """
        tied = [found for found in firsts if found.energy_j is not None and found.energy_j <= bound_j]
        best = tied[0] if len(tied) == 1 else min(tied, key=roomier)
        for groups, asked, cost_j in costs:
            for most_bytes, group in groups.by_memory(cost_j <= bound_j * ROUNDING):
                if most_bytes < best.free_bytes:
                    break
                if groups.may_serve(asked, group, PRESENT):
                    found = self._best_of(groups, asked, group)
                    if found is not None and found.energy_j is not None and found.energy_j <= bound_j:
                        best = min(best, found, key=roomier)
        return best

    def first_in_time(self) -> Candidate | None:
        """Phase three, as `dispatch.first_in_time`."""
        self._clock = BOOSTED
        self._looked_at.clear()
        best: Candidate | None = None
        for groups, asked in self._tables if self._work.left_ms > 0.0 else ():
            for most_bytes, group in groups.by_memory(groups.that_may_serve(asked, BOOSTED)):
                if best is not None and best.available_ms == 0.0 and most_bytes < best.free_bytes:
                    break
                found = self._best_of(groups, asked, group, earliest=True)
                if found is None:
                    groups.tighten(group, BOOSTED)
                else:
                    best = found if best is None else min(best, found, key=earlier)
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
            place = 0
            while (member := groups.member_at(group, place)) is not None:
                place += 1
                found = self._meet(member, asked.kv_bytes) if self._usable(member, asked.kv_bytes) else None
                if found is None:
                    continue
                self._looked_at.append(member)
                rank = late_rank(found, self._work.objectives)
                if least is None or rank < least:
                    best, least = found, rank
        return best
