"""The README's length and figures: each figure is that of a committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.distributed import product

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def figure(ratio: list[float], digits: int = 2) -> str:
    middle, lowest, highest = (f"{x:.{digits}f}" for x in ratio)
    return f"{middle} ({lowest}–{highest})"


def test_it_fits_on_two_pages() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_layouts_are_those_of_the_log() -> None:
    rows = [row.strip("| ").split(" | ") for row in product.markdown_rows(product.FILE.read_text())]
    cases = sum(int(row[1].replace(",", "")) for row in rows)
    worst = max((row[4] for row in rows), key=float)
    assert f"{cases:,} of {cases:,} agree; largest relative error of a gradient {worst}" in TEXT


def test_speeds_are_those_of_the_results() -> None:
    found = {label: ratio for kind in result("train_step").values() for label, ratio in kind["ratios"].items()}
    eager, fused = (found[f"tokens/s of ours / transformers{rest}"] for rest in ("", ", fused gelu"))
    assert f"{figure(eager)}; {figure(fused)} with its gelu fused" in TEXT
    assert f"| {figure(found['process-seconds of TP=2 / one process'])} |" in TEXT


def test_faults_are_those_of_the_log() -> None:
    (faults,) = re.findall(r"^(\d+ of \d+) faults survived", (ROOT / "tests" / "golden" / "soak.txt").read_text())
    assert f"| {faults} |" in TEXT
