"""Blocks that leave residual sums to the next norm equal the plain formula, also where they are recomputed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.run import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from tests.solo import Solo, random_batch, tiny

GPT = tiny(num_layers=3)


def plain_loss(params: dict[str, Tensor], batch: MicroBatch) -> Tensor:
    """GPT-2 from its definition."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"], GPT.norm_epsilon)

    words, heads = params["embedding.word_embeddings.weight"], GPT.num_attention_heads
    x = words[batch.tokens] + params["embedding.position_embeddings.weight"][: batch.tokens.shape[1]]
    for i in range(GPT.num_layers):
        qkv = linear(norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attention.linear_qkv")
        q, k, v = qkv.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"layers.{i}.self_attention.linear_proj")
        up = linear(norm(x, f"layers.{i}.pre_mlp_layernorm"), f"layers.{i}.mlp.linear_fc1")
        approximate = "tanh" if GPT.activation == "gelu_tanh" else "none"
        x = x + linear(F.gelu(up, approximate=approximate), f"layers.{i}.mlp.linear_fc2")
    logits = norm(x, "final_layernorm") @ words[: GPT.vocab].t()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return losses @ batch.loss_mask.flatten().to(losses.dtype)


PLANS = {
    "kept": TrainingConfig(),
    "norms": TrainingConfig(recompute_granularity="selective", recompute_modules=("layernorm",)),
    "mlp": TrainingConfig(recompute_granularity="selective", recompute_modules=("mlp", "core_attn")),
    "pairs of blocks": TrainingConfig(recompute_granularity="full", recompute_num_layers=2),
}


@pytest.mark.parametrize("plan", PLANS)
def test_loss_and_every_gradient(plan: str) -> None:
    solo, batch = Solo.build(GPT, training=PLANS[plan]), random_batch(GPT)
    for name, parameter in solo.params.items():
        if name.endswith("bias"):  # they start at zero
            parameter.data = torch.linspace(-1.0, 1.0, len(parameter), dtype=torch.float64)
    params = {name: p.detach().clone().requires_grad_() for name, p in solo.params.items()}
    expected = plain_loss(params, batch) / batch.loss_mask.sum()
    expected.backward()
    torch.testing.assert_close(solo.backward([batch]), expected.detach(), rtol=1e-13, atol=0.0)
    for name, gradient in solo.snapshot().items():
        torch.testing.assert_close(gradient, params[name].grad, rtol=1e-11, atol=1e-13, msg=name)


def test_gradients_of_16_bit_biases_and_norms_arrive_in_fp32() -> None:
    solo, batch = Solo.build(GPT, torch.bfloat16), random_batch(GPT)
    seen: dict[str, torch.dtype] = {}
    accumulate = solo.grad_accumulator.accumulate
    solo.grad_accumulator.accumulate = lambda name, grad: seen.update({name: grad.dtype}) or accumulate(name, grad)
    solo.backward([batch])
    assert {seen[name] for name, p in solo.params.items() if p.dim() == 1} == {torch.float32}
