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
from megatron.layers.dispatch import Exchange, ExpertRows, build_dispatchers
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
        self.training_dispatcher, self.other_dispatcher = build_dispatchers(context)
        self.parts = 2 if context.parallel.overlap_moe_expert_parallel_comm else 1
        self.overlaps_shared = context.parallel.moe_shared_expert_overlap
        # True once tokens did not fit in a buffer of the exchange.
        self.overflowed = torch.zeros((), dtype=torch.bool, device=context.device)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Route every token, and apply its experts."""
        routing = self.router(x_SBH, ctx.batch)
        dispatcher = self.training_dispatcher if self.training else self.other_dispatcher
        sent = (t.tensor_split(self.parts) for t in (x_SBH.flatten(0, 1), routing.experts, routing.weights))
        exchanges = [dispatcher.dispatch(*part, False) for part in zip(*sent)]
        finish_shared = None
        if self.shared_experts is not None and self.overlaps_shared:
            finish_shared = self.shared_experts.start(x_SBH, ctx)
        returning = [self._compute(exchange, dispatcher.local) for exchange in exchanges]
        shared = None
        if self.shared_experts is not None:
            shared = finish_shared().sum() if finish_shared else None
        results = [wait() for wait in returning]
        y_TH = results[0] if self.parts == 1 else torch.cat(results)
        y = y_TH.view_as(x_SBH)
        if self.shared_experts is not None:
            y = y + (self.shared_experts(x_SBH, ctx).sum() if shared is None else shared)
        return MixerOutput(y, losses=routing.losses)
