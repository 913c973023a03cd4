"""Small jobs that detect faults of experts and of multi-token prediction; like the jobs in ``detect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.data.loader import MaskBuilder
from megatron.layers.dispatch import ExactDispatcher, _RankExchange
from megatron.training.build import build_trainer
from megatron.training.components import exchange_overflow
from megatron.training.components.exchange_overflow import ExchangeOverflow
from megatron.training.components.expert_report import ExpertReport
from megatron.training.step import train_step
from tests.distributed.detect import BALANCE_DP2, MOE_EP2, MOE_TP2, TOLERANCE, Detector, training
from tests.distributed.grid import ATTENTION
from tests.distributed.grid import EXPERTS as MIXTURES
from tests.kit.cases import MODEL, RATES, Case, batches_of
from tests.kit.runs import part_of
from tests.kit.solo import mesh_of


def plan_a_route(rank: int, world_size: int) -> tuple[Any, int]:
    """Each rank has tokens of its own for four experts; the rows it sends and receives, and those of its experts."""
    mesh = mesh_of(rank, world_size, expert_model_parallel_size=world_size)
    chosen = torch.tensor(CHOSEN[rank])
    dispatcher = ExactDispatcher(mesh.group("ep", "etp"), 1, 4, 2)
    with patch.object(_RankExchange, "start", lambda *planned: planned):
        planned: Any = dispatcher.dispatch(torch.zeros(3, 1), chosen, torch.ones(chosen.shape), False)
    _, _, splits, *_, expert_rows = planned
    return splits, expert_rows


CHOSEN = [[[0, 1], [0, 1], [0, 3]], [[3, 2], [3, 2], [3, 2]]]
"""Experts of each rank's tokens: rank 0 has the first two."""

PLANNED = [(([3, 1], [3, 0]), 5), (([0, 3], [1, 3]), 7)]
"""The results, counted by hand."""


def flags_of_the_last_rank(rank: int, world_size: int, case: Case) -> int:
    """Return the number of warnings on this rank after tokens did not fit on the last rank."""
    trainer, printed = build_trainer(case.config(), rank, world_size), list[str]()
    overflow = part_of(trainer, ExchangeOverflow)
    for flag in overflow._flags if rank == world_size - 1 else ():
        flag.fill_(True)
    with patch.object(exchange_overflow, "print_warning", printed.append):
        overflow.on_log({})
    return len(printed)


def report_on_experts(rank: int, world_size: int, case: Case) -> list[dict[str, Any]]:
    """The metrics of the experts, step by step, with the losses of each layer."""
    config = case.config()
    config = replace(config, logging=replace(config.logging, moe_per_layer_logging=True))
    trainer, lines = build_trainer(config, rank, world_size), []
    report = part_of(trainer, ExpertReport)
    report.on_train_start()
    for step in range(case.steps):
        batches = batches_of(trainer, case, step)
        train_step(trainer, batches, RATES)
        report.on_step_taken(batches)
        trainer.progress.iteration += 1
        lines.append(dict(report.metrics()))
    return lines


def reports_on_experts_like_one_process(case: Case, ranks: Sequence[list[dict[str, Any]]]) -> bool:
    return all(lines == report_on_experts(0, 1, case.twin()) for lines in ranks)


def read_and_train(rank: int, world_size: int, case: Case) -> list[dict[str, float]]:
    """Losses and gradient norms of steps on samples that the library reads, masks and cuts."""
    trainer, steps = build_trainer(case.config(), rank, world_size), []
    trainer.reader.source = replace(trainer.reader.source, masks=case.documents)
    for _ in range(case.steps):
        metrics = train_step(trainer, trainer.next_batches(), RATES)
        trainer.progress.consumed_samples += case.samples
        numbers = {"loss": metrics.loss, "norm": metrics.grad_norm, **metrics.extra}
        steps.append({name: x.item() for name, x in numbers.items()})
    return steps


def reads_like_one_process(case: Case, ranks: Sequence[list[dict[str, float]]]) -> bool:
    alone = read_and_train(0, 1, case.twin())
    return all(got == pytest.approx(step, rel=TOLERANCE) for steps in ranks for got, step in zip(steps, alone))


FP8_ETP2 = replace(
    MOE_TP2,
    model=replace(MODEL, num_experts=4, add_bias_linear=False, moe_ffn_hidden_size=48),
    parallel=replace(MOE_TP2.parallel, expert_tensor_parallel_size=2),
    training=TrainingConfig(micro_batch_size=MOE_TP2.samples),
    precision=PrecisionConfig(params_dtype="fp64", fp8_format="hybrid", fp8_recipe="rowwise"),
)
SKIPPING_EP2 = replace(
    MOE_EP2,
    parallel=replace(MOE_EP2.parallel, moe_exchange="bounded"),
    training=replace(MOE_EP2.training, on_nonfinite="skip"),
)
_HEADS = replace(MODEL, vocab_size=13, position_embedding_type="rope", mtp_num_layers=2)
_DOCUMENTS = MaskBuilder(5, reset_positions=True, reset_attention=True)
HEADS_CP2 = Case(_HEADS, ParallelConfig(context_parallel_size=2), documents=_DOCUMENTS)
HYBRID_TP2_SP = replace(
    MOE_TP2,
    model=replace(
        MODEL,
        **ATTENTION["latent"] | {"qk_layernorm": True},
        **MIXTURES["shared"] | {"moe_shared_expert_gate": True, "moe_latent_size": 16},
        position_embedding_type="rope",
        normalization="RMSNorm",
        add_bias_linear=False,
        mtp_num_layers=1,
    ),
    steps=1,
)

EXPERTS: dict[str, Detector] = {
    "route": Detector(2, plan_a_route, (), lambda ranks: list(ranks) == PLANNED),
    "fp8-etp2": training(FP8_ETP2),
    "hybrid-tp2-sp": training(HYBRID_TP2_SP),
    "overflowed": Detector(2, flags_of_the_last_rank, (SKIPPING_EP2,), lambda ranks: list(ranks) == [1, 0]),
    "expert-report": Detector(
        2, report_on_experts, (BALANCE_DP2,), partial(reports_on_experts_like_one_process, BALANCE_DP2)
    ),
    "heads-cp2": Detector(2, read_and_train, (HEADS_CP2,), partial(reads_like_one_process, HEADS_CP2)),
}
