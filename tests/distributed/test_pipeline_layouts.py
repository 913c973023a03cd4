"""Pipelines train like one process: corner cases beside the layout matrix, and equality to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.parallel import PIPELINE_SCHEDULES
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.plan import stage_layers
from megatron.pipeline.schedules import make_schedule
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.distributed.faults import infinite_gradient
from tests.distributed.grid import DOCUMENTS, stages_on_a_rank
from tests.kit.cases import RATES, Case, batches_of, compare_with_twin, evaluation, pipeline, run_on
from tests.kit.pool import Pool
from tools.lib.verify_parallel import StepTrace

TOLERANCE = 1e-10


def check(pool: Pool, case: Case) -> None:
    steps = run_on(pool, case)
    assert [d for d in compare_with_twin(steps, case) if d.error > TOLERANCE] == []
    assert [step.drifted for step in steps] == [[]] * len(steps)


LONG = pytest.mark.slow
SHORT = ("interleaved", "zb-h2", "searched")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name in SHORT else LONG) for name in PIPELINE_SCHEDULES]
)
def test_micro_batches_fewer_than_ranks_and_an_odd_number(pool: Pool, schedule: str) -> None:
    stages = stages_on_a_rank(schedule) or 2
    check(pool, replace(pipeline(4, schedule, stages, samples=3, layers=4 * stages - 1), steps=1))


GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
CASES = {
    "groups of 3 of 7": pipeline(2, "interleaved", 2, 7, layers=4, **{GROUP: 3}),
    "3 stages on a rank": pipeline(2, "interleaved", 3, 5, layers=8),
    "few layers first and last, in a V": pipeline(
        2, "zb-v", layers=6, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=4
    ),
    "embedding and output layer counted": pipeline(
        4,
        "zb-h1",
        layers=6,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ),
    "written out": pipeline(2, pipeline_model_parallel_layout="Et*3|t|tt|L", layers=6),
    "of equal cost": pipeline(4, pipeline_model_parallel_layout="auto", layers=5, vocab_size=2048),
    "all at once": replace(
        pipeline(
            2,
            "dualpipe-v",
            layers=5,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            overlap_grad_reduce=False,
            num_query_groups=1,
            qk_layernorm=True,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            window_size=5,
            z_loss_coeff=1e-3,
        ),
        dp=2,
        samples=6,
        documents=DOCUMENTS["all"],
        training=TrainingConfig(recompute_granularity="selective"),
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG if n == "all at once" else ()) for n in CASES])
def test_layers_and_groups_as_asked_for(pool: Pool, name: str) -> None:
    check(pool, CASES[name])


UNEVEN: dict[str, Any] = {
    "hybrid_layer_pattern": "*-MMMEMM",
    "ffn_hidden_size": 768,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "mamba_head_dim": 16,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
    "add_bias_linear": False,
}
"""A block of attention and a wide MLP, then five that cost less together."""


@pytest.mark.parametrize(
    ("ranks", "schedule", "numbers"),
    [(2, "1f1b", [1, 5]), pytest.param(2, "zb-v", [0, 1, 1, 4], marks=LONG)],
)
def test_blocks_that_differ_are_split_by_cost(pool: Pool, ranks: int, schedule: str, numbers: list[int]) -> None:
    case = pipeline(ranks, schedule, samples=5, layers=6, **UNEVEN)
    stages = stage_layers(case.model, case.parallel, case.length)
    assert [stage.count for stage in stages] == numbers
    check(pool, case)


def test_a_schedule_from_a_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    make_schedule("zb-h1", 2, 1, 5).save(path)
    check(pool, pipeline(2, str(path), samples=5))


# ---- equal to the bit

STAGES = {
    "one each": (1, ("1f1b", "gpipe", "zb-h1")),
    "in a V": (2, ("zb-v", "dualpipe-v")),
}
"""Schedules that put the same stages on the same ranks, and how many on each."""

RANDOM: dict[str, Any] = {"layers": 5, "samples": 6, "hidden_dropout": 0.1, "attention_dropout": 0.1}
UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
TP2_SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FP32 = PrecisionConfig(params_dtype="fp32")


def same(one: Sequence[StepTrace], other: Sequence[StepTrace], norm: bool = True) -> bool:
    """Return True if two runs are equal to the bit in loss, gradients, weights and ``norm`` of all steps."""

    def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    steps = list(zip(one, other, strict=True))
    numbers = all(a.loss == b.loss and (a.grad_norm == b.grad_norm or not norm) for a, b in steps)
    return numbers and all(equal(a.grads, b.grads) and equal(a.weights, b.weights) for a, b in steps)


@pytest.mark.parametrize(
    ("stages", "options"), [("one each", {}), ("in a V", {}), pytest.param("in a V", TP2_SP, marks=LONG)]
)
def test_schedules_of_the_same_stages_are_equal_to_the_bit(pool: Pool, stages: str, options: dict[str, Any]) -> None:
    """A stage takes the micro-batches in the same order in all of them, so every sum has the same order.

    In a V the first and the last stage are on one rank, and add to the gradient of a tied embedding in turns, which
    are the same in both schedules.
    """
    count, names = STAGES[stages]
    runs = [in_fp32(pool, pipeline(2, name, count, **RANDOM, **options)) for name in names]
    assert [same(runs[0], run) for run in runs] == [True] * len(runs)


LAYOUTS = [(1, "1f1b", 1), (4, "zb-h2", 1), (2, "interleaved", 2), (2, "zb-v", 2)]


def test_pipelines_are_equal_to_one_rank_to_the_bit(pool: Pool) -> None:
    """With micro-batches of the same size. All but the norm, whose sum over stages has another order; so unclipped."""
    one, *others = (in_fp32(pool, pipeline(p, name, v, **RANDOM, **UNTIED), clip=0.0) for p, name, v in LAYOUTS)
    assert [same(one, other, norm=False) for other in others] == [True] * len(others)
    assert [step.grad_norm for step in one] == pytest.approx([step.grad_norm for step in others[1]], rel=1e-6)


def test_another_order_of_micro_batches_is_equal_up_to_rounding(pool: Pool, tmp_path: Path) -> None:
    """Backward from the last micro-batch to the first: what the tests above would not let pass."""
    usual, path = make_schedule("gpipe", 2, 1, 6), tmp_path / "reversed.csv"
    PipelineSchedule("reversed", tuple((*rank[:6], *reversed(rank[6:])) for rank in usual.ranks)).save(path)
    case = pipeline(2, str(path), **RANDOM)
    one, other = in_fp32(pool, pipeline(2, "gpipe", **RANDOM)), in_fp32(pool, case)
    assert not same(one, other)
    check(pool, case)


def in_fp32(pool: Pool, case: Case, clip: float = 1.0) -> list[StepTrace]:
    optimizer = replace(case.optimizer, clip_grad=clip)
    return run_on(pool, replace(case, precision=FP32, optimizer=optimizer, steps=2))


# ---- an overflow


def scaled(rank: int, world_size: int, case: Case, weight: str) -> tuple[list[float], list[bool], list[bool]]:
    """By step: the loss scale, whether it was skipped, whether this rank's weights moved.

    In step 1, the gradient of ``weight`` overflows on the rank that has it.
    """
    trainer = build_trainer(case.config(), rank, world_size)
    scales, skipped, moved = [], [], []
    for step in range(case.steps):
        before = [master.clone() for master in trainer.optimizer.main_params.values()]
        with infinite_gradient(weight if step == 1 else "none"):
            metrics = train_step(trainer, batches_of(trainer, case, step), RATES)
        scales.append(metrics.loss_scale.item())
        skipped.append(bool(metrics.skipped.item()))
        moved.append(not all(map(torch.equal, before, trainer.optimizer.main_params.values())))
    return scales, skipped, moved


def test_an_overflow_on_one_stage_is_skipped_on_all(pool: Pool) -> None:
    precision = PrecisionConfig(params_dtype="fp16", initial_loss_scale=1024.0, hysteresis=1)
    case = replace(pipeline(2, "zb-h1"), steps=3, precision=precision)
    for found in pool.run(2, scaled, case, "layers.1.mlp.linear_fc1.weight"):
        assert found == ([1024.0, 1024.0, 512.0], [False, True, False], [True, False, True])


# ---- evaluation


@pytest.mark.parametrize(("schedule", "dp"), [("interleaved", 1), ("zb-v", 2)])
def test_evaluation_matches_one_process(pool: Pool, schedule: str, dp: int) -> None:
    case = replace(pipeline(2, schedule, 2, layers=5, hidden_dropout=0.1), dp=dp)
    expected = evaluation(0, 1, case.twin())
    assert expected[0] != expected[1]
    for found in pool.run(case.world_size, evaluation, case):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0.0)
