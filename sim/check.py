"""What must hold in a world whatever goes wrong, checked as it runs and when it has come to rest."""

from typing import TYPE_CHECKING

from services.consolidator.core import ConsolidatorCore
from services.gateway.core import GatewayCore
from services.global_sched.core import GlobalSchedCore
from services.local_sched.moves import DESTINATION, holder
from services.local_sched.state import State
from services.local_sched.work import Stage
from services.migrator.core import MigratorCore
from shared import events as ev
from shared.model import Placement
from sim.nodes import GpuNode, Node

if TYPE_CHECKING:
    from sim.world import World

EVERY = 32  # events of one GPU between two looks that cost more
STOPPED_WITHIN_MS = 1_000.0  # as an `Abort` promises
ENERGY_PART = 1e-9  # of the meter's reading that its three uses may differ from it


class InvariantBroken(AssertionError):
    """Something that must never happen has happened; says how to see it again, and what came before."""

    def __init__(self, what: str, seed: int, replay: str, story: str) -> None:
        super().__init__(what, seed, replay, story)  # with these it also comes out of another process
        self.what = what
        self.seed = seed

    def __str__(self) -> str:
        what, seed, replay, story = self.args
        return f"{what}\nseed {seed}; again by: {replay}\nwhat came before:\n{story}"


class Checks:
    """The invariants of one world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._looks: dict[int, int] = {}
        self._decided_ms: dict[int, float] = {}
        self._strangers: dict[tuple[int, int, str], float] = {}
        self._placements: dict[tuple[int, int], Placement] = {}
        self._weights = {model.name: model.weight_bytes for model in world.scenario.models}

    def after(self, node: Node) -> None:
        """Look at a node that has just taken an event."""
        if isinstance(node.core, ConsolidatorCore):
            self._placement(node, node.core.placement)
        if not isinstance(node, GpuNode) or node.core is None:
            return
        state = node.local.state
        if state.ledger.free_bytes < 0:
            self._world.complain(
                f"{node.ident} has promised {-state.ledger.free_bytes} bytes too many", node.ident
            )
        if state.decided_ms != self._decided_ms.get(node.index):
            self._decided_ms[node.index] = state.decided_ms
            self._shares(node, state)
        looks = self._looks[node.index] = self._looks.get(node.index, 0) + 1
        if looks % EVERY == 0:
            self.look(node)

    def sent(self, node: Node, action: ev.Send) -> None:
        """Look at a message: a gateway that gives up on a GPU for want of tokens tells of a lost request."""
        message = action.message
        if not isinstance(message, ev.Abort) or message.reason != "stalled":
            return
        gpu = self._world.by_name[action.to]
        if not isinstance(gpu, GpuNode) or gpu.core is None:
            return
        state, request_id = gpu.local.state, message.request_id
        forgetful = state.outbox.limit < len(self._world.scenario.arrivals)
        entry = state.outbox.entries.get((request_id, message.attempt))
        if request_id not in state.works and entry is None and not forgetful:
            self._world.complain(f"{gpu.ident} was to serve {request_id}, and does not have it", request_id)

    def _placement(self, node: Node, placement: Placement) -> None:
        """No version goes back, and no GPU is to hold a model twice, or more weight than it has memory."""
        before = self._placements.get((node.index, node.life))
        if placement is before:
            return
        self._placements[node.index, node.life] = placement
        complain = self._world.complain
        if before is not None and placement.version < before.version:
            complain(f"{node.ident}: placement {placement.version} after {before.version}", node.ident)
        turns = self._world.scenario.settings.local.switching != "off"
        placed: dict[str, list[str]] = {}
        for instance in placement.instances:
            for gpu in instance.gpus:
                placed.setdefault(gpu, []).append(instance.model)
        for gpu, models in placed.items():
            weight_bytes = sum(self._weights.get(model, 0) for model in models)
            if len(set(models)) < len(models) or (weight_bytes > self._world.total_bytes and not turns):
                complain(f"{node.ident} places {models}, {weight_bytes} bytes, on {gpu}", node.ident, gpu)

    def _shares(self, node: GpuNode, state: State) -> None:
        running = [engine for engine in state.engines.values() if engine.running]
        sizes = state.device.sm_sizes_pct
        given = [engine.plan.sm_share_pct for engine in running if engine.plan]
        partitioned = len(sizes) > 1 and state.settings.shares != "all"
        if sum(given) > 100 and partitioned and len(running) * sizes[0] <= 100:
            self._world.complain(f"{node.ident} gives SM shares of {given} percent", node.ident)

    def look(self, node: GpuNode) -> None:
        """Compare a GPU's books with each other, and with what its engines hold."""
        state, complain = node.local.state, self._world.complain
        for name, pool in state.ledger.pools.items():
            if pool.held_blocks != sum(pool.holders.values()):
                complain(f"{node.ident} counts {pool.held_blocks} blocks of {name} as promised", node.ident)
            for holding in pool.holders:
                if holding.startswith("move:"):
                    transfer = state.moves.transfers.get(holding[5:])
                    known = transfer is not None and transfer.side == DESTINATION and not transfer.committed
                else:
                    known = holding in state.works and state.works[holding].request.model == name
                if not known:
                    complain(
                        f"{node.ident} keeps memory of {name} for {holding}, which is gone",
                        holding,
                        node.ident,
                    )
        for move_id, transfer in state.moves.transfers.items():
            promised = holder(move_id) in getattr(state.ledger.pools.get(transfer.model), "holders", {})
            open_here = transfer.side == DESTINATION and not transfer.committed
            if open_here and bool(transfer.credit_bytes) != promised:
                complain(f"{node.ident} has promised move {move_id} memory and does not keep it", move_id)
        self._works(node, state)
        self._engines(node, state)
        self._offload(node, state)
        self._energy(node)

    def _works(self, node: GpuNode, state: State) -> None:
        complain = self._world.complain
        for request_id, work in state.works.items():
            engine = state.engines.get(work.request.model)
            places = [request_id in state.queue, bool(engine and engine.running.get(work.run_id) is work)]
            places.append(work.stage is Stage.HELD)
            if sum(places) != 1:
                complain(f"{node.ident} has {request_id} as {work.stage} in {places}", request_id, node.ident)
            if places[1]:
                held = state.ledger.held_tokens(work.request.model, request_id)
                if held < work.context_tokens - 1:
                    complain(
                        f"{node.ident}: {request_id} has {work.context_tokens} tokens of {held} promised",
                        request_id,
                    )
        if len(state.queue) > len(state.works):
            complain(f"{node.ident} queues what it does not have", node.ident)

    def _engines(self, node: GpuNode, state: State) -> None:
        """No engine holds more for a run than its request was promised, nor more than there is.

        Where memory is too short to promise it ahead, steps not reported yet may have taken that much more.
        So may those that a scheduler has not heard of because it stood still, until it has taken all reports.
        """
        gpu, complain = node.gpu, self._world.complain
        catches_up = self._world.now_ms <= node.paused_until_ms
        assert gpu is not None
        if gpu.used_bytes > self._world.total_bytes:
            complain(f"{node.ident} uses {gpu.used_bytes} bytes", node.ident)
        for model, engine in gpu.engines.items():
            known = state.engines.get(model)
            for run_id, sequence in engine.sequences.items():
                work = known.running.get(run_id) if known else None
                if work is None:
                    self._stranger(node, run_id)
                    continue
                pool = state.ledger.pools[model]
                promised = pool.holders.get(work.request.request_id, 0)
                unheard_tokens = sequence.output_tokens - work.output_count if catches_up else 0
                ahead_tokens = max(state.settings.report_steps - 1, unheard_tokens)
                if sequence.blocks > promised - (-ahead_tokens // pool.block_tokens):
                    complain(
                        f"{node.ident}: run {run_id} holds {sequence.blocks} blocks of {promised} promised",
                        work.request.request_id,
                    )

    def _offload(self, node: GpuNode, state: State) -> None:
        """Host memory is taken for requests with KV there, within the bound, and no engine keeps more."""
        gpu, complain, pool = node.gpu, self._world.complain, state.offload
        assert gpu is not None
        if pool.taken_bytes > state.settings.offload_bytes:
            complain(f"{node.ident} takes {pool.taken_bytes} bytes of host memory for evicted requests")
        brought = [work.arrival for work in state.works.values() if work.arrival]
        wanted = {arrival.stage for arrival in brought if arrival.own_stage}
        if wanted != set(pool.stages):
            complain(f"{node.ident} keeps KV {pool.stages} in host memory, and wants {sorted(wanted)}")
        for engine in gpu.engines.values():
            for stage, tokens in engine.copies.kept.items():
                if stage not in wanted:
                    self._stranger(node, stage, "keeps KV of")
                elif tokens > pool.blocks_of(stage) * state.device.block_tokens:
                    complain(f"{node.ident}: {tokens} tokens of {stage} are kept, which has less room", stage)

    def _stranger(self, node: GpuNode, run_id: str, does: str = "runs") -> None:
        """A run that the scheduler does not know is one that it has just ordered to be stopped."""
        now_ms = self._world.now_ms
        since_ms = self._strangers.setdefault((node.index, node.life, f"{does} {run_id}"), now_ms)
        if now_ms - since_ms > STOPPED_WITHIN_MS and now_ms > node.paused_until_ms + STOPPED_WITHIN_MS:
            self._world.complain(f"{node.ident}: its engine still {does} {run_id}", run_id.partition("~")[0])

    def _energy(self, node: GpuNode) -> None:
        gpu = node.gpu
        assert gpu is not None
        meter_j = gpu.energy_j
        for name, parts in (("uses", node.uses_j), ("parts", node.parts_j)):
            total_j = sum(parts)
            past_j = sum(node.past_uses_j)
            if abs(total_j - past_j - meter_j) > ENERGY_PART * max(1.0, meter_j):
                self._world.complain(
                    f"{node.ident}: energy by {name} is {total_j - past_j} J, its meter says {meter_j}",
                    node.ident,
                )
            if min(parts) < -ENERGY_PART * max(1.0, meter_j):
                self._world.complain(f"{node.ident}: negative energy in {name}: {parts}", node.ident)

    # ---- at rest

    def unrest(self) -> list[tuple[str, str]]:
        """Return (what, about whom) of all that is outstanding; empty once the world is at rest."""
        found: list[tuple[str, str]] = []
        for record in self._world.clients.records.values():
            if not record.outcome:
                found.append((f"{record.request_id} has no end", record.request_id))
        for node in self._world.nodes:
            core = node.core
            if isinstance(core, GatewayCore) and core.inflight:
                found.append((f"{node.ident} still has {core.inflight} requests", node.ident))
            elif isinstance(core, MigratorCore) and core.moving:
                found.append((f"{node.ident} still has moves under way", node.ident))
            elif isinstance(core, GlobalSchedCore) and len(core._waiting):
                found.append((f"{node.ident} still has requests waiting", core._waiting.models()[0]))
            elif isinstance(node, GpuNode) and core is not None:
                found += self._gpu_unrest(node)
        return found

    def _gpu_unrest(self, node: GpuNode) -> list[tuple[str, str]]:
        state, gpu, name = node.local.state, node.gpu, node.ident
        assert gpu is not None
        found: list[tuple[str, str]] = []
        if state.works:
            first = next(iter(state.works))
            found.append((f"{name} still has work: {list(state.works)[:5]}", first))
        if state.outbox.pending:
            first = next(k[0] for k, e in state.outbox.entries.items() if e.tokens or e.end)
            found.append((f"{name} still has output of {first} that nobody acknowledges", first))
        if any(not t.committed for t in state.moves.transfers.values()):
            found.append((f"{name} still takes part in moves {list(state.moves.transfers)}", name))
        if state.offload.stages:
            found.append((f"{name} still keeps KV of {state.offload.stages[:5]} in host memory", name))
        for model, pool in state.ledger.pools.items():
            if pool.holders:
                found.append((f"{name} still promises memory of {model} to {list(pool.holders)[:5]}", model))
        for model, engine in gpu.engines.items():
            if engine.sequences:
                first = next(iter(engine.sequences))
                found.append((f"{name}: the engine of {model} still runs {first}", first.partition("~")[0]))
            if engine.copies.kept or engine.copies.waiting:
                found.append((f"{name}: the engine of {model} still keeps or copies KV", name))
        loading = any(e.state in ("loading", "unloading") for e in state.engines.values())
        booked = state.ledger.capacity_bytes - state.ledger.free_bytes
        if not loading and not found and gpu.used_bytes != booked:
            found.append((f"{name} has booked {booked} bytes, its engines use {gpu.used_bytes}", name))
        return found
