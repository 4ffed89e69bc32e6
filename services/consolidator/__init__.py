"""The consolidator: which models belong on which GPUs (3.5)."""
