"""What the consolidator knows: models, GPUs by their summaries, and the instances that are to be."""

import math
from collections.abc import Collection, Iterable, Mapping

from services.consolidator.place import KvFloor, Room, usable_bytes
from services.consolidator.settings import ConsolidatorSettings
from shared.devices import DEVICES, Device
from shared.model import EngineSummary, GpuSummary, Instance, ModelSpec, Placement, is_outdated
from shared.silicon import load_ms, wake_ms
from shared.weights import HostCaches

DRAINING = "draining"  # state of a GPU that takes no new work


class Cluster:
    """Desired and actual state, and the questions that planning and ordering ask of both.

    `models` are registered; `removed` are not any more, but still loaded somewhere. `resting` are GPUs that
    consolidation has emptied. `prefill` are those that compute prompts, where decodes are apart. `parked` and
    `room_short` are as in `Placement`.
    """

    def __init__(self, settings: ConsolidatorSettings, models: Iterable[ModelSpec]) -> None:
        self._set = settings
        self._least_kv = KvFloor(settings.min_kv_bytes, settings.min_kv_tokens)
        self.models = {model.name: model for model in models}
        self.removed: dict[str, ModelSpec] = {}
        self.summaries: dict[str, GpuSummary] = {}
        self.drained: set[str] = set()
        self.resting: set[str] = set()
        self.prefill: set[str] = set()
        self.parked: set[str] = set()
        self.caches = HostCaches()
        self.room_short = False
        self._by_model: dict[str, list[Instance]] = {}
        self._by_gpu: dict[str, list[Instance]] = {}

    # ---- desired: the placement, and its instances

    def placement(self, version: int) -> Placement:
        """Return what is to be, as a placement of that version."""
        drained, prefill, parked = (tuple(sorted(s)) for s in (self.drained, self.prefill, self.parked))
        return Placement(version, self.instances(), drained, prefill, self.room_short, parked)

    def follow(self, placement: Placement) -> None:
        """Take what a placement says; whether room is short, each replica sees for itself."""
        self.replace(placement.instances)
        self.drained, self.prefill = set(placement.drained), set(placement.prefill)
        self.parked = set(placement.parked)

    def instances(self) -> tuple[Instance, ...]:
        """Return all instances, ordered by model and GPU."""
        return tuple(
            instance
            for name in sorted(self._by_model)
            for instance in sorted(self._by_model[name], key=lambda i: i.gpus)
        )

    def replace(self, instances: Iterable[Instance]) -> None:
        """Forget all instances and take these."""
        self._by_model.clear()
        self._by_gpu.clear()
        for instance in instances:
            self.add(instance)

    def add(self, instance: Instance) -> None:
        """Add an instance; its model is parked no more."""
        self.parked.discard(instance.model)
        self._by_model.setdefault(instance.model, []).append(instance)
        for gpu in instance.gpus:
            self._by_gpu.setdefault(gpu, []).append(instance)

    def remove(self, instance: Instance) -> None:
        """Remove an instance that is there."""
        lists = [(self._by_model, instance.model)] + [(self._by_gpu, gpu) for gpu in instance.gpus]
        for index, key in lists:
            index[key].remove(instance)
            if not index[key]:
                del index[key]

    def rearrange(self, on_gpu: Mapping[str, Iterable[str]]) -> None:
        """Give GPUs these models and no others, an instance each; the GPUs without any rest then."""
        kept = [instance for instance in self.instances() if not on_gpu.keys() & set(instance.gpus)]
        fresh = [Instance(model=model, gpus=(gpu,)) for gpu in on_gpu for model in sorted(on_gpu[gpu])]
        self.replace([*kept, *fresh])
        self.rest_empty()

    def of_model(self, model: str) -> list[Instance]:
        """Return a model's instances."""
        return list(self._by_model.get(model, ()))

    def on_gpu(self, gpu: str) -> list[Instance]:
        """Return the instances that use a GPU."""
        return list(self._by_gpu.get(gpu, ()))

    def placed_on(self, gpu: str) -> list[str]:
        """Return the models that are to be on a GPU, the longest placed first."""
        return [instance.model for instance in self._by_gpu.get(gpu, ())]

    def gpus(self) -> list[str]:
        """Return every GPU that is known or used by an instance, by name."""
        return sorted(self.summaries.keys() | self._by_gpu.keys())

    def working_gpus(self) -> list[str]:
        """Return the known GPUs that take work, by name."""
        return sorted(gpu for gpu in self.summaries if not self.is_closed(gpu))

    def is_closed(self, gpu: str) -> bool:
        """Say whether a GPU takes no work: it is drained, or says that it is about to leave."""
        summary = self.summaries.get(gpu)
        return gpu in self.drained or (summary is not None and summary.state == DRAINING)

    def rest_empty(self) -> None:
        """All working GPUs without an instance rest, and no others."""
        self.resting = {gpu for gpu in self.working_gpus() if gpu not in self._by_gpu}

    # ---- actual: engines

    def engine(self, gpu: str, model: str) -> EngineSummary | None:
        """Return a model's engine on a GPU as last heard of, or None."""
        summary = self.summaries.get(gpu)
        return next((e for e in summary.engines if e.model == model), None) if summary else None

    def healthy(self, model: str) -> list[str]:
        """Return the GPUs that are to have a model and have not failed to; one not heard of yet counts."""
        placed = [gpu for i in self._by_model.get(model, ()) for gpu in i.gpus if not self.is_closed(gpu)]
        engines = ((gpu, self.engine(gpu, model)) for gpu in placed)
        return [gpu for gpu, engine in engines if engine is None or engine.state != "failed"]

    def is_outdated(self, engine: EngineSummary) -> bool:
        """Say whether an engine serves another specification than the one registered now."""
        spec = self.models.get(engine.model)
        return spec is not None and is_outdated(engine, spec)

    def ready(self, model: str) -> list[tuple[str, EngineSummary]]:
        """Return the GPUs, each with its engine, that are to have a model and can serve it as it is."""
        engines = ((gpu, self.engine(gpu, model)) for gpu in self.healthy(model))
        return [(gpu, e) for gpu, e in engines if e and e.state == "ready" and not self.is_outdated(e)]

    def ready_beside(self, instance: Instance) -> bool:
        """Say whether another instance of the same model could serve it alone."""
        return any(gpu not in instance.gpus for gpu, _ in self.ready(instance.model))

    def is_coming(self, model: str) -> bool:
        """Say whether a model is being loaded on a GPU where it is to be, or has the room to."""
        for gpu in self.healthy(model):
            engine = self.engine(gpu, model)
            if engine is not None and engine.state == "loading":
                return True
            if engine is None and gpu in self.summaries:
                loaded = self.loaded_on(gpu)
                return self.switches(gpu) or self.need_bytes(gpu, model) <= self.free_bytes(gpu, loaded)
        return False

    # ---- how soon a model can run

    def near(self, now_ms: float, model: ModelSpec) -> dict[str, float]:
        """Return -1 for each GPU whose host has a model's weights in memory: a load there is the sooner.

        -2 where an engine of the model is asleep.
        """
        hosts = self.caches.hosts(now_ms, model)
        near = [gpu for gpu, summary in self.summaries.items() if summary.host in hosts] if hosts else ()
        return dict.fromkeys(near, -1.0) | dict.fromkeys(self._asleep(model), -2.0)

    def start_ms(self, now_ms: float, model: ModelSpec) -> dict[str, float]:
        """Return for each GPU the time until a model could run there: to wake it, and to load."""
        times = self.loads_ms(now_ms, self.summaries, [model])
        starts = {gpu: self.wake_ms(gpu) + loads[model.name] for gpu, loads in times.items()}
        for gpu in self._asleep(model):
            if device := DEVICES.get(self.summaries[gpu].gpu_type):
                starts[gpu] = load_ms(device, model.weight_bytes, "asleep")
        return starts

    def _asleep(self, model: ModelSpec) -> list[str]:
        """Return the GPUs on which an engine of a model is asleep."""
        return [gpu for gpu, summary in self.summaries.items() if model.name in summary.asleep]

    def wake_ms(self, gpu: str) -> float:
        """Return the time until a GPU can begin to load."""
        summary = self.summaries[gpu]
        device = DEVICES.get(summary.gpu_type)
        return wake_ms(device, summary.state) if device else math.inf  # a type unknown to this version

    def loads_ms(
        self, now_ms: float, gpus: Iterable[str], models: Collection[ModelSpec]
    ) -> dict[str, Mapping[str, float]]:
        """Return by GPU and model the time of a load, once the GPU is awake.

        GPUs of one host and type have one and the same mapping.
        """
        near: dict[str, set[str]] = {}  # by host, the models it has in memory
        for model in models:
            for host in self.caches.hosts(now_ms, model):
                near.setdefault(host, set()).add(model.name)
        found: dict[tuple[str, str], Mapping[str, float]] = {}
        by_type: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
        times: dict[str, Mapping[str, float]] = {}
        for gpu in gpus:
            host, gpu_type = self.summaries[gpu].host, self.summaries[gpu].gpu_type
            if gpu_type not in by_type:
                device = DEVICES.get(gpu_type)
                by_type[gpu_type] = (_loads_ms(device, models, "disk"), _loads_ms(device, models, "host"))
            if (host, gpu_type) not in found:
                from_disk, from_host = by_type[gpu_type]
                found[host, gpu_type] = from_disk | {name: from_host[name] for name in near.get(host, ())}
            times[gpu] = found[host, gpu_type]
        return times

    # ---- memory

    def switches(self, gpu: str) -> bool:
        """Say whether models take turns on a GPU: it can have all of them, whatever its memory."""
        summary = self.summaries.get(gpu)
        return summary is not None and summary.switches

    def need_bytes(self, gpu: str, model: str) -> int:
        """Return the bytes a model takes on a GPU; one never heard of counts as none.

        Its KV memory is the pool that an engine gets there, or the least that is to be found.
        """
        spec = self.models.get(model) or self.removed.get(model)
        return spec.weight_bytes + self.kv(gpu).of(spec) if spec else 0

    def kv(self, gpu: str) -> KvFloor:
        """Return the KV memory that a model takes on a GPU, or is at least to find."""
        pool_bytes = self.summaries[gpu].kv_pool_bytes
        return KvFloor(pool_bytes) if pool_bytes else self._least_kv

    def free_bytes(self, gpu: str, models: Iterable[str]) -> int:
        """Return what placement may still use of a GPU that holds `models`; negative if that is too much."""
        usable = usable_bytes(self.summaries[gpu].total_bytes, self._set.safety_margin)
        return usable - sum(self.need_bytes(gpu, model) for model in models)

    def loaded_on(self, gpu: str) -> set[str]:
        """Return the models that hold memory on a GPU now."""
        return {engine.model for engine in self.summaries[gpu].engines if engine.state != "failed"}

    def rooms(self, without: str = "") -> list[Room]:
        """Return the room on each working GPU without `without`. Models on their way out still fill it.

        One whose models take turns is no question of room: it has them all.
        """
        rooms = []
        for gpu in self.working_gpus():
            if self.switches(gpu):
                continue
            there = self.loaded_on(gpu).union(self.placed_on(gpu))
            if without not in there:
                free_bytes = self.free_bytes(gpu, sorted(there))
                rooms.append(Room(gpu, self.summaries[gpu].engine, free_bytes, self.kv(gpu)))
        return rooms


def _loads_ms(device: Device | None, models: Iterable[ModelSpec], source: str) -> dict[str, float]:
    """Return by model the time of a load; endless on a type of GPU that this version does not know."""
    return {m.name: load_ms(device, m.weight_bytes, source) if device else math.inf for m in models}
