"""The shared expert of a mixture of experts, an MLP that processes every token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.mlp import MLP
from megatron.layers.recompute_plan import RecomputePlan


class SharedExpert(MLP):
    """``mlp(x)``, or with a gate ``sigmoid(w . x) mlp(x)`` (Qwen2-MoE, arXiv 2407.10671), of ``[S(/tp), B, H]``."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        super().__init__(config, context, layer, plan)
        self.gate_weight: nn.Parameter | None = None
        if config.moe_shared_expert_gate:
            self.gate_weight = context.parameter("gate_weight", autograd=True)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Apply the MLP, and multiply its output by the gate."""
        return self._apply_gate(x_SBH, super().forward(x_SBH, ctx))

    def start(self, x_SBH: Tensor, ctx: ForwardContext) -> Callable[[], MixerOutput]:
        """See :meth:`MLP.start`."""
        finish = super().start(x_SBH, ctx)
        return lambda: self._apply_gate(x_SBH, finish())

    def _apply_gate(self, x_SBH: Tensor, output: MixerOutput) -> MixerOutput:
        y_SBH = output.sum()
        if self.gate_weight is not None:
            gate_SB1 = self.kernels.linear.differentiable(x_SBH, self.gate_weight)
            y_SBH = y_SBH * self.kernels.linear.elementwise(torch.sigmoid, gate_SB1)
        return MixerOutput(y_SBH)
