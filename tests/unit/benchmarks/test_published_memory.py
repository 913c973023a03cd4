"""The forecast against memory that Megatron-LM recorded."""

from __future__ import annotations

import pytest

from benchmarks.published_memory import CASES, Case, forecast, table
from tests.unit.pages import ROOT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forecasts_are_near_what_megatron_lm_recorded(case: Case) -> None:
    state, peak = forecast(case)
    assert state == pytest.approx(case.allocated, rel=0.06)
    assert peak == pytest.approx(case.peak, rel=0.05)


def test_the_results_are_those_of_the_program() -> None:
    text = (ROOT / "benchmarks" / "results" / "published_memory.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in text
