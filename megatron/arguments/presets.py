"""Known models: shape, sequence length and the optimizer settings of their papers. Dropout is 0 in all.

A preset sets neither layout, precision, batch nor length: those depend on the machine and the budget. A batch far from
that of the paper is noted, because the learning rate was chosen for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.config.batch import full_global_batch_size
from megatron.config.run import RunConfig

Preset = dict[str, Any]

_PAPERS: Preset = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
}

_GPT: Preset = _PAPERS | {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    # Brown et al. 2020, appendix B: warm-up over 375M of 300B tokens, decay to a tenth
    "lr_warmup_fraction": 0.00125,
    "adam_eps": 1e-8,
}

_LLAMA: Preset = _PAPERS | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    # Touvron et al. 2023: warm-up of 2,000 of about 500,000 steps, decay to a tenth
    "lr_warmup_fraction": 0.004,
    "adam_eps": 1e-5,
}


def _shape(layers: int, hidden: int, heads: int, length: int, lr: float, min_lr: float) -> Preset:
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return shape | {"seq_length": length, "max_position_embeddings": length, "lr": lr, "min_lr": min_lr}


def _gpt(layers: int, hidden: int, heads: int, length: int, lr: float) -> Preset:
    return _GPT | _shape(layers, hidden, heads, length, lr, lr / 10) | {"vocab_size": 50257}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, lr: float) -> Preset:
    # Grattafiori et al. 2024, section 3.4.1: warm-up of 8,000 of 1,200,000 steps, decay to a hundredth
    model = {"ffn_hidden_size": ffn, "vocab_size": 128256, "num_query_groups": 8, "rotary_base": 500000.0}
    warmup = {"lr_warmup_fraction": 8000 / 1_200_000}
    return _LLAMA | _shape(layers, hidden, heads, 8192, lr, lr / 100) | model | warmup


def _mixture(layers: int, hidden: int, heads: int, length: int, positions: int, model: Preset) -> Preset:
    # Their rates are not published; these are Llama 2's for 7B and 13B.
    return _LLAMA | _shape(layers, hidden, heads, length, 3e-4, 3e-5) | {"max_position_embeddings": positions} | model


# Models with experts have the values of their config.json, positions beyond the first context length included.
_MIXTRAL: Preset = {
    "vocab_size": 32000,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "rotary_base": 1e6,
    "num_experts": 8,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.02,),
}
_QWEN3_30B_A3B: Preset = {
    "vocab_size": 151936,
    "num_query_groups": 4,
    "kv_channels": 128,
    "qk_layernorm": True,
    "norm_epsilon": 1e-6,
    "rotary_base": 1e6,
    "ffn_hidden_size": 6144,
    "num_experts": 128,
    "moe_ffn_hidden_size": 768,
    "moe_router_topk": 8,
    "moe_router_load_balancing_type": ("global_aux_loss",),
    "moe_aux_loss_coeff": (0.001,),
}
_GPT_OSS_20B: Preset = {
    "vocab_size": 201088,
    "num_query_groups": 8,
    "kv_channels": 64,
    "add_bias_linear": True,
    "position_embedding_type": "yarn",
    "rotary_base": 150000.0,
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_correction_range_round_to_int": False,
    "attention_pattern": "local:128,global",
    "softmax_type": "learnable",
    "activation": "quick_geglu",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "ffn_hidden_size": 2880,
    "num_experts": 32,
    "moe_router_topk": 4,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),  # not published
}
# DeepSeek-AI 2024, arXiv 2412.19437, section 4.2: warm-up of 2,000 of 235,000 steps; the rate is constant for 10T of
# its 14.8T tokens before the cosine. The weight of the further token is that of the last 4.8T.
_DEEPSEEK_V3: Preset = {
    "lr_warmup_fraction": 2000 / 235_000,
    "adam_eps": 1e-8,
    "init_method_std": 0.006,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "norm_epsilon": 1e-6,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rotary_scaling_factor": 40.0,
    "mscale_all_dim": 1.0,
    "ffn_hidden_size": 18432,
    "num_experts": 256,
    "moe_layer_freq": "[0]*3+[1]*58",
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.001,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.0001,),
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.1,
}
_NEMOTRON: Preset = {"position_embedding_type": "none", "activation": "relu2"}
_NEMOTRON_H_8B: Preset = _NEMOTRON | {
    "hybrid_layer_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "vocab_size": 131072,
    "num_query_groups": 8,
    "ffn_hidden_size": 21504,
}
_NEMOTRON_3_NANO: Preset = _NEMOTRON | {
    "hybrid_layer_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "vocab_size": 131072,
    "num_query_groups": 2,
    "kv_channels": 128,
    "mamba_num_heads": 64,
    "ffn_hidden_size": 1856,
    "num_experts": 128,
    "moe_ffn_hidden_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_router_topk": 6,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.0001,),
}
_QWEN3_NEXT: Preset = {
    "hybrid_layer_pattern": "GEGEGE*E" * 12,
    "vocab_size": 151936,
    "num_query_groups": 2,
    "kv_channels": 256,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
    "norm_epsilon": 1e-6,
    "rotary_base": 1e7,
    "rotary_percent": 0.25,
    "ffn_hidden_size": 5120,
    "num_experts": 512,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "moe_shared_expert_gate": True,
    "moe_router_topk": 10,
    "moe_router_load_balancing_type": ("global_aux_loss",),
    "moe_aux_loss_coeff": (0.001,),
}
_GRANITE_4_H_TINY: Preset = {
    "hybrid_layer_pattern": f"{'ME' * 5}*E{'ME' * 9}*E{'ME' * 9}*E{'ME' * 9}*E{'ME' * 4}",
    "position_embedding_type": "none",
    "vocab_size": 100352,
    "num_query_groups": 4,
    "untie_embeddings_and_output_weights": False,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "softmax_scale": 1 / 128,
    "mamba_num_groups": 1,
    "ffn_hidden_size": 512,
    "num_experts": 64,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_router_topk": 6,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),  # not published
}
_TINY_HYBRID: Preset = _NEMOTRON | {
    "hybrid_layer_pattern": "M-M*-M-",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_fraction": 0.05,
    "num_query_groups": 4,
    "ffn_hidden_size": 512,
    "mamba_state_dim": 32,
    "mamba_head_dim": 32,
    "mamba_num_groups": 2,
}


def _hybrid(hidden: int, heads: int, length: int, positions: int, model: Preset) -> Preset:
    # Shapes are those of config.json, rates Llama 2's for 7B and 13B.
    preset = _LLAMA | _shape(0, hidden, heads, length, 3e-4, 3e-5) | {"max_position_embeddings": positions} | model
    del preset["num_layers"]  # it follows from the pattern
    return preset


_TINY_DEEPSEEK: Preset = _DEEPSEEK_V3 | {
    "lr_warmup_fraction": 0.05,
    "init_method_std": 0.02,
    "max_position_embeddings": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "ffn_hidden_size": 384,
    "num_experts": 16,
    "moe_layer_freq": "[0]*1+[1]*3",
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
del _TINY_DEEPSEEK["vocab_size"], _TINY_DEEPSEEK["rotary_scaling_factor"], _TINY_DEEPSEEK["mscale_all_dim"]


# Learning rates of the GPT family: Brown et al. 2020, table 2.1, at the nearest size. The tiny models are small enough
# for a laptop's CPU; their vocabulary is the tokenizer's.
PRESETS = MappingProxyType(
    {
        "gpt2-124m": _gpt(12, 768, 12, 1024, 6e-4),
        "gpt2-355m": _gpt(24, 1024, 16, 1024, 3e-4),
        "gpt2-774m": _gpt(36, 1280, 20, 1024, 2.5e-4),
        "gpt2-1.5b": _gpt(48, 1600, 25, 1024, 2e-4),
        "gpt3-175b": _gpt(96, 12288, 96, 2048, 0.6e-4),
        "llama2-7b": _LLAMA | _shape(32, 4096, 32, 4096, 3e-4, 3e-5) | {"ffn_hidden_size": 11008, "vocab_size": 32000},
        "llama3-8b": _llama3(32, 4096, 32, 14336, 3e-4),
        "llama3-70b": _llama3(80, 8192, 64, 28672, 1.5e-4),
        "llama3-405b": _llama3(126, 16384, 128, 53248, 8e-5),
        "mixtral-8x7b": _mixture(32, 4096, 32, 32768, 32768, _MIXTRAL),
        "qwen3-30b-a3b": _mixture(48, 2048, 32, 4096, 40960, _QWEN3_30B_A3B),
        "gpt-oss-20b": _mixture(24, 2880, 64, 4096, 131072, _GPT_OSS_20B),
        "deepseek-v3": _LLAMA | _shape(61, 7168, 128, 4096, 2.2e-4, 2.2e-5) | _DEEPSEEK_V3,
        "nemotron-h-8b": _hybrid(4096, 32, 8192, 8192, _NEMOTRON_H_8B),
        "nemotron-3-nano-30b-a3b": _hybrid(2688, 32, 8192, 262144, _NEMOTRON_3_NANO),
        "granite-4.0-h-tiny": _hybrid(1536, 12, 4096, 131072, _GRANITE_4_H_TINY),
        "qwen3-next-80b-a3b": _hybrid(2048, 16, 4096, 262144, _QWEN3_NEXT),
        "tiny-gpt2": _GPT | _shape(2, 64, 4, 256, 1e-3, 1e-4) | {"lr_warmup_fraction": 0.05},
        "tiny-llama": _LLAMA
        | _shape(4, 128, 8, 256, 1e-3, 1e-4)
        | {"lr_warmup_fraction": 0.05, "num_query_groups": 4, "ffn_hidden_size": 384},
        "tiny-moe": _LLAMA
        | _shape(4, 128, 8, 256, 1e-3, 1e-4)
        | {"lr_warmup_fraction": 0.05, "num_query_groups": 4, "ffn_hidden_size": 192}
        | {"num_experts": 8, "moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.01,)},
        "tiny-deepseek": _LLAMA | _shape(4, 128, 4, 256, 1e-3, 1e-4) | _TINY_DEEPSEEK,
        "tiny-hybrid": _hybrid(128, 8, 256, 256, _TINY_HYBRID),
    }
)

# GPT: Brown et al. 2020, table 2.1. Llama 2: Touvron et al. 2023, section 2.2. Llama 3: Grattafiori et al. 2024,
# section 3.4.1, for 405B the last stage of its ramp, for the others, whose batches are not published, the first.
# DeepSeek-V3: section 4.2, the last stage of its ramp. Models with the rates of Llama 2: its batch.
PAPER_TOKENS_PER_STEP = MappingProxyType(
    dict.fromkeys(("gpt2-124m", "gpt2-355m", "gpt2-774m"), 500_000)
    | {"gpt2-1.5b": 1_000_000, "gpt3-175b": 3_200_000, "llama2-7b": 4_000_000}
    | {"llama3-8b": 4_000_000, "llama3-70b": 4_000_000, "llama3-405b": 16_000_000, "deepseek-v3": 15360 * 4096}
    | dict.fromkeys(("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"), 4_000_000)
    | dict.fromkeys(("nemotron-h-8b", "nemotron-3-nano-30b-a3b"), 4_000_000)
    | dict.fromkeys(("granite-4.0-h-tiny", "qwen3-next-80b-a3b"), 4_000_000)
)
"""Tokens per step for which the learning rate of a preset was chosen."""


def preset_batch_notes(name: str | None, config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if a preset's learning rate is used with less than half or more than twice its paper's batch."""
    paper, training = PAPER_TOKENS_PER_STEP.get(name or ""), config.training
    scaled = config.optimizer.lr_scaling != "none"
    if scaled or paper is None or name is None or config.optimizer.lr != PRESETS[name]["lr"]:
        return
    tokens = full_global_batch_size(training, config.parallel.data_parallel_size(world_size)) * training.seq_length
    if not paper / 2 <= tokens <= 2 * paper:
        samples = 16 * max(1, round(paper / training.seq_length / 16))
        yield (
            f"TOKENS PER STEP: {tokens:,} here, {paper:,} in the paper that the learning rate "
            f"{config.optimizer.lr:g} of --preset {name} comes from; set --global-batch-size {samples}, another --lr, "
            f"or --lr-scaling sqrt --lr-base-batch-size {samples}"
        )
