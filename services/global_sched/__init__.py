"""The global scheduler: picks a GPU per request (3.3)."""
