"""How fast KV goes from the card to the host's pinned memory and back, in pieces of some sizes."""

import msgspec

from services.cli.gpu_check.lab import Lab

WINDOW_S = 0.5
SIZES_BYTES = (1 << 20, 16 << 20, 256 << 20)
"""16 MiB is 18 blocks of 16 tokens of Qwen2.5-7B."""


class Copied(msgspec.Struct, frozen=True):
    """Copies of a size in a direction; `to` the ``host`` or the ``device``."""

    to: str
    n_bytes: int
    gb_per_s: float


class CopiesFound(msgspec.Struct, frozen=True):
    """What was copied, and the bandwidth that the device model has for it."""

    copies: tuple[Copied, ...]
    modelled_gb_per_s: float


def copies(lab: Lab) -> CopiesFound:
    """Copy there and back."""
    with lab.kernels() as kernels:
        found = tuple(
            Copied(to, n_bytes, lab.run(kernels, WINDOW_S, do="copy", to=to, n_bytes=n_bytes).gb_per_s)
            for n_bytes in SIZES_BYTES
            for to in ("host", "device")
        )
    return CopiesFound(found, lab.device.host_bytes_per_ms / 1e6)
