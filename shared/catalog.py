"""The catalog of emulated models: 43 dense decoders of 3B-72B, with the shapes of the published ones.

The ranks choose a nested, mixed set: the first 16, 24 or 32 are the sets of the paper's experiments, which
does not list its own models. `verified` in the file says whether a shape was read in a published
configuration, or is from memory and only its parameter count agrees with the published one.
"""

from functools import cache
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.model import ModelSpec, Struct

RANKED = 32  # models that every device holds


class CatalogEntry(Struct):
    """One line of `catalog.json`. `festina_rank` is None for models outside the ranked sets."""

    name: str
    festina_rank: int | None
    params: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    vocab_tokens: int
    tied_embeddings: bool
    verified: bool

    def spec(self) -> ModelSpec:
        """Return the model as an emulated engine serves it."""
        shape = msgspec.structs.asdict(self)
        del shape["festina_rank"], shape["verified"]
        return ModelSpec(engine="emulated", **shape)


@cache
def entries() -> tuple[CatalogEntry, ...]:
    """Return all models, those with a rank first and in its order. Reads the file once."""
    return msgspec.json.decode(
        Path(__file__).with_name("catalog.json").read_bytes(), type=tuple[CatalogEntry, ...]
    )


def emulated_models(count: int = 16) -> tuple[ModelSpec, ...]:
    """Return the first `count` models, by rank; those past rank 32 may be too large for one device.

    Raises ConfigError if there are not that many.
    """
    if not 0 <= count <= len(entries()):
        raise ConfigError(f"asked for {count} emulated models; choose 0 to {len(entries())}")
    return tuple(entry.spec() for entry in entries()[:count])


def pool_models(count: int) -> tuple[ModelSpec, ...]:
    """Return `count` models by rank; past the ranked ones, copies of them under other names."""
    ranked = emulated_models(min(count, RANKED))
    copies = [
        msgspec.structs.replace(ranked[i % RANKED], name=f"{ranked[i % RANKED].name} ({i // RANKED + 1})")
        for i in range(RANKED, count)
    ]
    return (*ranked, *copies)
