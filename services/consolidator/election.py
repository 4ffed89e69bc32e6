"""Which of several consolidators leads: of all that are heard, the one whose id comes first.

Every replica announces itself on the bus, which is also the only way in which a leader can act: one that is
cut off from it neither leads nor misses the others. Two may believe for a moment that they lead, at a start
or after one stood still. That is safe: a leader begins with a placement version above every earlier one, and
what is ordered under a lower version than a GPU has seen is dropped.
"""


class Election:
    """Who is there, by heartbeats.

    Args:
        own: id of this replica.
        silent_ms: one not heard of for this long is gone.
    """

    def __init__(self, own: str, silent_ms: float) -> None:
        self._own = own
        self._silent_ms = silent_ms
        self._heard_ms: dict[str, float] = {}

    def hear(self, now_ms: float, peer: str) -> None:
        """Note a heartbeat."""
        self._heard_ms[peer] = now_ms

    def excuse(self, now_ms: float) -> None:
        """Start all silences anew: nobody could be heard."""
        self._heard_ms = dict.fromkeys(self._heard_ms, now_ms)

    def leads(self, heard_until_ms: float) -> bool:
        """Say whether this replica leads, and forget who is gone.

        Args:
            heard_until_ms: when the last message of any kind came. Later silence may be our own deafness.
        """
        silent_since_ms = heard_until_ms - self._silent_ms
        self._heard_ms = {peer: ms for peer, ms in self._heard_ms.items() if ms > silent_since_ms}
        return all(self._own <= peer for peer in self._heard_ms)
