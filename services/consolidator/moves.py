"""How a plan is carried out: models leave a GPU only once they serve elsewhere, which takes room.

Where GPUs would wait for one another, a model that stands in the way is brought to a third GPU for the time
being. So the plan becomes several placements, each of which is waited for before the next is put in force.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

Held = Mapping[str, Sequence[str]]
"""Models by GPU."""

MOST_STAGES = 16  # each takes a load, so a plan that needs more is late by a minute


def stages(
    holds: Held,
    on_gpu: Held,
    free_bytes: Mapping[str, int],
    need_bytes: Callable[[str, str], int],
    free_to_leave: Collection[str],
) -> list[dict[str, list[str]]]:
    """Return the placements by which GPUs get from what they hold to what they are to hold.

    All fit and have all models, and none uses more GPUs than are used before. Each can be reached from
    the one before with no GPU waiting for another. If the last is not `on_gpu`, no way to that was found, and
    it is the part of the plan that can be carried out; there may be none.

    Args:
        holds: by GPU, the models it has.
        on_gpu: by GPU, the models it is to have; one that is to have none may be left out.
        free_bytes: by GPU, beside what it has.
        need_bytes: what a model takes, by GPU and model.
        free_to_leave: models that may leave at once: idle ones, and such as serve on further GPUs as well.
    """
    walk = _Walk(holds, on_gpu, free_bytes, need_bytes, free_to_leave)
    start = walk.placement()
    walk.go_on()
    found = [start]
    while not walk.there and len(found) <= MOST_STAGES:
        walk.bring_back()
        found.append(walk.placement())
        if not walk.step_aside():
            break
        found.append(walk.placement())
        walk.go_on()
    if walk.there and all(_is_stage(each, start) for each in found[1:]):
        return [each for before, each in pairwise([*found, walk.placement()]) if each != before]
    part = found[1]
    return [part] if part != start and _is_stage(part, start) else []


def _is_stage(placement: Held, start: Held) -> bool:
    """Say whether a placement has all models, on no more GPUs than at the start."""
    models = [{model for held in each.values() for model in held} for each in (placement, start)]
    used = [sum(map(bool, each.values())) for each in (placement, start)]
    return models[0] == models[1] and used[0] <= used[1]


class _Walk:
    """Models on their way from GPU to GPU. `stations` are where models are for the time being."""

    def __init__(
        self,
        holds: Held,
        on_gpu: Held,
        free_bytes: Mapping[str, int],
        need_bytes: Callable[[str, str], int],
        free_to_leave: Collection[str],
    ) -> None:
        self._has = {gpu: set(models) for gpu, models in holds.items()}
        self._goal = {gpu: set(on_gpu.get(gpu, ())) for gpu in holds}
        self._left_bytes = dict(free_bytes)
        self._need_bytes = need_bytes
        self._may_leave = set(free_to_leave)  # and what is on a GPU where it is to be
        for gpu, models in self._goal.items():
            self._may_leave |= models & self._has[gpu]
        self._stations: dict[str, str] = {}
        self._homes = {model: gpu for gpu, models in holds.items() for model in models}
        self._most_used = sum(map(bool, self._has.values()))
        self._aside: set[str] = set()  # each steps aside once at most

    @property
    def there(self) -> bool:
        """Whether every GPU has what it is to have, and nothing else."""
        return self._has == self._goal

    def placement(self) -> dict[str, list[str]]:
        """Return the models by GPU, as they are now."""
        return {gpu: sorted(models) for gpu, models in self._has.items()}

    def go_on(self) -> None:
        """Move until nothing can be moved: what serves elsewhere leaves, and what fits comes."""
        progress = True
        while progress:
            progress = False
            for gpu in self._has:
                for model in self._leaving(gpu):
                    if model in self._may_leave:
                        self._leave(gpu, model)
                        progress = True
                for model in self._missing(gpu):
                    if self._need_bytes(gpu, model) <= self._left_bytes[gpu]:
                        self._come(gpu, model)
                        self._may_leave.add(model)
                        self._stations.pop(model, None)
                        progress = True

    def step_aside(self) -> bool:
        """Bring a model that stands in the way to a GPU that has room for it; says if there is one.

        Rather one whose leaving makes room for another at once, and a small one.
        """
        offers = []
        for gpu in self._has:
            missing = [self._need_bytes(gpu, model) for model in self._missing(gpu)]
            for model in self._leaving(gpu) if missing else ():
                need_bytes = self._need_bytes(gpu, model)
                too_little = self._left_bytes[gpu] + need_bytes < min(missing)
                offers.append((too_little, need_bytes, model, gpu))
        for _, _, model, gpu in sorted(offers):
            if model not in self._aside and self._wait(model):
                self._leave(gpu, model)
                self._aside.add(model)
                return True
        return False

    def bring_back(self) -> None:
        """Give those that left at once, and have not come where they are to be, a place to wait at."""
        there = set().union(*self._has.values())
        for model, home in sorted(self._homes.items()):
            if model not in there:
                self._wait(model, home)

    def _wait(self, model: str, home: str = "") -> bool:
        """Let a model wait at its `home`, or else the used GPU with most room; says if there is room."""
        rooms = [gpu for gpu in self._has if self._takes(gpu, model)]
        if rooms:
            gpu = home if home in rooms else max(rooms, key=self._preference)
            self._come(gpu, model)
            self._stations[model] = gpu
        return bool(rooms)

    def _takes(self, gpu: str, model: str) -> bool:
        """Say whether a model can wait at a GPU; an empty one only if no more are used then than at first."""
        has = self._has[gpu]
        if model in has or model in self._goal[gpu]:
            return False
        fits = self._need_bytes(gpu, model) <= self._left_bytes[gpu]
        return fits and (bool(has) or sum(map(bool, self._has.values())) < self._most_used)

    def _preference(self, gpu: str) -> tuple[bool, int, str]:
        return bool(self._has[gpu]), self._left_bytes[gpu], gpu

    def _missing(self, gpu: str) -> list[str]:
        return sorted(self._goal[gpu] - self._has[gpu])

    def _leaving(self, gpu: str) -> list[str]:
        away = self._has[gpu] - self._goal[gpu]
        return sorted(model for model in away if self._stations.get(model) != gpu)

    def _come(self, gpu: str, model: str) -> None:
        self._has[gpu].add(model)
        self._left_bytes[gpu] -= self._need_bytes(gpu, model)

    def _leave(self, gpu: str, model: str) -> None:
        self._has[gpu].remove(model)
        self._left_bytes[gpu] += self._need_bytes(gpu, model)
