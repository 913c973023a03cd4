"""Linears in FP8: every layout quantises the same values, and quantised weights are those of the current step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.config.run import PrecisionConfig, TrainingConfig
from tests.distributed.drive import LR, MODEL, Case, pipeline, run_case, run_on
from tests.distributed.pool import Pool
from tools.lib.verify_parallel import StepTrace, compare_traces, join_traces

TP2 = ParallelConfig(tensor_model_parallel_size=2)
TP2_SP = replace(TP2, sequence_parallel=True)
GATED = replace(MODEL, activation="swiglu", normalization="RMSNorm", num_query_groups=2)


def precision(recipe: str, fp8_format: str = "hybrid", **rest: Any) -> PrecisionConfig:
    return PrecisionConfig(params_dtype="fp64", fp8_format=fp8_format, fp8_recipe=recipe, **rest)


def case(parallel: ParallelConfig, recipe: str, **rest: Any) -> Case:
    return replace(Case(GATED, parallel, precision(recipe), TrainingConfig(micro_batch_size=2)), **rest)


def wide(recipe: str, samples: int, size: int) -> Case:
    """Sizes and tokens of a rank that are multiples of a block."""
    model = replace(
        MODEL, num_layers=1, hidden_size=size, ffn_hidden_size=2 * size, num_attention_heads=2, kv_channels=size // 2
    )
    training = TrainingConfig(micro_batch_size=samples)
    return Case(model, TP2_SP, precision(recipe, "e4m3"), training, samples=samples, steps=1)


ZB = replace(pipeline(2, "zb-v", layers=4), precision=precision("tensorwise"), dp=1)
CASES = {
    "tensorwise-tp2": case(TP2, "tensorwise"),
    "tensorwise-tp2-sp": case(TP2_SP, "tensorwise"),
    "tensorwise-tp2-sp-dp2": case(TP2_SP, "tensorwise", dp=2, training=TrainingConfig(micro_batch_size=1)),
    "tensorwise-zb-v-tp2-sp": replace(
        ZB, parallel=replace(ZB.parallel, tensor_model_parallel_size=2, sequence_parallel=True)
    ),
    "rowwise-tp2-dp2": case(TP2, "rowwise", dp=2),
    "rowwise-tp2-sp": case(TP2_SP, "rowwise"),
    "first-last": case(
        TP2_SP,
        "rowwise",
        model=replace(GATED, num_layers=3),
        precision=precision("rowwise", first_last_layers_bf16=True),
    ),
    "wgrad": case(TP2_SP, "rowwise", precision=precision("rowwise", fp8_wgrad=False)),
    "recomputed": case(
        TP2_SP,
        "tensorwise",
        training=TrainingConfig(micro_batch_size=2, recompute_granularity="full", recompute_method="uniform"),
    ),
    "mxfp8-tp2-sp": wide("mxfp8", 16, 64),
    "blockwise-tp2-sp": wide("blockwise", 64, 256),
}


@cache
def on_one_rank(wanted: Case) -> list[StepTrace]:
    """The steps of a case on one process, in the same micro-batches."""
    training = TrainingConfig(micro_batch_size=wanted.training.micro_batch_size)
    return [
        join_traces([step])
        for step in run_case(0, 1, replace(wanted, parallel=ParallelConfig(), dp=1, training=training))
    ]


def largest_deviation(steps: Sequence[StepTrace], wanted: Case) -> float:
    pairs = zip(steps, on_one_rank(wanted), strict=True)
    return max(d.error for i, (got, ref) in enumerate(pairs) for d in compare_traces(i, got, ref, 1e-5, LR))


@pytest.mark.parametrize("name", CASES)
def test_layouts_agree(pool: Pool, name: str) -> None:
    assert largest_deviation(run_on(pool, CASES[name]), CASES[name]) <= 1e-10
