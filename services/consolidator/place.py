"""Which GPU a model goes to, by memory alone (3.5): worst fit, and what must leave where nothing fits.

Worst fit puts the largest model where most memory is left, so that what remains for KV stays balanced between
GPUs. It is a heuristic: it may leave a model out that a cleverer packing would have fitted.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from shared.model import ModelSpec


@dataclass(frozen=True, slots=True)
class KvFloor:
    """KV memory for a model on a GPU: so many bytes, and no less than so many of its tokens take.

    A token of one model may take thirty times the memory of one of another; what is balanced by bytes alone
    leaves the models with much KV without room for requests.
    """

    n_bytes: int
    tokens: int = 0

    def of(self, model: ModelSpec) -> int:
        """Return it for a model, in bytes."""
        return max(self.n_bytes, self.tokens * model.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of the memory that placement may use on a GPU, in bytes; negative: it is overfull.

    Args:
        kv: the KV memory that each model there takes, or is at least to find.
    """

    gpu: str
    engine: str
    free_bytes: int
    kv: KvFloor

    def need_bytes(self, model: ModelSpec) -> int:
        """Return what a model takes there: its weights and its KV memory."""
        return model.weight_bytes + self.kv.of(model)


@dataclass(frozen=True, slots=True)
class IdleModel:
    """A loaded model without work.

    Args:
        idle_ms: for how long.
        need_bytes: the memory that unloading it gives back.
        rate_per_s: how often it is asked for, as far as that is known: so many requests a second would find
            it gone.
    """

    model: str
    idle_ms: float
    need_bytes: int
    rate_per_s: float = 0.0


def usable_bytes(total_bytes: int, safety_margin: float) -> int:
    """Return the bytes of a GPU that placement may fill: M_eff of 3.5.2."""
    return int(total_bytes * (1.0 - safety_margin))


Order = Callable[[ModelSpec], Mapping[str, float]]
"""By model, which GPUs come first, whatever their room: those with the least number; unnamed ones have 0."""


def place(
    models: Iterable[ModelSpec], rooms: Iterable[Room], order: Order = lambda model: {}
) -> dict[str, str]:
    """Return the GPU of each model that fits, by worst-fit decreasing; the others are left out.

    Only GPUs of the model's engine kind count. Ties go to the first by name, so the result does not depend on
    the order of the arguments. Cost: models times GPUs.
    """
    room_of = {room.gpu: room for room in rooms}
    free_bytes = {gpu: room.free_bytes for gpu, room in room_of.items()}
    chosen: dict[str, str] = {}
    floor = max((room.kv for room in room_of.values()), key=lambda kv: kv.tokens, default=KvFloor(0))
    for model in sorted(models, key=lambda m: (-m.weight_bytes - floor.of(m), m.name)):
        left_bytes = {
            gpu: free_bytes[gpu] - room.need_bytes(model)
            for gpu, room in room_of.items()
            if room.engine == model.engine
        }
        fits = [gpu for gpu, bytes_left in left_bytes.items() if bytes_left >= 0]
        first = order(model)
        gpu = min(fits, key=lambda g: (first.get(g, 0.0), -left_bytes[g], g), default=None)
        if gpu is not None:
            chosen[model.name] = gpu
            free_bytes[gpu] = left_bytes[gpu]
    return chosen


def evict(
    model: ModelSpec,
    rooms: Iterable[Room],
    idle: Mapping[str, Collection[IdleModel]],
    order: Order = lambda model: {},
) -> tuple[str, tuple[str, ...]] | None:
    """Return the GPU where unloading idle models makes room for `model`, and those idle models; else None.

    Where more models are in use than fit, whatever is unloaded will be asked for again; so the victims are
    those by which fewest requests a second are missed, which are few, large and rarely used models. Of equal
    ones the longest idle leave first, and the best GPU is the first by `order`, then the one whose most
    recently used victim has been idle longest, then the one with fewer victims.
    """
    best: tuple[float, float, float, int, str, tuple[str, ...]] | None = None
    first = order(model)
    for room in rooms:
        victims = _victims(room.need_bytes(model) - room.free_bytes, idle.get(room.gpu, ()))
        if victims is None:
            continue
        missed_per_s = sum(victim.rate_per_s for victim in victims)
        least_idle_ms = min((victim.idle_ms for victim in victims), default=float("inf"))
        names = tuple(victim.model for victim in victims)
        offer = (missed_per_s, first.get(room.gpu, 0.0), -least_idle_ms, len(victims), room.gpu, names)
        if best is None or offer < best:
            best = offer
    return best and best[4:]


def _victims(missing_bytes: int, idle: Iterable[IdleModel]) -> list[IdleModel] | None:
    """Return idle models that give back so much memory, few requests missed; None if all are too little."""
    order = sorted(idle, key=lambda c: (c.rate_per_s / c.need_bytes, -c.idle_ms, c.model))
    chosen: list[IdleModel] = []
    for candidate in order:
        if missing_bytes <= 0:
            break
        chosen.append(candidate)
        missing_bytes -= candidate.need_bytes
    if missing_bytes > 0:
        return None
    for victim in sorted(chosen, key=lambda c: -c.rate_per_s):  # those whose memory is not needed after all
        if victim.rate_per_s and missing_bytes + victim.need_bytes <= 0:
            chosen.remove(victim)
            missing_bytes += victim.need_bytes
    return chosen
