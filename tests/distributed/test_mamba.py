"""Mamba-2 in every layout and from its state; its memory and its FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.sharding import padded_vocab_size
from megatron.inference.generate import SamplingParams, generate
from megatron.layers.kv_cache import KVCache
from megatron.planner.activations import activation_memory, peak_activations
from megatron.planner.flops import FlopsPerToken
from tests.kit.cases import MODEL, Case, PackedConversations, assert_like_one_process, run_in_small_tiles, selective
from tests.kit.cases import context_parallel as cp
from tests.kit.pool import Pool
from tests.kit.solo import Solo, text_on_ranks, tiny
from tests.unit.inference.test_generate import reread
from tests.unit.planner.test_activations import LONG, config_of, measured
from tests.unit.planner.test_flops import SEQ, counted
from tests.unit.planner.test_flops import expected as expected_flops

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


FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}
ZERO_3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
CASES = {
    "tp": case({"tensor_model_parallel_size": 4}, {"mamba_norm_groups": 1, "mamba_proj_bias": True}),
    "sp, documents, norm recomputed": case(
        SP, {"mamba_norm_before_gate": True}, selective("layernorm"), documents=PACKED
    ),
    "p2p, 4 ranks, documents": case(cp("p2p", ranks=4), documents=PACKED),
    "a2a, shared groups, documents": case(cp("a2a", ranks=4), {"mamba_num_groups": 2}, documents=PACKED),
}
SLOW = {
    "tp, one group of the norm": case({"tensor_model_parallel_size": 2, **cp("a2a")}, {"mamba_norm_groups": 1}),
    "sp, muon": case(SP, optimizer=OptimizerConfig(optimizer="muon", adam_eps=1e-5)),
    "sp, lora": case(SP, {"lora_rank": 2}, selective("layernorm")),
    "sp, dora": case(SP, {"lora_rank": 2, "lora_dora": True, "mamba_proj_bias": True}),
    "p2p": case(cp("p2p")),
    "p2p, sp, limits": case(cp("p2p", **SP), {"mamba_dt_min": 0.01, "mamba_dt_max": 0.05}),
    "p2p, 3 ranks, wide convolution": case(cp("p2p", ranks=3), {"mamba_conv_kernel_dim": 7}, documents=PACKED),
    "p2p, 4 ranks, convolution over chunks": case(cp("p2p", ranks=4), {"mamba_conv_kernel_dim": 11}, documents=PACKED),
    "p2p, no convolution": case(cp("p2p"), {"mamba_conv_kernel_dim": 1, "mamba_conv_bias": False}, documents=PACKED),
    "p2p, full recomputation": case(cp("p2p"), {}, FULL, documents=PACKED),
    "a2a, sp": case(cp("a2a", **SP), {}, selective("layernorm", "mlp"), documents=PACKED),
    "a2a+p2p, documents": case(cp("a2a+p2p", 2, 2, ranks=4), documents=PACKED),
    "a2a+p2p, sp, full recomputation": case(cp("a2a+p2p", 2, 2, ranks=4, **SP), {}, FULL, documents=PACKED),
    "zb-h1, sp": case({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", **SP}, documents=PACKED),
    "pp, p2p": case({"pipeline_model_parallel_size": 2, **cp("p2p")}, {}, selective("layernorm"), documents=PACKED),
    "zero 3, offload": case(
        ZERO_3, {}, selective("layernorm", cpu_offloading_num_layers=1, min_offloaded_tensor_size=1), dp=2
    ),
    "zero 3, p2p, documents": case({**ZERO_3, **cp("p2p")}, documents=PACKED, dp=2),
    "beside attention": case(
        cp("p2p", **SP),
        {"token_mixers": ("mamba2", "attention"), "position_embedding_type": "rope", "hidden_dropout": 0.1},
        documents=PACKED,
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = (CASES | SLOW)[name]
    assert_like_one_process(pool.run(one.world_size, run_in_small_tiles, one), one)


def mamba(**changes: Any) -> ModelConfig:
    return tiny(**MAMBA | changes)


GENERATED = {
    "mamba": mamba(),
    "beside attention": mamba(token_mixers=("mamba2", "attention"), position_embedding_type="rope", num_query_groups=2),
    "no convolution": mamba(mamba_conv_kernel_dim=1),
}


@pytest.mark.parametrize("name", GENERATED)
def test_text_from_the_state_is_that_of_reading_again(name: str) -> None:
    """Of prompts of different lengths, which begin with padding; and of several tokens after others."""
    chunk = Solo.build(GENERATED[name]).chunk
    prompts, greedy = [[5, 6, 7, 8, 9], [1], [3, 2, 1]], SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, 9, greedy) == expected
    cache = KVCache(10)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 3, 1, 4], [4, 3, 2, 1, 0, 2, 7, 7]])
    parts = [chunk.logits(part, cache) for part in tokens.split((5, 1, 2), 1)]
    torch.testing.assert_close(torch.cat(parts), chunk.logits(tokens), rtol=1e-12, atol=1e-12)


def test_the_state_has_a_constant_size() -> None:
    """State and rows of the convolution of each layer, whatever was read."""
    config, samples = GENERATED["mamba"], 2
    chunk, cache = Solo.build(config).chunk.eval(), KVCache(10)
    inner, channels = config.mamba_inner_size, config.mamba_inner_size + 2 * 4 * config.mamba_state_dim
    expected = config.num_layers * samples * (inner * config.mamba_state_dim + 3 * channels) * 8
    for length in (1, 6):
        chunk.logits(torch.zeros(samples, length, dtype=torch.long), cache)
        assert cache.nbytes == expected


def test_ranks_with_some_heads_give_the_same_text(pool: Pool) -> None:
    alone = generate(Solo.build(mamba()).chunk, [[5, 6, 7], [1]], 8, SamplingParams(0.0))
    assert pool.run(2, text_on_ranks, mamba()) == [alone, alone]


FLAGS = (
    "--token-mixers mamba2 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16 --position-embedding-type none"
    " --normalization RMSNorm --disable-bias-linear --swiglu"
)
FORECAST = [
    f"{FLAGS} --recompute-granularity selective --recompute-modules layernorm",
    f"{LONG} {FLAGS} --mlp-chunk-size 100 --bf16 --reset-attention-mask",
    *(
        pytest.param(f"{LONG} {FLAGS} --mlp-chunk-size 100 {more}", marks=pytest.mark.slow)
        for more in (
            "--mamba-chunk-size 32",
            "--mamba-num-heads 64",
            "--mamba-state-dim 64 --bf16",
            "--seq-length 8192 --mamba-state-dim 64 --mamba-head-dim 32",
            "--seq-length 8192 --mamba-state-dim 64 --mamba-head-dim 32 --bf16",
        )
    ),
]


@pytest.mark.parametrize("flags", FORECAST)
def test_the_forecast_matches_the_tensors_of_a_step(flags: str) -> None:
    (((kept, _), peak),) = measured(0, 1, (flags,))
    (((forward, _)),) = activation_memory(config_of(flags), 1)
    assert kept == pytest.approx(forward.after, rel=0.005)
    (predicted,) = peak_activations(config_of(flags), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


DISTRIBUTED = tuple(
    f"{LONG} {FLAGS} --mlp-chunk-size 100 {layout}"
    for layout in (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type a2a",
        "--context-parallel-size 2 --cp-comm-type a2a --mamba-num-groups 1",
    )
)


@pytest.mark.slow
def test_the_forecast_matches_the_tensors_of_ranks(pool: Pool) -> None:
    for number, of_ranks in enumerate(zip(*pool.run(2, measured, DISTRIBUTED))):
        config = config_of(DISTRIBUTED[number], 2)
        ((forward, _),), (predicted,) = activation_memory(config, 1), peak_activations(config, 1)
        for kept, _ in of_ranks:
            assert kept[0] == pytest.approx(forward.after, rel=0.005), DISTRIBUTED[number]
        assert max(peak for _, peak in of_ranks) == pytest.approx(sum(predicted.values()), rel=0.1)


def test_products_match_the_count_of_torch() -> None:
    """Chunks have other products than the recurrence, and compute these twice in forward."""
    training, config = TrainingConfig(), mamba()
    heads, channels, state, groups = config.mamba_heads, config.mamba_head_dim, config.mamba_state_dim, 4
    chunk = config.mamba_chunk_size
    chunks = -(-SEQ // chunk)
    of_states = heads * channels * state
    recurrence = 2 * of_states
    padded = chunks * chunk * (groups * chunk * state + heads * chunk * channels + 2 * of_states)
    between = (chunks + 1) ** 2 * of_states
    difference = 4 * 2 * (padded + between) / SEQ - 3 * 2 * recurrence
    assert expected_flops(config, training) + config.num_layers * difference == pytest.approx(counted(config, training))


def test_flops_as_megatron_lm_counts_them() -> None:
    """Its scan has 7 FLOPs for each element of the state, and the projections 2 for each weight (training.py there)."""
    config = config_of(FLAGS)
    model, h = config.model, config.model.hidden_size
    inner, state = model.mamba_inner_size, model.mamba_state_dim
    projections = 2 * h * (3 * inner + 2 * model.mamba_num_groups * state + model.mamba_heads)
    layer = projections + 7 * inner * state + 2 * 3 * h * model.ffn
    rows = padded_vocab_size(model.vocab, model.make_vocab_size_divisible_by, 1)
    assert FlopsPerToken.from_config(config).megatron == 3 * (model.num_layers * layer + 2 * h * rows)
