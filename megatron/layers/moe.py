"""Mixture of experts (MoE): a router, token dispatch, the experts, and the shared expert.

Experts are distributed over EP ranks, and each may be sharded over expert-TP. A dispatcher sends every token to the
ranks of its experts and its results back; the output of a token is the weighted sum of its experts' outputs, plus the
shared expert's. The weights are applied inside the experts, so results are only added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.dispatch import Dispatcher, ExactDispatcher, ExpertRows, LocalDispatcher
from megatron.layers.experts import Experts
from megatron.layers.mlp import MLP
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.router import Router


class MixtureOfExperts(nn.Module):
    """``[S(/tp), B, H] -> [S(/tp), B, H]``, and the router's losses; TP ranks route their part."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.router = Router(config, context.submodule("router"))
        self.experts = Experts(config, context.submodule("experts"), plan.drops_activation)
        self.shared_experts: MLP | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(config, context.submodule("shared_experts"), layer, plan)
        group, tp_size = context.mesh.group("ep", "etp"), context.mesh.layout.sizes["etp"]
        kind = LocalDispatcher if group.size == 1 else ExactDispatcher
        self.dispatcher: Dispatcher = kind(
            group, tp_size, config.num_experts or 0, config.moe_router_topk, context.kernels.sum_rows
        )

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Route every token, and apply its experts."""
        routing = self.router(x_SBH, ctx.batch)
        exchange = self.dispatcher.dispatch(x_SBH.flatten(0, 1), routing.experts, routing.weights, False)
        tokens = exchange.wait()
        rows = ExpertRows.of(tokens, self.dispatcher.local, self.context.kernels.sum_rows)
        counts = rows.offsets.diff(prepend=rows.offsets.new_zeros(1)).tolist()
        y_RH = self.experts(rows.rows.copy(tokens.x), counts)
        y_RH = (y_RH * rows.weights(tokens.weights).unsqueeze(1)).to(y_RH.dtype)
        y = exchange.combine(rows.rows.add(y_RH))().view_as(x_SBH)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x_SBH, ctx).sum()
        return MixerOutput(y, losses=routing.losses)
