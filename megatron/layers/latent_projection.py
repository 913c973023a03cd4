"""Projections of a mixture of experts that work in a narrower space than the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext
from megatron.layers.linear import ReplicatedLinear


class LatentProjection(ReplicatedLinear):
    """A replicated linear to the space of the experts, or back from it, whose bias has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return with_bias_gradient(super().forward(x), self.bias)


def latent_projection(config: ModelConfig, context: BuildContext) -> nn.Module:
    """Build the projection, the identity where experts have the width of the residual stream."""
    return LatentProjection(context) if config.moe_latent_size else nn.Identity()
