"""What becomes of a request whose model moves to another GPU (Appendix F): decided request by request."""

from dataclasses import dataclass

from shared.lut import Lut
from shared.silicon import transfer_ms

STAY, TOKENS, KV = "finish in place", "move tokens and recompute", "move tokens and KV"
TOKEN_BYTES = 4  # of a token id on the wire


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a request, and for how long that delays its next token."""

    how: str
    delay_ms: float


def decide(
    lut: Lut, context_tokens: int, remaining_tokens: int, step_ms: float, link: str, at: tuple[int, int]
) -> Choice:
    """Say whether a running request finishes where it is, or moves, and with what.

    It stays if it is done sooner than it would have moved. Else it takes its KV along where the link is
    faster than computing it again at that length.

    Args:
        lut: table of its model on the destination.
        context_tokens: tokens whose KV it has.
        remaining_tokens, step_ms: tokens it has yet to make, and the time of each where it is.
        link: ``nvlink``, ``pcie`` or ``tcp``.
        at: clock in MHz and SM share in percent with which the destination would compute.
    """
    token_bytes = context_tokens * TOKEN_BYTES
    recompute_ms = transfer_ms(lut.device, token_bytes, link) + lut.ttft_ms(*at, context_tokens)
    kv_ms = float(transfer_ms(lut.device, token_bytes + lut.request_bytes(context_tokens), link))
    move = Choice(TOKENS, recompute_ms) if recompute_ms <= kv_ms else Choice(KV, kv_ms)
    return Choice(STAY, 0.0) if remaining_tokens * step_ms <= move.delay_ms else move
