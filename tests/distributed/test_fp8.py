"""Linears in FP8: every layout quantises the same values, and quantised weights are up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from megatron.arguments.checks.parameters import check_fp8_sizes
from megatron.arguments.cli import parse
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.comm import ALL_GATHER, Group
from megatron.distributed.mesh import Mesh
from megatron.kernels.fp8 import Float8Kernel, WeightCasts
from megatron.optimizer.lr_scheduler import Rates
from megatron.planner.memory import fp8_weight_bytes
from megatron.training.build import build_trainer
from megatron.training.components.average import AverageWeights
from megatron.training.step import evaluate, train_step
from tests.kit.cases import LR, MODEL, RATES, SEQ_LENGTH, Case, batches_of, pipeline, run_case, run_on
from tests.kit.pool import Pool
from tests.kit.runs import part_of
from tests.kit.short import one_in
from tools.lib.verify_parallel import RankTrace, StepTrace, compare_traces, join_traces

TP2 = ParallelConfig(tensor_model_parallel_size=2)
TP2_SP = replace(TP2, sequence_parallel=True)
GATED = replace(MODEL, activation="swiglu", normalization="RMSNorm", num_query_groups=2)


def precision(recipe: str, fp8_format: str = "hybrid", **rest: Any) -> PrecisionConfig:
    return PrecisionConfig(params_dtype="fp64", fp8_format=fp8_format, fp8_recipe=recipe, **rest)


def case(parallel: ParallelConfig, recipe: str, **rest: Any) -> Case:
    return replace(Case(GATED, parallel, precision(recipe), TrainingConfig(micro_batch_size=2)), **rest)


def context(size: int, kind: str = "p2p", **rest: Any) -> ParallelConfig:
    """Context parallelism; a2a+p2p exchanges heads between pairs of ranks."""
    pairs = (2, size // 2) if kind == "a2a+p2p" else ()
    return ParallelConfig(
        context_parallel_size=size, cp_comm_type=kind, hierarchical_context_parallel_sizes=pairs, **rest
    )


def wide(recipe: str, samples: int, size: int, parallel: ParallelConfig = TP2_SP) -> Case:
    """Sizes and tokens of a rank that are multiples of a block."""
    model = replace(
        MODEL, num_layers=1, hidden_size=size, ffn_hidden_size=2 * size, num_attention_heads=2, kv_channels=size // 2
    )
    training = TrainingConfig(micro_batch_size=samples)
    return Case(model, parallel, precision(recipe, "e4m3"), training, samples=samples, steps=1)


def in_chunks(whole: Case) -> Case:
    """The MLP on two of six rows at a time."""
    return replace(whole, training=replace(whole.training, mlp_chunk_size=2))


def experts(recipe: str, parallel: ParallelConfig, **rest: Any) -> Case:
    """Two of four experts per token; a rank's rows come from other ranks, with other micro-batches."""
    wanted = case(parallel, recipe, model=replace(GATED, num_experts=4, moe_ffn_hidden_size=48), dp=2)
    return replace(wanted, training=TrainingConfig(micro_batch_size=1), **rest)


def wide_experts(parallel: ParallelConfig) -> Case:
    """In blocks of 128."""
    wanted = wide("blockwise", 64, 256, parallel)
    return replace(wanted, model=replace(wanted.model, num_experts=2, moe_router_topk=1, moe_router_pre_softmax=True))


ETP2 = replace(TP2_SP, expert_tensor_parallel_size=2)
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
    "tensorwise-cp2-tp2-sp": case(context(2, tensor_model_parallel_size=2, sequence_parallel=True), "tensorwise"),
    "tensorwise-cp3-gathered": case(context(3, "all_gather"), "tensorwise"),
    "tensorwise-cp4-heads": case(context(4, "a2a"), "tensorwise"),
    "tensorwise-cp2-recomputed": case(
        context(2),
        "tensorwise",
        training=TrainingConfig(micro_batch_size=2, recompute_granularity="full", recompute_method="uniform"),
    ),
    "tensorwise-cp2-zb-v": replace(ZB, parallel=replace(ZB.parallel, context_parallel_size=2)),
    "rowwise-cp2-heads-tp2-sp": case(
        context(2, "a2a", tensor_model_parallel_size=2, sequence_parallel=True), "rowwise"
    ),
    "rowwise-cp2-tp2": case(context(2, tensor_model_parallel_size=2), "rowwise"),
    "rowwise-cp2-dp2": case(context(2), "rowwise", dp=2, training=TrainingConfig(micro_batch_size=1)),
    "rowwise-cp4-both": case(context(4, "a2a+p2p"), "rowwise"),
    "rowwise-cp2-wgrad": case(context(2), "rowwise", precision=precision("rowwise", fp8_wgrad=False)),
    "mxfp8-cp4-both": wide("mxfp8", 16, 64, context(4, "a2a+p2p")),
    "mxfp8-cp2-tp2-sp": wide("mxfp8", 16, 64, context(2, tensor_model_parallel_size=2, sequence_parallel=True)),
    "blockwise-cp3": wide("blockwise", 32, 256, context(3)),
    "mxfp8-tp2-sp": wide("mxfp8", 16, 64),
    "blockwise-tp2-sp": wide("blockwise", 64, 256),
    "rowwise-experts-ep2": experts("rowwise", ParallelConfig(expert_model_parallel_size=2)),
    "rowwise-experts-ep2-etp2": experts("rowwise", replace(ETP2, expert_model_parallel_size=2)),
    "tensorwise-experts-ep4-tp2-sp": experts(
        "tensorwise", replace(TP2_SP, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    ),
    "rowwise-experts-biases-etp2": experts(
        "rowwise", ETP2, model=replace(MODEL, num_experts=4, moe_ffn_hidden_size=48, add_bias_linear=True)
    ),
    "blockwise-experts-etp2": wide_experts(ETP2),
    "mxfp8-tp2-sp-chunks": in_chunks(wide("mxfp8", 16, 64)),
    "blockwise-tp2-sp-chunks": in_chunks(wide("blockwise", 64, 256)),
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


SLOW = (
    "tensorwise-tp2-sp",
    "tensorwise-tp2-sp-dp2",
    "rowwise-tp2-sp",
    "wgrad",
    "recomputed",
    "tensorwise-cp2-tp2-sp",
    "tensorwise-cp4-heads",
    "tensorwise-cp2-zb-v",
    "rowwise-cp2-tp2",
    "rowwise-cp2-dp2",
    "rowwise-cp4-both",
    "mxfp8-cp2-tp2-sp",
    "mxfp8-tp2-sp",
    "blockwise-tp2-sp",
    "blockwise-tp2-sp-chunks",
    "rowwise-experts-ep2",
)
"""Cases whose recipe, axes and options others have, too."""


@pytest.mark.parametrize("name", one_in(2, CASES, SLOW))
def test_layouts_agree(pool: Pool, name: str) -> None:
    assert largest_deviation(run_on(pool, CASES[name]), CASES[name]) <= 1e-10


def run_with_scales_of_parts(rank: int, world_size: int, wanted: Case, forgotten: str) -> list[RankTrace]:
    """Train with scales that cover what the ranks along one axis hold, not the whole matrix."""
    group = Mesh.group

    def without(mesh: Mesh, *axes: str) -> Group:
        if sys._getframe(1).f_code.co_name != "quantize" or forgotten not in axes:
            return group(mesh, *axes)
        others = [axis for axis in axes if axis != forgotten]
        return group(mesh, *others) if others else Group()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "group", without)
        return run_case(rank, world_size, wanted)


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        pytest.param("tensorwise-tp2", "tp", marks=pytest.mark.slow),
        ("rowwise-tp2-sp", "tp"),
        ("tensorwise-cp3-gathered", "cp"),
        pytest.param("tensorwise-cp2-tp2-sp", "tp", marks=pytest.mark.slow),
        pytest.param("tensorwise-cp2-tp2-sp", "cp", marks=pytest.mark.slow),
        pytest.param("rowwise-cp2-heads-tp2-sp", "cp", marks=pytest.mark.slow),
        ("rowwise-experts-biases-etp2", "etp"),
    ],
)
def test_scales_of_parts_are_noticed(pool: Pool, name: str, forgotten: str) -> None:
    wanted = CASES[name]
    ranks = pool.run(wanted.world_size, run_with_scales_of_parts, wanted, forgotten)
    assert largest_deviation([join_traces(step) for step in zip(*ranks)], wanted) > 1e-4


def test_blocks_across_chunks_are_refused(pool: Pool) -> None:
    """Two chunks of a rank's 96 tokens lie apart in the sequence: a block with tokens of both would be another one."""
    apart = wide("mxfp8", 8, 64, context(2))
    assert largest_deviation(run_on(pool, apart), apart) > 1e-8
    whole, cut = (
        {problem.code for problem in check_fp8_sizes(each.config(), 2)}
        for each in (wide("mxfp8", 16, 64, context(2)), apart)
    )
    assert (whole, cut) == (set(), {"E923"})


def bytes_gathered(rank: int, world_size: int, cases: Sequence[Case]) -> list[float]:
    """Bytes of all-gathers over the tensor-parallel ranks that this rank sends in a step."""
    found = []
    for wanted in cases:
        trainer = build_trainer(wanted.config(), rank, world_size)
        trainer.mesh.meter.pop_bytes_sent()
        train_step(trainer, batches_of(trainer, wanted, 0), RATES)
        found.append(trainer.mesh.meter.pop_bytes_sent()["tp", ALL_GATHER])
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_sequence_parallel_rows_are_sent_in_one_byte(pool: Pool, recipe: str) -> None:
    """A step gathers the inputs of qkv and fc1 twice, and the output gradients of proj and fc2.

    Where the scales of both products differ, the gradients are gathered for each, with scales of rows for the first.
    """
    fp32 = [
        replace(case(TP2_SP, recipe), precision=PrecisionConfig(fp8_format=f, fp8_recipe=recipe))
        for f in (None, "hybrid")
    ]
    tokens = fp32[0].samples * SEQ_LENGTH
    sent = tokens * MODEL.hidden_size * MODEL.num_layers // 2  # elements of a matrix that half of the ranks lack
    gathers, scales = (6, 0) if recipe == "tensorwise" else (8, 4 * 4 * tokens * MODEL.num_layers // 2)
    for plain, quantised in pool.run(2, bytes_gathered, fp32):
        assert plain - quantised == 6 * 4 * sent - (gathers * sent + scales)


def trained(wanted: Case) -> list[Tensor]:
    """Losses of steps of several micro-batches and of evaluations between them, one of them with averaged weights."""
    config = replace(wanted.config(), optimizer=OptimizerConfig(ema_decay=0.5))
    trainer = build_trainer(replace(config, training=replace(config.training, eval_iters=2)), 0, 1)
    losses = []
    for step in range(3):
        losses.append(train_step(trainer, batches_of(trainer, wanted, step), RATES).loss)
        losses.append(evaluate(trainer))
        with part_of(trainer, AverageWeights).in_model():
            losses.append(evaluate(trainer))
        losses.append(evaluate(trainer))
    return losses


@contextmanager
def never_dropped(casts: WeightCasts) -> Iterator[None]:
    casts._casts = casts._casts or {}
    yield


def test_weights_are_quantised_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept casts change nothing: every step and evaluation begins with the current weights."""
    wanted = case(ParallelConfig(), "rowwise")
    calls: list[tuple[int, ...]] = []
    quantize = Float8Kernel.quantize
    monkeypatch.setattr(Float8Kernel, "quantize", lambda self, x, *a: calls.append(x.shape) or quantize(self, x, *a))
    kept, count = trained(wanted), len(calls)
    weights = 4 * MODEL.num_layers
    monkeypatch.setattr(WeightCasts, "kept", lambda self: nullcontext())
    assert trained(wanted) == kept
    again = len(calls) - count
    assert again - count == weights * (
        3 * 2 + 9 * 2
    )  # the second micro-batch of 3 steps, and of 9 evaluations in 2 parts
    monkeypatch.setattr(WeightCasts, "kept", never_dropped)
    assert trained(wanted) != kept


FLAGS = (
    "--bf16 --mock-data --vocab-size 256 --device cpu --num-layers 2 --hidden-size 128 --num-attention-heads 4 "
    "--seq-length 64 --micro-batch-size 2 --global-batch-size 2 --train-iters 300"
)


def final_loss(steps: int, flags: str = "") -> float:
    """Mean loss of the last tenth of a training run."""
    trainer = build_trainer(parse([*FLAGS.split(), *flags.split()], {}).config, 0, 1)
    losses = []
    for _ in range(steps):
        losses.append(train_step(trainer, trainer.next_batches(), Rates(3e-3, 0.1)).loss.item())
        trainer.progress.consumed_samples += 2
    return sum(losses[-steps // 10 :]) / (steps // 10)


def test_the_loss_falls_as_in_bf16() -> None:
    small = "--hidden-size 32 --seq-length 32 "
    assert final_loss(20, small + "--fp8-format hybrid") == pytest.approx(final_loss(20, small), rel=0.01)


@pytest.mark.slow
def test_a_curve_of_300_steps_is_within_the_noise_of_bf16() -> None:
    """The noise is the spread of bf16 runs from other initial weights."""
    plain = [final_loss(300, f"--seed {seed}") for seed in (1234, 1, 2, 3)]
    recipes = (
        "hybrid --fp8-recipe tensorwise",
        *(f"e4m3 --fp8-recipe {name}" for name in ("rowwise", "blockwise", "mxfp8")),
    )
    found = {recipe: final_loss(300, f"--fp8-format {recipe}") for recipe in recipes}
    print("bf16", plain, "fp8", found)
    assert all(abs(loss - sum(plain) / 4) < max(plain) - min(plain) for loss in found.values())


@pytest.mark.parametrize(("name", "heads"), [("first-last", None), ("first-last", 1), ("rowwise-experts-ep2", None)])
def test_the_planner_counts_the_casts(monkeypatch: pytest.MonkeyPatch, name: str, heads: int | None) -> None:
    """Two bytes per weight of a linear in FP8, all kept at the end of a step."""
    wanted = CASES[name]
    model = replace(wanted.model, mtp_num_layers=heads, position_embedding_type="rope")
    wanted = replace(wanted, model=model, parallel=ParallelConfig(), dp=1)
    if heads:  # the last layer is not in FP8 there, nor are heads of its kind
        wanted = replace(wanted, precision=replace(wanted.precision, first_last_layers_bf16=False))
    trainer = build_trainer(wanted.config(), 0, 1)
    kept: list[int] = []
    run = trainer.pipeline.run

    def run_and_count(*arguments: Any) -> None:
        run(*arguments)
        kept.append(sum(cast.data.nbytes for cast in (trainer.chunks[0].context.fp8.casts._casts or {}).values()))

    monkeypatch.setattr(trainer.pipeline, "run", run_and_count)
    train_step(trainer, trainer.complete(batches_of(trainer, wanted, 0)), RATES)
    assert kept == [fp8_weight_bytes(trainer.config)]
