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
from tests.kit.cases import MODEL, RATES, Case, PackedConversations, batches_of, compare_with_twin
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
EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "add_bias_linear": False,
    "activation": "swiglu",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
}
CASES = {
    "tp": case(tensor_model_parallel_size=2),
    "tp, sp, dropout": case({"hidden_dropout": 0.1}, **TP),
    "pp, tied": case(**PP),
    "pp, untied": case(UNTIED, **PP),
    "dp, micro-batches": case(dp=2),
    "vpp": case({"num_layers": 4}, **PP, num_virtual_stages_per_pipeline_rank=2),
    "both ends on a rank, untied": case(UNTIED | {"num_layers": 4}, **PP, pipeline_schedule="zb-v"),
    "both ends on a rank, tied": case({"num_layers": 4}, **PP, pipeline_schedule="zb-v"),
    "zb": case(UNTIED, **PP, pipeline_schedule="zb-h1"),
    "a stage of its own": case(UNTIED, **PP, pipeline_model_parallel_layout="Ett|L"),
    "cp, p2p": case(context_parallel_size=2),
    "cp, a2a": case(context_parallel_size=2, cp_comm_type="a2a"),
    "cp, all-gather, documents": replace(case(context_parallel_size=2, cp_comm_type="all_gather"), documents=DOCUMENTS),
    "sp, cp, conversations": replace(case(context_parallel_size=2, **TP), documents=PackedConversations()),
    "zero 3": case(UNTIED, 2, data_parallel_sharding_strategy="optim_grads_params"),
    "zero 3, tied, one prefetched": case(
        {}, 2, data_parallel_sharding_strategy="optim_grads_params", param_gather_prefetch=1
    ),
    "zero 3, pp": case(UNTIED, 2, data_parallel_sharding_strategy="optim_grads_params", **PP),
    "zero 3, recomputed": case(
        {}, 2, {"recompute_granularity": "full"}, data_parallel_sharding_strategy="optim_grads_params"
    ),
    "zero 2, recomputed": case(
        {},
        2,
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp", "core_attn")},
        data_parallel_sharding_strategy="optim_grads",
    ),
    "padded": replace(case({}, 2, {"pad_global_batch": True, "micro_batch_size": 2}), samples=5),
    "offload": case({}, 1, {"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1}, **PP),
    "experts": case(EXPERTS, 2, expert_model_parallel_size=2),
    "experts, etp, pp": case(EXPERTS, 2, expert_model_parallel_size=2, **PP, **TP),
    "capped, scaled": case(
        {
            "final_logit_softcapping": 3.0,
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "layernorm_placement": "sandwich",
            "parallel_attention": True,
            "z_loss_coeff": 0.1,
        },
        **TP,
    ),
    "none positions LN": case(
        {"position_embedding_type": "none", "normalization": "LayerNorm", "mtp_num_layers": 1}, **PP
    ),
    "window, local rope": case(
        {"attention_pattern": "global,local:3", "rotary_base_local": 100.0, "num_layers": 3},
        context_parallel_size=2,
        **PP,
    ),
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
