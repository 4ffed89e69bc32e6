"""Spans in files: bounded on disk, and readable after whatever happened to a file, its folder or its disk."""

import os
import shutil
from pathlib import Path

import pytest

from shared.span_log import FILES_KEPT, OLD_SUFFIX, SpanLog, oldest_ms, spans_naming
from shared.spans import SpanLine


def span(number: int, text: str = "") -> SpanLine:
    return SpanLine(
        service="gateway",
        id="g",
        name="gateway.request",
        start_ms=float(number),
        end_ms=number + 1.0,
        attributes={"festina.request_id": f"r{number:04}", "text": text},
        trace_id="0" * 32,
        span_id=f"{number:016}",
        error="",
    )


def numbers(folder: Path) -> list[int]:
    return sorted(int(found.start_ms) for found in spans_naming(folder, "gateway.request"))


def test_a_folder_that_vanished_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    log = SpanLog(folder, "gateway", "g", most_bytes=100_000)
    log.write([span(1)])
    shutil.rmtree(folder)
    log.write([span(2)])
    assert numbers(folder) == [2]
    shutil.rmtree(folder)
    log.write([span(3, "x" * 60_000)])  # at once enough to be put aside
    log.write([span(4)])
    assert numbers(folder) == [3, 4]


def test_a_file_deleted_before_it_is_put_aside_costs_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=2_000)
    log.write([span(1)])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, target: (_ for _ in ()).throw(FileNotFoundError(path)))
        with pytest.raises(FileNotFoundError):
            log.write([span(2, "x" * 1_000)])
    log.write([span(3)])
    assert 3 in numbers(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_until_there_is_room(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=100_000)
    path = tmp_path / "gateway.g.jsonl"
    path.symlink_to("/dev/full")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            log.write([span(1)])
    path.unlink()
    log.write([span(2)])
    assert numbers(tmp_path) == [2]


def test_a_line_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=100_000)
    log.write([span(1), span(2)])
    log.close()
    path = tmp_path / "gateway.g.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = SpanLog(tmp_path, "gateway", "g", most_bytes=100_000)
    again.write([span(3)])
    assert numbers(tmp_path) == [1, 3] and oldest_ms(tmp_path) == 1.0


def test_a_write_cut_short_ends_in_an_error_and_the_next_one_begins_a_line(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=100_000)
    log.write([span(1)])
    whole = log._file

    class Short:
        """Has room for half of what it is given."""

        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

        def write(self, data: bytes) -> int:
            assert whole is not None
            return whole.write(data[: len(data) // 2])

    log._file = Short()  # type: ignore[assignment]
    with pytest.raises(OSError, match="no room"):
        log.write([span(2)])
    log.write([span(3)])
    assert numbers(tmp_path) == [1, 3]


def test_spans_put_aside_while_one_reads_are_read_once(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, "gateway", "g", most_bytes=2_000)
    log.write([span(1, "x" * 1_000)])
    assert (tmp_path / f"gateway.g{OLD_SUFFIX}").exists()
    log.write([span(2), span(3)])
    reading = spans_naming(tmp_path, "gateway.request")
    first = next(reading)
    log.write([span(4, "x" * 1_000)])  # puts aside what is being read
    found = sorted(int(one.start_ms) for one in [first, *reading])
    assert [number for number in found if number in (2, 3)] == [2, 3]
    assert len(found) == len(set(found)), "what was read at its old place is not told again"
    assert numbers(tmp_path) == [2, 3, 4]


def test_files_in_use_are_kept_however_many_they_are(tmp_path: Path) -> None:
    logs = [SpanLog(tmp_path, "local_sched", f"gpu-{n}", most_bytes=100_000) for n in range(2 * FILES_KEPT)]
    for number, log in enumerate(logs):
        log.write([span(number)])
    assert numbers(tmp_path) == list(range(2 * FILES_KEPT))


def test_files_of_processes_long_gone_are_deleted(tmp_path: Path) -> None:
    for number in range(FILES_KEPT + 5):
        log = SpanLog(tmp_path, "gateway", f"host-{number:02}", most_bytes=100_000)
        log.write([span(number)])
        log.close()
        os.utime(tmp_path / f"gateway.host-{number:02}.jsonl", (number, number))
    other = SpanLog(tmp_path, "gateway_of_another", "x", most_bytes=100_000)
    other.write([span(900)])
    os.utime(tmp_path / "gateway_of_another.x.jsonl", (0, 0))
    SpanLog(tmp_path, "gateway", "new", most_bytes=100_000).write([span(999)])
    assert numbers(tmp_path) == [*range(5, FILES_KEPT + 5), 900, 999]
