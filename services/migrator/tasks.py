"""Coroutines under way in one asyncio loop, which end with whoever began them."""

import asyncio
from collections.abc import Coroutine


class Tasks:
    """Keeps what it has begun until that ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, coroutine: Coroutine[None, None, None]) -> None:
        """Begin a coroutine."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Cancel what is under way, and return when it has ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
