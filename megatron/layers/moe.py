"""Mixture of experts (MoE): a router, token dispatch, the experts, and the shared expert.

Experts are distributed over EP ranks, and each may be sharded over expert-TP. An all-to-all sends every token to the
ranks of its experts and back; the output of a token is the weighted sum of its experts' outputs, plus the shared
expert's. No token is dropped, so message sizes depend on the data and the host waits for the counts once per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.dispatch import DispatchPlan
from megatron.layers.experts import Experts
from megatron.layers.latent_projection import latent_projection
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.router import Router
from megatron.layers.shared_expert import SharedExpert


class MixtureOfExperts(nn.Module):
    """``[S(/tp), B, H] -> [S(/tp), B, H]``, and the router's losses; TP ranks route their part."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.group, self.tp_size = context.mesh.group("ep", "etp"), context.mesh.layout.sizes["etp"]
        self.router = Router(config, context.submodule("router"))
        self.fc1_latent_proj = latent_projection(config, context.submodule("fc1_latent_proj"))
        self.fc2_latent_proj = latent_projection(config, context.submodule("fc2_latent_proj"))
        self.experts = Experts(config, context.submodule("experts"), plan.drops_activation)
        self.shared_experts: SharedExpert | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExpert(config, context.submodule("shared_experts"), layer, plan)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Route every token, and apply its experts."""
        routing = self.router(x_SBH, ctx)
        x_TH = self.fc1_latent_proj(x_SBH).flatten(0, 1)
        plan = DispatchPlan.plan(routing.experts, self.config.num_experts or 0, self.tp_size, self.group)
        parts_TCH = plan.combine(self.experts(plan.dispatch(x_TH), plan.offsets), len(x_TH))
        weights_TC = routing.weights.repeat_interleave(self.tp_size, dim=1)
        y_TH = torch.einsum("tc,tch->th", weights_TC, parts_TCH.to(weights_TC.dtype)).to(x_TH.dtype)
        y = self.fc2_latent_proj(y_TH.unflatten(0, x_SBH.shape[:2]))
        if self.shared_experts is not None:
            y = y + self.shared_experts(x_SBH, ctx).y
        return MixerOutput(y, losses=routing.losses)
