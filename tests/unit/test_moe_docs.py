"""The figures in docs/moe.md are those of a committed result."""

from __future__ import annotations

import json

from tests.unit.pages import ROOT, page, rows


def test_costs_match_the_result() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "experts.json").read_text())["ratios"]
    shown = {name: cells for name, *cells in rows(page("moe"), "option | time of a step with it / without")}
    assert shown == {name: [f"{middle:.2f} ({low:.2f}–{high:.2f})"] for name, (middle, low, high) in found.items()}
