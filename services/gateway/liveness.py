"""Which GPUs are alive, as far as this gateway can know: silence is proof only while it could have heard."""


class Liveness:
    """When each GPU was heard of last.

    A GPU is silent between its last sign of life and the last message of any kind that this gateway has had
    from the bus, its own heartbeat included: after that message it is perhaps the gateway that is cut off.

    Args:
        silent_ms: a GPU not heard of for this long is lost.
        check_interval_ms: time between two looks.
    """

    def __init__(self, silent_ms: float, check_interval_ms: float) -> None:
        self.silent: set[str] = set()
        self.due_ms = 0.0
        self._silent_ms = silent_ms
        self._interval_ms = check_interval_ms
        self._heard_ms: dict[str, float] = {}
        self._bus_ms = 0.0

    def hear(self, gpu: str, now_ms: float) -> None:
        """Note a sign of life."""
        self._heard_ms[gpu] = max(now_ms, self._heard_ms.get(gpu, now_ms))
        self.silent.discard(gpu)

    def hear_bus(self, now_ms: float) -> None:
        """Note that a message has come, from whomever."""
        self._bus_ms = now_ms

    def excuse(self, until_ms: float) -> None:
        """Take every GPU not lost so far as heard of at `until_ms`: what they sent is lost or unread."""
        for gpu in self._heard_ms.keys() - self.silent:
            self._heard_ms[gpu] = max(self._heard_ms[gpu], until_ms)

    def newly_silent(self, now_ms: float, bus_up: bool) -> list[str]:
        """Return the GPUs found lost at this look; none while our own bus is down.

        A look that comes late means that this process itself stood still, with messages still unread.
        """
        late_ms = now_ms - self.due_ms if self.due_ms > 0.0 else 0.0
        self.due_ms = now_ms + self._interval_ms
        if late_ms >= self._silent_ms / 2:
            self.excuse(now_ms)
        if not bus_up:
            return []
        lost = [
            gpu
            for gpu, heard_ms in self._heard_ms.items()
            if gpu not in self.silent and self._bus_ms - heard_ms >= self._silent_ms
        ]
        self.silent.update(lost)
        return lost
