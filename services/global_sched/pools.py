"""Dispatch among many GPUs (3.3): those that serve one model, in groups of those that are alike.

A GPU is put into its new groups (`alike.py`) when its state changes. A request then looks into few of them
(`search.py`), and finds what `dispatch.decide` finds over all.
"""

import math
from collections.abc import Callable, Container
from typing import NamedTuple

from services.global_sched.alike import Groups, Member
from services.global_sched.dispatch import Decision
from services.global_sched.estimate import CurvesOf, Stance, Work, stance
from services.global_sched.search import Search
from services.global_sched.view import GpuView
from shared.model import ModelSpec

GROUPS_PER_MEMBER, SPARE_GROUPS = 8, 1000  # with more, most are of states long past, and they begin anew


class _Held(NamedTuple):
    """A GPU as a pool has it: its groups, its members of them, and how many wait there."""

    view: GpuView
    groups: Groups
    members: list[Member]
    queued: int


class Pool:
    """The GPUs that serve one model.

    Args:
        is_silent: says whether a GPU has been silent for too long at a time.
        max_queued: an engine with so many waiting is full.
    """

    def __init__(
        self,
        spec: ModelSpec,
        curves_of: CurvesOf,
        is_silent: Callable[[GpuView, float], bool],
        max_queued: int,
    ) -> None:
        self._spec = spec
        self._curves_of = curves_of
        self._is_silent = is_silent
        self._max_queued = max_queued
        self._groups: dict[str, Groups] = {}  # by GPU type
        self._held: dict[str, _Held] = {}  # by GPU, the last that was put in at the end
        self.queued = 0

    def __len__(self) -> int:
        return len(self._held)

    # ---- state

    def put(self, view: GpuView) -> None:
        """Take in how a GPU that serves the model stands now."""
        self.remove(view.gpu)
        curves = self._curves_of(view.summary.gpu_type, self._spec.name)
        assert curves is not None and curves.lut.device.has_meter, "only GPUs of known energy have groups"
        groups = self._groups.get(curves.lut.device.name)
        if groups is None:
            groups = self._groups[curves.lut.device.name] = Groups(curves)
        members = self._made(view, groups)
        for member in members:
            groups.add(member)
        held = self._held[view.gpu] = _Held(view, groups, members, view.engines[self._spec.name].queued)
        self.queued += held.queued
        if len(groups) > GROUPS_PER_MEMBER * groups.held + SPARE_GROUPS:
            self._renew(groups)

    def remove(self, gpu: str) -> None:
        """Forget a GPU."""
        held = self._held.pop(gpu, None)
        if held is not None:
            for member in held.members:
                held.groups.remove(member)
            self.queued -= held.queued

    def _renew(self, old: Groups) -> None:
        """Let the members of all groups of one GPU type begin new ones."""
        new = self._groups[old.curves.lut.device.name] = Groups(old.curves)
        for gpu, held in self._held.items():
            if held.groups is old:
                for member in held.members:
                    member.group = new.group_of(member.present)
                    new.add(member)
                self._held[gpu] = held._replace(groups=new)

    def _made(self, view: GpuView, groups: Groups) -> list[Member]:
        """Return a GPU's members: one per SM share that the largest request could find free there."""
        model, made = self._spec.name, []
        largest_bytes = groups.curves.lut.request_bytes(self._spec.context_tokens)
        floor_bytes = -1
        for share_pct, (from_ms, most_bytes) in view.shares(model).items():
            if floor_bytes >= largest_bytes:
                break
            present = stance(view, model, share_pct, self._curves_of, boost=False)
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
        return stance(view, self._spec.name, share_pct, self._curves_of, boost=True)

    # ---- decisions

    def decide(
        self, work: Work, now_ms: float, skipped: Container[str], tie: float, told: bool = False
    ) -> Decision | None:
        """Return what the three phases choose among all GPUs but those `skipped`; None if there is none.

        With `told`, the decision says what was looked at.
        """
        model = self._spec.name

        def is_usable(member: Member) -> bool:
            view = member.view
            return (
                view.queued(model) < self._max_queued
                and not self._is_silent(view, now_ms)
                and view.gpu not in skipped
            )

        return Search(self.groups(), work, now_ms, is_usable).decide(tie, told)

    def is_heard(self, now_ms: float) -> bool:
        """Say whether any GPU is heard of; those that told something last are asked first."""
        return any(not self._is_silent(held.view, now_ms) for held in reversed(self._held.values()))

    def members(self, gpu: str) -> list[Member]:
        """Return a GPU's members, by the time from which their share is free."""
        return self._held[gpu].members

    def groups(self) -> list[Groups]:
        """Return the groups, one object per GPU type."""
        return list(self._groups.values())
