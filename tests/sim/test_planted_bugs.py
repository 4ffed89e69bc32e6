"""A bug planted in each core, to see that the soak would have found it.

=============  =====================================================================================
gateway        takes tokens that come again for new ones
gateway        forgets to end a request whose GPU reports its end
global_sched   keeps a request in its waiting room that it has sent to a GPU
local_sched    does not give back the memory of requests that end
local_sched    forgets the token at which it evicts a request
local_sched    stops nothing in its engines
local_sched    keeps host memory for the KV of requests that have it back
local_sched    does not tell an engine to drop KV that nobody comes back for
consolidator   places models without asking whether they fit
consolidator   goes on with an old placement version when it begins to lead
migrator       never ends a move that it gives up
migrator       takes a request for started that the destination only holds
=============  =====================================================================================
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from services.consolidator import core as consolidator
from services.consolidator import upkeep
from services.gateway.core import GatewayCore
from services.global_sched.asks import WaitingRoom
from services.local_sched import ends, evict
from services.local_sched.emulated_kv import Copies
from services.local_sched.ledger import Ledger
from services.migrator.core import MigratorCore
from shared import events as ev
from shared.slabs import SlabPool
from sim.check import InvariantBroken
from sim.soak import play

MOST_SEEDS = 120  # as the suite plays
Plant = Callable[[pytest.MonkeyPatch], None]


def gateway_takes_repeats(patch: pytest.MonkeyPatch) -> None:
    right = GatewayCore._take_delta

    def wrong(self: GatewayCore, owned: Any, delta: ev.TokenDelta) -> None:
        have = len(owned.output)
        right(self, owned, replace(delta, first_seq=have) if delta.first_seq < have else delta)

    patch.setattr(GatewayCore, "_take_delta", wrong)


def gateway_forgets_ends(patch: pytest.MonkeyPatch) -> None:
    right = GatewayCore._take_delta

    def wrong(self: GatewayCore, owned: Any, delta: ev.TokenDelta) -> None:
        late = delta.end is not None and owned.attempt > 1
        right(self, owned, replace(delta, end=None) if late else delta)

    patch.setattr(GatewayCore, "_take_delta", wrong)


def scheduler_keeps_what_it_sent(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: WaitingRoom, ask: Any) -> None:
        ask.since_ms = None

    patch.setattr(WaitingRoom, "leave", wrong)


def local_keeps_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "release", lambda self, model, holder: None)


def local_forgets_a_token(patch: pytest.MonkeyPatch) -> None:
    right = ends.with_output

    def wrong(work: Any) -> Any:
        request = right(work)
        return replace(request, output_tokens=request.output_tokens[:-1])

    patch.setattr(evict, "with_output", wrong)


def local_stops_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ends, "_stop", lambda state, work: [])


def local_keeps_host_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlabPool, "free", lambda self, name: None)


def local_drops_no_kv(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "free", lambda self, stage: None)


def consolidator_overfills(patch: pytest.MonkeyPatch) -> None:
    def wrong(models: Any, rooms: Any) -> dict[str, str]:
        first = next(iter(rooms), None)
        return {model.name: first.gpu for model in models} if first else {}

    patch.setattr(upkeep, "place", wrong)


def consolidator_goes_back(patch: pytest.MonkeyPatch) -> None:
    right = consolidator.ConsolidatorCore._publish

    def wrong(self: Any) -> list[ev.Action]:
        version = self._placement.version
        actions = right(self)
        if self._placement.version != version:
            self._placement = replace(self._placement, version=version - 1)
        return actions

    patch.setattr(consolidator.ConsolidatorCore, "_publish", wrong)


def migrator_never_ends(patch: pytest.MonkeyPatch) -> None:
    right = MigratorCore._abort

    def wrong(self: Any, now_ms: float, run: Any, reason: str) -> list[ev.Action]:
        actions = right(self, now_ms, run, reason)
        self._runs[run.step_id] = run
        return actions

    patch.setattr(MigratorCore, "_abort", wrong)


def migrator_commits_too_soon(patch: pytest.MonkeyPatch) -> None:
    right = MigratorCore.step

    def wrong(self: Any, now_ms: float, event: Any) -> list[ev.Action]:
        actions = right(self, now_ms, event)
        if isinstance(event, ev.Adopted) and not event.started:
            return right(self, now_ms, replace(event, started=True))  # and never says so to the destination
        return actions

    patch.setattr(MigratorCore, "step", wrong)


PLANTS: dict[Plant, int] = {  # and a seed that was seen to catch it, which is tried first
    gateway_takes_repeats: 4,
    gateway_forgets_ends: 1,
    scheduler_keeps_what_it_sent: 0,
    local_keeps_memory: 0,
    local_forgets_a_token: 1,
    local_stops_nothing: 4,
    local_keeps_host_memory: 0,
    local_drops_no_kv: 73,
    consolidator_overfills: 2,
    consolidator_goes_back: 0,
    migrator_never_ends: 61,
    migrator_commits_too_soon: 22,
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_some_seed_catches_it(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(InvariantBroken):
        for seed in (PLANTS[plant], *range(MOST_SEEDS)):
            play(seed)
