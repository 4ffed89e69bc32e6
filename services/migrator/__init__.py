"""The migrator of one GPU host: moves requests between GPUs (3.5, F)."""
