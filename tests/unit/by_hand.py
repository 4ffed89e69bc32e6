"""A model with round numbers, for what is worked out by hand."""

from shared.model import ModelSpec

# 8 billion parameters in 2 bytes; 100,000 bytes of KV per token; 1 ms + 32 * 0.027 ms of overhead per step.
MODEL = ModelSpec(
    name="m",
    engine="emulated",
    params=8_000_000_000,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    weight_bytes=16_000_000_000,
    kv_bytes_per_token=100_000,
)
