"""What the settings of several services check alike."""

from collections.abc import Iterable

from shared.errors import ConfigError
from shared.model import Struct


def require_positive(settings: Struct, names: Iterable[str]) -> None:
    """Raise ConfigError for the first of these fields that is not above zero."""
    for name in names:
        if getattr(settings, name) <= 0:
            raise ConfigError(f"{name} must be positive, not {getattr(settings, name)}")
