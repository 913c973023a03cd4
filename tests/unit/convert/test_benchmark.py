"""The benchmark of conversions, in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.conversion import Measured, describe, main


def test_speed_is_relative_to_the_copies_beside_it() -> None:
    sizes = {"largest": 4_000_000, "read": 9_000_000, "written": 18_000_000, "peak": 302_000_000}
    measured = Measured(10, **sizes, checked_seconds=7.4, seconds=[2.0, 1.0, 4.0], copy_seconds=[1.0, 1.0, 1.0])
    assert measured.bound == 1_008_000_000
    row = "| gpt2, to Hugging Face | 9 | 18 | 4 | 302 | 1,008 | 14 | 27 | 0.50 | 7 |"
    assert describe({"gpt2, to Hugging Face": measured})[-1] == row


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden-size", "64", "--vocab-size", "500", "--size", "1MB", "--repeats", "1"]
    assert main(["--folder", str(tmp_path), "--family", "llama", *sizes]) == 0
    rows = re.findall(r"^\| llama, (\w+) Hugging Face \|", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["from", "to"]
    assert list(tmp_path.iterdir()) == []
