"""Feed-forward half of a transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.layers.context import BuildContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.recompute import recompute_producer


class MLP(nn.Module):
    """Two linears and an activation, ``[S(/tp), B, H] -> [S(/tp), B, H]``; gate and up projection are fused."""

    def __init__(self, config: ModelConfig, context: BuildContext, drop_activation: bool) -> None:
        super().__init__()
        self.activation, self.drop_activation, self.kernels = config.activation, drop_activation, context.kernels
        self.linear_fc1 = ColumnParallelLinear(context.submodule("linear_fc1"))
        self.linear_fc2 = RowParallelLinear(context.submodule("linear_fc2"))

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Apply the MLP."""
        return recompute_producer(self._activate, self.linear_fc1(x_SBH), self.linear_fc2, self.drop_activation)

    def _activate(self, x: Tensor) -> Tensor:
        return self.kernels.activation(x, self.linear_fc1.bias, self.activation)
