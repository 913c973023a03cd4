"""Mixture of experts (MoE), in the place of a block's MLP.

Experts are distributed over EP ranks, and each may be sharded over expert-TP. Tokens are dispatched to their experts
and back (:mod:`megatron.layers.dispatch`); the output of a token is the weighted sum of its experts' outputs, plus the
shared expert's.

Shapes: R rows received by this rank, sorted by expert; I in, O out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.layers.dispatch import Route
from megatron.layers.mlp import MLP
from megatron.layers.recompute import feed
from megatron.layers.router import Router
from megatron.parallel.build import BuildContext
from megatron.parallel.grads import GradSink, Rows
from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.shard import Init, ShardSpec


class _GroupedLinearFunction(torch.autograd.Function):
    """``y_e = x_e W_e^T`` for every expert e; backward ``dx_e = dy_e W_e``, ``dW_e = dy_e^T x_e``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Sequence[int], sink: GradSink, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.sink, ctx.name = rows, sink, name
        return _grouped_matmul(x, [w.t() for w in weight.chunk(len(rows))], rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows: Sequence[int] = ctx.rows
        dw = ctx.sink.add(ctx.name, ctx.sink.recall(x, None), Rows(dy), rows)
        return _grouped_matmul(dy, weight.chunk(len(rows)), rows), dw, None, None, None


def _grouped_matmul(x_RI: Tensor, weights_IO: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Multiply every expert's rows by its weight."""
    return torch.cat([x @ w for x, w in zip(x_RI.split(list(rows)), weights_IO, strict=True)])


class GroupedLinear(nn.Module):
    """``[R, I] -> [R, O]``: every row is multiplied by the weight of its expert."""

    def __init__(self, context: BuildContext, weight: ShardSpec) -> None:
        super().__init__()
        self.weight = context.parameter("weight", weight)
        self._sink, self._name = context.sink, context.name("weight")

    def forward(self, x_RI: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply the layer; ``rows`` is the number of rows of each expert."""
        y: Tensor = _GroupedLinearFunction.apply(x_RI, self.weight, rows, self._sink, self._name)
        return y


class Experts(nn.Module):
    """The MLPs of this rank's experts, without biases: ``[R, H] -> [R, H]``, partial sums under expert-TP."""

    def __init__(self, config: ModelConfig, context: BuildContext, output_std: float, drop_activation: bool) -> None:
        super().__init__()
        self.activation, self.drop_activation, self.kernels = config.activation, drop_activation, context.kernels
        experts, h, ffn, shard = config.num_experts or 0, config.hidden_size, config.expert_ffn, context.expert_shard
        up = (experts, 2, ffn, h) if config.gated else (experts, ffn, h)
        fc1 = shard.split(up, len(up) - 2, Init(config.init_method_std))
        self.linear_fc1 = GroupedLinear(context.at("linear_fc1"), fc1)
        self.linear_fc2 = GroupedLinear(context.at("linear_fc2"), shard.split((experts, h, ffn), 2, Init(output_std)))

    def forward(self, x_RH: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply every expert to its rows."""
        up = self.linear_fc1(x_RH, rows)
        return feed(self._activate, up, lambda x: self.linear_fc2(x, rows), self.drop_activation)

    def _activate(self, x: Tensor) -> Tensor:
        return self.kernels.activation(x, self.activation)


class MixtureOfExperts(nn.Module):
    """``[S(/tp), B, H] -> [S(/tp), B, H]``, and the router's losses ``[2]``; TP ranks route their part."""

    def __init__(self, config: ModelConfig, context: BuildContext, output_std: float, drop_activation: bool) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.group, self.tp_size = context.mesh.group("ep", "etp"), context.mesh.layout.sizes["etp"]
        self.router = Router(config, context.at("router"))
        self.experts = Experts(config, context.at("experts"), output_std, drop_activation)
        self.shared_experts: MLP | None = None
        if width := config.moe_shared_expert_intermediate_size:
            shared = context.at("shared_experts")
            self.shared_experts = MLP(config, shared, output_std, drop_activation, width)

    def forward(self, x_SBH: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Route every token, and apply its experts."""
        routing = self.router(x_SBH, batch)
        x_TH = x_SBH.flatten(0, 1)
        route = Route.plan(routing.experts, self.config.num_experts or 0, self.tp_size, self.group)
        parts_TCH = route.back(self.experts(route.there(x_TH), route.counts), len(x_TH))
        weights_TC = routing.weights.repeat_interleave(self.tp_size, dim=1)
        y = torch.einsum("tc,tch->th", weights_TC, parts_TCH.to(weights_TC.dtype)).to(x_TH.dtype).view_as(x_SBH)
        return (y if self.shared_experts is None else y + self.shared_experts(x_SBH)), routing.losses
