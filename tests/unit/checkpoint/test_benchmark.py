"""The benchmark of checkpoints runs, in small, and verifies that it loads the saved values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.checkpoint import main
from benchmarks.record import ratios


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "--megabytes", "1", "--hidden-size", "64", "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^\| (save / raw write|load / raw read) \| \d+\.\d\d ", out, re.MULTILINE) == [
        "save / raw write",
        "load / raw read",
    ]
    assert re.search(r"^\| asynchronous save \| \d+\.\d\d \|", out, re.MULTILINE)
    assert "A save takes " in out
    assert list(tmp_path.iterdir()) == []


def test_results_are_of_one_size() -> None:
    with pytest.raises(SystemExit):
        main(["--megabytes", "1", "--write"])


def test_a_ratio_is_of_neighbours() -> None:
    assert ratios([1.0, 4.0, 1.0], [2.0, 4.0, 4.0]) == [0.5, 0.25, 1.0]
