"""Settings: defaults, then a TOML file, then the environment, into one frozen struct, validated once.

A settings struct has a section name. ``[section] field = …`` in the file named by ``FESTINA_CONFIG`` sets a
field, and so does ``FESTINA_<SECTION>_<FIELD>``, which wins. `Common` has the empty section: its fields stand
at the top of the file and in ``FESTINA_<FIELD>``.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What every service needs: bus, store, tracing, metrics, logs.

    Args:
        id: id of this replica, GPU or host on the bus; made from the host's name and process id when empty.
        nats_url: address of the bus; ``tls://`` turns TLS on.
        nats_user, nats_password, nats_token, nats_credentials: what the bus asks for; the last is a file.
        nats_ca_file: certificate authority of the bus, when it is not a public one.
        redis_url: address of the store, with user and password if it has them; ``rediss://`` is TLS.
        redis_ca_file: certificate authority of the store.
        tracing: export spans to `otlp_endpoint` and to `trace_dir`.
        otlp_endpoint: base address of an OTLP/HTTP receiver, such as Jaeger's; empty: none.
        trace_dir: folder for the latest spans, which `festina explain` reads; empty: none.
        trace_mb: megabytes there that each service keeps at most.
        metrics_host, metrics_port: where this service shows its Prometheus metrics; port -1 shows none.
        log_level: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``.
        drain_s: how long a service that is told to stop may take to end its work.
        system: the serving system whose policies all services follow (`shared/systems.py`).
    """

    id: str = ""
    system: str = "festina"
    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password: str = ""
    nats_token: str = ""
    nats_credentials: str = ""
    nats_ca_file: str = ""
    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_ca_file: str = ""
    tracing: bool = True
    otlp_endpoint: str = "http://127.0.0.1:4318"
    trace_dir: str = ""
    trace_mb: int = 16
    metrics_host: str = "127.0.0.1"
    metrics_port: int = -1
    log_level: str = "INFO"
    drain_s: float = 20.0


def load(
    settings_type: type[T],
    section: str = "",
    environ: Mapping[str, str] | None = None,
    preset: Mapping[str, Any] | None = None,
) -> T:
    """Return the settings of one section.

    Args:
        settings_type: the struct to fill; its defaults are the lowest layer.
        section: name of the section; empty for `Common`.
        environ: the environment; the process's own by default.
        preset: values that take the place of the struct's defaults.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or has a value of the wrong kind.
    """
    environ = os.environ if environ is None else environ
    names = {field.name for field in msgspec.structs.fields(settings_type)}
    values = {**(preset or {}), **_from_file(environ.get("FESTINA_CONFIG", ""), section, names)}
    prefix = f"FESTINA_{section.upper()}_" if section else "FESTINA_"
    for variable, text in environ.items():
        field = variable.removeprefix(prefix).lower()
        if not variable.startswith(prefix) or (not section and field not in names):
            continue  # without a section, other sections' variables share the prefix
        if field not in names:
            raise ConfigError(f"{variable} is not a setting; {section} has: {', '.join(sorted(names))}")
        values[field] = text
    try:
        return msgspec.convert(values, settings_type, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting of section [{section or 'top'}]: {error}") from None


def _from_file(path: str, section: str, names: set[str]) -> dict[str, Any]:
    if not path:
        return {}
    try:
        whole = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"FESTINA_CONFIG={path} cannot be read: {error}") from None
    found = whole.get(section, {}) if section else {k: v for k, v in whole.items() if not isinstance(v, dict)}
    unknown = sorted(set(found) - names)
    if unknown:
        where = f"[{section}]" if section else "its top level"
        raise ConfigError(
            f"{path}: {where} has no setting {', '.join(unknown)}; known: {', '.join(sorted(names))}"
        )
    return dict(found)
