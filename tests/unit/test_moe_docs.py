"""The figures in docs/moe.md are those of a committed result."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from tests.unit.pages import ROOT, page, rows


def test_costs_match_the_result() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "experts.json").read_text())["ratios"]
    shown = {name: cells for name, *cells in rows(page("moe"), "option | time of a step with it / without")}
    assert shown == {name: [f"{middle:.2f} ({low:.2f}–{high:.2f})"] for name, (middle, low, high) in found.items()}


def test_loads_match_the_result() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "experts.json").read_text())["loads"]
    shown = rows(page("moe"), "router | loss | busiest expert")
    assert [name for name, *_ in shown] == [*found]
    for (name, *cells), each in zip(shown, found.values(), strict=True):
        of_ranks = [mean(each[f"of {ranks}"]["steps"][-12:]) for ranks in (4, 8)]
        figures = [each["loss"], each["expert"], *of_ranks, each["predicted"]]
        assert cells == [f"{figure:.2f}" for figure in figures], name
        assert len(each["of 4"]["steps"]) * 4096 == pytest.approx(5e5, rel=0.05)
