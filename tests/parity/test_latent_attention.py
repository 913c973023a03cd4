"""Latent attention against DeepSeek-V3's of transformers in fp64: logits, and every gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from tests.kit.solo import Solo, random_batch, tiny
from tests.parity.families import copy_into, everything_in_double

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
    model = transformers.DeepseekV3ForCausalLM(made).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


NAMES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}


def translate(t: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of ``DeepseekV3ForCausalLM`` under our names."""
    out = {
        "embedding.word_embeddings.weight": t["model.embed_tokens.weight"],
        "final_layernorm.weight": t["model.norm.weight"],
        "output_layer.weight": t["lm_head.weight"],
    }
    for i in range(LAYERS):
        a, b = f"layers.{i}", f"model.layers.{i}"
        out[f"{a}.input_layernorm.weight"] = t[f"{b}.input_layernorm.weight"]
        out[f"{a}.pre_mlp_layernorm.weight"] = t[f"{b}.post_attention_layernorm.weight"]
        out[f"{a}.mlp.linear_fc1.weight"] = torch.cat([t[f"{b}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
        out[f"{a}.mlp.linear_fc2.weight"] = t[f"{b}.mlp.down_proj.weight"]
        for of_theirs, of_ours in NAMES.items():
            if (name := f"{b}.self_attn.{of_theirs}.weight") in t:
                out[f"{a}.self_attention.{of_ours}.weight"] = t[name]
    return out


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_deepseek_v3(name: str) -> None:
    changes, rope = CASES[name]
    config = ours(changes)
    torch.manual_seed(0)
    solo, batch = Solo.build(config), random_batch(config)
    with everything_in_double():
        twin = theirs(config, rope)
        copy_into(solo.params, translate(dict(twin.named_parameters())))
        logits = twin(input_ids=batch.tokens).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        mean = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        mean.backward()
    loss = solo.backward([batch])
    expected = translate({n: p.grad for n, p in twin.named_parameters()})
    gradients = solo.snapshot()
    assert gradients.keys() == expected.keys()
    assert loss.item() == pytest.approx(mean.item(), rel=1e-12)
    for parameter, gradient in gradients.items():
        wanted = expected[parameter]
        error = (gradient[: len(wanted)] - wanted).norm() / wanted.norm()
        assert error < 1e-10, (parameter, error)
    solo.chunk.eval()
    torch.testing.assert_close(solo.chunk.logits(batch.tokens).transpose(0, 1), logits, rtol=1e-11, atol=1e-11)


def test_scores_have_their_factor_with_either_kind_of_positions() -> None:
    """Megatron-LM multiplies by the square of the factor of mscale_all_dim, whatever the type of the positions."""
    factor = (0.1 * 1.3 * math.log(8.0) + 1.0) ** 2 / math.sqrt(12 + 6)
    for kind in ("rope", "yarn"):
        scale = ours({"rope_type": kind, "mscale_all_dim": 1.3}).latent_softmax_scale
        assert scale == pytest.approx(factor, rel=1e-14)
