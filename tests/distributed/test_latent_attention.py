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
    "sp, plain queries": case(SP, {"q_lora_rank": None}),
    "sp, wide values": case(SP, {"v_head_dim": 18}),
    "p2p": case(cp("p2p")),
    "p2p, sp, documents": case(cp("p2p", **SP), documents=PackedConversations()),
    "all_gather": case(cp("all_gather")),
    "a2a, dropout": case(cp("a2a"), {"attention_dropout": 0.2}),
    "a2a+p2p": case(cp("a2a+p2p", 2, 2, ranks=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    ranks = pool.run(one.world_size, run_in_small_tiles, one)
    deviations = compare_with_twin([join_traces(step) for step in zip(*ranks)], one)
    assert len(deviations) > 20
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation
