"""Blocks that leave residual sums to the next norm equal the plain formula, also where they are recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.registry import Kernels
from megatron.layers.norm import Residual
from tests.kit.solo import Solo, random_batch, tiny

GPT = tiny(num_layers=3)


def plain_loss(params: dict[str, Tensor], batch: MicroBatch, model: ModelConfig = GPT) -> Tensor:
    """GPT-2 from its definition, with other norms, branches and multipliers."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in params:
            return x
        weight = params[f"{name}.weight"] + float(model.apply_layernorm_1p)
        return F.layer_norm(x, x.shape[-1:], weight, params[f"{name}.bias"], GPT.norm_epsilon)

    words, heads = params["embedding.word_embeddings.weight"], GPT.num_attention_heads
    x = (
        words[batch.tokens] * model.embedding_multiplier
        + params["embedding.position_embeddings.weight"][: batch.tokens.shape[1]]
    )
    for i in range(GPT.num_layers):
        qkv = linear(norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attention.linear_qkv")
        q, k, v = qkv.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = linear(y, f"layers.{i}.self_attention.linear_proj")
        attended = x + model.residual_multiplier * norm(y, f"layers.{i}.post_self_attn_layernorm")
        x = x if model.parallel_attention else attended
        up = linear(norm(x, f"layers.{i}.pre_mlp_layernorm"), f"layers.{i}.mlp.linear_fc1")
        approximate = "tanh" if GPT.activation == "gelu_tanh" else "none"
        y = linear(F.gelu(up, approximate=approximate), f"layers.{i}.mlp.linear_fc2")
        x = attended + model.residual_multiplier * norm(y, f"layers.{i}.post_mlp_layernorm")
    logits = norm(x, "final_layernorm") @ words[: GPT.vocab].t() / model.logits_scaling
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return losses @ batch.loss_mask.flatten().to(losses.dtype)


PLANS = {
    "kept": TrainingConfig(),
    "norms": TrainingConfig(recompute_granularity="selective", recompute_modules=("layernorm",)),
    "mlp": TrainingConfig(recompute_granularity="selective", recompute_modules=("mlp", "core_attn")),
    "pairs of blocks": TrainingConfig(recompute_granularity="full", recompute_num_layers=2),
}


MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 1.5}
BLOCKS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"layernorm_placement": "post", "apply_layernorm_1p": True},
    "sandwich": {"layernorm_placement": "sandwich", **MULTIPLIERS},
    "parallel": {"parallel_attention": True, **MULTIPLIERS},
    "parallel post": {"parallel_attention": True, "layernorm_placement": "post"},
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("plan", PLANS)
def test_loss_and_every_gradient(plan: str, block: str) -> None:
    model = replace(GPT, **BLOCKS[block])
    solo, batch = Solo.build(model, training=PLANS[plan]), random_batch(GPT)
    for name, parameter in solo.params.items():
        if name.endswith("bias"):  # they start at zero
            parameter.data = torch.linspace(-1.0, 1.0, len(parameter), dtype=torch.float64)
    params = {name: p.detach().clone().requires_grad_() for name, p in solo.params.items()}
    expected = plain_loss(params, batch, model) / batch.loss_mask.sum()
    expected.backward()
    torch.testing.assert_close(solo.backward([batch]), expected.detach(), rtol=1e-13, atol=0.0)
    for name, gradient in solo.snapshot().items():
        torch.testing.assert_close(gradient, params[name].grad, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"apply_layernorm_1p": True, "qk_layernorm": True, "layernorm_placement": "sandwich"},
        {"normalization": "RMSNorm", "qk_layernorm": True, "qk_layernorm_scope": "all", "num_query_groups": 2},
    ],
    ids=["gpt", "1 + weight", "all heads"],
)
def test_gradients_of_16_bit_biases_and_norms_arrive_in_fp32(changes: dict[str, Any]) -> None:
    model = replace(GPT, **changes)
    solo, batch = Solo.build(model, torch.bfloat16), random_batch(model)
    seen: dict[str, torch.dtype] = {}
    accumulate = solo.grad_accumulator.accumulate
    solo.grad_accumulator.accumulate = lambda name, grad: seen.update({name: grad.dtype}) or accumulate(name, grad)
    solo.backward([batch])
    assert {seen[name] for name, p in solo.params.items() if p.dim() == 1} == {torch.float32}
    grads = solo.buckets.grads
    rounded = [n for n, p in solo.params.items() if p.dim() == 1 and torch.equal(grads[n], grads[n].bfloat16().float())]
    assert rounded == []


def test_gradients_of_parts_of_16_bit_sinks_arrive_in_fp32() -> None:
    """As under all-to-all context parallelism, where a rank has the sinks of some heads."""
    model = replace(GPT, softmax_type="learnable")
    solo, batch = Solo.build(model, torch.bfloat16), random_batch(model)
    for layer in solo.chunk.layers.values():
        core, kernel = layer.self_attention.core_attention, Kernels().attention

        def split(*args: Any, kernel: Any = kernel) -> Tensor:
            return kernel(*args[:-1], replace(args[-1], sink=torch.cat(args[-1].sink.split(1))))

        core.kernels = replace(core.kernels, attention=split)
    solo.backward([batch])
    sinks = [grad for name, grad in solo.buckets.grads.items() if name.endswith("softmax_offset")]
    assert len(sinks) == model.num_layers
    assert not any(torch.equal(grad, grad.bfloat16().float()) for grad in sinks)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_one_plus_weight_is_not_rounded(normalization: str) -> None:
    """A weight of 2^-10 would be lost in a 16-bit sum with 1."""
    model = replace(GPT, apply_layernorm_1p=True, normalization=normalization)
    norm = Solo.build(model, torch.bfloat16).chunk.final_layernorm
    assert norm is not None
    torch.nn.init.constant_(norm.weight, 2.0**-10)
    x = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, y = norm(Residual(x))
    centred = x.double() - (x.double().mean(-1, keepdim=True) if normalization == "LayerNorm" else 0.0)
    exact = centred / (centred.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt() * (1 + 2.0**-10)
    assert y.dtype == torch.bfloat16
    assert ((y.double() / exact) - 1).abs().max() <= 2.0**-8
    assert ((y.double() / exact) - 1).mean().abs() < 2.0**-12, "a lost weight is a bias of 2^-10"
