"""The local scheduler of one GPU: batches, shares, clock, memory, engines (3.4)."""
