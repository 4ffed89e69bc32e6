"""What happened lately in a world, to be told when something is wrong."""

from collections import deque
from typing import NamedTuple

from shared import events as ev

REMEMBERED = 20_000
TOLD = 40


class Line(NamedTuple):
    """One event: when, at which node, and what; an action of a node towards its clients counts as well."""

    at_ms: float
    node: str
    what: object


class Story:
    """The last events of a world."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque(maxlen=REMEMBERED)

    def add(self, at_ms: float, node: str, what: object) -> None:
        """Remember an event."""
        self._lines.append(Line(at_ms, node, what))

    def about(self, *names: str, count: int = TOLD) -> str:
        """Return the last events that mention one of these names, one a line; all where none is named."""
        wanted = [name for name in names if name]
        marks = [quoted for name in wanted for quoted in (f"'{name}'", f"'{name}~")]
        told: list[str] = []
        for line in reversed(self._lines):
            if len(told) >= count:
                break
            text = _short(line)
            if text and (not wanted or line.node in wanted or any(name in text for name in marks)):
                told.append(text)
        return "\n".join(reversed(told))


def _short(line: Line) -> str:
    """Return an event in one line; heartbeats without news are left out."""
    what = line.what
    if isinstance(what, ev.Tick | ev.GatewayAlive | ev.ConsolidatorAlive):
        return ""
    text = repr(what)
    prompt = text.find("prompt_tokens=(")
    if prompt >= 0:
        end = text.find(")", prompt)
        text = f"{text[:prompt]}prompt_tokens=...{text[end + 1 :]}"
    if len(text) > 400:
        text = text[:400] + "..."
    return f"{line.at_ms:12.3f} ms  {line.node:<14} {text}"
