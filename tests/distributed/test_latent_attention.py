"""Latent attention, and attention with a gate on its output, in every layout, and from the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.inference.generate import SamplingParams, generate
from megatron.layers.kv_cache import KVCache
from megatron.planner.activations import activation_memory, peak_activations
from tests.kit.cases import MODEL, Case, PackedConversations, assert_like_one_process, run_in_small_tiles, selective
from tests.kit.cases import context_parallel as cp
from tests.kit.pool import Pool
from tests.kit.short import one_in
from tests.kit.solo import Solo, text_on_ranks, tiny
from tests.unit.inference.test_generate import reread
from tests.unit.planner.test_activations import LLAMA, LONG, config_of, measured
from tests.unit.planner.test_flops import counted, expected

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


def gated(parallel: dict[str, Any], training: dict[str, Any] | None = None, **model: Any) -> Case:
    changed = replace(MODEL, attention_output_gate=True, num_query_groups=2, position_embedding_type="rope", **model)
    return Case(changed, ParallelConfig(**parallel), training=TrainingConfig(**training or {}))


CASES |= {
    "gate, heads shared by ranks": gated({"tensor_model_parallel_size": 4}),
    "gate, sp, core attention recomputed": gated(SP, selective("core_attn", "layernorm"), qk_layernorm=True),
    "gate, all heads normalised": gated(
        {"tensor_model_parallel_size": 4, "sequence_parallel": True},
        normalization="RMSNorm",
        qk_layernorm=True,
        qk_layernorm_scope="all",
    ),
    "gate, a2a": gated(cp("a2a"), add_bias_linear=False),
    "gate, lora": gated({"tensor_model_parallel_size": 4}, lora_rank=2, lora_target=("linear_qkv.gate", "*proj")),
    "gate, muon": replace(
        gated({"tensor_model_parallel_size": 4}), optimizer=OptimizerConfig(optimizer="muon", adam_eps=1e-5)
    ),
}


SLOW = ("p2p", "all_gather, wide values", "a2a, sinks, documents", "sp, all recomputed")
"""Cases whose features others have, too."""


@pytest.mark.parametrize("name", one_in(2, CASES, SLOW))
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    assert_like_one_process(pool.run(one.world_size, run_in_small_tiles, one), one)


def latent(**changes: Any) -> ModelConfig:
    return tiny(**LATENT | {"kv_lora_rank": 20} | changes)


MIXED = {"multi_latent_attention": False, "token_mixers": ("latent-attention", "attention")}
GENERATED = {
    "latent": latent(),
    "plain queries, rope": latent(q_lora_rank=None, rope_type="rope", v_head_dim=18, window_size=6),
    "no positions": latent(position_embedding_type="none", no_rope_freq="1", qk_layernorm=False),
    "beside attention": latent(**MIXED),
    "gate": tiny(attention_output_gate=True, num_query_groups=2, position_embedding_type="rope"),
}


@pytest.mark.parametrize("name", GENERATED)
def test_text_from_the_cache_is_that_of_reading_again(name: str) -> None:
    """Of prompts of different lengths, which begin with padding."""
    chunk = Solo.build(GENERATED[name]).chunk
    prompts, greedy = [[5, 6, 7, 8, 9], [1], [3, 2, 1]], SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, 9, greedy) == expected
    cache = KVCache(10)
    first, second = torch.tensor([[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]), torch.tensor([[3, 1], [2, 7]])
    parts = [chunk.logits(tokens, cache) for tokens in (first, second)]
    torch.testing.assert_close(torch.cat(parts), chunk.logits(torch.cat((first, second), 1)), rtol=1e-12, atol=1e-12)


def test_the_cache_holds_latents() -> None:
    """Of a token kv_lora_rank + qk_pos_emb_head_dim elements in a layer, whatever the number of heads."""
    capacity, samples, sizes = 10, 2, {}
    for heads in (2, 4):
        config, cache = latent(num_attention_heads=heads), KVCache(capacity)
        Solo.build(config).chunk.eval().logits(torch.zeros(samples, 3, dtype=torch.long), cache)
        sizes[heads] = cache.nbytes
    expected = config.num_layers * capacity * samples * (config.kv_lora_rank + config.qk_pos_emb_head_dim) * 8
    assert sizes == {2: expected, 4: expected}


@pytest.mark.parametrize("name", ["latent", "plain queries, rope", "no positions"])
def test_a_token_attends_to_latents_as_to_the_keys_and_values_of_heads(name: str) -> None:
    """A single one does not project the cached latents; several do."""
    chunk, caches = Solo.build(GENERATED[name]).chunk.eval(), (KVCache(10), KVCache(10))
    read = torch.tensor([[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]])
    for cache in caches:
        chunk.logits(read, cache)
    projected: list[str] = []
    for module_name, module in chunk.named_modules():
        if module_name.endswith("linear_kv_up_proj"):
            module.register_forward_hook(lambda module, inputs, output: projected.append("up"))
    single = [chunk.logits(torch.tensor([[token], [9 - token]]), caches[0]) for token in (3, 8)]
    assert not projected
    both = chunk.logits(torch.tensor([[3, 8], [6, 1]]), caches[1])
    assert len(projected) == GENERATED[name].num_layers
    torch.testing.assert_close(torch.cat(single), both, rtol=1e-12, atol=1e-12)
    assert caches[0].nbytes == caches[1].nbytes


def test_ranks_with_some_heads_give_the_same_text(pool: Pool) -> None:
    alone = generate(Solo.build(latent()).chunk, [[5, 6, 7], [1]], 8, SamplingParams(0.0))
    assert pool.run(2, text_on_ranks, latent()) == [alone, alone]


MLA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --multi-latent-attention"
    " --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm"
)
PLAIN = MLA.replace("--q-lora-rank 24", "").replace("--qk-layernorm", "")
GATE = f"{LLAMA} --attention-output-gate"
AGAIN = "--recompute-granularity selective --recompute-modules"
FORECAST = [
    f"{MLA} {AGAIN} mla_up_proj core_attn layernorm",
    f"{PLAIN} --v-head-dim 24 {AGAIN} mla_up_proj",
    f"{LONG} {MLA} --qk-head-dim 60 --v-head-dim 16 --mlp-chunk-size 100",
    f"{LONG} {PLAIN} --qk-head-dim 60 --v-head-dim 90 --attention-dropout 0.1 --mlp-chunk-size 100",
    f"{GATE} {AGAIN} core_attn",
    f"{LONG} {GATE} --qk-layernorm --qk-layernorm-scope all --mlp-chunk-size 100",
]


@pytest.mark.parametrize("flags", one_in(2, FORECAST))
def test_the_forecast_matches_the_tensors_of_a_step(flags: str) -> None:
    (((kept, _), peak),) = measured(0, 1, (flags,))
    (((forward, _)),) = activation_memory(config_of(flags), 1)
    assert kept == pytest.approx(forward.after, rel=0.005)
    (predicted,) = peak_activations(config_of(flags), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


@pytest.mark.parametrize("modules", [("mla_up_proj",), ("core_attn", "layernorm")])
def test_products_match_the_count_of_torch(modules: tuple[str, ...]) -> None:
    """Fused kernels of equal widths multiply the padding of values too; with dropout there is none."""
    training = TrainingConfig(**selective(*modules))
    equal_widths = latent(**MIXED, num_layers=2, v_head_dim=12)
    for config in (equal_widths, latent(attention_dropout=0.1), GENERATED["gate"]):
        assert expected(config, training) == counted(config, training, fused=True)
