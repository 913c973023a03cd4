"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init
from megatron.layers.context import BuildContext


class Norm(nn.Module):
    """``[..., width] -> [..., width]``, statistics in at least fp32.

    Args:
        config: kind and epsilon.
        context: of the module.
        width: size of the last dimension.
        partial_grad: each TP rank normalises only some of the rows, so gradients are summed over TP.

    """

    def __init__(self, config: ModelConfig, context: BuildContext, width: int, partial_grad: bool) -> None:
        super().__init__()
        self.eps, self.kernels = config.norm_epsilon, context.kernels
        replicate = context.shard.replicate
        self.weight = context.parameter("weight", replicate((width,), Init(value=1.0), partial_grad), autograd=True)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = context.parameter("bias", replicate((width,), Init(), partial_grad), autograd=True)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``norm(x)``, or ``(x + y, norm(x + y))``."""
        if y is None:
            return self.kernels.norm(x, self.weight, self.bias, self.eps)
        return self.kernels.add_norm(x, y, self.weight, self.bias, self.eps)

    def forward_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(x + y, norm(x + y))``."""
        total, normed = self(x, y)  # called as a module, so that its hooks run
        return total, normed
