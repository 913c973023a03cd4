"""Gated DeltaNet against Qwen3-Next's of transformers in fp64: logits, and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kit.solo import tiny
from tests.parity.families import Tensors, assert_equal_to_twin, from_llama
from tests.parity.test_output_gate import gates_after_queries

transformers = pytest.importorskip("transformers")

CONFIG = tiny(
    num_layers=3,
    token_mixers=("gated-delta-net", "gated-delta-net", "attention"),
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=3,
    num_query_groups=2,
    kv_channels=12,
    ffn_hidden_size=48,
    attention_output_gate=True,
    qk_layernorm=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
    normalization="RMSNorm",
    apply_layernorm_1p=True,
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
OURS, THEIRS = "pre_gated_delta_net_layernorm.weight", "input_layernorm.weight"


def of_delta_net(t: Tensors) -> dict[str, Tensor]:
    """A layer's tensors by our names. There a key head is followed by what shares it: q, k, v, gates; beta, alpha."""
    keys, values = CONFIG.linear_num_key_heads, CONFIG.linear_num_value_heads // CONFIG.linear_num_key_heads
    d, v = CONFIG.linear_key_head_dim, CONFIG.linear_value_head_dim * values
    wide = t["in_proj_qkvz.weight"].unflatten(0, (keys, -1)).split((d, d, v, v), dim=1)
    narrow = t["in_proj_ba.weight"].unflatten(0, (keys, -1)).split(values, dim=1)
    same = {name: t[name] for name in ("dt_bias", "A_log", "norm.weight")}
    return same | {
        "linear_in.weight": torch.cat([part.flatten(0, 1) for part in (*wide, *narrow)]),
        "conv.weight": t["conv1d.weight"].squeeze(1),
        "linear_out.weight": t["out_proj.weight"],
    }


def translated(t: Tensors) -> dict[str, Tensor]:
    out = from_llama(gates_after_queries(t, CONFIG), CONFIG)
    for layer in range(CONFIG.num_layers):
        theirs, ours = f"model.layers.{layer}.linear_attn.", f"layers.{layer}."
        found = {name.removeprefix(theirs): value for name, value in t.items() if name.startswith(theirs)}
        if found:
            out |= {f"{ours}gated_delta_net.{name}": value for name, value in of_delta_net(found).items()}
            out[ours + OURS] = out.pop(ours + THEIRS)
    return out


def test_logits_and_gradients_are_those_of_qwen3_next() -> None:
    made = transformers.Qwen3NextConfig(
        hidden_size=CONFIG.hidden_size,
        num_hidden_layers=CONFIG.num_layers,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_key_head_dim=CONFIG.linear_key_head_dim,
        linear_value_head_dim=CONFIG.linear_value_head_dim,
        linear_num_key_heads=CONFIG.linear_num_key_heads,
        linear_num_value_heads=CONFIG.linear_num_value_heads,
        linear_conv_kernel_dim=CONFIG.linear_conv_kernel_dim,
        mlp_only_layers=[*range(CONFIG.num_layers)],
        intermediate_size=CONFIG.ffn,
        vocab_size=CONFIG.vocab,
        num_attention_heads=CONFIG.num_attention_heads,
        num_key_value_heads=CONFIG.kv_groups,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.norm_epsilon,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        attn_implementation="eager",
        use_cache=False,
    )
    assert_equal_to_twin(CONFIG, lambda: transformers.Qwen3NextForCausalLM(made), translated)
