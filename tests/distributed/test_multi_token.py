"""Multi-token prediction in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.data.loader import MaskBuilder
from megatron.kernels import block_attention
from megatron.pipeline.plan import resolve_pipeline
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.kit.cases import MODEL, RATES, Case, batches_of, compare_with_twin
from tests.kit.pool import Pool
from tools.lib.verify_parallel import RankTrace, join_traces, trace_step

DOCUMENTS = MaskBuilder(eod=7, reset_positions=True, reset_attention=True)
ROPE = replace(MODEL, position_embedding_type="rope", normalization="RMSNorm")


def case(
    model: dict[str, Any] | None = None, dp: int = 1, training: dict[str, Any] | None = None, **parallel: Any
) -> Case:
    changed: ModelConfig = replace(ROPE, **({"mtp_num_layers": 2} | (model or {})))
    layout = resolve_pipeline(changed, ParallelConfig(**parallel))
    return Case(changed, layout, training=TrainingConfig(**training or {}), dp=dp)


TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
CASES = {
    "tp": case(tensor_model_parallel_size=2),
    "tp, sp, dropout": case({"hidden_dropout": 0.1}, **TP),
    "pp, tied": case(**PP),
    "pp, untied": case(UNTIED, **PP),
    "dp, micro-batches": case(dp=2),
}


def steps_of(rank: int, ranks: int, one: Case) -> list[tuple[RankTrace, dict[str, float]]]:
    """Train on this rank; return of each step its trace, and the losses of the depths."""
    with patch.multiple(block_attention, BLOCK=8, UNFUSED_BLOCK=8):  # several tiles
        trainer, steps = build_trainer(one.config(), rank, ranks), []
        for step in range(one.steps):
            metrics = train_step(trainer, trainer.complete(batches_of(trainer, one, step)), RATES)
            steps.append((trace_step(trainer, metrics), {name: x.item() for name, x in metrics.extra.items()}))
    return steps


@cache
def alone(twin: Case) -> list[tuple[RankTrace, dict[str, float]]]:
    return steps_of(0, 1, twin)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    ranks = pool.run(one.world_size, steps_of, one)
    deviations = compare_with_twin([join_traces([trace for trace, _ in step]) for step in zip(*ranks)], one)
    assert any(deviation.name.startswith("mtp.layers.1.mtp_model_layer") for deviation in deviations)
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation
    for step, (_, expected) in zip(zip(*ranks), alone(one.twin()), strict=True):
        assert {"mtp loss 1", "mtp loss 2"} <= expected.keys()
        assert all(losses == pytest.approx(expected, rel=1e-10) for _, losses in step)
