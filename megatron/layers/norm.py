"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.bias import with_bias_gradient
from megatron.layers.context import BuildContext


class Residual(NamedTuple):
    """The hidden state as a sum ``x + y`` that is still to be taken: the next norm takes it in its own kernel."""

    x: Tensor
    # Output of attention or of the MLP; None if there is nothing to add.
    y: Tensor | None = None
    # The bias that y contains, if its gradient is still to be taken (see :mod:`megatron.kernels.bias`).
    y_bias: Tensor | None = None

    def sum(self) -> Tensor:
        """Return ``x + y``."""
        return self.x if self.y is None else self.x + with_bias_gradient(self.y, self.y_bias)


class Norm(nn.Module):
    """``[..., width] -> [..., width]``, statistics in at least fp32.

    A LayerNorm has a bias.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.eps, self.kernels, self.one_plus = config.norm_epsilon, context.kernels, config.apply_layernorm_1p
        self.weight, self.bias = context.parameter("weight", autograd=True), context.bias(autograd=True)

    @property
    def scale(self) -> Tensor:
        """The factor of normalised values: the weight, or 1 + weight in at least fp32."""
        if not self.one_plus:
            return self.weight
        return 1.0 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, residual: Residual) -> tuple[Tensor, Tensor]:
        """Return ``(x + y, norm(x + y))``."""
        x, y, y_bias = residual
        if y is None:
            return x, self.kernels.norm(x, self.scale, self.bias, self.eps)
        return self.kernels.add_norm(x, y, y_bias, self.scale, self.bias, self.eps)
