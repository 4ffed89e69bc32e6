"""A host's weights: what its migrator keeps, tells and forgets; and the page cache that holds real ones."""

import asyncio
from typing import Any

from msgspec.structs import replace

from services.migrator.actions import DropWeights, KeepWeights
from services.migrator.core import MigratorCore
from services.migrator.settings import MigratorSettings
from services.migrator.weight_files import WeightFiles
from shared import events as ev
from shared.catalog import emulated_models
from shared.model import digest
from shared.weights import WEIGHTS_BEAT_MS

A, B, C = (replace(model, weight_bytes=40) for model in emulated_models(3))


def core(capacity_bytes: int = 100) -> MigratorCore:
    made = MigratorCore("h", MigratorSettings(weight_cache_bytes=capacity_bytes))
    assert made.wake_ms is not None and told(made.step(1_000.0, ev.Tick())) == [()]  # it begins empty
    return made


def told(actions: list[ev.Action]) -> list[tuple[str, ...]]:
    return [a.message.specs for a in actions if isinstance(a, ev.Send) and a.to == "h"]  # type: ignore[attr-defined]


def test_the_latest_used_that_fit_are_kept_and_told_of() -> None:
    made = core()
    a, b, c = map(digest, (A, B, C))
    assert told(made.step(1_000.0, ev.WeightsUsed(model=A))) == [(a,)]
    assert told(made.step(1_000.0, ev.WeightsUsed(model=B))) == [(a, b)]
    assert told(made.step(1_000.0, ev.WeightsUsed(model=A))) == []  # nothing came or went
    assert told(made.step(2_000.0, ev.WeightsUsed(model=C))) == [(a, c)]
    assert made.wake_ms == 2_000.0 + WEIGHTS_BEAT_MS
    assert told(made.step(made.wake_ms, ev.Tick())) == [(a, c)]
    assert not made.moving


def test_one_that_keeps_nothing_tells_nothing() -> None:
    made = MigratorCore("h", MigratorSettings(weight_cache_bytes=0))
    assert made.wake_ms is None and made.step(0.0, ev.WeightsUsed(model=A)) == []


def test_weights_on_disk_are_read_ahead_and_given_back() -> None:
    made = core()
    real = [replace(model, engine="vllm", weights=f"/models/{model.name}") for model in (A, B, C)]

    def use(model: Any) -> list[ev.Action]:
        return [a for a in made.step(0.0, ev.WeightsUsed(model=model)) if not isinstance(a, ev.Send)]

    assert use(real[0]) == [KeepWeights(folder=real[0].weights)] and use(real[1]) != []
    assert use(real[2]) == [DropWeights(folder=real[0].weights), KeepWeights(folder=real[2].weights)]


async def _keep_and_drop(folder: str) -> None:
    files = WeightFiles()
    files.keep(KeepWeights(folder=folder))
    files.drop(DropWeights(folder=folder))
    files.keep(KeepWeights(folder=folder + "/nowhere"))
    await asyncio.sleep(0.05)
    await files.close()


def test_files_are_advised_on(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    (tmp_path / "config.json").write_text("{}")
    asked: list[int] = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, start, n_bytes, advice: asked.append(advice))
    asyncio.run(_keep_and_drop(str(tmp_path)))
    assert len(asked) == 2
