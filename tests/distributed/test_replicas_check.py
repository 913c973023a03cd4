"""Copies of weights that differ by one bit are found on any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config.errors import UserError
from megatron.config.logging import LoggingConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import check_weight_copies
from megatron.training.step import train_step
from tests.kit.cases import MODEL, RATES, Case, batches_of
from tests.kit.pool import Pool

BF16 = PrecisionConfig(params_dtype="bf16")
GQA = replace(MODEL, num_query_groups=2)
TP2_DP2 = Case(parallel=ParallelConfig(tensor_model_parallel_size=2), dp=2, precision=BF16)
TP4 = Case(GQA, ParallelConfig(tensor_model_parallel_size=4))
DP4 = Case(dp=4, precision=BF16)
PP2_TP2 = Case(parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), precision=BF16)
PP4 = Case(parallel=ParallelConfig(pipeline_model_parallel_size=4))
WORDS = "embedding.word_embeddings.weight"
NORM, FC1, QKV = (f"layers.1.{n}.weight" for n in ("input_layernorm", "mlp.linear_fc1", "self_attention.linear_qkv"))


def check_message(rank: int, world_size: int, case: Case, name: str, at: int, master: bool, element: int) -> str:
    """Return the check's report after a step and a bit that flips on rank ``at``."""
    config = replace(case.config(), logging=LoggingConfig(check_weight_hash_across_dp_replicas_interval=2))
    trainer = build_trainer(config, rank, world_size)
    train_step(trainer, batches_of(trainer, case, 0), RATES)
    trainer.progress.iteration = 6
    check_weight_copies(trainer)
    if rank == at:
        tensor = trainer.optimizer.main_params[name] if master else trainer.params[name].detach()
        words = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        words.view(-1)[element] ^= 1
    try:
        check_weight_copies(trainer)
    except UserError as error:
        return str(error)
    return ""


CASES: dict[str, tuple[Case, str, int, bool, int, str]] = {
    "a replica's weight": (TP2_DP2, FC1, 3, False, 5, f"{FC1} is not the same on ranks 1, 3\n"),
    "its master": (TP2_DP2, FC1, 0, True, 5, f"the master of {FC1} is not the same on ranks 0, 2\n"),
    "most are equal": (DP4, FC1, 2, False, 0, f"{FC1} on rank 2 differs from ranks 0, 1, 3\n"),
    "a norm inside a replica": (TP4, NORM, 1, False, 3, f"{NORM} on rank 1 differs from ranks 0, 2, 3\n"),
    "a copy of a key": (TP4, QKV, 3, False, -1, f"{QKV} is not the same on ranks 2, 3\n"),
    "a tied weight's copy": (PP4, WORDS, 3, False, 40, f"{WORDS} is not the same on ranks 0, 3\n"),
    "its master's shard": (PP2_TP2, WORDS, 2, True, 5, f"the master of {WORDS} is not the same on ranks 0, 2\n"),
    "queries without a copy": (TP4, QKV, 3, False, 0, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_flipped_bit_is_named(pool: Pool, name: str) -> None:
    case, *damage, expected = CASES[name]
    texts = pool.run(case.world_size, check_message, case, *damage)
    if not expected:
        assert texts == [""] * case.world_size
        return
    assert set(texts) == {texts[0]}
    assert texts[0].startswith(f"E707 copies of the weights differ after step 6: {expected}")
    assert "--ckpt-step N, N at most 4" in texts[0]
