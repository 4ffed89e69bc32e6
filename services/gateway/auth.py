"""API keys: who is calling. Only their SHA-256 digests are kept.

Keys come from a TOML file and from the store (``festina keys add``). In the file, ``[keys]`` maps a key, or
``sha256:`` and the hex digest of one, to the name of its tenant::

    [keys]
    "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b" = "team-a"
    "a-plain-key" = "admin"

    [tenants.team-a]
    requests_per_minute = 600
    tokens_per_minute = 100_000
    max_concurrent = 32
    weight = 2.0

Every line of a tenant may be left out. Without any key the gateway is open, and every caller is the tenant
``default``.
"""

import hmac
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.limits import fault
from shared.errors import ConfigError, InvalidRequest
from shared.model import Tenant

ADMIN = "admin"
OPEN_TENANT = "default"


class ApiKeys:
    """Digest -> tenant, from the file (fixed) and from the store (replaced as it changes)."""

    def __init__(self, from_file: Mapping[str, str] | None = None) -> None:
        self._from_file = dict(from_file or {})
        self._keys = dict(self._from_file)

    @property
    def configured(self) -> bool:
        """Whether there is any key; without one everybody may do everything."""
        return bool(self._keys)

    def set_stored(self, keys: Mapping[str, str]) -> None:
        """Take what the store holds now, digest in hex -> tenant; a key of the file wins."""
        self._keys = {**keys, **self._from_file}

    def tenant_of(self, authorization: str | None) -> str:
        """Return the tenant of an ``Authorization`` header. Raises InvalidRequest (401) if it has none."""
        if not self._keys:
            return OPEN_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "no API key: send the header Authorization: Bearer <key>"
            raise InvalidRequest(401, "invalid_api_key", message)
        digest = digest_of(key.strip())
        tenant = None
        for known, owner in self._keys.items():  # all of them, so the time taken tells nothing
            if hmac.compare_digest(known, digest):
                tenant = owner
        if tenant is None:
            raise InvalidRequest(401, "invalid_api_key", "this API key is not known here")
        return tenant

    def require_admin(self, authorization: str | None) -> None:
        """Raise InvalidRequest (401, 403) unless no keys are used or this is one of the tenant ``admin``."""
        if self.tenant_of(authorization) != ADMIN and self.configured:
            raise InvalidRequest(403, "forbidden", f"this needs an API key of the tenant {ADMIN!r}")


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key, in hex."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: str) -> dict[str, str]:
    """Return digest -> tenant of a file of keys. Raises ConfigError if it cannot be read or is malformed."""
    keys = _read(path).get("keys")
    if not isinstance(keys, dict) or not keys:
        raise ConfigError(f"API key file {path} must have a table [keys], with at least one key")
    found = {}
    for key, tenant in keys.items():
        if not key or not isinstance(tenant, str) or not tenant:
            raise ConfigError(f'API key file {path}: each line must be "key" = "tenant"')
        digest = key.removeprefix("sha256:").lower() if key.startswith("sha256:") else digest_of(key)
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ConfigError(f"API key file {path}: a SHA-256 has 64 hex digits (tenant {tenant!r})")
        found[digest] = tenant
    return found


def read_tenants(path: str) -> dict[str, Tenant]:
    """Return the limits of the tenants that a file of keys names. Raises ConfigError as `read_keys` does."""
    tables = _read(path).get("tenants", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"API key file {path}: limits stand in tables [tenants.NAME]")
    known = {field.name for field in msgspec.structs.fields(Tenant)} - {"name"}
    found = {}
    for name, table in tables.items():
        where = f"API key file {path}: [tenants.{name}]"
        if unknown := sorted(table.keys() - known):
            raise ConfigError(f"{where} has no setting {unknown[0]}; known: {', '.join(sorted(known))}")
        try:
            tenant = msgspec.convert({**table, "name": name}, Tenant)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}") from None
        if wrong := fault(tenant):
            raise ConfigError(f"{where}: {wrong[1]}")
        found[name] = tenant
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"API key file {path} cannot be read: {error}") from None
    if unknown := sorted(content.keys() - {"keys", "tenants"}):
        raise ConfigError(f"API key file {path} has {unknown[0]}, which is neither [keys] nor [tenants.NAME]")
    return content
