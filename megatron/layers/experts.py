"""The experts of a rank: grouped linears, which multiply every row by the weight of its expert.

Shapes: R rows, sorted by expert, H hidden, I in, O out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.kernels.linear import column_sum
from megatron.layers.context import BuildContext
from megatron.layers.recompute import recompute_producer


class _GroupedLinearFunction(torch.autograd.Function):
    """``y_e = x_e W_e^T + b_e`` for every expert e; backward ``dx_e = dy_e W_e``, ``dW_e = dy_e^T x_e``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sequence[int], layer: GroupedLinear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.layer, ctx.has_bias = rows, layer, bias is not None
        by_expert = zip(x.split(list(rows)), weight.chunk(len(rows)), strict=True)
        y = torch.cat([layer.kernel.forward(x_e, w_e, None) for x_e, w_e in by_expert])
        if bias is not None:
            for y_e, b_e in zip(y[:, layer.columns].split(list(rows)), bias.chunk(len(rows)), strict=True):
                y_e += b_e
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows: Sequence[int] = ctx.rows
        layer: GroupedLinear = ctx.layer
        grads = layer.grad_accumulator
        dw = None
        if ctx.needs_input_grad[1]:
            dw = grads.accumulate_wgrad(layer.name, grads.wgrad_input(x, None), WgradOperand(dy), rows)
        by_expert = zip(dy.split(list(rows)), weight.chunk(len(rows)), strict=True)
        dx = torch.cat([layer.kernel.input_gradient(dy_e, w_e) for dy_e, w_e in by_expert])
        db = torch.cat([*map(column_sum, dy[:, layer.columns].split(list(rows)))]) if ctx.has_bias else None
        return dx, dw, db, None, None


class GroupedLinear(nn.Module):
    """``[R, I] -> [R, O]``: every row is multiplied by the weight of its expert, whose bias is added.

    If the inputs are sharded over expert-TP, outputs are partial sums, and each rank adds a part of the bias.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        if self.bias is not None:
            width, spec = self.weight.shape[0], context.spec("bias")
            experts = spec.local_view[0]
            width, held = width // experts, self.bias.numel() // experts
            first = spec.pieces[0].global_box.start[-1] if held < width else 0
            self.columns = slice(first, first + held)
        self.kernel, self.name = context.kernels.linear, context.name("weight")
        self.grad_accumulator = context.grad_accumulator

    def forward(self, x_RI: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply the layer; ``rows`` is the number of rows of each expert."""
        y: Tensor = _GroupedLinearFunction.apply(x_RI, self.weight, self.bias, rows, self)
        return y


class Experts(nn.Module):
    """The MLPs of this rank's experts: ``[R, H] -> [R, H]``, partial sums under expert-TP."""

    def __init__(self, config: ModelConfig, context: BuildContext, drop_activation: bool) -> None:
        super().__init__()
        self.activation, self.drop_activation = config.activation_options, drop_activation
        self.kernels = context.kernels
        self.linear_fc1 = GroupedLinear(context.submodule("linear_fc1"))
        self.linear_fc2 = GroupedLinear(context.submodule("linear_fc2"))

    def forward(self, x_RH: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply every expert to its rows."""
        up, down = self.linear_fc1(x_RH, rows), partial(self.linear_fc2, rows=rows)
        return recompute_producer(self._activate, up, down) if self.drop_activation else down(self._activate(up))

    def _activate(self, x: Tensor) -> Tensor:
        return self.kernels.activation(x, None, *self.activation)
