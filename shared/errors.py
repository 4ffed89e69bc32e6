"""The errors that Festina raises on purpose, one tree.

An infeasible request is a result, not an exception; a broken invariant is an assert and a crash.
"""

from collections.abc import Mapping


class FestinaError(Exception):
    """Root of every error raised on purpose. The message names what was wrong and what to do."""


class ConfigError(FestinaError):
    """A setting is unknown, malformed or contradicts another."""


class Unavailable(FestinaError):
    """The bus, the store or an engine cannot be reached; the caller may try again, within bounds."""


class ActuatorRefused(FestinaError):
    """A device refused a change of state and keeps its old one."""


class LutMiss(FestinaError):
    """The look-up table has no entry; the message names what to profile."""


class LutRefused(FestinaError):
    """A stored look-up table is damaged, or of another schema or device; the message says which."""


class InvalidRequest(FestinaError):
    """A client's request cannot be served as it stands (HTTP 4xx, or 503 where waiting may help).

    Args:
        status: HTTP status to answer with.
        code: OpenAI's machine-readable code, such as ``model_not_found``.
        message: what was wrong and what to do.
        param: name of the offending field, where there is one.
        retry_after_s: seconds after which trying again makes sense, where it does.
        headers: what the answer's headers say besides.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
