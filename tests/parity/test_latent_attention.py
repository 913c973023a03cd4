"""Latent attention against DeepSeek-V3's of transformers in fp64: logits, and every gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from megatron.config.model import ModelConfig
from tests.kit.solo import tiny
from tests.parity.families import assert_equal_to_twin, translate

transformers = pytest.importorskip("transformers")

LAYERS = 2
EPSILON = 1e-6  # of the norms of latents there, whatever the others have
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latent queries": ({"q_lora_rank": 24, "rope_type": "rope"}, {}),
    "plain queries, narrow values": ({"rope_type": "rope", "v_head_dim": 6}, {}),
    "wide values": ({"q_lora_rank": 10, "rope_type": "rope", "v_head_dim": 40}, {}),
    "yarn": (
        {"q_lora_rank": 24, "mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "yarn, one scale": ({"v_head_dim": 18}, YARN),
}


def ours(changes: Mapping[str, Any]) -> ModelConfig:
    yarn = {"rotary_scaling_factor": 8.0, "yarn_original_max_position_embeddings": 8}
    sizes = {"kv_lora_rank": 20, "qk_head_dim": 12, "qk_pos_emb_head_dim": 6, "v_head_dim": 10}
    rest = {"normalization": "RMSNorm", "norm_epsilon": EPSILON, "activation": "swiglu", "add_bias_linear": False}
    return tiny(
        multi_latent_attention=True,
        num_layers=LAYERS,
        ffn_hidden_size=48,
        qk_layernorm=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        **yarn | sizes | rest | changes,
    )


def theirs(config: ModelConfig, rope: Mapping[str, Any]) -> Any:
    made = transformers.DeepseekV3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        intermediate_size=config.ffn,
        vocab_size=config.vocab,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_head_dim,
        qk_rope_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        rms_norm_eps=EPSILON,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **rope},
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.DeepseekV3ForCausalLM(made)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_deepseek_v3(name: str) -> None:
    changes, rope = CASES[name]
    config = ours(changes)
    assert_equal_to_twin(config, lambda: theirs(config, rope), lambda t: translate("DeepseekV3", t, config))


def test_scores_have_their_factor_with_either_kind_of_positions() -> None:
    """Megatron-LM multiplies by the square of the factor of mscale_all_dim, whatever the type of the positions."""
    factor = (0.1 * 1.3 * math.log(8.0) + 1.0) ** 2 / math.sqrt(12 + 6)
    for kind in ("rope", "yarn"):
        scale = ours({"rope_type": kind, "mscale_all_dim": 1.3}).latent_softmax_scale
        assert scale == pytest.approx(factor, rel=1e-14)
