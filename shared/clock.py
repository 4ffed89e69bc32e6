"""Time: Unix milliseconds, taken once from the wall clock and advanced by the monotonic one.

A step of the wall clock (NTP, an administrator) therefore changes nothing in a running service.
"""

import time

_START_UNIX_MS = time.time() * 1000.0
_START_MONOTONIC = time.monotonic()


def now_ms() -> float:
    """Return milliseconds since 1970, monotonic within this process."""
    return _START_UNIX_MS + (time.monotonic() - _START_MONOTONIC) * 1000.0
