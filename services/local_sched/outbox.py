"""Tokens sent but not acknowledged: what a gateway may still have to be told again."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.events import AckedThrough, Send, TokenDelta, Tokens
from shared.model import RequestEnd


@dataclass
class Unacknowledged:
    """The tail of one attempt's output that its gateway has not confirmed."""

    gateway: str
    first_seq: int
    sent_ms: float
    tokens: list[int] = field(default_factory=list)
    end: RequestEnd | None = None


class Outbox:
    """Unacknowledged output per attempt, at most `limit` attempts.

    When full, the attempt that ended first is dropped, else the oldest: its gateway has been silent longest.
    """

    def __init__(self, gpu: str, limit: int) -> None:
        self.gpu = gpu
        self.limit = limit
        self.entries: dict[tuple[str, int], Unacknowledged] = {}

    def send(self, now_ms: float, deltas: Iterable[tuple[str, TokenDelta]]) -> list[Send]:
        """Keep (gateway, delta) pairs and return one message per gateway that carries them."""
        deltas = list(deltas)
        for gateway, delta in deltas:
            self._keep(now_ms, gateway, delta)
        return self._messages(deltas)

    def acknowledge(self, acks: Iterable[AckedThrough]) -> None:
        """Drop what a gateway says it has."""
        for ack in acks:
            key = (ack.request_id, ack.attempt)
            entry = self.entries.get(key)
            if entry is None:
                continue
            have = max(0, ack.next_seq - entry.first_seq)
            entry.first_seq += min(have, len(entry.tokens))
            del entry.tokens[:have]
            if ack.ended and entry.end is not None:
                del self.entries[key]

    def resend(self, now_ms: float, older_than_ms: float = 0.0, request_id: str = "") -> list[Send]:
        """Return again what was sent at least `older_than_ms` ago and not acknowledged (of one request)."""
        deltas = []
        for (owner, attempt), entry in self.entries.items():
            if request_id not in ("", owner) or now_ms - entry.sent_ms < older_than_ms:
                continue
            if entry.tokens or entry.end:
                entry.sent_ms = now_ms
                delta = TokenDelta(
                    request_id=owner,
                    attempt=attempt,
                    first_seq=entry.first_seq,
                    token_ids=tuple(entry.tokens),
                    end=entry.end,
                )
                deltas.append((entry.gateway, delta))
        return self._messages(deltas)

    def drop(self, request_id: str, attempt: int) -> None:
        """Forget an attempt, and every lower one, that its gateway no longer wants."""
        for lower in range(1, attempt + 1):
            self.entries.pop((request_id, lower), None)

    def drop_gateway(self, gateway: str) -> None:
        """Forget all that is meant for a gateway that is gone."""
        self.entries = {key: entry for key, entry in self.entries.items() if entry.gateway != gateway}

    def _keep(self, now_ms: float, gateway: str, delta: TokenDelta) -> None:
        key = (delta.request_id, delta.attempt)
        entry = self.entries.get(key)
        if entry is None:
            if len(self.entries) >= self.limit:
                ended = (k for k, e in self.entries.items() if e.end is not None)
                del self.entries[next(ended, next(iter(self.entries)))]
            entry = self.entries[key] = Unacknowledged(gateway, delta.first_seq, now_ms)
        if not entry.tokens:
            entry.sent_ms = now_ms
        entry.tokens.extend(delta.token_ids)
        if delta.end is not None:
            entry.end = delta.end
            self.entries[key] = self.entries.pop(key)  # ended attempts stand in the order they ended

    def _messages(self, deltas: list[tuple[str, TokenDelta]]) -> list[Send]:
        by_gateway: dict[str, list[TokenDelta]] = {}
        for gateway, delta in deltas:
            by_gateway.setdefault(gateway, []).append(delta)
        return [
            Send(to=gateway, message=Tokens(gpu=self.gpu, deltas=tuple(found)))
            for gateway, found in by_gateway.items()
        ]
