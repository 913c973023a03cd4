"""Small hybrid models of `transformers`, and their tensors under our names, written out as one explicit mapping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from tests.parity.families import EXPERT_BIAS, Tensors, join_qkv

EPSILON = 1e-3  # large enough for a norm that ignores it to be seen
SIZES = {"vocab_size": 101, "hidden_size": 32, "tie_word_embeddings": False, "pad_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_n_groups": 2, "mamba_chunk_size": 4}
STEPS = {"time_step_limit": [0.2, 1.5]}
NEMOTRON_MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 4, "ssm_state_size": 5, "n_groups": 2, "chunk_size": 4}
NEMOTRON_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 3}
NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 2.5, "topk_group": 2}
FACTORS = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 1.5}
DELTA = {"linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
NEMOTRON = SIZES | HEADS | NEMOTRON_MAMBA | {"head_dim": 12, "intermediate_size": 40, "layer_norm_epsilon": EPSILON}
LIKE_LLAMA = SIZES | HEADS | {"intermediate_size": 40, "num_hidden_layers": 3, "rms_norm_eps": EPSILON}
QWEN = LIKE_LLAMA | DELTA | {"head_dim": 16, "layer_types": MIXED}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        SIZES
        | STEPS
        | {"num_heads": 8, "head_dim": 8, "state_size": 5, "n_groups": 2, "chunk_size": 4, "num_hidden_layers": 3}
        | {"layer_norm_epsilon": EPSILON, "use_bias": True},
    ),
    "mamba2-tied": (
        "Mamba2",
        SIZES
        | {"num_heads": 12, "head_dim": 8, "expand": 3, "state_size": 3, "n_groups": 4, "chunk_size": 4}
        | {"num_hidden_layers": 2, "tie_word_embeddings": True, "use_conv_bias": False, "conv_kernel": 3},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "M-MM*--*M", "time_step_min": 0.5}),
    "nemotron-3": ("NemotronH", NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "MEM*EE-"}),
    "nemotron-3-latent": (
        "NemotronH",
        NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "ME*E", "moe_latent_size": 8},
    ),
    "bamba": ("Bamba", LIKE_LLAMA | MAMBA | STEPS | {"attn_layer_indices": [1]}),
    "granite-4": (
        "GraniteMoeHybrid",
        LIKE_LLAMA
        | MAMBA
        | FACTORS
        | {"layer_types": MIXED, "num_local_experts": 0, "shared_intermediate_size": 40}
        | {"position_embedding_type": "nope", "head_dim": 6},
    ),
    "granite-4-experts": (
        "GraniteMoeHybrid",
        LIKE_LLAMA
        | MAMBA
        | FACTORS
        | {"layer_types": MIXED, "num_local_experts": 4, "intermediate_size": 12, "shared_intermediate_size": 20}
        | {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "qwen3-next": ("Qwen3Next", QWEN | SHARED | {"mlp_only_layers": [0]}),
    "qwen3-5": ("Qwen3_5Text", QWEN | {"linear_num_key_heads": 3}),
    "qwen3-5-moe": ("Qwen3_5MoeText", {k: v for k, v in (QWEN | SHARED).items() if k != "intermediate_size"}),
}
"""Names of cases -> transformers' class of configurations without ``Config``, and its options."""


def config_of(name: str, **others: Any) -> Any:
    """The configuration of a case, or with other options."""
    import transformers

    family, options = HYBRIDS[name]
    config = getattr(transformers, f"{family}Config")(**options | others, use_cache=False)
    config._experts_implementation = "eager"  # the others want widths that are multiples of 16 bytes
    return config


def build(name: str, seed: int = 1, **others: Any) -> nn.Module:
    """A model of transformers whose weights hide no mistake, in fp32."""
    import transformers

    family, config = HYBRIDS[name][0], config_of(name, **others)
    torch.manual_seed(seed)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, value in model.state_dict().items():
            around_zero = name.endswith((EXPERT_BIAS, "A_log", "dt_bias"))
            around_zero |= family.startswith("Qwen") and not name.endswith("linear_attn.norm.weight")
            value.normal_(mean=float(value.dim() == 1 and not around_zero), std=0.2)
    return model.eval()


def from_hybrid(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of all families: each residual layer by what is there."""
    place, words = ("backbone", "embeddings") if "backbone.embeddings.weight" in t else ("model", "embed_tokens")
    words = "embeddings" if "model.embeddings.weight" in t else words
    norms = [f"{place}.{name}.weight" for name in ("norm_f", "norm", "final_layernorm")]
    out = {
        "embedding.word_embeddings.weight": t[f"{place}.{words}.weight"],
        "final_layernorm.weight": next(t[name] for name in norms if name in t),
    }
    if config.untie_embeddings_and_output_weights:
        out["output_layer.weight"] = t["lm_head.weight"]
    by_symbol = f"{place}.layers.0.norm.weight" in t
    symbol = 0
    for layer in range(config.num_layers):
        for mixer in config.mixers(layer):
            if by_symbol:
                found = part(t, f"{place}.layers.{symbol}.")
                inside, norm = part(found, "mixer."), found["norm.weight"]
            else:
                found = part(t, f"{place}.layers.{layer}.")
                names = ("mamba.", "linear_attn.", "self_attn.")
                others = ("shared_mlp.", "block_sparse_moe.", "feed_forward.", "mlp.")
                token_mixer = mixer not in ("mlp", "experts")
                inside = {}
                for name in names if token_mixer else others:
                    inside |= part(found, name)
                second = "pre_ff_layernorm" if "pre_ff_layernorm.weight" in found else "post_attention_layernorm"
                norm = found[f"{'input_layernorm' if token_mixer else second}.weight"]
                if mixer == "experts" and "shared_mlp.input_linear.weight" in found:
                    inside = part(found, "block_sparse_moe.")
                    inside |= {f"shared_experts.{k}": v for k, v in part(found, "shared_mlp.").items()}
            symbol += 1
            module, make = MIXERS[mixer]
            names = {"self_attention": "input_layernorm"}
            out[f"layers.{layer}.{names.get(module, f'pre_{module}_layernorm')}.weight"] = norm
            out |= {f"layers.{layer}.{module}.{name}": value for name, value in make(inside, config).items()}
    return out


def part(t: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in t.items() if name.startswith(prefix)}


def mamba(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    out = {name: t[name] for name in ("dt_bias", "A_log", "D", "norm.weight")}
    out |= {"conv.weight": t["conv1d.weight"].squeeze(1)}
    for ours, theirs in {"conv": "conv1d", "linear_in": "in_proj", "linear_out": "out_proj"}.items():
        kinds = ("bias",) if ours == "conv" else ("weight", "bias")
        out |= {f"{ours}.{kind}": t[f"{theirs}.{kind}"] for kind in kinds if f"{theirs}.{kind}" in t}
    return out


def gated_delta_net(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    out = {name: t[name] for name in ("dt_bias", "A_log", "norm.weight")}
    out |= {"conv.weight": t["conv1d.weight"].squeeze(1), "linear_out.weight": t["out_proj.weight"]}
    if "in_proj_qkv.weight" in t:
        rows = [t[f"in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]
    else:
        heads, dk, dv = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        each = config.linear_num_value_heads // heads
        qkvz = t["in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split([dk, dk, each * dv, each * dv], dim=1)
        ba = t["in_proj_ba.weight"].unflatten(0, (heads, -1)).split([each, each], dim=1)
        rows = [x.flatten(0, 1) for x in (*qkvz, *ba)]
    return out | {"linear_in.weight": torch.cat(rows)}


def attention(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    q, k, v = (t[f"{x}_proj.weight"] for x in "qkv")
    if config.attention_output_gate:  # the queries of a group before its gates
        groups, per_group = config.kv_groups, config.heads_per_group
        q = q.unflatten(0, (groups, per_group, 2, config.head_dim)).transpose(1, 2).flatten(0, 3)
    out = {"linear_qkv.weight": join_qkv(q, k, v, config), "linear_proj.weight": t["o_proj.weight"]}
    return out | {f"{x}_layernorm.weight": t[f"{x}_norm.weight"] for x in "qk" if f"{x}_norm.weight" in t}


def mlp(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    if "input_linear.weight" in t:
        return {"linear_fc1.weight": t["input_linear.weight"], "linear_fc2.weight": t["output_linear.weight"]}
    up = [t[f"{x}_proj.weight"] for x in ("gate", "up") if f"{x}_proj.weight" in t]
    return {"linear_fc1.weight": torch.cat(up), "linear_fc2.weight": t["down_proj.weight"]}


def experts(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    gate = "gate.weight" if "gate.weight" in t else "router.weight"
    out = {"router.weight": t[gate]}
    if f"gate.{EXPERT_BIAS}" in t:
        out["router.expert_bias"] = t[f"gate.{EXPERT_BIAS}"]
    if "shared_expert_gate.weight" in t:
        out["shared_experts.gate_weight"] = t["shared_expert_gate.weight"]
    shared = part(t, "shared_experts.") or part(t, "shared_expert.")
    out |= {f"shared_experts.{name}": value for name, value in mlp(shared, config).items()}
    out |= {name: value for name, value in t.items() if "latent_proj" in name}
    up = t["experts.gate_up_proj" if "experts.gate_up_proj" in t else "experts.up_proj"]
    return out | {
        "experts.linear_fc1.weight": up.flatten(0, 1),
        "experts.linear_fc2.weight": t["experts.down_proj"].flatten(0, 1),
    }


MIXERS = {
    "mamba2": ("mamba", mamba),
    "gated-delta-net": ("gated_delta_net", gated_delta_net),
    "attention": ("self_attention", attention),
    "mlp": ("mlp", mlp),
    "experts": ("mlp", experts),
}
"""Mixers -> their modules here, and the mapping of what is inside."""
