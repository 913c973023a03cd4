"""The README's length and figures: each figure is in a committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu import standings
from tests.distributed import product

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def figure(ratio: list[float], digits: int = 2) -> str:
    middle, lowest, highest = (f"{x:.{digits}f}" for x in ratio)
    return f"{middle} ({lowest}–{highest})"


def test_layouts_match_the_log() -> None:
    rows = [row.strip("| ").split(" | ") for row in product.markdown_rows(product.FILE.read_text())]
    cases = sum(int(row[1].replace(",", "")) for row in rows)
    worst = max((row[4] for row in rows), key=float)
    assert f"{cases:,} of {cases:,} agree; largest relative error of a gradient {worst}" in TEXT


def test_speeds_match_the_results() -> None:
    found = result("train_step")["GPT-2 124M, transformers, micro-batch 1"]["ratios"]
    eager, fused = (found[f"tokens/s of ours / transformers{rest}"] for rest in ("", ", fused gelu"))
    assert f"{figure(eager)}; {figure(fused)} with its gelu fused" in TEXT


def test_speeds_on_a_gpu_match_the_results() -> None:
    found = {case["case"]: standings(case) for case in result("gpu")["cases"]}
    rates = {name: (v["best"]["tokens/s"], v["transformers"]["tokens/s"]) for name, v in found.items()}
    ratios = {name: ours / theirs for name, (ours, theirs) in rates.items()}
    speeds = f"{ratios['124M-s1024']:.2f} (GPT-2 124M), {ratios['8B-shape-s8192']:.2f} (8 layers of Llama 8B)"
    assert f"| {speeds} |" in TEXT
    for name, (ours, theirs) in rates.items():
        mfu = " / ".join(f"{found[name][whose]['MFU']:.1%}" for whose in ("best", "transformers"))
        row = f"| {ours:,.0f} / {theirs:,.0f} | {mfu} | {ratios[name]:.2f} |"
        assert row in (ROOT / "docs" / "performance.md").read_text()


def test_faults_match_the_log() -> None:
    (faults,) = re.findall(r"^(\d+ of \d+) faults survived", (ROOT / "tests" / "golden" / "soak.txt").read_text())
    assert f"| {faults} |" in TEXT
