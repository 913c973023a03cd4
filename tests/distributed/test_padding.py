"""A batch that does not divide over the ranks is padded with samples that do not count in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.training import TrainingConfig
from tests.distributed.grid import FACTORS, case_of
from tests.distributed.test_layout_matrix import TOLERANCE_FP64, check
from tests.kit.cases import Case, compare_with_twin, evaluation, run_on
from tests.kit.pool import Pool

PLAIN = {name: values[0] for name, values in FACTORS.items()}
PADDED = TrainingConfig(pad_global_batch=True)

CASES: dict[str, dict[str, Any]] = {
    "one of nine": {"dp": 3, "samples": 8},
    "a part of a micro-batch, and dropout": {
        "dp": 3, "samples": 8, "micro_batch": 2, "dropout": "hidden", "documents": "all", "recompute": "all modules",
    },
    "a rank that has nothing else": {"dp": 4, "samples": 2, "optimizer": "muon", "z_loss": 1e-2},
    "weights later": {"pp": 2, "schedule": "zb-h1", "dp": 2, "samples": 6, "micro_batch": 2, "zero": "2"},
    "experts": {
        "tp": "2sp", "dp": 3, "samples": 8, "micro_batch": 2, "experts": "balanced", "ep": 2, "etp": 1, "biases": "no",
        "zero": "1",
    },
}  # fmt: skip


def padded(choice: dict[str, Any]) -> Case:
    """The case of a choice, whose samples need not divide over the ranks."""
    case = case_of(PLAIN | choice)
    assert case.samples % (case.training.micro_batch_size * case.dp)
    return replace(case, training=replace(case.training, pad_global_batch=True))


@pytest.mark.parametrize("name", CASES)
def test_a_padded_batch_trains_like_one_process(pool: Pool, name: str) -> None:
    case = padded(CASES[name])
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)


def test_padding_is_no_part_of_an_evaluation(pool: Pool) -> None:
    """Its micro-batches are read as in a run, unlike in the other tests."""
    ((before, after),) = pool.run(1, evaluation, Case(samples=8))
    for got in pool.run(3, evaluation, Case(samples=8, dp=3, training=PADDED)):
        assert got == pytest.approx((before, after), rel=TOLERANCE_FP64)
