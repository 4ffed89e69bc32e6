"""Tokens sent but not acknowledged: what a gateway may still have to be told again."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from shared.events import AckedThrough, Send, TokenDelta, Tokens
from shared.model import RequestEnd

# The bus takes 1 MiB a message; a token id takes up to 5 bytes of it, what surrounds a delta about 300.
MESSAGE_TOKENS = 100_000
DELTA_OVERHEAD_TOKENS = 64


@dataclass(slots=True)
class Unacknowledged:
    """What a gateway has not confirmed of one attempt: the tail of its output, and that it has moved here."""

    gateway: str
    first_seq: int
    sent_ms: float
    tokens: list[int] = field(default_factory=list)
    end: RequestEnd | None = None
    moved_from: str = ""

    @property
    def is_open(self) -> bool:
        """Whether there is anything to confirm."""
        return bool(self.tokens or self.end or self.moved_from)


class Outbox:
    """Unacknowledged output per attempt, at most `limit` attempts.

    When full, the attempt that ended first is dropped, else the oldest: its gateway has been silent longest.
    """

    def __init__(self, gpu: str, limit: int) -> None:
        self.gpu = gpu
        self.limit = limit
        self.entries: dict[tuple[str, int], Unacknowledged] = {}
        self.silent: dict[str, float] = {}  # gateways that are not listening, since when

    @property
    def unacknowledged(self) -> int:
        """Attempts of which their gateways have not confirmed all."""
        return sum(entry.is_open for entry in self.entries.values())

    @property
    def pending(self) -> bool:
        """Whether anything is unacknowledged by a gateway that listens."""
        return any(entry.is_open and entry.gateway not in self.silent for entry in self.entries.values())

    def send(
        self,
        now_ms: float,
        deltas: Iterable[tuple[str, TokenDelta]],
        ages_ms: tuple[float, ...] = (),
    ) -> list[Send]:
        """Keep (gateway, delta) pairs and return one message per gateway that carries them."""
        kept = [(gateway, self._keep(now_ms, gateway, delta)) for gateway, delta in deltas]
        return self._messages(kept, ages_ms)

    def acknowledge(self, acks: Iterable[AckedThrough]) -> None:
        """Drop what a gateway says it has."""
        for ack in acks:
            key = (ack.request_id, ack.attempt)
            entry = self.entries.get(key)
            if entry is None:
                continue
            entry.moved_from = ""
            have = max(0, ack.next_seq - entry.first_seq)
            entry.first_seq += min(have, len(entry.tokens))
            del entry.tokens[:have]
            if ack.ended and entry.end is not None:
                del self.entries[key]

    def resend(
        self, now_ms: float, older_than_ms: float = 0.0, request_id: str = "", gateway: str = ""
    ) -> list[Send]:
        """Return again what was sent at least `older_than_ms` ago and not acknowledged.

        With `request_id` or `gateway` only what is of that; what is meant for silent gateways waits.
        """
        deltas = []
        for (owner, attempt), entry in self.entries.items():
            if request_id not in ("", owner) or now_ms - entry.sent_ms < older_than_ms:
                continue
            if entry.gateway in self.silent or gateway not in ("", entry.gateway):
                continue
            if entry.is_open:
                entry.sent_ms = now_ms
                delta = TokenDelta(
                    request_id=owner,
                    attempt=attempt,
                    first_seq=entry.first_seq,
                    token_ids=tuple(entry.tokens),
                    end=entry.end,
                    moved_from=entry.moved_from,
                )
                deltas.append((entry.gateway, delta))
        return self._messages(deltas)

    def has_end(self, request_id: str, attempt: int) -> bool:
        """Say whether an attempt has ended here, and its gateway has not confirmed that."""
        entry = self.entries.get((request_id, attempt))
        return entry is not None and entry.end is not None

    def drop(self, request_id: str, attempt: int) -> None:
        """Forget an attempt, and every lower one, that its gateway no longer wants."""
        for lower in range(1, attempt + 1):
            self.entries.pop((request_id, lower), None)

    def silence(self, gateway: str, now_ms: float) -> None:
        """Keep what is meant for a gateway until it is heard again."""
        self.silent[gateway] = now_ms

    def hear(self, gateway: str, now_ms: float) -> list[Send]:
        """A gateway listens; returns what waited for that, if it did not before."""
        if self.silent.pop(gateway, None) is None:
            return []
        return self.resend(now_ms, gateway=gateway)

    def forget_silent(self, now_ms: float, after_ms: float) -> None:
        """Forget all that is meant for gateways that have been silent for so long."""
        gone = {gateway for gateway, since_ms in self.silent.items() if now_ms - since_ms >= after_ms}
        if gone:
            self.entries = {key: entry for key, entry in self.entries.items() if entry.gateway not in gone}
            self.silent = {gateway: ms for gateway, ms in self.silent.items() if gateway not in gone}

    def _keep(self, now_ms: float, gateway: str, delta: TokenDelta) -> TokenDelta:
        """Keep a delta; returns it as it is to be sent."""
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
        entry.moved_from = entry.moved_from or delta.moved_from
        if delta.end is not None:
            entry.end = delta.end
            self.entries[key] = self.entries.pop(key)  # ended attempts stand in the order they ended
        return replace(delta, moved_from=entry.moved_from) if entry.moved_from else delta

    def _messages(self, deltas: list[tuple[str, TokenDelta]], ages_ms: tuple[float, ...] = ()) -> list[Send]:
        """Return the messages that carry the deltas: one per gateway, more where it would be too large."""
        parts: dict[str, list[list[TokenDelta]]] = {}
        room: dict[str, int] = {}
        for gateway, delta in deltas:
            room[gateway] = room.get(gateway, 0) - len(delta.token_ids) - DELTA_OVERHEAD_TOKENS
            if room[gateway] < 0:
                parts.setdefault(gateway, []).append([])
                room[gateway] = MESSAGE_TOKENS - len(delta.token_ids) - DELTA_OVERHEAD_TOKENS
            parts[gateway][-1].append(delta)
        return [
            Send(to=gateway, message=Tokens(gpu=self.gpu, deltas=tuple(part), ages_ms=ages_ms))
            for gateway, found in parts.items()
            for part in found
        ]
