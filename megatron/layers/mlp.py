"""MLP, the feed-forward mixer of a transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.recompute import recompute_producer
from megatron.layers.recompute_plan import RecomputePlan


class MLP(nn.Module):
    """Two linears and an activation, ``[S(/tp), B, H] -> [S(/tp), B, H]``; gate and up projection are fused."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        super().__init__()
        # Rows that are computed at a time, and again in backward; None for all at once.
        self.chunk_size, self.grad_accumulator = plan.mlp_chunk_size, context.grad_accumulator
        self.activation, self.kernels = config.activation_options, context.kernels
        self.drop_activation = plan.drops_activation and self.chunk_size is None  # a chunk is recomputed anyway
        self.linear_fc1 = ColumnParallelLinear(context.submodule("linear_fc1"))
        self.linear_fc2 = RowParallelLinear(context.submodule("linear_fc2"))

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Apply the MLP."""
        y_SBH = self.apply_to_rows(x_SBH) if self.chunk_size is None else _InChunks.apply(x_SBH, self)
        return MixerOutput(y_SBH, self.linear_fc2.bias)

    def start(self, x_SBH: Tensor, ctx: ForwardContext) -> Callable[[], MixerOutput]:
        """Apply the first linear; return a function that applies the rest. In chunks all is applied at once."""
        if self.chunk_size is not None:
            y_SBH = _InChunks.apply(x_SBH, self)
            return lambda: MixerOutput(y_SBH, self.linear_fc2.bias)
        up = self.linear_fc1(x_SBH)
        return lambda: MixerOutput(self._finish(up), self.linear_fc2.bias)

    def apply_to_rows(self, x_SBH: Tensor) -> Tensor:
        """Apply the MLP to any number of rows at once."""
        return self._finish(self.linear_fc1(x_SBH))

    def _finish(self, up: Tensor) -> Tensor:
        if self.drop_activation:
            return recompute_producer(self._activate, self.linear_fc2, up)
        return self.linear_fc2(self._activate(up))

    def _activate(self, x: Tensor) -> Tensor:
        return self.kernels.activation(x, self.linear_fc1.bias, *self.activation)


class _InChunks(torch.autograd.Function):
    """The MLP, computed chunk by chunk; backward computes each chunk again.

    Only one chunk's inner activations exist at a time. So weight gradients are not deferred to a W action, which would
    have to keep those of all chunks.
    """

    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, mlp: MLP) -> Tensor:
        ctx.save_for_backward(x_SBH)
        ctx.mlp = mlp
        y_SBH = torch.empty_like(x_SBH)
        for x, y in zip(x_SBH.detach().split(mlp.chunk_size), y_SBH.split(mlp.chunk_size)):
            y.copy_(mlp.apply_to_rows(x))
        return y_SBH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SBH: Tensor) -> tuple[Tensor, None]:
        (x_SBH,), mlp = ctx.saved_tensors, ctx.mlp
        dx_SBH = torch.empty_like(x_SBH)
        chunks = zip(*(t.split(mlp.chunk_size) for t in (x_SBH, dy_SBH, dx_SBH)))
        with mlp.grad_accumulator.one_contribution(), torch.enable_grad():
            for x, dy, dx in chunks:
                x = x.detach().requires_grad_()
                mlp.apply_to_rows(x).backward(dy)
                dx.copy_(x.grad)
        return dx_SBH, None
