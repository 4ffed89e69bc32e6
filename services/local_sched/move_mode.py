"""How a running request had better move to another GPU, if at all (F): decided request by request."""

from typing import NamedTuple

from shared.lut import Lut

STAY, TOKENS, KV = "stay", "tokens", "kv"


class Choice(NamedTuple):
    """What to do with a request, and for how long that delays its next token."""

    mode: str
    delay_ms: float


def move_mode(
    lut: Lut,
    context_tokens: int,
    kv_bytes: int,
    remaining_ms: float,
    bandwidth_bytes_s: float,
    sm_clock_mhz: int,
) -> Choice:
    """Return the mode of a move.

    The request takes its KV along where that is sooner there than it is computed again; it stays if it ends
    before it would have moved. KV is copied twice, into the stage and out of it; only the second time, and
    the last part of the first, nothing else goes on.

    Args:
        context_tokens: what would be computed again.
        kv_bytes: of these tokens; 0: it has no KV that could travel.
        remaining_ms: until it ends where it is.
        bandwidth_bytes_s: of the way to the destination; 0: KV cannot travel.
        sm_clock_mhz: at which the destination would compute.
    """
    tokens = Choice(TOKENS, float(lut.ttft_ms(sm_clock_mhz, 100, context_tokens)))
    choice, lasts_ms = tokens, tokens.delay_ms
    if kv_bytes and bandwidth_bytes_s:
        kv_ms = 1000.0 * kv_bytes / bandwidth_bytes_s + 2 * lut.device.link_setup_ms
        if kv_ms < tokens.delay_ms:
            choice, lasts_ms = Choice(KV, kv_ms), 2 * kv_ms
    return Choice(STAY, 0.0) if remaining_ms <= lasts_ms else choice
