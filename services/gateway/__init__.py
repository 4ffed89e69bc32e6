"""The gateway: REST API in front, owner of every request."""
