"""The record of a step: digests that depend on no layout, norms, samples with their texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.training.build import build_trainer
from megatron.training.step_record import summarize_tensors
from megatron.training.trainer import Trainer
from tests.distributed.detect import DP2, TP2, ZERO1, ZERO3
from tests.kit.cases import Case, pipeline
from tests.kit.pool import Pool

FLIPPED = "layers.0.mlp.linear_fc1.weight"

CASES: dict[str, Case] = {
    "tp2": TP2,
    "dp2": DP2,
    "zero 1": ZERO1,
    "zero 3": ZERO3,
    "pp2": pipeline(2),
}


def of_weights(trainer: Trainer) -> dict[str, tuple[str, float]]:
    """Digest and norm of each main parameter."""
    summaries = summarize_tensors(trainer, trainer.optimizer.main_params)
    return {name: (summary.text, summary.squares) for name, summary in summaries.items()}


def summarized(rank: int, world_size: int, case: Case, flip: bool) -> dict[str, Any]:
    trainer = build_trainer(case.config(), rank, world_size)
    if flip and FLIPPED in trainer.optimizer.main_params:  # one bit of one element of each shard
        trainer.optimizer.main_params[FLIPPED].view(-1)[:1].view(torch.int64).bitwise_xor_(1)
    return of_weights(trainer)


@pytest.mark.parametrize("name", CASES)
def test_digests_of_global_tensors_do_not_depend_on_the_layout_and_see_one_bit(pool: Pool, name: str) -> None:
    case = CASES[name]
    expected = of_weights(build_trainer(case.twin().config(), 0, 1))
    first, *others = pool.run(2, summarized, case, False)
    assert others == [{}]
    assert {name: text for name, (text, _) in first.items()} == {name: text for name, (text, _) in expected.items()}
    assert [*first] == [*expected]
    flipped = pool.run(2, summarized, case, True)[0]
    assert [name for name in first if first[name][0] != flipped[name][0]] == [FLIPPED]
