"""The benchmark of conversions, in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.conversion import Measured, describe, main


def test_a_ratio_counts_largest_tensors_above_the_baseline() -> None:
    measured = Measured(10, largest=4_000_000, model=9_000_000, baseline=300_000_000, peak=302_000_000, seconds=1.4)
    assert measured.ratio == 0.5
    assert describe({"gpt2, to Hugging Face": measured})[-1] == "| gpt2, to Hugging Face | 9 | 4 | 2 | 0.50 | 300 | 1 |"


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden-size", "64", "--num-layers", "1", "--vocab-size", "500"]
    assert main(["--folder", str(tmp_path), "--family", "llama", *sizes]) == 0
    rows = re.findall(r"^\| llama, (\w+) Hugging Face \|", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["from", "to"]
    assert list(tmp_path.iterdir()) == []
