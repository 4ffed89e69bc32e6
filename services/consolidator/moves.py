"""Whether a plan can be carried out: models leave a GPU only once they serve elsewhere, which takes room."""

from collections.abc import Callable, Collection, Mapping, Sequence


def can_follow(
    holds: Mapping[str, Sequence[str]],
    on_gpu: Mapping[str, Sequence[str]],
    free_bytes: Mapping[str, int],
    need_bytes: Callable[[str, str], int],
    free_to_leave: Collection[str],
) -> bool:
    """Say whether GPUs get from what they hold to what they are to hold, with none waiting for one another.

    Two models that are to change places between full GPUs would each wait for ever for the other to leave.

    Args:
        holds: by GPU, the models it has.
        on_gpu: by GPU, the models it is to have; one that is to have none may be left out.
        free_bytes: by GPU, beside what it has.
        need_bytes: what a model takes, by GPU and model.
        free_to_leave: models that may leave at once: idle ones, and such as serve on further GPUs as well.
    """
    left_bytes = dict(free_bytes)
    missing = {gpu: [m for m in on_gpu.get(gpu, ()) if m not in held] for gpu, held in holds.items()}
    leaving = {gpu: [m for m in held if m not in on_gpu.get(gpu, ())] for gpu, held in holds.items()}
    serving = {model for gpu, held in holds.items() for model in held if model in on_gpu.get(gpu, ())}
    serving |= set(free_to_leave)
    progress = True
    while progress and any(missing.values()):
        progress = False
        for gpu in holds:
            for model in [model for model in leaving[gpu] if model in serving]:
                leaving[gpu].remove(model)
                left_bytes[gpu] += need_bytes(gpu, model)
                progress = True
            for model in list(missing[gpu]):
                if need_bytes(gpu, model) <= left_bytes[gpu]:
                    missing[gpu].remove(model)
                    left_bytes[gpu] -= need_bytes(gpu, model)
                    serving.add(model)
                    progress = True
    return not any(missing.values())
