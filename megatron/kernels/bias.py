"""Gradients of the biases of linear layers.

A linear adds its bias in forward. Backward needs the sum of ``dy`` over all rows, and ``dy`` is what the backward of
the consumer of ``y`` computes: the activation, the split into q, k and v, dropout, or the residual sum. So a consumer
takes the bias as an argument that has no effect on its values, and also returns its gradient, from the same kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def column_sum(dy: Tensor) -> Tensor:
    """``[..., O] -> [O]``, summed in at least fp32."""
    return dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


def with_bias_gradient(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``y``, which contains ``bias``; in backward the bias receives the column sum of ``dy``."""
    return y if bias is None or not bias.requires_grad else _BiasGradient.apply(y, bias)


class _BiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, column_sum(dy)
