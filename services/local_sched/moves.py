"""A request moving between two GPUs: what each side has promised, and until when (3.5, F).

A migrator drives both sides by messages; `Moves` keeps the records and `services/local_sched/transfer.py`
acts on them. A side that hears nothing more goes back to what was before: the source after the time to
live, the destination after twice that, so that a late commit finds the request on at least one of them.
"""

from dataclasses import dataclass, field

from shared.events import Action, KvStaged
from shared.model import Request

SOURCE, DESTINATION = "source", "destination"


@dataclass
class Transfer:
    """One side of one move.

    Args:
        side: ``source`` or ``destination``.
        heard_ms: when the migrator was last heard of it.
        migrator: who drives the move; at the source only that of a running request is kept.
        mode: how a running request moves from here (`live.py`); empty for one that waits.
        exports: orders to copy KV that the engine has not answered yet.
        frozen: the request is held in its engine; `staged`: what that copied last, once it has said so, with
            the tokens that the stage covers (`kv_tokens`).
        source: from which GPU; at the destination, as is all that follows.
        wanted_tokens: what memory is asked for; more than what was promised, `credit_bytes`, where that is
            to grow.
        request: what was adopted, at `adopted_ms`, with `kv_tokens` in `stage`; it has taken `energy_j`
            elsewhere.
        committed: it is done; kept a while only to answer a repeat.
    """

    side: str
    request_id: str
    model: str
    heard_ms: float
    migrator: str = ""
    mode: str = ""
    exports: int = 0
    frozen: bool = False
    staged: KvStaged | None = None
    kv_tokens: int = 0
    source: str = ""
    wanted_tokens: int = 0
    credit_bytes: int = 0
    stage: str = ""
    request: Request | None = None
    predicted_output_tokens: int = 0
    energy_j: float | None = 0.0
    adopted_ms: float = 0.0
    committed: bool = False

    @property
    def awaits(self) -> bool:
        """Whether memory is kept here for a request that has yet to come; only then may it be more."""
        return self.side == DESTINATION and self.request is None and not self.committed


@dataclass
class Moves:
    """The moves this GPU takes part in, by move id; `notices` are to be said of stages that are over."""

    transfers: dict[str, Transfer] = field(default_factory=dict)
    notices: list[Action] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Moves that are not done."""
        return sum(not transfer.committed for transfer in self.transfers.values())

    def of_request(self, request_id: str) -> list[str]:
        """Return the ids of the unfinished moves of a request."""
        return [m for m, t in self.transfers.items() if t.request_id == request_id and not t.committed]

    def expected(self, model: str) -> bool:
        """Say whether a request of this model may still arrive here by a move."""
        return any(
            t.model == model and t.side == DESTINATION and not t.committed for t in self.transfers.values()
        )

    def expired(self, now_ms: float, ttl_ms: float) -> list[str]:
        """Return the ids of moves whose time to live is over at their side."""
        return [m for m, t in self.transfers.items() if now_ms >= expiry_ms(t, ttl_ms)]

    def next_expiry_ms(self, ttl_ms: float) -> float | None:
        """Return when the next move expires here; None if there is none."""
        return min((expiry_ms(t, ttl_ms) for t in self.transfers.values()), default=None)


def expiry_ms(transfer: Transfer, ttl_ms: float) -> float:
    """Return when a side gives up on a move it hears nothing more of."""
    return transfer.heard_ms + (ttl_ms if transfer.side == SOURCE else 2 * ttl_ms)


def holder(move_id: str) -> str:
    """Return the name under which a move holds memory in the ledger."""
    return f"move:{move_id}"
