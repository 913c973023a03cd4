"""Gated DeltaNet in every layout, and from its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from tests.kit.cases import MODEL, Case, PackedConversations, compare_with_twin, run_in_small_tiles
from tests.kit.pool import Pool
from tools.lib.verify_parallel import join_traces

DELTA: dict[str, Any] = {
    "token_mixers": ("gated-delta-net",),
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MIXED: dict[str, Any] = {"token_mixers": ("gated-delta-net", "attention"), "position_embedding_type": "rope"}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}


def case(
    parallel: dict[str, Any], model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **rest: Any
) -> Case:
    delta = replace(MODEL, **DELTA | (model or {}))
    return Case(delta, ParallelConfig(**parallel), training=TrainingConfig(**training or {}), **rest)


def cp(method: str, *sizes: int, ranks: int = 2, **rest: Any) -> dict[str, Any]:
    return {
        "context_parallel_size": ranks,
        "cp_comm_type": method,
        "hierarchical_context_parallel_sizes": sizes,
        **rest,
    }


CASES = {
    "tp": case({"tensor_model_parallel_size": 4}),
    "sp, documents": case(SP, MIXED, documents=PackedConversations()),
    "p2p": case(cp("p2p")),
    "p2p 4, documents": case(cp("p2p", ranks=4), documents=PackedConversations()),
    "a2a, documents, sp": case(cp("a2a", **SP), MIXED, documents=PackedConversations()),
    "a2a+p2p, documents": case(cp("a2a+p2p", 2, 2, ranks=4), documents=PackedConversations()),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    ranks = pool.run(one.world_size, run_in_small_tiles, one)
    deviations = compare_with_twin([join_traces(step) for step in zip(*ranks)], one)
    assert len(deviations) > 20
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation
