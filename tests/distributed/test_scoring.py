"""Scores of tokens, and frozen models: equal in every layout to plain logits on one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.inference.scoring import score_tokens
from megatron.layers.context import BuildContext
from megatron.model.gpt import GPTChunk, build_gpt
from megatron.training.build import build_trainer
from megatron.training.frozen_models import FrozenModel
from megatron.training.step import train_step
from tests.distributed.grid import EXPERTS
from tests.kit.cases import MODEL, RATES, Case, batches_of, pipeline
from tests.kit.checkpoints import save_model
from tests.kit.pool import Pool
from tests.kit.solo import one_rank_mesh

REQUESTS = [
    ([5, 17, 99, 4, 4], 4),
    ([100, 3], 1),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 97], 3),
    ([44, 44, 44], 2),
    ([7, 8, 9, 10, 11, 12, 13], 6),
]
ROPE = replace(
    MODEL, num_layers=4, num_query_groups=2, position_embedding_type="rope", untie_embeddings_and_output_weights=True
)
FEW = replace(ROPE, vocab_size=9, final_logit_softcapping=2.0)
"""So few tokens that one of two tensor-parallel ranks holds padding alone."""


Scores = list[tuple[list[float], list[bool]]]


def requests_for(model: ModelConfig) -> list[tuple[list[int], int]]:
    return [([token % model.vocab for token in tokens], count) for tokens, count in REQUESTS]


def trained_scores(rank: int, world_size: int, case: Case) -> tuple[Scores, float]:
    """Scores of a run's own model between two steps, and the loss of the second."""
    trainer = build_trainer(case.config(), rank, world_size)
    train_step(trainer, batches_of(trainer, case, 0), RATES)
    scores = score_tokens(trainer, requests_for(case.model), batch_size=2)
    return scores, train_step(trainer, batches_of(trainer, case, 1), RATES).loss.item()


def plain_scores(chunk: GPTChunk) -> Scores:
    """The scores by the logits of the whole model."""
    found = []
    for tokens, count in requests_for(chunk.config):
        log_probs = functional.log_softmax(chunk.eval().logits(torch.tensor([tokens]))[:-1, 0], -1)
        labels = torch.tensor(tokens[1:])
        scores = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)[-count:].tolist()
        found.append((scores, (log_probs.argmax(-1) == labels)[-count:].tolist()))
    return found


@cache
def expected(case: Case) -> tuple[Scores, float]:
    """The scores by the logits of one process, and its loss."""
    trainer = build_trainer(case.config(), 0, 1)
    train_step(trainer, batches_of(trainer, case, 0), RATES)
    scores = plain_scores(trainer.chunks[0])
    return scores, train_step(trainer, batches_of(trainer, case, 1), RATES).loss.item()


def check(found: Scores, scores: Scores) -> None:
    assert [flags for _, flags in found] == [flags for _, flags in scores]
    for (got, _), (want, _) in zip(found, scores, strict=True):
        assert got == pytest.approx(want, rel=1e-10, abs=1e-10)


LAYOUTS: dict[str, Case] = {
    "one": Case(ROPE),
    "few": Case(FEW, ParallelConfig(tensor_model_parallel_size=2)),
    "tp2-sp": Case(ROPE, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2-dp2": replace(pipeline(2, layers=4), dp=2, model=ROPE),
    "vpp": replace(pipeline(2, stages=2, layers=4), model=ROPE),
    "zb-v": replace(pipeline(2, "zb-v", layers=4), model=ROPE),
    "zero3": Case(ROPE, ParallelConfig(data_parallel_sharding_strategy="optim_grads_params"), dp=2),
    "cp2": Case(ROPE, ParallelConfig(context_parallel_size=2)),
    "ep2": Case(
        replace(MODEL, add_bias_linear=False, **EXPERTS["balanced"]),
        ParallelConfig(expert_model_parallel_size=2),
        dp=2,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_match_plain_logits_in_every_layout(pool: Pool, name: str) -> None:
    case = LAYOUTS[name]
    scores, loss = expected(case.twin())
    assert {True, False} == {greedy for _, flags in scores for greedy in flags} or case.model is FEW
    for found, found_loss in pool.run(case.world_size, trained_scores, case):
        check(found, scores)
        assert found_loss == pytest.approx(loss, rel=1e-10), "scoring must leave no trace in training"


def frozen_scores(rank: int, world_size: int, case: Case, folder: Path) -> Scores:
    """Scores of another model, within a run."""
    trainer = build_trainer(replace(case.config(), precision=PrecisionConfig()), rank, world_size)
    saved = SavedModel(open_checkpoint(folder)[0])
    config = replace(trainer.config, precision=PrecisionConfig(params_dtype="fp64"))
    frozen = FrozenModel.build(config, trainer.mesh, trainer.device, saved)
    assert not any(p.requires_grad for chunk in frozen.chunks.values() for p in chunk.parameters())
    return score_tokens(frozen, requests_for(saved.model), batch_size=3)


@pytest.mark.parametrize(
    "case",
    [
        replace(
            pipeline(2, stages=2, layers=8, pipeline_model_parallel_layout="Et|t*2|t*4|tL"), precision=PrecisionConfig()
        ),
        Case(MODEL, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), dp=2),
    ],
    ids=["vpp", "tp2-sp-dp2"],
)
def test_a_frozen_model_of_another_size_runs_in_the_layout_of_a_run(pool: Pool, tmp_path: Path, case: Case) -> None:
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
    chunk = build_gpt(ROPE, TrainingConfig(), context)
    save_model(chunk, tmp_path, params_dtype="fp64")
    for found in pool.run(case.world_size, frozen_scores, case, tmp_path):
        check(found, plain_scores(chunk))
