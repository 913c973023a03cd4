"""Latent attention in every layout, beside the options of attention, and from its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from tests.kit.cases import MODEL, Case, PackedConversations, compare_with_twin, run_in_small_tiles
from tests.kit.pool import Pool
from tools.lib.verify_parallel import join_traces

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "rotary_scaling_factor": 4.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
    "yarn_original_max_position_embeddings": 8,
}
FP8 = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def case(
    parallel: dict[str, Any], model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **rest: Any
) -> Case:
    precision = PrecisionConfig(params_dtype="fp64")
    if "fp8_recipe" in rest:
        precision = replace(precision, fp8_format="hybrid", fp8_recipe=rest.pop("fp8_recipe"))
    latent = replace(MODEL, **LATENT | (model or {}))
    return Case(latent, ParallelConfig(**parallel), precision, TrainingConfig(**training or {}), **rest)


def cp(method: str, *sizes: int, ranks: int = 2, **rest: Any) -> dict[str, Any]:
    return {
        "context_parallel_size": ranks,
        "cp_comm_type": method,
        "hierarchical_context_parallel_sizes": sizes,
        **rest,
    }


def selective(*modules: str, **rest: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules, **rest}


CASES = {
    "tp": case({"tensor_model_parallel_size": 4}),
    "sp, plain queries, up-projections recomputed": case(SP, {"q_lora_rank": None}, selective("mla_up_proj")),
    "sp, wide values, sinks": case(SP, {"v_head_dim": 18, "softmax_type": "learnable"}),
    "sp, all recomputed": case(SP, {}, selective("mla_up_proj", "core_attn", "layernorm", "mlp")),
    "sp, full recomputation, overlap": case(
        {**SP, "tp_comm_overlap": True}, {}, {"recompute_granularity": "full", "recompute_num_layers": 2}
    ),
    "sp, beside attention": case(
        SP,
        {
            "multi_latent_attention": False,
            "token_mixers": ("latent-attention", "attention"),
            "num_query_groups": 2,
            "num_layers": 4,
            "rope_type": "rope",
            "no_rope_freq": "[0,0,1,0]",
            "rotary_base_local": 100.0,
            "attention_pattern": "local:5*2,global",
        },
    ),
    "p2p": case(cp("p2p")),
    "p2p, sp, documents, window": case(cp("p2p", **SP), {"window_size": 7}, documents=PackedConversations()),
    "all_gather, wide values": case(cp("all_gather"), {"v_head_dim": 18}),
    "all_gather, softcap": case(cp("all_gather"), {"attn_logit_softcapping": 2.0}),
    "a2a, dropout": case(cp("a2a"), {"attention_dropout": 0.2, "hidden_dropout": 0.1}, selective("mla_up_proj")),
    "a2a, sinks, documents": case(cp("a2a"), {"softmax_type": "learnable"}, documents=PackedConversations()),
    "a2a+p2p": case(cp("a2a+p2p", 2, 2, ranks=4)),
    "zb-h1, sp": case(
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", **SP}, {}, selective("mla_up_proj")
    ),
    "zero 3, offload": case(
        {"data_parallel_sharding_strategy": "optim_grads_params"},
        {},
        selective("mla_up_proj", cpu_offloading_num_layers=1, min_offloaded_tensor_size=1),
        dp=2,
    ),
    "tp, lora": case({"tensor_model_parallel_size": 2}, {"lora_rank": 2}, selective("mla_up_proj")),
    "sp, dora": case(SP, {"lora_rank": 2, "lora_dora": True}),
    "sp, fp8": case(SP, FP8, fp8_recipe="tensorwise"),
    "sp, fp8 rowwise, up-projections recomputed": case(SP, FP8, selective("mla_up_proj"), fp8_recipe="rowwise"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    ranks = pool.run(one.world_size, run_in_small_tiles, one)
    deviations = compare_with_twin([join_traces(step) for step in zip(*ranks)], one)
    assert len(deviations) > 20
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation
