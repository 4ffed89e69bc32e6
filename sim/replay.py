"""Play recordings of live services again, through fresh cores: ``python -m sim.replay FOLDER``.

Each core must do again what it did then. What a core was made with is told by its settings (the environment's
as in service) and by what it has said itself: a GPU's summaries name its device, host and start.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.consolidator.core import ConsolidatorCore
from services.consolidator.settings import ConsolidatorSettings
from services.gateway.core import GatewayCore
from services.gateway.settings import GatewaySettings
from services.global_sched.core import GlobalSchedCore
from services.global_sched.settings import GlobalSettings
from services.local_sched.core import LocalSchedCore
from services.local_sched.settings import LocalSettings
from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from shared import events as ev
from shared.config import load
from shared.devices import device_for
from shared.model import GpuSummary
from shared.recording import encoded, event_types, read
from shared.subjects import CONSOLIDATOR, GATEWAY, GLOBAL, LOCAL, MIGRATOR


class Differs(AssertionError):
    """A core did something else than in its recording."""


def replay(path: Path, environ: Mapping[str, str] | None = None) -> int:
    """Play one recording and return its number of steps.

    Args:
        path: the recording.
        environ: settings of the service, as its environment had them; this process's own by default.

    Raises:
        Differs: at the first step at which the actions are others.
    """
    service, _, ident = path.stem.partition(".")
    core = _MAKERS[service](path, ident, environ)
    steps = 0
    for now_ms, event, wanted in read(path):
        done = encoded(core.step(now_ms, event))
        steps += 1
        if done != wanted:
            pairs = [(a, b) for a, b in zip(wanted, done, strict=False) if a != b]
            raise Differs(
                f"{path.name}: step {steps} at {now_ms}, {event!r:.300}: {len(wanted)} actions then, "
                f"{len(done)} now; first difference: {pairs[:1]!r:.1000}"
            )
    return steps


def _local(path: Path, ident: str, environ: Mapping[str, str] | None) -> LocalSchedCore:
    summary = _summary(path)
    device, settings = device_for(summary.gpu_type), load(LocalSettings, LOCAL, environ)
    kind, started_ms, elastic = summary.engine, summary.started_ms, elastic_kv(path)
    return LocalSchedCore(ident, summary.host, kind, device, settings, started_ms, elastic_kv=elastic)


def elastic_kv(path: Path) -> bool:
    """Say whether a GPU's engines shared its memory for KV, instead of having pools of their own."""
    return _summary(path).kv_pool_bytes == 0


def _summary(path: Path) -> GpuSummary:
    """Return the first that a GPU has told of itself."""
    for _, _, actions in read(path):
        for kind, data in actions:
            if kind == "Send" and b"SummaryChanged" in data:
                summary: GpuSummary = _sent(data).summary
                return summary
    raise Differs(f"{path.name} has no summary, so its device is not known")


def _sent(data: bytes) -> Any:
    fields = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
    kinds: Any = None
    for kind in event_types():
        if issubclass(kind, ev.Message):
            kinds = kind if kinds is None else kinds | kind
    return msgspec.msgpack.decode(fields["message"], type=kinds)


_MAKERS: dict[str, Callable[[Path, str, Mapping[str, str] | None], ev.Core]] = {
    GATEWAY: lambda path, ident, environ: GatewayCore(ident, load(GatewaySettings, GATEWAY, environ)),
    GLOBAL: lambda path, ident, environ: GlobalSchedCore(ident, load(GlobalSettings, GLOBAL, environ)),
    LOCAL: _local,
    CONSOLIDATOR: lambda path, ident, environ: ConsolidatorCore(
        ident, load(ConsolidatorSettings, CONSOLIDATOR, environ), None, ()
    ),
    MIGRATOR: lambda path, ident, environ: MigratorCore(ident, load(MigratorSettings, MIGRATOR, environ)),
}


def main() -> int:
    """Entry point; the exit status is 1 if a core did something else."""
    failed = 0
    for path in sorted(Path(sys.argv[1]).glob("*.rec")):
        try:
            print(f"{path.name}: {replay(path)} steps, all the same")
        except Differs as error:
            failed = 1
            print(error)
    return failed


if __name__ == "__main__":
    sys.exit(main())
