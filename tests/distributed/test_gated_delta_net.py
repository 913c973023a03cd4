"""Gated DeltaNet in every layout, and from its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.inference.generate import SamplingParams, generate
from megatron.layers.kv_cache import KVCache
from tests.kit.cases import MODEL, Case, PackedConversations, compare_with_twin, run_in_small_tiles
from tests.kit.pool import Pool
from tests.kit.solo import Solo, tiny
from tests.unit.inference.test_generate import reread
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


def delta(**changes: Any) -> ModelConfig:
    return tiny(**DELTA | changes)


GENERATED = {
    "alone": delta(linear_num_key_heads=2),
    "beside attention": delta(**MIXED, num_query_groups=2, linear_conv_kernel_dim=3),
    "beside latent attention": delta(
        token_mixers=("latent-attention", "gated-delta-net"), kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_text_from_the_state_is_that_of_reading_again(name: str) -> None:
    """Of prompts of different lengths, which begin with padding, and of tokens that are read in parts."""
    chunk = Solo.build(GENERATED[name]).chunk
    prompts, greedy = [[5, 6, 7, 8, 9], [1], [3, 2, 1]], SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, 9, greedy) == expected
    cache, tokens = KVCache(12), torch.arange(24).view(2, 12)
    parts = [chunk.logits(part, cache) for part in tokens.split((6, 1, 2, 3), dim=1)]
    torch.testing.assert_close(torch.cat(parts), chunk.logits(tokens), rtol=1e-11, atol=1e-11)
    sizes = [state.shape[1:].numel() for name, state in cache.states.items() if "gated_delta_net" in name]
    assert {*sizes} <= {8 * 6 * 5, *((width - 1) * (2 * keys * 6 + 8 * 5) for width in (3, 4) for keys in (2, 4))}
    assert sizes, "the state and the last rows are kept, whatever the number of tokens"
