"""Reading traces: any CSV of (time, model, input, output), and ServeGen's clients.

Columns are found by name, in any order and case; `COLUMNS` lists the names of the traces in use (Azure,
Aegaeon, Mooncake). Times are seconds, or milliseconds in a column whose name ends in ``_ms``, or a time of
day (``00:01:02.500``), or a date with one.
"""

import csv
import gzip
import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from shared.errors import ConfigError
from sim.lengths import Lengths, Quantiles
from sim.workload import WINDOW_S, Arrival, Client, Window

COLUMNS = {
    "time": (
        "time",
        "time_s",
        "time_ms",
        "at_s",
        "at_ms",
        "arrival_s",
        "arrival_ms",
        "timestamp",
        "request time",
    ),
    "model": ("model", "model name", "model_name"),
    "input": ("input", "input_tokens", "input length", "contexttokens", "prompt_tokens"),
    "output": ("output", "output_tokens", "output length", "generatedtokens", "completion_tokens"),
    "tenant": ("tenant",),
}
NEEDED = ("time", "input", "output")
SERVEGEN_HOUR = Path(__file__).with_name("data") / "servegen_m-large"

_CLOCK = re.compile(r"(\d+):(\d{2}):(\d{2}(?:\.\d+)?)")


def read_trace(path: Path) -> list[Arrival]:
    """Return the requests of a CSV file (``.gz`` too), as they stand there; a row without a model has ``""``.

    Raises:
        ConfigError: it cannot be read, lacks a column, or holds something else than a number; the message
            names line and column.
    """
    found: dict[str, str] = {}
    arrivals: list[Arrival] = []
    for line, row in _rows(path):
        if not found:
            found = _columns(path, list(row))
        arrivals.append(
            Arrival(
                at_ms=_time_ms(path, line, found["time"], row),
                model=(row[found["model"]] or "").strip() if "model" in found else "",
                input_tokens=_count(path, line, found["input"], row),
                output_tokens=_count(path, line, found["output"], row),
                tenant=(row[found["tenant"]] or "default").strip() if "tenant" in found else "default",
            )
        )
    if not arrivals:
        raise ConfigError(f"{path}: no requests below the header line")
    return arrivals


def read_clients(prefix: Path = SERVEGEN_HOUR) -> list[Client]:
    """Return ServeGen's clients, those with the highest mean rate first.

    Args:
        prefix: of ``<prefix>_arrivals*.csv[.gz]`` (client, window_s, rate_rps, pattern, shape) and
            ``<prefix>_client_lengths.csv`` (client, field, and a column ``q0.5`` for each quantile). By
            default an hour of 32 clients of ServeGen's m-large, which comes with Festina.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    arrivals = sorted(prefix.parent.glob(prefix.name + "_arrivals*.csv*"))
    if not arrivals:
        raise ConfigError(f"no file is called {prefix}_arrivals*.csv; name the part before _arrivals")
    lengths = _read_lengths(prefix.with_name(prefix.name + "_client_lengths.csv"))
    windows: dict[str, dict[int, Window]] = {}
    for line, row in _rows(arrivals[0]):
        number = int(_number(arrivals[0], line, "window_s", row) // WINDOW_S)
        windows.setdefault(row["client"], {})[number] = Window(
            rate_rps=_number(arrivals[0], line, "rate_rps", row),
            pattern=row["pattern"],
            shape=_number(arrivals[0], line, "shape", row),
        )
    first = min(number for of_client in windows.values() for number in of_client)
    last = max(number for of_client in windows.values() for number in of_client)
    clients = [
        Client(
            name=name,
            windows=tuple(of_client.get(number) for number in range(first, last + 1)),
            lengths=lengths[name],
        )
        for name, of_client in windows.items()
        if name in lengths
    ]
    return sorted(clients, key=lambda c: -sum(w.rate_rps for w in c.windows if w is not None))


def _read_lengths(path: Path) -> dict[str, Lengths]:
    """Return lengths by client, of those that have both."""
    found: dict[str, dict[str, Quantiles]] = {}
    for line, row in _rows(path):
        names = [name for name in row if re.fullmatch(r"q0\.\d+", name)]
        if not names:
            raise ConfigError(f"{path}: no column is called q0.5 or the like")
        tokens = [_number(path, line, name, row) for name in names]
        at = (0.0, *(float(name[1:]) for name in names), 1.0)
        quantiles = Quantiles(at, (tokens[0], *tokens, tokens[-1]))
        found.setdefault(row["client"], {})[row.get("field", "")] = quantiles
    both = ("input_tokens", "output_tokens")
    return {name: Lengths(*(of[f] for f in both)) for name, of in found.items() if all(f in of for f in both)}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, columns) of a CSV file with a header."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row.values():
                    missing = next(name for name, value in row.items() if value is None)
                    raise ConfigError(f"{path}, line {reader.line_num}: column {missing!r} is missing")
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def _columns(path: Path, names: list[str]) -> dict[str, str]:
    """Map each thing a trace says to the column that says it."""
    by_lower = {name.strip().lower(): name for name in names if name}
    found = {
        thing: by_lower[known] for thing, knowns in COLUMNS.items() for known in knowns if known in by_lower
    }
    missing = [thing for thing in NEEDED if thing not in found]
    if missing:
        wanted = "; ".join(f"{thing}: one of {', '.join(COLUMNS[thing])}" for thing in missing)
        raise ConfigError(f"{path}, line 1: no column for {wanted}. It has: {', '.join(by_lower)}")
    return found


def _time_ms(path: Path, line: int, column: str, row: dict[str, str]) -> float:
    text = row[column].strip()
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = clock.groups()
        return (int(hours) * 3600 + int(minutes) * 60 + float(seconds)) * 1000.0
    if "-" in text[1:] and ":" in text:
        try:
            # at most microseconds: Azure writes ten-millionths
            return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)).timestamp() * 1000.0
        except ValueError:
            pass
    number = _number(path, line, column, row)
    return number if column.lower().endswith("_ms") else number * 1000.0


def _number(path: Path, line: int, column: str, row: dict[str, str]) -> float:
    if column not in row:
        raise ConfigError(f"{path}, line 1: no column is called {column!r}")
    try:
        number = float(row[column])
        if not math.isfinite(number):
            raise ValueError
        return number
    except ValueError:
        raise ConfigError(
            f"{path}, line {line}, column {column!r}: {row[column]!r} is not a number"
        ) from None


def _count(path: Path, line: int, column: str, row: dict[str, str]) -> int:
    number = _number(path, line, column, row)
    if number < 0 or number != int(number):
        raise ConfigError(f"{path}, line {line}, column {column!r}: {row[column]!r} is not a count of tokens")
    return max(1, int(number))
