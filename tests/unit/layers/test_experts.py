"""Experts on sorted rows against a loop over rows in fp64: values and all gradients, with rows of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.kernels.grouped_linear import TORCH_GROUPED_LINEAR, GroupedLinearKernel
from megatron.kernels.registry import Kernels
from megatron.layers.context import BuildContext
from megatron.layers.experts import Experts
from megatron.layers.mixers.registry import MIXERS
from tests.kit.solo import Gradients, one_rank_mesh, tiny

EXPERTS, PADDING = 4, 3

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"add_bias_linear": False},
    "gated": {"add_bias_linear": False, "activation": "swiglu"},
    "biases": {"add_bias_linear": True},
    "gated, biases": {"add_bias_linear": True, "activation": "swiglu"},
}

COUNTS = {"all have rows": [2, 3, 1, 4], "some have none": [0, 5, 0, 2], "one has all": [0, 0, 6, 0]}


def undefined_padding() -> GroupedLinearKernel:
    """Products whose results are NaN in rows of padding."""

    def spoil(product: Any) -> Any:
        def spoilt(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
            y: Tensor = product(x, weight, offsets)
            y[int(offsets[-1]) :] = torch.nan
            return y

        return spoilt

    own = TORCH_GROUPED_LINEAR
    return own._replace(forward=spoil(own.forward), input_gradient=spoil(own.input_gradient))


class Made:
    """Experts alone, with biases that are not zero, and where their gradients go."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float64, drop_activation: bool = False) -> None:
        kernels = Kernels(grouped_linear=undefined_padding())
        self.context = BuildContext(one_rank_mesh(), GradAccumulator(), dtype, kernels=kernels)
        self.context.declare(MIXERS["experts"].parameters(config, self.context.sharding))
        self.module = Experts(config, self.context.submodule("experts"), drop_activation)
        for parameter in self.module.parameters():
            if not parameter.any():
                parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        params = self.context.params.items()
        self.gradients = {n: torch.zeros_like(p, dtype=torch.promote_types(dtype, torch.float32)) for n, p in params}
        self.context.grad_accumulator.bind(Gradients(self.gradients))


def by_hand(config: ModelConfig, params: dict[str, Tensor], x_RH: Tensor, weights_R: Tensor, rows: list[int]) -> Tensor:
    """Row by row; the weight multiplies the result."""
    by_expert = {name.removeprefix("experts."): p.unflatten(0, (EXPERTS, -1)) for name, p in params.items()}

    def linear(name: str, x: Tensor, e: int) -> Tensor:
        bias = by_expert.get(f"{name}.bias")
        return by_expert[f"{name}.weight"][e] @ x + (0 if bias is None else bias[e])

    out = []
    for row, e in enumerate(rows):
        up = linear("linear_fc1", x_RH[row], e)
        half = len(up) // 2
        activated = F.silu(up[:half]) * up[half:] if config.gated else F.gelu(up, approximate="tanh")
        out.append(weights_R[row] * linear("linear_fc2", activated, e))
    return torch.stack(out)


@pytest.mark.parametrize("drop_activation", [False, True], ids=["kept", "activation dropped"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_match_a_loop(name: str, counts: list[int], drop_activation: bool) -> None:
    config = tiny(num_experts=EXPERTS, moe_ffn_hidden_size=12, **MODELS[name])
    made, end = Made(config, drop_activation=drop_activation), sum(counts)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, end + PADDING, 32, generator=generator, dtype=torch.float64)
    weights = torch.rand(end + PADDING, generator=generator, dtype=torch.float64)
    for t in (x, dy, weights):
        t[end:] = torch.nan
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = made.module(x, torch.tensor(counts).cumsum(0, dtype=torch.int32), weights)
    y.backward(dy)

    params = {n: p.detach().clone().requires_grad_() for n, p in made.context.params.items() if "experts." in n}
    leaves = [t.detach()[:end].requires_grad_() for t in (x, weights)]
    expected = by_hand(config, params, leaves[0], leaves[1], [e for e in range(EXPERTS) for _ in range(counts[e])])
    expected.backward(dy[:end])
    close = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(y[:end], expected, **close)
    for mine, right in zip((x, weights), leaves):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad[:end], right.grad, **close)
    for n, parameter in params.items():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(made.gradients[n], grad, **close, msg=n)


def test_gradients_of_row_weights_are_not_rounded() -> None:
    config = tiny(num_experts=EXPERTS, moe_ffn_hidden_size=12, **MODELS["gated, biases"])
    made, counts = Made(config, torch.bfloat16), [8, 24, 0, 32]
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 64, 32, generator=generator).bfloat16()
    weights = torch.rand(64, generator=generator).requires_grad_()
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    (made.module(x, offsets, weights) * dy).sum(1).float().backward(torch.ones(64))
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32
    assert (weights.grad != weights.grad.bfloat16()).float().mean() > 0.9
