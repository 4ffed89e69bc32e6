"""GPUs that are alike share one answer: groups of them, with their energies and bounds side by side (3.3).

What a request takes (Eq. 2) depends on a GPU only by its clock, the SM share and the batch that the request
would run in. GPUs equal in these form a group, and there are a few thousand groups however many the GPUs are.
All energies of one request are two products of a vector with a matrix that never changes. Beside them stand
bounds of what a group's members have at best: memory, room for context, time from which the engine is free. A
group that cannot serve a request even by these is not looked into, and no member need be.

Bounds only widen as members come; once a look into a group was in vain, they are made exact again.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.global_sched.curves import Curve, Curves
from services.global_sched.estimate import Stance, Work
from services.global_sched.view import GpuView

SLACK = 0.01
"""In ms and tokens: bounds are made in another order of arithmetic than the estimates that they bound."""

ROUNDING = 1.0 + 2e-6
"""Energies of groups may be off by this factor; those of members are exact."""

PRESENT, BOOSTED = 0, 1  # the clock that bounds hold for: the GPU's own, or the highest

# Columns of bounds, all such that more is better. From when an engine is free is known for requests that have
# at least so much time left; and up to when any but a short prefill would make another late, for those that
# have at most so much (Table 2 gives them 250, 400 and 2000 ms).
BYTES, TOKENS, SLOWED = 0, 1, 2
LEFT_AT_LEAST_MS = (200.0, 350.0, 1700.0)
LEFT_AT_MOST_MS = (260.0, 410.0)
FREE_FROM, CLOSED_UNTIL, CLOSED_FOR = 3, 6, 8
COLUMNS = 10
NOTHING = np.full(COLUMNS, -np.inf)
UNKNOWN = np.full(COLUMNS, np.inf)
UNKNOWN[SLOWED] = -1.0


@dataclass(slots=True, eq=False)
class Member:
    """A GPU in one group: as it stands for a model from the time on at which a certain SM share is free.

    Args:
        free_bytes: memory free now, when it was put in order; it may have become less.
        from_ms: time from which the share is free (absolute).
        floor_bytes: memory free before that: a smaller request does not wait for it.
        most_bytes: most memory ever free with this share.
        present: how it stands at its clock.
        boost: makes how it stands at the highest clock; asked when it is first wanted.
    """

    view: GpuView
    group: int
    free_bytes: int
    from_ms: float
    floor_bytes: int
    most_bytes: int
    present: Stance
    boost: Callable[[GpuView, int], Stance]
    bounds: NDArray[np.float64] = field(init=False)
    boosted_bounds: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        self.bounds = self._bounds(self.present)

    def stance(self, clock: int) -> Stance:
        """Return how it stands at `PRESENT` or `BOOSTED`."""
        return self.present if clock == PRESENT else self.boost(self.view, self.present.share_pct)

    def bounds_at(self, clock: int) -> NDArray[np.float64]:
        """Return what it has at best there."""
        if clock == PRESENT:
            return self.bounds
        if self.boosted_bounds is None:
            self.boosted_bounds = self._bounds(self.stance(BOOSTED))
        return self.boosted_bounds

    def _bounds(self, at: Stance) -> NDArray[np.float64]:
        room_tokens = at.room_tokens
        if room_tokens <= 0.0 or not at.keeps_beside:
            return NOTHING
        free_from = [SLACK - max(self.from_ms, at.busy_until_ms(left_ms)) for left_ms in LEFT_AT_LEAST_MS]
        (until_s, for_s), (until_m, for_m) = [at.closed(left_ms) for left_ms in LEFT_AT_MOST_MS]
        return np.array(
            (
                self.most_bytes,
                room_tokens + SLACK,
                -1.0 / at.compute,
                *free_from,
                -until_s,
                -until_m,
                for_s,
                for_m,
            )
        )

    @property
    def place(self) -> tuple[int, str]:
        """Its place in its group: the most free memory first (3.3), then by id."""
        return -self.free_bytes, self.view.gpu


class Asked:
    """A request as the groups of one table see it.

    Args:
        cell, mean_cell: where its input and its mean context lie on the table's axes.
        free_from, closed: columns of the bounds that hold for it; None if none do.
    """

    def __init__(self, curves: Curves, work: Work, now_ms: float) -> None:
        self.work = work
        self.now_ms = now_ms
        self.kv_bytes = curves.lut.request_bytes(work.input_tokens + work.output_tokens)
        self.mean_tokens = work.mean_tokens
        self.cell = curves.inputs.locate(work.input_tokens)
        self.mean_cell = curves.contexts.locate(work.mean_tokens)
        left_ms = work.left_ms
        self.due_ms = now_ms + left_ms + SLACK
        late = left_ms <= 0.0  # then it comes after all that is not
        known = len(LEFT_AT_LEAST_MS) if late else bisect_right(LEFT_AT_LEAST_MS, left_ms)
        self.free_from = FREE_FROM + known - 1 if known else None
        at_most = bisect_left(LEFT_AT_MOST_MS, left_ms)
        self.closed = at_most if at_most < len(LEFT_AT_MOST_MS) and not late else None


class Groups:
    """All groups of one model on GPUs of one type."""

    def __init__(self, curves: Curves) -> None:
        self.curves = curves
        self.members: list[list[tuple[int, str, Member]]] = []
        self.held = 0  # members of all groups
        self._ids: dict[tuple[int, int, int], int] = {}
        self._prefill: list[tuple[Curve, Curve]] = []
        inputs, contexts = len(curves.inputs.points), len(curves.contexts.points)
        self._prefill_ms = np.zeros((2, inputs, 2, 0))
        # single precision: half of the memory to go through, and no decision rests on it (see ROUNDING)
        self._prefill_j = np.zeros((inputs, 3, 0), np.float32)
        self._token_j = np.zeros((contexts, 3, 0), np.float32)
        self._bounds = np.zeros((2, 0, COLUMNS))
        self._most_free: list[float] = []
        self._absent_j = np.zeros(0, np.float32)  # infinite for a group without members
        self._powers = np.ones(3, np.float32)  # scratch, as long as a request is asked for

    def __len__(self) -> int:
        return len(self.members)

    # ---- members

    def group_of(self, at: Stance) -> int:
        """Return the group of GPUs that stand so; a new one if there is none yet."""
        key = (at.clock_mhz, at.share_pct, at.batch)
        found = self._ids.get(key)
        if found is not None:
            return found
        group = self._ids[key] = len(self.members)
        if group == len(self._absent_j):
            self._grow()
        f_max_mhz = max(at.clock_mhz, self.curves.lut.device.f_max_mhz)
        prefill = (at.prefill, self.curves.prefill(f_max_mhz, at.share_pct))
        self.members.append([])
        self._most_free.append(0.0)
        self._prefill.append(prefill)
        for clock in (PRESENT, BOOSTED):
            self._prefill_ms[clock, :, :, group] = np.array((prefill[clock].ms, prefill[clock].ms_slope)).T
        self._prefill_j[:, :, group] = at.prefill.energy_parts()
        self._token_j[:, :, group] = at.decode.energy_parts()
        return group

    def _grow(self) -> None:
        more = max(64, len(self._absent_j) // 4)  # a request reads these, too, where it reads all groups

        def wider(array: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([array, np.zeros((*array.shape[:-1], more), array.dtype)], axis=-1)

        self._prefill_ms, self._prefill_j = wider(self._prefill_ms), wider(self._prefill_j)
        self._token_j, self._absent_j = wider(self._token_j), wider(self._absent_j)
        none = np.full((2, more, COLUMNS), -np.inf)
        self._bounds = np.concatenate([self._bounds, none], axis=1)

    def add(self, member: Member) -> None:
        """Put a GPU into its group. What it has at its highest clock is worked out when it is asked for."""
        group = member.group
        insort(self.members[group], (*member.place, member))
        self.held += 1
        self._absent_j[group] = 0.0
        if member.free_bytes > self._most_free[group]:
            self._most_free[group] = member.free_bytes
        bounds = self._bounds[PRESENT, group]
        np.maximum(bounds, member.bounds, out=bounds)
        self._bounds[BOOSTED, group] = UNKNOWN

    def remove(self, member: Member) -> None:
        """Take a GPU out of its group, whose bounds stay as they are as long as it has others."""
        members = self.members[member.group]
        del members[bisect_left(members, member.place)]
        self.held -= 1
        self._most_free[member.group] = -members[0][0] if members else 0.0
        if not members:
            self._absent_j[member.group] = np.inf
            self._bounds[:, member.group] = NOTHING

    def member_at(self, group: int, place: int) -> Member | None:
        """Return the member with the most free memory, the next, and so on; None after the last.

        What has less by now is put right on the way.
        """
        members = self.members[group]
        while place < len(members):
            member = members[place][2]
            free_bytes = member.view.free_bytes
            if free_bytes >= member.free_bytes:
                return member
            del members[place]
            member.free_bytes = free_bytes
            insort(members, (*member.place, member))
            self._most_free[group] = -members[0][0]
        return None

    def tighten(self, group: int, clock: int) -> None:
        """Make a group's bounds exact."""
        each = [member.bounds_at(clock) for _, _, member in self.members[group]]
        self._bounds[clock, group] = np.maximum.reduce(each) if each else NOTHING

    # ---- a request

    def energies_j(self, asked: Asked) -> NDArray[np.float32]:
        """Return what a request takes in each group, at the members' present clock, within `ROUNDING`."""
        cost_j = self._products(1.0, asked.cell, self._prefill_j)
        cost_j += self._products(asked.work.output_tokens - 1.0, asked.mean_cell, self._token_j)
        cost_j += self._absent_j
        return cost_j[: len(self)]

    def _products(
        self, times: float, at: tuple[int, float], parts: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return so many times the energy at a place of an axis, by group, those yet to come among them."""
        (cell, part), powers = at, self._powers
        powers[0], powers[1], powers[2] = times, times * part, times * part * part
        # of all that there is room for: only what lies in one piece is not copied first
        product: NDArray[np.float32] = powers.dot(parts[cell])
        return product

    def may_serve(self, asked: Asked, group: int, clock: int) -> bool:
        """Say whether one of a group's members may serve a request within the objectives."""
        bounds = self._bounds[clock, group].tolist()
        if bounds[BYTES] < asked.kv_bytes or bounds[TOKENS] < asked.mean_tokens:
            return False
        took_ms = self._prefill[group][clock].ms_at(*asked.cell) * -bounds[SLOWED]
        free_ms = asked.now_ms if asked.free_from is None else max(asked.now_ms, -bounds[asked.free_from])
        if free_ms + took_ms > asked.due_ms:
            return False
        if asked.closed is None or -bounds[CLOSED_UNTIL + asked.closed] <= asked.now_ms:
            return True
        return bool(took_ms <= bounds[CLOSED_FOR + asked.closed] + SLACK)

    def that_may_serve(self, asked: Asked, clock: int) -> NDArray[np.bool_]:
        """Say the same of all groups."""
        bounds = self._bounds[clock, : len(self)]
        may = self.first_tokens_ms(asked, clock) <= asked.due_ms
        may &= (bounds[:, BYTES] >= asked.kv_bytes) & (bounds[:, TOKENS] >= asked.mean_tokens)
        if asked.closed is not None:
            is_open = bounds[:, CLOSED_UNTIL + asked.closed] >= -asked.now_ms
            took_ms = self._took_ms(asked, clock)
            may &= is_open | (took_ms <= bounds[:, CLOSED_FOR + asked.closed] + SLACK)
        return np.asarray(may)

    def first_tokens_ms(self, asked: Asked, clock: int) -> NDArray[np.float64]:
        """Return the earliest time (absolute) of a first token, by group; inf where there is none."""
        free_ms: NDArray[np.float64] | float = asked.now_ms
        if asked.free_from is not None:
            free_ms = np.maximum(-self._bounds[clock, : len(self), asked.free_from], asked.now_ms)
        return np.asarray(self._took_ms(asked, clock) + free_ms)

    def _took_ms(self, asked: Asked, clock: int) -> NDArray[np.float64]:
        cell, part = asked.cell
        took_ms = np.dot((1.0, part), self._prefill_ms[clock, cell, :, : len(self)])
        return np.asarray(took_ms * -self._bounds[clock, : len(self), SLOWED])

    def by_memory(self, groups: NDArray[np.bool_]) -> list[tuple[float, int]]:
        """Return (most free memory of a member, group) of each that is marked, the most first."""
        free = self._most_free
        order = sorted([(-free[group], group) for group in groups.nonzero()[0].tolist()])
        return [(-less, group) for less, group in order]
