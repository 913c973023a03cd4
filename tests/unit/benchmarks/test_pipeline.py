"""The page of benchmarks.pipeline says what was measured, and the plain loop computes what the runtime does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from benchmarks import pipeline
from megatron.distributed import comm


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])  # those that hand nothing over on a rank
def test_both_compute_the_same(name: str) -> None:
    case = pipeline.Case.of(name, 3)
    with patch.multiple(comm, start_send=pipeline.nothing_moves, start_receive=pipeline.nothing_moves):
        case.plain()()
        plain, case.weight.grad = case.weight.grad, None
        case.pipeline()()
    assert plain is not None
    assert torch.equal(case.weight.grad, plain)


def test_what_an_action_costs() -> None:
    row = {"actions": 10, "computing": 4, "micros": {"runtime": [300.0, 500.0, 400.0], "plain": [100.0, 200.0, 200.0]}}
    assert pipeline.price(row) == [20.0, 30.0, 20.0]
    result = {"schedules": {"zb-h1": row}, "rounds": 3, "microbatches": 8, "load": 0.5}
    machine = {"processor": "a processor", "python": "3", "torch": "2"}
    page = pipeline.report(result | machine)
    assert "| zb-h1 | 10 | 4 | 20.0 | 20.0 | 30.0 | 2.5 |" in page
    assert "all below 50 us" in page
    row["micros"]["runtime"] = [1000.0] * 3
    assert "above 50 us: zb-h1" in pipeline.report(result | machine)
