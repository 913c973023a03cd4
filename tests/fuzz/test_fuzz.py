"""Mutated files are refused with a sentence, or read as they are: targets and mutations are in `fuzz.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.data.errors import DataError
from tests.fuzz import fuzz
from tests.fuzz.fuzz import FILE, ROOT, TARGETS, DifferenceError, Tally, Target, run_input, run_targets

HEAD = re.compile(r"([\d,]+) inputs, (\d+) wrong, ([\d,]+) s: ")


def test_some_seconds_of_inputs() -> None:
    tallies = run_targets([*TARGETS], 2 / len(TARGETS))
    assert {name: tally.wrong for name, tally in tallies.items()} == {name: [] for name in TARGETS}
    assert all(tally.inputs for tally in tallies.values())


@pytest.mark.slow
def test_ten_minutes_of_inputs(tmp_path: Path) -> None:
    output = tmp_path / "found.txt"
    command = [sys.executable, "-m", "tests.fuzz.fuzz", "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_long_run_is_kept() -> None:
    head, *rows = FILE.read_text().splitlines()
    found = HEAD.match(head)
    assert found is not None
    inputs, wrong, seconds = (int(number.replace(",", "")) for number in found.groups())
    assert (wrong, inputs >= 25_000, seconds >= 600) == (0, True, True)
    assert {row.split()[0] for row in rows[2:]} == {*TARGETS}


def refuse(error: BaseException) -> Callable[[bytes], object]:
    def read(content: bytes) -> object:
        raise error

    return read


PLANTED: list[tuple[Callable[[bytes], object], tuple[int, str]]] = [
    (lambda content: content, (1, "")),
    (lambda content: None, (0, "")),
    (refuse(DataError("a sentence", "a fix")), (0, "")),
    (refuse(DataError("")), (0, "an error without a sentence")),
    (refuse(DifferenceError("another value")), (0, "DifferenceError: another value at")),
    (refuse(KeyError("x")), (0, "KeyError: 'x' at")),
    (refuse(ValueError("a sentence")), (0, "")),
    (refuse(UnicodeDecodeError("utf-8", b"", 0, 1, "x")), (0, "UnicodeDecodeError: ")),
    (refuse(SystemExit(1)), (0, "SystemExit: 1 at")),
]


@pytest.mark.parametrize(("read", "expected"), PLANTED, ids=lambda value: str(value)[:40])
def test_wrong_answers_are_recorded(
    read: Callable[[bytes], object], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "CLEAN", (DataError,))
    tally = Tally()
    run_input("x 0", Target("bytes", [], read, (ValueError,)), b"", tally)
    accepted, wrong = expected
    assert (tally.inputs, tally.accepted, bool(tally.wrong)) == (1, accepted, bool(wrong))
    assert wrong in "".join(tally.wrong)
