"""Mamba-2 in every layout, against its recurrence, and from its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from tests.kit.cases import MODEL, Case, PackedConversations, compare_with_twin, run_in_small_tiles
from tests.kit.pool import Pool
from tools.lib.verify_parallel import join_traces

MAMBA = {
    "token_mixers": ("mamba2",),
    "mamba_state_dim": 6,
    "mamba_head_dim": 8,
    "mamba_num_groups": 4,
    "mamba_chunk_size": 5,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PACKED = PackedConversations()


def case(
    parallel: dict[str, Any], model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **rest: Any
) -> Case:
    mamba = replace(MODEL, **MAMBA | (model or {}))
    return Case(mamba, ParallelConfig(**parallel), training=TrainingConfig(**training or {}), **rest)


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
    "sp, documents": case(SP, documents=PACKED),
    "p2p": case(cp("p2p")),
    "p2p, documents": case(cp("p2p"), documents=PACKED),
    "p2p, 4 ranks, documents": case(cp("p2p", ranks=4), documents=PACKED),
    "a2a": case(cp("a2a")),
    "a2a, documents": case(cp("a2a", ranks=4), {"mamba_num_groups": 2}, documents=PACKED),
    "a2a+p2p, documents": case(cp("a2a+p2p", 2, 2, ranks=4), documents=PACKED),
    "whole norm, tp": case({"tensor_model_parallel_size": 4}, {"mamba_norm_groups": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    ranks = pool.run(one.world_size, run_in_small_tiles, one)
    deviations = compare_with_twin([join_traces(step) for step in zip(*ranks)], one)
    assert len(deviations) > 40
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation
