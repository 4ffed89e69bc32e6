"""Which GPU a model goes to, by memory alone (3.5): worst fit, and what must leave where nothing fits.

Worst fit puts the largest model where most memory is left, so that what remains for KV stays balanced between
GPUs. It is a heuristic: it may leave a model out that a cleverer packing would have fitted.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shared.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of the memory that placement may use on a GPU, in bytes; negative: it is overfull."""

    gpu: str
    engine: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class IdleModel:
    """A loaded model without work: for how long, and the memory that unloading it gives back."""

    model: str
    idle_ms: float
    need_bytes: int


def usable_bytes(total_bytes: int, safety_margin: float) -> int:
    """Return the bytes of a GPU that placement may fill: M_eff of 3.5.2."""
    return int(total_bytes * (1.0 - safety_margin))


def need_bytes(model: ModelSpec, min_kv_bytes: int) -> int:
    """Return what a model takes on a GPU: its weights and the least KV memory it is to find."""
    return model.weight_bytes + min_kv_bytes


def place(models: Iterable[ModelSpec], rooms: Iterable[Room], min_kv_bytes: int) -> dict[str, str]:
    """Return the GPU of each model that fits, by worst-fit decreasing; the others are left out.

    Only GPUs of the model's engine kind count. Ties go to the first by name, so the result does not depend on
    the order of the arguments. Cost: models times GPUs.
    """
    free_bytes = {room.gpu: room.free_bytes for room in rooms}
    engine_of = {room.gpu: room.engine for room in rooms}
    chosen: dict[str, str] = {}
    for model in sorted(models, key=lambda m: (-m.weight_bytes, m.name)):
        fitting = [gpu for gpu, engine in engine_of.items() if engine == model.engine]
        gpu = min(fitting, key=lambda g: (-free_bytes[g], g), default=None)
        need = need_bytes(model, min_kv_bytes)
        if gpu is not None and free_bytes[gpu] >= need:
            chosen[model.name] = gpu
            free_bytes[gpu] -= need
    return chosen


def evict(
    need: int, rooms: Iterable[Room], idle: Mapping[str, Collection[IdleModel]]
) -> tuple[str, tuple[str, ...]] | None:
    """Return the GPU where unloading idle models gives `need` bytes, and those models; else None.

    On each GPU the longest idle leave first, no more than it takes. The best GPU is the one whose most
    recently used victim has been idle longest, then the one with fewer victims.
    """
    best: tuple[float, int, str, tuple[str, ...]] | None = None
    for room in rooms:
        free_bytes, victims, least_idle_ms = room.free_bytes, [], float("inf")
        for candidate in sorted(idle.get(room.gpu, ()), key=lambda c: (-c.idle_ms, c.model)):
            if free_bytes >= need:
                break
            free_bytes += candidate.need_bytes
            least_idle_ms = candidate.idle_ms
            victims.append(candidate.model)
        offer = (-least_idle_ms, len(victims), room.gpu, tuple(victims))
        if free_bytes >= need and (best is None or offer < best):
            best = offer
    return best and best[2:]
