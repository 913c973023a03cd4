"""Feed-forward half of a transformer block."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init
from megatron.layers.context import BuildContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.recompute import recompute_producer


class MLP(nn.Module):
    """Two linears and an activation, ``[S(/tp), B, H] -> [S(/tp), B, H]``; gate and up projection are fused."""

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        output_std: float,
        drop_activation: bool,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.drop_activation, self.kernels = config.activation, drop_activation, context.kernels
        shard, h, ffn = context.shard, config.hidden_size, width or config.ffn
        view = (2, ffn) if config.gated else (ffn,)
        rows, dim = prod(view), len(view) - 1
        weight = replace(shard.split((rows, h), dim, Init(config.init_method_std), (*view, h)), matrices=dim)
        bias = shard.split((rows,), dim, Init(), view) if config.add_bias_linear else None
        self.linear_fc1 = ColumnParallelLinear(context.submodule("linear_fc1"), weight, bias)
        self.linear_fc2 = RowParallelLinear(context.submodule("linear_fc2"), ffn, h, output_std, config.add_bias_linear)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Apply the MLP."""
        return recompute_producer(self._activate, self.linear_fc1(x_SBH), self.linear_fc2, self.drop_activation)

    def _activate(self, x: Tensor) -> Tensor:
        return self.kernels.activation(x, self.activation)
