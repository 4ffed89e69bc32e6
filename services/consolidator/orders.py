"""The orders that turn what is into what is to be: load, unload, move (3.5, F).

Each follows from a difference between placement and summaries and is repeated while the difference lasts, so
a lost message or a restarted GPU needs no handling of its own.
"""

from dataclasses import dataclass

from services.consolidator.cluster import Cluster
from services.consolidator.settings import ConsolidatorSettings
from shared import events as ev
from shared.model import EngineSummary, GpuSummary


@dataclass(slots=True)
class _Sent:
    """A load: when it was ordered last, and how often again because what was loaded had failed."""

    sent_ms: float
    failed: int


@dataclass(slots=True)
class _MoveUnderWay:
    """A move of a model's requests off a GPU; no other before `until_ms`."""

    move_id: str
    until_ms: float


def is_busy(engine: EngineSummary) -> bool:
    """Say whether anything runs or waits on an engine."""
    return engine.running > 0 or engine.queued > 0


class Orders:
    """What has been ordered of the GPUs and migrators, and what is to be ordered next.

    Args:
        prefix: start of every move id; no other run of any consolidator may have it.
    """

    def __init__(self, settings: ConsolidatorSettings, cluster: Cluster, prefix: str) -> None:
        self._set = settings
        self._cluster = cluster
        self._prefix = prefix
        self._loads: dict[tuple[str, str], _Sent] = {}
        self._unload_ms: dict[tuple[str, str], float] = {}
        self._moves: dict[tuple[str, str], _MoveUnderWay] = {}
        self._move_count = 0

    def for_gpu(self, now_ms: float, gpu: str, version: int) -> list[ev.Action]:
        """Return the orders due for one GPU, under a placement version. Cost: its engines and models."""
        summary = self._cluster.summaries.get(gpu)
        if summary is None:
            return []
        actions = self._load_missing(now_ms, summary, version)
        placed = self._cluster.placed_on(gpu)
        for engine in summary.engines:
            outdated = engine.state != "failed" and self._cluster.is_outdated(engine)
            if engine.model not in placed or outdated:
                actions += self._clear(now_ms, summary, engine, version)
        return actions

    def forget(self, gpu: str) -> None:
        """A GPU is gone or has restarted: nothing ordered of it before counts."""
        for table in (self._loads, self._unload_ms, self._moves):
            for key in [key for key in table if key[0] == gpu]:
                del table[key]

    def move_ended(self, now_ms: float, move_id: str) -> None:
        """A migrator is done with a move; the next one off the same engine comes after a pause."""
        for move in self._moves.values():
            if move.move_id == move_id:
                move.until_ms = now_ms + self._set.order_retry_ms

    def _load_missing(self, now_ms: float, summary: GpuSummary, version: int) -> list[ev.Action]:
        """Order what is placed on a GPU, is not loaded there, and fits beside what still is."""
        engines = {engine.model: engine for engine in summary.engines}
        missing = []
        for model in self._cluster.placed_on(summary.gpu):
            engine = engines.get(model)
            if engine and engine.state == "ready":
                self._has_lasted(now_ms, summary.gpu, model)
            if engine is None or engine.state == "failed":
                missing.append(model)
        if not missing:
            return []
        free_bytes = self._cluster.free_bytes(summary.gpu, self._cluster.loaded_on(summary.gpu))
        actions: list[ev.Action] = []
        for model in missing:
            engine, key = engines.get(model), (summary.gpu, model)
            need_bytes = self._cluster.need_bytes(summary.gpu, model)
            if need_bytes > free_bytes and not summary.switches:
                continue
            free_bytes -= need_bytes
            sent = self._loads.get(key)
            if sent is None or now_ms - sent.sent_ms >= self._load_wait_ms(sent, engine is not None):
                failed = sent.failed if sent else 0
                if engine is not None:
                    failed += 1
                    actions.append(ev.Count(name="engine_restarts", labels={"model": model}))
                self._loads[key] = _Sent(now_ms, failed)
                order = ev.Load(model=self._cluster.models[model], placement_version=version)
                actions += [ev.Send(to=summary.gpu, message=order), ev.Count(name="loads")]
        return actions

    def _load_wait_ms(self, sent: _Sent, failed: bool) -> float:
        """Time until a load is ordered again: soon if it may be lost, ever later if it fails."""
        if not failed:
            return self._set.order_retry_ms
        return min(self._set.load_backoff_ms * 2.0 ** min(sent.failed, 30), self._set.load_backoff_max_ms)

    def _has_lasted(self, now_ms: float, gpu: str, model: str) -> None:
        """Forget how often an engine has failed once it has lasted for as long as the longest back-off."""
        sent = self._loads.get((gpu, model))
        if sent is not None and now_ms - sent.sent_ms >= self._set.load_backoff_max_ms:
            del self._loads[gpu, model]

    def _clear(
        self, now_ms: float, summary: GpuSummary, engine: EngineSummary, version: int
    ) -> list[ev.Action]:
        """Get an engine off a GPU it has no place on: move what waits or runs there, unload it once idle.

        What waits for an outdated engine was meant for that: it is served there.
        """
        key = (summary.gpu, engine.model)
        removed, outdated = engine.model in self._cluster.removed, self._cluster.is_outdated(engine)
        if is_busy(engine) and not removed and not outdated:
            return self._move_away(now_ms, summary, engine.model)
        known = removed or engine.model in self._cluster.models
        idle = not is_busy(engine) and (known or engine.idle_ms >= self._set.unknown_idle_ms)
        # One that is to serve elsewhere serves here until it can, unless this is the room it waits for.
        needed = not outdated and self._cluster.is_coming(engine.model)
        # A failed engine is unloaded as well: it holds no memory, but shows until it is.
        leaves = engine.state == "failed" or (engine.state == "ready" and (removed or (idle and not needed)))
        sent_ms = self._unload_ms.get(key, float("-inf"))
        if not leaves or now_ms - sent_ms < self._set.order_retry_ms:
            return []
        self._unload_ms[key] = now_ms
        if_idle_ms = 0.0 if removed or outdated else self._unless_used_ms(engine)
        order = ev.Unload(model=engine.model, placement_version=version, if_idle_ms=if_idle_ms)
        return [ev.Send(to=summary.gpu, message=order), ev.Count(name="unloads")]

    def _unless_used_ms(self, engine: EngineSummary) -> float:
        """How idle an engine must still be when the order arrives: as idle as seen, or its keep-alive."""
        spec = self._cluster.models.get(engine.model)
        keep_alive_ms = spec.keep_alive_ms if spec else None
        return engine.idle_ms if keep_alive_ms is None else min(engine.idle_ms, keep_alive_ms)

    def _move_away(self, now_ms: float, summary: GpuSummary, model: str) -> list[ev.Action]:
        """Have a model's requests moved (F) to its ready instance with the most free KV memory.

        Of those that run, the source lets only those go that gain by it.
        """
        key = (summary.gpu, model)
        ready = [(-engine.free_kv_bytes, gpu) for gpu, engine in self._cluster.ready(model)]
        if not ready or (key in self._moves and now_ms < self._moves[key].until_ms):
            return []
        self._move_count += 1
        destination = min(ready)[1]
        host = self._cluster.summaries[destination].host
        move = ev.Move(
            move_id=f"{self._prefix}.{self._move_count}",
            request_id="**",
            model=model,
            source=summary.gpu,
            destination=destination,
            destination_host="" if host == summary.host else host,
        )
        self._moves[key] = _MoveUnderWay(move.move_id, now_ms + self._set.move_timeout_ms)
        return [ev.Send(to=summary.host, message=move), ev.Count(name="moves")]
