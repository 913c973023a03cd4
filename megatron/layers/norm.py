"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.parallel.build import BuildContext
from megatron.parallel.shard import Init


class Norm(nn.Module):
    """``[..., width] -> [..., width]``, statistics in at least fp32.

    Args:
        config: kind and epsilon.
        context: of the module.
        width: size of the last dimension.
        partial: each TP rank sees only some of the rows, so gradients are summed over TP.

    """

    def __init__(self, config: ModelConfig, context: BuildContext, width: int, partial: bool) -> None:
        super().__init__()
        self.eps, self.shape = config.norm_epsilon, (width,)
        replicate = context.shard.replicate
        self.weight = context.parameter("weight", replicate((width,), Init(value=1.0), partial), autograd=True)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = context.parameter("bias", replicate((width,), Init(), partial), autograd=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self.bias is None:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
