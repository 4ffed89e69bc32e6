"""A service as a process: its logs, the signals that end it, and how it exits."""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from shared.config import Common
from shared.errors import FestinaError

log = logging.getLogger("festina")


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    _STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in self._STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def run_service(settings: Common, main: Callable[[asyncio.Event], Awaitable[bool]]) -> None:
    """Run a service's coroutine until SIGTERM or SIGINT; exit 1 with one line on an error made on purpose.

    Args:
        settings: for the log level.
        main: takes the event that is set when the service is told to stop; returns whether all went well.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)

    async def supervised() -> bool:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await main(stop)

    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            well = runner.run(supervised())
    except FestinaError as error:
        log.error(str(error))
        sys.exit(1)
    sys.exit(0 if well else 1)
