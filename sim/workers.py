"""Processes that play the tasks of a plan side by side, and show how far they are."""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

from rich.progress import Progress

from sim.collector import collecting_rarely
from sim.tasks import Played, Task, play_task

LOOK_S = 0.2  # between two looks at what is done


class Workers:
    """As many processes as there are cores; `play` is what `sim.plan.plan` asks for.

    Args:
        budget_s: time for all tasks together, from now on; inf: whatever they take.
    """

    def __init__(self, bar: Progress, description: str, budget_s: float) -> None:
        spawn = get_context("spawn")  # a fork would take the progress bar's thread's locks with it
        self._bar, self._description, self._budget_s = bar, description, budget_s
        self._task = bar.add_task(description, total=None)
        self._started_s = time.monotonic()
        self._count = os.cpu_count() or 1
        self._done = spawn.Value("d", 0.0)
        self._pool = ProcessPoolExecutor(self._count, spawn, initializer=_join, initargs=(self._done,))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def left_s(self) -> float:
        """Return how much of the budget is left."""
        return max(0.0, self._budget_s - (time.monotonic() - self._started_s))

    def play(self, name: str, tasks: Sequence[Task], for_s: float, least: int) -> list[Played]:
        """Play tasks in order for so many seconds, at least so many of them, and return what came of them."""
        until_s = time.monotonic() + for_s
        began = self._done.value
        futures: list[Future[Played]] = []
        open_tasks: set[Future[Played]] = set()
        while True:
            now_s = time.monotonic()
            while len(open_tasks) < self._count and len(futures) < len(tasks):
                if len(futures) >= least and now_s >= until_s:
                    break
                futures.append(self._pool.submit(_play, tasks[len(futures)]))
                open_tasks.add(futures[-1])
            if not open_tasks:
                return [future.result() for future in futures]
            open_tasks = wait(open_tasks, LOOK_S, FIRST_COMPLETED).not_done
            self._show(name, self._done.value - began, len(tasks))

    def _show(self, name: str, done: float, tasks: int) -> None:
        """Show the part of the budget that is spent, or without one the part of these tasks."""
        part = 1.0 - self.left_s() / self._budget_s if self._budget_s < math.inf else done / tasks
        said = f"{self._description}, {name}: {done:.0f} played"
        self._bar.update(self._task, description=said, completed=part, total=1.0)


_done: Any = None  # in a worker: the tasks done by all of them, as a shared number


def _join(done: Any) -> None:
    global _done
    _done = done


def _play(task: Task) -> Played:
    """Play a task in a worker, and keep the shared number up to date."""
    started_s, told = time.monotonic(), 0.0

    def tell(part: float) -> None:
        nonlocal told
        with _done.get_lock():
            _done.value += part - told
        told = part

    with collecting_rarely():
        counts = play_task(task, tell)
    tell(1.0)
    return Played(counts, time.monotonic() - started_s)
