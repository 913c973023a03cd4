"""Sixteen bits on several ranks: the same model up to rounding, and one decision of all ranks about every step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.distributed.faults import infinite_gradient
from tests.kit.cases import MODEL, RATES, Case, batches_of, pipeline, reference, run_on
from tests.kit.pool import Pool

CASE = Case(
    replace(MODEL, num_query_groups=2, qk_layernorm=True, hidden_dropout=0.1),
    ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    PrecisionConfig(params_dtype="fp16", initial_loss_scale=2.0**24, hysteresis=1, loss_scale_window=3),
    TrainingConfig(micro_batch_size=1),
    dp=2,
    steps=12,
)
PIPELINE = replace(pipeline(2, "zb-v", layers=4, samples=8, num_query_groups=2, hidden_dropout=0.1), dp=2)


@pytest.mark.parametrize("case", [CASE, PIPELINE], ids=["tp2-sp-dp2", "pp2x2-zb-v-dp2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_near_fp32_on_one_process(pool: Pool, dtype: str, case: Case) -> None:
    """Rounding differs with the layout, so this only finds gross mistakes: a sum in the wrong format, a lost scale."""
    case = replace(case, steps=2, precision=PrecisionConfig(params_dtype=dtype, initial_loss_scale=1024.0))
    steps, exact = run_on(pool, case), reference(replace(case, precision=PrecisionConfig()).twin())
    for got, ref in zip(steps, exact, strict=True):
        assert got.loss == pytest.approx(ref.loss, rel=5e-3)
        assert got.grad_norm == pytest.approx(ref.grad_norm, rel=2e-2)
        assert got.drifted == []
    assert all(grad.dtype == torch.float32 for grad in steps[0].grads.values())


@dataclass(frozen=True)
class Scaling:
    """By step: the loss scale it ran with, whether it was skipped, and a checksum of this rank's weights after it."""

    scales: list[float]
    skipped: list[bool]
    weights: list[float]


def run_scaled(rank: int, world_size: int, case: Case, overflow_on: int | None) -> Scaling:
    """Train; with ``overflow_on`` that rank's gradient of one weight is infinite in step 3."""
    trainer = build_trainer(case.config(), rank, world_size)
    out = Scaling([], [], [])
    for step in range(case.steps):
        with infinite_gradient() if (rank, step) == (overflow_on, 3) else nullcontext():
            metrics = train_step(trainer, batches_of(trainer, case, step), RATES)
        out.scales.append(metrics.loss_scale.item())
        out.skipped.append(bool(metrics.skipped.item()))
        out.weights.append(sum(m.double().abs().sum().item() for m in trainer.optimizer.main_params.values()))
    return out


def test_all_ranks_keep_the_same_loss_scale(pool: Pool) -> None:
    ranks = pool.run(CASE.world_size, run_scaled, CASE, None)
    assert len({tuple(rank.scales) for rank in ranks}) == len({tuple(rank.skipped) for rank in ranks}) == 1
    scales, skipped = ranks[0].scales, ranks[0].skipped
    assert skipped[0], "the first scale is meant to be too large"
    assert not all(skipped)
    assert max(b / a for a, b in zip(scales, scales[1:])) == 2.0
    assert all(b == a / 2 for a, b, skip in zip(scales, scales[1:], skipped) if skip)


def test_an_overflow_on_one_rank_stops_the_update_on_all(pool: Pool) -> None:
    case = replace(CASE, steps=5, precision=PrecisionConfig(params_dtype="fp32"))
    for rank in pool.run(case.world_size, run_scaled, case, 3):
        assert rank.skipped == [False, False, False, True, False]
        assert rank.weights[3] == rank.weights[2]
        assert rank.weights[4] != rank.weights[3]
