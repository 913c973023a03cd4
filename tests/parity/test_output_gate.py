"""The gate on the output of attention against Qwen3-Next's of transformers in fp64: logits, and every gradient."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from tests.kit.solo import Solo, random_batch, tiny
from tests.parity.families import copy_into, everything_in_double

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


def translate(t: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights or gradients of ``Qwen3NextForCausalLM`` with full attention and MLPs, under our names."""
    out = {
        "embedding.word_embeddings.weight": t["model.embed_tokens.weight"],
        "final_layernorm.weight": t["model.norm.weight"],
        "output_layer.weight": t["lm_head.weight"],
    }
    groups, per_group, d = config.kv_groups, config.heads_per_group, config.head_dim
    for i in range(LAYERS):
        a, b = f"layers.{i}", f"model.layers.{i}"
        out[f"{a}.input_layernorm.weight"] = t[f"{b}.input_layernorm.weight"]
        out[f"{a}.pre_mlp_layernorm.weight"] = t[f"{b}.post_attention_layernorm.weight"]
        out[f"{a}.mlp.linear_fc1.weight"] = torch.cat([t[f"{b}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
        out[f"{a}.mlp.linear_fc2.weight"] = t[f"{b}.mlp.down_proj.weight"]
        of_heads = t[f"{b}.self_attn.q_proj.weight"].unflatten(0, (groups, per_group, 2, d))
        queries, gates = of_heads.unbind(2)
        k, v = (t[f"{b}.self_attn.{x}_proj.weight"].unflatten(0, (groups, 1, d)) for x in "kv")
        out[f"{a}.self_attention.linear_qkv.weight"] = torch.cat((queries, gates, k, v), 1).flatten(0, 2)
        out[f"{a}.self_attention.linear_proj.weight"] = t[f"{b}.self_attn.o_proj.weight"]
        for x in "qk":
            out[f"{a}.self_attention.{x}_layernorm.weight"] = t[f"{b}.self_attn.{x}_norm.weight"]
    return out


def test_logits_and_gradients_are_those_of_qwen3_next() -> None:
    torch.manual_seed(0)
    solo, batch = Solo.build(CONFIG), random_batch(CONFIG)
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
    with everything_in_double():
        twin = transformers.Qwen3NextForCausalLM(made).double()
        for parameter in twin.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        copy_into(solo.params, translate(dict(twin.named_parameters()), CONFIG))
        logits = twin(input_ids=batch.tokens).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        ((losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()).backward()
    solo.backward([batch])
    expected = translate({n: p.grad for n, p in twin.named_parameters()}, CONFIG)
    gradients = solo.snapshot()
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        wanted = expected[parameter]
        error = (gradient[: len(wanted)] - wanted).norm() / wanted.norm()
        assert error < 1e-10, (parameter, error)
    solo.chunk.eval()
    torch.testing.assert_close(solo.chunk.logits(batch.tokens).transpose(0, 1), logits, rtol=1e-11, atol=1e-11)
