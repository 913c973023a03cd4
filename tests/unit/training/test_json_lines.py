from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from megatron.training.loggers.run_folder import JsonLinesLogger, read_json_lines


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in path.open()]


class FailingDisk:
    """Takes ``room`` bytes, then raises; ``room`` can be given back."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_lines_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = JsonLinesLogger(path, warn=pytest.fail)
    lines.write({"iteration": 1, "lm loss": 2.5, "skipped-iterations": [3]})
    assert read_lines(path) == [{"iteration": 1, "lm loss": 2.5, "skipped-iterations": [3]}]
    lines.close()
    again = JsonLinesLogger(path, warn=pytest.fail)
    again.write({"iteration": 2})
    assert [line["iteration"] for line in read_lines(path)] == [1, 2]
    again.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "m.jsonl"
    lines = JsonLinesLogger(path, warn=pytest.fail)
    lines.write({"lm loss": value})
    lines.close()
    assert read_lines(path) == [{"lm loss": None}]


def test_a_line_cut_off_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    lines = JsonLinesLogger(path, warn=pytest.fail)
    lines.write({"iteration": 2})
    lines.close()
    assert path.read_text() == '{"iteration": 1}\n{"iterat\n{"iteration": 2}\n'
    assert list(read_json_lines(path)) == [{"iteration": 1}, None, {"iteration": 2}]


def test_lines_that_are_no_objects_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'\xc3\x00\n[1]\n{}\n\n{"a": 1')
    assert list(read_json_lines(path)) == [None, None, {}, None, None]


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_warns_once_and_is_used_again_when_it_can(tmp_path: Path, room: int) -> None:
    path, warnings = tmp_path / "m.jsonl", list[str]()
    lines = JsonLinesLogger(path, warn=warnings.append)
    lines.close()
    disk = FailingDisk(path, room)
    lines._file = disk  # type: ignore[assignment]
    for iteration in range(3):
        lines.write({"iteration": iteration})
    disk.room = 10**6
    lines.write({"iteration": 3})
    lines.close()
    assert len(warnings) == 1
    assert "m.jsonl" in warnings[0]
    assert "no space left" in warnings[0].lower()
    assert path.read_text().splitlines()[-1] == '{"iteration": 3}'
    assert len(path.read_text().splitlines()) == (2 if room else 1)
