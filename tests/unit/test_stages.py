"""Stages of moving requests: their files, and what is in them."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from services.migrator.stages import Stages
from shared.errors import ConfigError, FestinaError
from shared.stage import (
    HEADER_BYTES,
    RECORD_BYTES,
    Stage,
    StageDamaged,
    StageHeader,
    StageSettings,
    mapped,
    stage_bytes,
)

HEADER = StageHeader(model="m", digest="d", dtype="float32", shape=(4, 2, 32, 128), block_tokens=32)


# ---- what is in a stage


def new_stage(block_bytes: int, blocks: int) -> tuple[bytearray, Stage]:
    memory = bytearray(stage_bytes(block_bytes, blocks))
    return memory, Stage.format(memoryview(memory), block_bytes)


def test_a_stage_says_whose_kv_it_holds_and_of_how_many_tokens() -> None:
    _, stage = new_stage(100, 5)
    assert stage.capacity_blocks == 5 and stage.header() is None and stage.tokens(32) == 0
    stage.describe(HEADER)
    assert stage.header() == HEADER
    for block, tokens in ((0, 32), (1, 32), (2, 7), (4, 32)):
        stage.block(block)[:] = bytes([block]) * 100
        stage.fill(block, tokens)
    assert stage.tokens(32) == 71  # block 3 is missing
    assert [stage.check(block) for block in range(5)] == [32, 32, 7, 0, 32]
    assert (stage.check_first(2), stage.check_first(9)) == (64, 103)
    stage.empty(1)
    assert stage.tokens(32) == 32
    _, copy = new_stage(100, 9)
    copy.put_head(stage.head())
    assert copy.header() == HEADER


@pytest.mark.parametrize("at", range(0, 100, 9))
def test_one_wrong_bit_is_noticed(at: int) -> None:
    memory, stage = new_stage(100, 2)
    stage.describe(HEADER)
    stage.block(1)[:] = os.urandom(100)
    stage.fill(1, 32)
    memory[HEADER_BYTES + 2 * RECORD_BYTES + 100 + at] ^= 4
    for check in (lambda: stage.check(1), lambda: stage.check_first(2)):
        with pytest.raises(StageDamaged, match="checksum of block 1"):
            check()
    memory[20 + at % 30] ^= 4
    with pytest.raises(StageDamaged, match="description"):
        stage.header()


def test_what_is_no_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageDamaged, match="no stage"):
        Stage(memoryview(bytearray(HEADER_BYTES)))
    _, stage = new_stage(100, 2)
    with pytest.raises(StageDamaged, match="room for 2 blocks, not for block 2"):
        stage.block(2)
    _, other = new_stage(50, 2)
    with pytest.raises(StageDamaged):
        stage.put_head(other.head())
    (tmp_path / "short").write_bytes(b"FSTKV")
    for name, reason in (("short", "shorter"), ("gone", "not there")):
        with pytest.raises(StageDamaged, match=reason), mapped(tmp_path / name):
            pass


# ---- files


def open_stages(folder: Path, max_bytes: int = 1 << 20) -> Stages:
    return Stages("host", StageSettings(dir=str(folder), max_bytes=max_bytes, slab_bytes=10_000))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "host").iterdir() if path.name != ".lock")


async def test_stages_grow_keep_what_they_hold_and_are_removed(tmp_path: Path) -> None:
    stages = open_stages(tmp_path)
    assert await stages.hold("one", 1_000, 3) == ""
    with mapped(stages.path("one")) as stage:
        assert stage.capacity_blocks == 9  # a slab, less what the records take
        stage.block(2)[:] = b"x" * 1_000
        stage.fill(2, 32)
    assert await stages.hold("one", 1_000, 20) == ""
    with mapped(stages.path("one")) as stage:
        assert stage.capacity_blocks == 27 and stage.check(2) == 32
        stages.free("one")
        assert bytes(stage.block(2)) == b"x" * 1_000  # who has it mapped still reads it
    assert files(tmp_path) == [] and stages.pool.taken_bytes == 0
    reason = await stages.hold("two", 1_000, 100_000)
    assert "bytes for stages are free" in reason and files(tmp_path) == []
    with pytest.raises(FestinaError, match="no name of a stage"):
        await stages.hold("../two", 1_000, 1)
    assert await stages.hold("three", 1_000, 1) == ""
    stages.path("three").unlink()  # as an engine does that has read it
    assert await stages.hold("four", 1_000, 1) == ""
    assert stages.pool.stages == ("four",)
    stages.close()
    assert files(tmp_path) == []


async def test_without_memory_there_is_a_reason_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    stages = open_stages(tmp_path)
    assert await stages.hold("one", 1_000, 3) == "no memory for stage one: No space left on device"
    assert files(tmp_path) == [] and stages.pool.taken_bytes == 0
    stages.close()


def test_a_folder_has_one_migrator_and_what_an_earlier_one_left_goes(tmp_path: Path) -> None:
    first = open_stages(tmp_path)
    (tmp_path / "host" / "left-behind").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"another migrator uses it; FESTINA_STAGES_DIR"):
        open_stages(tmp_path)
    assert files(tmp_path) == ["left-behind"]
    os.close(first._lock)  # as if it had been killed
    second = open_stages(tmp_path)
    assert files(tmp_path) == []
    second.close()


async def test_many_at_once_leave_nothing_mapped(tmp_path: Path) -> None:
    stages = open_stages(tmp_path)
    await asyncio.gather(*(stages.hold(f"s{n}", 1_000, 1 + n % 5) for n in range(20)))
    for name in stages.pool.stages:
        with pytest.raises(ZeroDivisionError), mapped(stages.path(name)) as stage:
            _ = stage.block(0)[: 1 // 0]
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    stages.close()
