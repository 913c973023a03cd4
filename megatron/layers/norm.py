"""The residual stream between layers, and its norms: LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext


class Residual(NamedTuple):
    """The hidden state as a sum ``x + y`` that is still to be taken: the next norm takes it in its own kernel."""

    x: Tensor
    # Output of a mixer; None if there is nothing to add.
    y: Tensor | None = None
    # The bias that y contains, if its gradient is still to be taken.
    y_bias: Tensor | None = None

    def sum(self) -> Tensor:
        """Return ``x + y``."""
        return self.x if self.y is None else self.x + with_bias_gradient(self.y, self.y_bias)


class Norm(nn.Module):
    """``[..., width] -> [..., width]``, statistics in at least fp32.

    A LayerNorm has a bias.
    """

    joins_next = True  # a sharded parameter store gathers its few weights with those of the next block

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.eps, self.kernels, self.one_plus = config.norm_epsilon, context.kernels, config.apply_layernorm_1p
        self.weight, self.bias = context.parameter("weight", autograd=True), context.bias(autograd=True)

    def affine(self, wide: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the factor of normalised values and the bias, in at least fp32 if ``wide`` or the factor is a sum."""
        if not (wide or self.one_plus):
            return self.weight, self.bias
        bias = None if self.bias is None else widened(self.bias)
        return widened(self.weight, float(self.one_plus)), bias

    def forward(self, residual: Residual) -> tuple[Tensor, Tensor]:
        """Return ``(x + y, norm(x + y))``."""
        (x, y, y_bias), (scale, bias) = residual, self.affine()
        if y is None:
            return x, self.kernels.norm(x, scale, bias, self.eps)
        return self.kernels.add_norm(x, y, y_bias, scale, bias, self.eps)

    def normalize(self, x: Tensor) -> Tensor:
        """Return ``norm(x)``."""
        return self(Residual(x))[1]


class NoNorm:
    """In the place of a norm that a block does not have."""

    def __call__(self, residual: Residual) -> tuple[Tensor, Tensor]:
        """Return ``(x + y, x + y)``."""
        x = residual.sum()
        return x, x

    def normalize(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


def widened(weight: Tensor, offset: float = 0.0) -> Tensor:
    """Return ``offset + weight`` in at least fp32; unlike that of a cast, the gradient is not rounded."""
    wide: Tensor = _Widened.apply(weight, offset)
    return wide


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, offset: float) -> Tensor:
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
