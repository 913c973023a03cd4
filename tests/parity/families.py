"""Tensors of `transformers` models under our names and in our arrangement, written out as one explicit mapping.

The maps only transpose, reorder and join, so they carry weights and gradients alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from tests.kit.solo import Solo, random_batch

Tensors = Mapping[str, Tensor]


EXPERT_BIAS = "e_score_correction_bias"
"""In DeepSeek a buffer, in Ernie a parameter without gradient."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers of a model of transformers, by name."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach() for name, value in held if name in model.state_dict()}


def randomise(model: nn.Module) -> None:
    """Their initial biases are 0, their norms 1 and their attention nearly uniform: all would hide mistakes."""
    with torch.no_grad():
        for name, value in tensors_of(model).items():
            value.normal_(mean=float(value.dim() == 1 and not name.endswith(EXPERT_BIAS)), std=0.2)


def translate(family: str, tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of a ``family`` of transformers, by its name before ``ForCausalLM``."""
    if family == "Ernie4_5_Moe":
        config = replace(config, rotary_interleaved=False)  # theirs turns the same channels together
    if config.num_experts:
        return (from_gpt_oss if family == "GptOss" else from_experts)(tensors, config)
    return {"GPT2": from_gpt2, "GPTNeoX": from_neox}.get(family, from_llama)(tensors, config)


def from_gpt2(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of ``GPT2LMHeadModel``, whose Conv1D weights are ``[in, out]``."""
    out = {
        "embedding.word_embeddings.weight": t["transformer.wte.weight"],
        "embedding.position_embeddings.weight": t["transformer.wpe.weight"],
        "final_layernorm.weight": t["transformer.ln_f.weight"],
        "final_layernorm.bias": t["transformer.ln_f.bias"],
    }
    if config.untie_embeddings_and_output_weights:
        out["output_layer.weight"] = t["lm_head.weight"]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            out[f"{ours}.input_layernorm.{kind}"] = t[f"{theirs}.ln_1.{kind}"]
            out[f"{ours}.pre_mlp_layernorm.{kind}"] = t[f"{theirs}.ln_2.{kind}"]
            qkv = t[f"{theirs}.attn.c_attn.{kind}"].t().unflatten(0, (3, config.num_attention_heads, -1))
            out[f"{ours}.self_attention.linear_qkv.{kind}"] = qkv.transpose(0, 1).flatten(0, 2)
            out[f"{ours}.self_attention.linear_proj.{kind}"] = t[f"{theirs}.attn.c_proj.{kind}"].t()
            out[f"{ours}.mlp.linear_fc1.{kind}"] = t[f"{theirs}.mlp.c_fc.{kind}"].t()
            out[f"{ours}.mlp.linear_fc2.{kind}"] = t[f"{theirs}.mlp.c_proj.{kind}"].t()
    return out


def from_neox(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of ``GPTNeoXForCausalLM``, which has the rows of a head's query, key and value one after the other."""
    plain = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
    out = {"embedding.word_embeddings.weight": t["gpt_neox.embed_in.weight"]}
    if config.untie_embeddings_and_output_weights:
        out["output_layer.weight"] = t["lm_head.weight"]
    for kind in ("weight", "bias"):
        out[f"final_layernorm.{kind}"] = t[f"gpt_neox.final_layer_norm.{kind}"]
        for i in range(config.num_layers):
            for ours, theirs in plain.items():
                out[f"layers.{i}.{ours}.{kind}"] = t[f"gpt_neox.layers.{i}.{theirs}.{kind}"]
    return out


def from_llama(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of ``LlamaForCausalLM`` and its relatives, with whatever biases they have, and norms wherever they are."""
    out = {"embedding.word_embeddings.weight": t["model.embed_tokens.weight"]}
    if config.untie_embeddings_and_output_weights:
        out["output_layer.weight"] = t["lm_head.weight"]
    for kind in ("weight", "bias"):
        plain = {"final_layernorm": "model.norm"}
        for i in range(config.num_layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            plain |= {
                f"{ours}.input_layernorm": f"{theirs}.input_layernorm",
                f"{ours}.self_attention.q_layernorm": f"{theirs}.self_attn.q_norm",
                f"{ours}.self_attention.k_layernorm": f"{theirs}.self_attn.k_norm",
                f"{ours}.self_attention.linear_proj": f"{theirs}.self_attn.o_proj",
                f"{ours}.mlp.linear_fc1": f"{theirs}.mlp.c_fc",
            }
            plain[f"{ours}.mlp.linear_fc2"] = f"{theirs}.mlp.{'c_proj' if not config.gated else 'down_proj'}"
            if config.layernorm_placement == "pre":
                plain[f"{ours}.pre_mlp_layernorm"] = f"{theirs}.post_attention_layernorm"
            else:
                plain |= {
                    f"{ours}.post_self_attn_layernorm": f"{theirs}.post_attention_layernorm",
                    f"{ours}.pre_mlp_layernorm": f"{theirs}.pre_feedforward_layernorm",
                    f"{ours}.post_mlp_layernorm": f"{theirs}.post_feedforward_layernorm",
                }
            if f"{theirs}.self_attn.kv_a_proj_with_mqa.weight" in t:
                plain |= {f"{ours}.self_attention.{a}": f"{theirs}.self_attn.{b}" for a, b in LATENT.items()}
            elif f"{theirs}.self_attn.q_proj.{kind}" in t:
                q, k, v = (t[f"{theirs}.self_attn.{x}_proj.{kind}"] for x in "qkv")
                out[f"{ours}.self_attention.linear_qkv.{kind}"] = join_qkv(q, k, v, config)
            if f"{theirs}.self_attn.qkv_proj.{kind}" in t:
                heads = (config.num_attention_heads, config.kv_groups, config.kv_groups)
                parts = t[f"{theirs}.self_attn.qkv_proj.{kind}"].split([n * config.head_dim for n in heads])
                out[f"{ours}.self_attention.linear_qkv.{kind}"] = join_qkv(*parts, config)
                plain[f"{ours}.mlp.linear_fc1"] = f"{theirs}.mlp.gate_up_proj"
            if f"{theirs}.mlp.up_proj.{kind}" in t:
                gate_up = [t[f"{theirs}.mlp.{x}_proj.{kind}"] for x in ("gate", "up")]
                out[f"{ours}.mlp.linear_fc1.{kind}"] = torch.cat(gate_up)
        out |= {f"{ours}.{kind}": t[f"{theirs}.{kind}"] for ours, theirs in plain.items() if f"{theirs}.{kind}" in t}
    return out


LATENT = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
}
"""Modules of latent attention here -> of DeepSeek."""


def from_experts(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of Mixtral and other mixtures of experts, from their modules or from their files."""
    out = from_llama(t, config)
    for i in range(config.num_layers):
        if not config.has_experts(i):
            continue
        places = [f"model.layers.{i}.{module}" for module in ("mlp", "block_sparse_moe")]
        names = [(place, f"{place}.{gate}.weight") for place in places for gate in ("gate", "router", "router.layer")]
        theirs, gate = next((place, name) for place, name in names if name in t)
        out[f"layers.{i}.mlp.router.weight"] = t[gate]
        for bias in ("gate.", "gate.moe_statics.", "moe_statics."):
            if f"{theirs}.{bias}{EXPERT_BIAS}" in t:
                out[f"layers.{i}.mlp.router.expert_bias"] = t[f"{theirs}.{bias}{EXPERT_BIAS}"].flatten()
        shared = f"{theirs}.shared_expert{'' if f'{theirs}.shared_expert_gate.weight' in t else 's'}"
        if f"{shared}.down_proj.weight" in t:
            gate_up = [t[f"{shared}.{x}_proj.weight"] for x in ("gate", "up")]
            out[f"layers.{i}.mlp.shared_experts.linear_fc1.weight"] = torch.cat(gate_up)
            out[f"layers.{i}.mlp.shared_experts.linear_fc2.weight"] = t[f"{shared}.down_proj.weight"]
        if f"{shared}_gate.weight" in t:
            out[f"layers.{i}.mlp.shared_experts.gate_weight"] = t[f"{shared}_gate.weight"]
        up, down = _of_experts(t, f"{theirs}.experts", config.num_experts or 0)
        out[f"layers.{i}.mlp.experts.linear_fc1.weight"] = up.flatten(0, 1)
        out[f"layers.{i}.mlp.experts.linear_fc2.weight"] = down.flatten(0, 1)
    return out


def from_gpt_oss(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Of ``GptOssForCausalLM``: columns of the gate and of the other half in turn, weights ``[E, in, out]``."""
    out = from_llama(t, config)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        out[f"{ours}.self_attention.core_attention.softmax_offset"] = t[f"{theirs}.self_attn.sinks"]
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            out[f"{ours}.mlp.router.{kind}"] = t[f"{theirs}.mlp.router.{kind}"]
            up, down = (t[f"{theirs}.mlp.experts.{name}_proj{suffix}"] for name in ("gate_up", "down"))
            halves = [up[..., 0::2], up[..., 1::2]]  # of the last axis
            parts = [half.mT if kind == "weight" else half for half in halves]
            out[f"{ours}.mlp.experts.linear_fc1.{kind}"] = torch.cat(parts, 1).flatten(0, 1)
            out[f"{ours}.mlp.experts.linear_fc2.{kind}"] = (down.mT if kind == "weight" else down).flatten(0, 1)
    return out


def _of_experts(t: Tensors, place: str, experts: int) -> tuple[Tensor, Tensor]:
    """Gate over up ``[E, 2 * ffn, h]``, and down ``[E, h, ffn]``."""
    parent = place.rpartition(".")[0]
    if f"{parent}.input_linear.weight" in t:
        return t[f"{parent}.input_linear.weight"], t[f"{parent}.output_linear.weight"]
    if f"{place}.gate_up_proj" in t:
        return t[f"{place}.gate_up_proj"], t[f"{place}.down_proj"]
    gate, up, down = ("w1", "w3", "w2") if f"{place}.0.w1.weight" in t else ("gate_proj", "up_proj", "down_proj")
    each = [f"{place}.{e}" for e in range(experts)]
    rows = [torch.cat([t[f"{expert}.{gate}.weight"], t[f"{expert}.{up}.weight"]]) for expert in each]
    return torch.stack(rows), torch.stack([t[f"{expert}.{down}.weight"] for expert in each])


def join_qkv(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
    """Per key/value head: its queries, its key, its value."""
    q, k, v = (x.unflatten(0, (config.kv_groups, -1, config.head_dim)) for x in (q, k, v))
    if config.rotary_interleaved:  # channels i and i + d/2 turn together there, 2i and 2i + 1 here
        q, k = (x.unflatten(2, (2, -1)).transpose(2, 3).flatten(2, 3) for x in (q, k))
    return torch.cat((q, k, v), dim=1).flatten(0, 2)


@torch.no_grad()
def copy_into(params: Mapping[str, nn.Parameter], weights: Tensors) -> None:
    """Copy global weights into the parameters of one rank; names must match exactly, padding keeps its zeros."""
    if set(weights) != set(params):
        raise KeyError(f"names differ: {sorted(set(weights) ^ set(params))}")
    for name, param in params.items():
        param[: len(weights[name])].copy_(weights[name])


@contextmanager
def everything_in_double() -> Iterator[None]:
    """Make `transformers` compute wholly in fp64: the fp32 it names in norms, angles and loss means fp64 here."""
    import transformers.modeling_utils  # noqa: F401  # modules imported later would keep the wrong types for good

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def assert_equal_to_twin(config: ModelConfig, make: Callable[[], Any], translate: Callable[[Tensors], Tensors]) -> None:
    """Compare logits and every gradient in fp64.

    Args:
        config: of our model.
        make: creates the model of transformers.
        translate: its weights, or gradients, under our names.
    """
    torch.manual_seed(0)
    solo, batch = Solo.build(config), random_batch(config)
    with everything_in_double():
        twin = make().double()
        for parameter in twin.parameters():
            nn.init.normal_(parameter, std=0.2)
        copy_into(solo.params, translate(dict(twin.named_parameters())))
        logits = twin(input_ids=batch.tokens).logits
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        mean = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        mean.backward()
    assert solo.backward([batch]).item() == pytest.approx(mean.item(), rel=1e-12)
    expected = translate({name: parameter.grad for name, parameter in twin.named_parameters()})
    gradients = solo.snapshot()
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        wanted = expected[name]
        error = (gradient[: len(wanted)] - wanted).norm() / wanted.norm()
        assert error < 1e-10, (name, error)
    solo.chunk.eval()
    torch.testing.assert_close(solo.chunk.logits(batch.tokens).transpose(0, 1), logits, rtol=1e-11, atol=1e-11)
