"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.layers.context import BuildContext


class Norm(nn.Module):
    """``[..., width] -> [..., width]``, statistics in at least fp32.

    A LayerNorm has a bias.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.eps, self.kernels = config.norm_epsilon, context.kernels
        self.weight, self.bias = context.parameter("weight", autograd=True), context.bias(autograd=True)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``norm(x)``, or ``(x + y, norm(x + y))``."""
        if y is None:
            return self.kernels.norm(x, self.weight, self.bias, self.eps)
        return self.kernels.add_norm(x, y, self.weight, self.bias, self.eps)

    def forward_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(x + y, norm(x + y))``."""
        total, normed = self(x, y)  # called as a module, so that its hooks run
        return total, normed
