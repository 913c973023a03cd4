"""Linears of every kind of weight, each in a context of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.kernels.quantized import dequantize
from megatron.layers import parameters
from megatron.layers.adapters import adapted_row_norms
from megatron.layers.context import BuildContext
from megatron.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from megatron.layers.providers import PROVIDERS
from tests.kit.solo import one_rank_mesh, tiny

WIDE = tiny(hidden_size=64, ffn_hidden_size=128, lora_rank=2)
LINEARS: dict[str, type[ParallelLinear]] = {
    "self_attention.linear_qkv": ColumnParallelLinear,
    "self_attention.linear_proj": RowParallelLinear,
    "mlp.linear_fc1": ColumnParallelLinear,
    "mlp.linear_fc2": RowParallelLinear,
}


def build(config: ModelConfig, name: str) -> ParallelLinear:
    """A linear of the first block, in a fresh context; magnitudes come from the frozen weight."""
    specs = {key: spec for key, spec in parameters.gpt(config).items() if key.startswith(f"layers.0.{name}.")}
    params: dict[str, torch.nn.Parameter] = {}
    gradients = GradAccumulator.to_grad(params)
    context = BuildContext(one_rank_mesh(), gradients, torch.float64, model=config, providers=PROVIDERS, params=params)
    linear = LINEARS[name](context.declare(specs).block(0).submodule(name))
    assert [*params] == [*specs]
    for key, norms in adapted_row_norms(linear).items():
        params[key].data.copy_(norms)
    return linear


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("precision", ["int8", "nf4"])
@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("target", ["", "linear_*"], ids=["frozen", "adapted"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_quantised_linear_multiplies_by_the_values_of_its_bytes(
    precision: str, name: str, target: str, dora: bool
) -> None:
    """Forward, input gradient and the gradients of adapters, against the formula in plain autograd."""
    config = replace(WIDE, lora_dora=dora, lora_target=(target or "layers.1.*",), frozen_weights_precision=precision)
    linear = build(config, name)
    assert linear.weight.dtype == torch.uint8
    if target:
        linear.lora_b.data.copy_(draw(3, *linear.lora_b.shape))
    dense = dequantize(linear.weight, precision, torch.float64)
    assert dense.abs().max() > 0
    x, dy = draw(0, 5, 2, dense.shape[1]).requires_grad_(), draw(1, 5, 2, dense.shape[0])
    y = linear(x)
    y.backward(dy)
    mine, x.grad = x.grad, None
    adapters = [key for key, _ in linear.named_parameters() if key.startswith("lora_")]
    assert len(adapters) == (0 if not target else 3 if dora else 2)
    leaves = {key: getattr(linear, key).detach().clone().requires_grad_() for key in adapters}
    whole = dense
    if target:
        whole = dense + config.lora_scale * low_rank(linear, leaves["lora_a"], leaves["lora_b"])
    expected = x.matmul(whole.t())
    if target and dora:
        expected = expected * (leaves["lora_magnitude"] / whole.detach().norm(dim=1))
    expected = expected + (0.0 if linear.bias is None else linear.bias.detach())
    expected.backward(dy)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine, x.grad, rtol=1e-10, atol=1e-10)
    for key, leaf in leaves.items():
        torch.testing.assert_close(getattr(linear, key).grad, leaf.grad, rtol=1e-10, atol=1e-10)
    assert linear.weight.grad is None


def low_rank(linear: ParallelLinear, a: Tensor, b: Tensor) -> Tensor:
    """Return ``B A``; each of q, k and v, which alternate by heads, has rows of A of its own."""
    if not linear.name.endswith("linear_qkv"):
        return b.matmul(a)
    heads = b.view(WIDE.num_attention_heads, 3, -1, b.shape[1])
    return torch.einsum("hpdr,pri->hpdi", heads, a.unflatten(0, (3, -1))).flatten(0, 2)


def test_disabled_adapters_leave_the_frozen_weight() -> None:
    linear = build(replace(WIDE, lora_dora=True, lora_target=("linear_*",)), "mlp.linear_fc1")
    linear.lora_b.data.fill_(0.5)
    x = draw(0, 3, 64)
    frozen, adapted = x.matmul(linear.weight.t()) + linear.bias, linear(x)
    with linear.product.switch.off():
        torch.testing.assert_close(linear(x), frozen, rtol=1e-12, atol=1e-12)
    assert torch.equal(linear(x), adapted)
    assert not torch.allclose(adapted, frozen)
