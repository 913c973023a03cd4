"""Cells on several ranks: parallel layouts against one process, and predicted against actual memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.pipeline.plan import resolve_pipeline
from megatron.planner.memory import rank_state_bytes
from megatron.training.build import build_trainer
from tests.cards.card import Card
from tests.cards.cell import Cell, Measures
from tests.kit.cases import SEQ_LENGTH, Case, compare_with_twin, run_on
from tests.kit.pool import Pool
from tests.unit.planner.test_memory import allocated

TP_PP = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2)
CP_ZERO_3 = ParallelConfig(context_parallel_size=2, data_parallel_sharding_strategy="optim_grads_params")
EP = ParallelConfig(expert_model_parallel_size=2)
BF16 = PrecisionConfig(params_dtype="bf16")


def model_of(card: Card) -> ModelConfig:
    """The card's model with sizes that two ranks divide, and longer positions."""
    model = replace(card.config, max_position_embeddings=max(card.config.max_position_embeddings or 0, SEQ_LENGTH))
    if model.num_experts:
        model = replace(model, num_experts=model.num_experts + model.num_experts % 2)
    if model.linear_num_key_heads == 3:  # of Qwen3.5
        model = replace(model, linear_num_key_heads=2)
    return model


def cases(card: Card) -> Mapping[str, Case]:
    """Three layouts, two without experts, of the same run."""
    model = model_of(card)
    found = {"TP x PP": Case(model, resolve_pipeline(model, TP_PP)), "CP x ZeRO-3": Case(model, CP_ZERO_3, dp=2)}
    found |= {"EP": Case(model, EP, dp=2)} if model.num_experts else {}
    return {name: replace(case, length=length_of(card)) for name, case in found.items()}


def length_of(card: Card) -> int:
    """Tokens of a sample: more than two windows, and than one on each context-parallel rank, of a long context."""
    return 256 if card.is_long else SEQ_LENGTH


def layouts(card: Card, folder: Path, pool: Pool) -> Measures:
    """Loss, norm, every gradient and weight of two steps: the largest relative difference."""
    return {
        name: max(deviation.error for deviation in compare_with_twin(run_on(pool, case), case))
        for name, case in cases(card).items()
    }


def allocations(rank: int, world_size: int, case: Case) -> dict[str, int]:
    """Bytes of each part of the state of this rank."""
    return allocated(build_trainer(case.config(), rank, world_size))


def state_bytes(card: Card, folder: Path, pool: Pool) -> Measures:
    """Bytes that the planner predicts of the state of a rank, and the tensors of a run."""
    one = Case(model_of(card), ParallelConfig(), length=length_of(card))
    found: Measures = {}
    for layout in (one, *cases(card).values()):
        case = replace(layout, precision=BF16)
        actual = pool.run(case.world_size, allocations, case)
        predicted = [rank_state_bytes(case.config(), case.world_size, rank) for rank in range(case.world_size)]
        found.setdefault("bytes", sum(actual[0].values()))
        differences = [
            abs(rank.get(part, 0) - plan.get(part, 0))
            for rank, plan in zip(actual, predicted, strict=True)
            for part in rank.keys() | plan.keys()
        ]
        found["difference"] = max(float(found.get("difference", 0)), *differences)
    return found


COVERED = (
    *("megatron/distributed", "megatron/layers", "megatron/model", "megatron/pipeline", "megatron/optimizer"),
    *("megatron/kernels", "megatron/training/step.py", "megatron/training/build.py", "tests/cards/layouts.py"),
    *("tests/cards/card.py", "tests/kit/cases.py"),
)
CELLS = {
    "layouts": Cell(
        layouts,
        "two steps in fp64 on several ranks (TP 2 x PP 2 with sequence parallelism; CP 2 x ZeRO-3 on 2 replicas; EP 2) "
        "against one process: largest relative difference of loss, norm, a gradient or a weight",
        {"TP x PP": 1e-10, "CP x ZeRO-3": 1e-10, "EP": 1e-10},
        COVERED,
        optional=("EP",),
    ),
    "bytes": Cell(
        state_bytes,
        "bytes of weights, gradients, optimizer and buffers of every rank in bf16, on one process and in these "
        "layouts, predicted by the planner (`tools/memory.py`) and allocated: largest difference",
        {"difference": 0},
        ("megatron/planner", "megatron/layers/parameters.py", *COVERED),
    ),
}
