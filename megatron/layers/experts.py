"""The experts of a rank: grouped linears, which multiply every row by the weight of its expert.

Rows are sorted by expert, and ``offsets`` say where those of each expert end; rows after the last are padding
(:mod:`megatron.kernels.grouped_linear`).

Shapes: R rows, E experts of this rank, H hidden, I in, O out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.kernels.activation import WeightedRows
from megatron.layers.context import BuildContext
from megatron.layers.recompute import recompute_producer


class _GroupedLinearFunction(torch.autograd.Function):
    """``y_e = x_e W_e^T + p_e b_e`` for every expert e, with the factors p of rows.

    Backward: ``dx_e = dy_e W_e``, ``dW_e = dy_e^T x_e``, ``db_e = dy_e^T p_e``, ``dp_e = dy_e b_e``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factor: Tensor | None,
        offsets: Tensor,
        layer: GroupedLinear,
        last: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, factor, offsets)
        ctx.layer, ctx.last = layer, last
        y = layer.kernel.forward(x, layer.by_expert(weight), offsets)
        if bias is not None:
            added = layer.bias_of_rows(bias, offsets, len(x))
            y[:, layer.columns] += added if factor is None else (added * factor.unsqueeze(1)).to(y.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, factor, offsets = ctx.saved_tensors
        layer: GroupedLinear = ctx.layer
        grads = layer.grad_accumulator
        dw = db = dfactor = None
        if ctx.needs_input_grad[1]:

            def multiply(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
                layer.kernel.weight_gradient(layer.by_expert(target), x, dy, offsets, beta)

            dw = grads.accumulate_wgrad(layer.name, grads.wgrad_input(x, None), WgradOperand(dy), multiply, ctx.last)
        dx = layer.kernel.input_gradient(dy, layer.by_expert(weight), offsets)
        if bias is not None:
            dy_held = dy[:, layer.columns]
            db = layer.kernel.bias_gradient(dy_held, offsets, factor).flatten()
            if factor is not None:
                rows = layer.bias_of_rows(bias, offsets, len(x))
                dfactor = (dy_held.to(factor.dtype) * rows.to(factor.dtype)).sum(1)
        return dx, dw, db, dfactor, None, None, None


class GroupedLinear(nn.Module):
    """``[R, I] -> [R, O]``: every row is multiplied by the weight of its expert, whose bias is added.

    If the inputs are sharded over expert-TP, outputs are partial sums, and each rank adds a part of the bias.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        self.experts = context.spec("weight").local_view[0]
        if self.bias is not None:
            width, held = self.weight.shape[0] // self.experts, self.bias.numel() // self.experts
            first = context.spec("bias").pieces[0].global_box.start[-1] if held < width else 0
            self.columns = slice(first, first + held)
        products = (provider(context) for provider in context.grouped_providers)
        self.kernel = next((product for product in products if product is not None), context.kernels.grouped_linear)
        self.name, self.grad_accumulator = context.name("weight"), context.grad_accumulator

    def forward(self, x_RI: Tensor, offsets: Tensor, row_weights: Tensor | None = None, last: bool = True) -> Tensor:
        """Apply the layer.

        Args:
            x_RI: rows, sorted by expert.
            offsets: cumulative numbers of rows of the experts, int32 ``[E]``.
            row_weights: factors of the bias ``[R]``, for rows that are multiplied by them already.
            last: False if backward adds to the gradient of the weight once more in this micro-batch.
        """
        factor = None if self.bias is None else row_weights
        y: Tensor = _GroupedLinearFunction.apply(x_RI, self.weight, self.bias, factor, offsets, self, last)
        return y

    def by_expert(self, weight: Tensor) -> Tensor:
        """View a weight, or its gradient, as ``[E, O, I]``."""
        return weight.unflatten(0, (self.experts, -1))

    def bias_of_rows(self, bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
        """Return the bias of the expert of each row; padding gets that of the last expert."""
        numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
        experts = torch.searchsorted(offsets, numbers, right=True).clamp_(max=self.experts - 1)
        return self.by_expert(bias)[experts]


class Experts(nn.Module):
    """The MLPs of this rank's experts: ``[R, H] -> [R, H]``, partial sums under expert-TP."""

    def __init__(self, config: ModelConfig, context: BuildContext, drop_activation: bool) -> None:
        super().__init__()
        self.activation, self.drop_activation = config.activation_options, drop_activation
        self.kernels = context.kernels
        self.linear_fc1 = GroupedLinear(context.submodule("linear_fc1"))
        self.linear_fc2 = GroupedLinear(context.submodule("linear_fc2"))

    def forward(self, x_RH: Tensor, offsets: Tensor, row_weights: Tensor | None = None, last: bool = True) -> Tensor:
        """Apply every expert to its rows.

        The weights of rows are applied between the linears, where a kernel reads and writes the rows anyway:
        ``p (W2 a + b) = W2 (p a) + p b``. So the results of a token can be added as they are.

        Args:
            x_RH: rows, sorted by expert.
            offsets: cumulative numbers of rows of the experts, int32 ``[E]``.
            row_weights: factors of the results ``[R]``, in at least fp32. They have a gradient.
            last: False for a part of the rows whose backward comes before that of another.
        """
        activate = partial(self._activate, offsets=offsets, row_weights=row_weights)
        down = partial(self.linear_fc2, offsets=offsets, row_weights=row_weights, last=last)
        up = self.linear_fc1(x_RH, offsets, last=last)
        return recompute_producer(activate, down, up) if self.drop_activation else down(activate(up))

    def _activate(self, x: Tensor, offsets: Tensor, row_weights: Tensor | None) -> Tensor:
        rows = None if row_weights is None else WeightedRows(row_weights, offsets[-1:])
        return self.kernels.activation(x, None, *self.activation, rows)
