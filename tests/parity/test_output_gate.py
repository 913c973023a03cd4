"""The gate on the output of attention against Qwen3-Next's of transformers in fp64: logits, and every gradient."""

from __future__ import annotations

import pytest
from torch import Tensor

from megatron.config.model import ModelConfig
from tests.kit.solo import tiny
from tests.parity.families import Tensors, assert_equal_to_twin, translate

transformers = pytest.importorskip("transformers")

LAYERS = 2
CONFIG = tiny(
    num_layers=LAYERS,
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


def gates_after_queries(t: Tensors, config: ModelConfig = CONFIG) -> Tensors:
    """Return tensors in which the queries of a key/value head are followed by their gates, as here."""
    groups, per_group, d = config.kv_groups, config.heads_per_group, config.head_dim

    def arranged(q: Tensor) -> Tensor:
        return q.unflatten(0, (groups, per_group, 2, d)).transpose(1, 2).flatten(0, 3)

    return {name: arranged(value) if "q_proj" in name else value for name, value in t.items()}


def test_logits_and_gradients_are_those_of_qwen3_next() -> None:
    made = transformers.Qwen3NextConfig(
        hidden_size=CONFIG.hidden_size,
        num_hidden_layers=LAYERS,
        layer_types=["full_attention"] * LAYERS,
        mlp_only_layers=[*range(LAYERS)],
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
    assert_equal_to_twin(
        CONFIG,
        lambda: transformers.Qwen3NextForCausalLM(made),
        lambda t: translate("Qwen3Next", gates_after_queries(t), CONFIG),
    )
