"""The loads of routers that have learned: what is counted, and the speed that is predicted from it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experts import busiest, predicted_ratio
from tests.unit.pages import ROOT


def test_the_busiest_rank_has_the_sum_of_neighbouring_experts() -> None:
    counts = torch.tensor([[1.0, 5, 2, 0], [4, 4, 4, 4]])
    assert busiest(counts).tolist() == [2.5, 1.0]
    assert busiest(counts, 2).tolist() == [1.5, 1.0]
    assert busiest(counts, 1).tolist() == [1.0, 1.0]


def test_the_prediction_passes_through_the_measured_loads() -> None:
    text = (ROOT / "benchmarks" / "results" / "launches.md").read_text().partition("## qwen3-moe-ep4-s4096")[2]
    lines = [line.split("|") for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ours")]
    milliseconds = {cells[1].partition(", at ")[0].strip(): float(cells[7]) for cells in lines}
    forced = milliseconds["ours, forced balance"]
    for load, row in ((1.0, "ours, --cuda-graph none"), (1.5, "ours, busiest rank 1.5"), (2.0, "ours, busiest rank 2")):
        assert predicted_ratio(load) == pytest.approx(forced / milliseconds[row], rel=2e-3)
    assert predicted_ratio(1.5) < predicted_ratio(1.25) < predicted_ratio(1.0)
    assert predicted_ratio(3.0) < predicted_ratio(2.0)
