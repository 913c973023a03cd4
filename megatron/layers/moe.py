"""Mixture of experts (MoE): a router, token dispatch, the experts, and the shared expert.

Experts are distributed over EP ranks, and each may be sharded over expert-TP. A dispatcher sends every token to the
ranks of its experts and its results back; the output of a token is the weighted sum of its experts' outputs, plus the
shared expert's. The weights are applied inside the experts, so results are only added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.dispatch import BoundedDispatcher, Exchange, ExpertRows, MeasuringDispatcher, build_dispatchers
from megatron.layers.experts import Experts
from megatron.layers.linear import ReplicatedLinear
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.router import Router
from megatron.layers.shared_expert import SharedExpert


class LatentProjection(ReplicatedLinear):
    """A replicated linear to the space of the experts, or back from it, whose bias has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return with_bias_gradient(super().forward(x), self.bias)


class MixtureOfExperts(nn.Module):
    """``[S(/tp), B, H] -> [S(/tp), B, H]``, and the router's losses; TP ranks route their part."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        super().__init__()
        self.config, self.kernels = config, context.kernels
        self.router = Router(config, context.submodule("router"))
        projection = LatentProjection if config.moe_latent_size else nn.Identity
        self.fc1_latent_proj = projection(context.submodule("fc1_latent_proj"))
        self.fc2_latent_proj = projection(context.submodule("fc2_latent_proj"))
        self.experts = Experts(config, context.submodule("experts"), plan.drops_activation)
        self.shared_experts: SharedExpert | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExpert(config, context.submodule("shared_experts"), layer, plan)
        self.training_dispatcher, self.other_dispatcher = build_dispatchers(config, context)
        # Parts of the tokens, of which one travels while the experts compute another.
        self.parts = 2 if context.parallel.overlap_moe_expert_parallel_comm else 1
        self.overlaps_shared = context.parallel.moe_shared_expert_overlap
        # Of a step that is run again to explain it.
        self.measured: MeasuringDispatcher | None = None
        self.name = context.name("experts").removesuffix(".experts")

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Route every token, and apply its experts.

        What lies between the start of an exchange and its end hides it, in backward, too, which goes the other way.
        """
        routing = self.router(x_SBH, ctx)
        x_TH = self.fc1_latent_proj(x_SBH).flatten(0, 1)
        dispatcher = self.training_dispatcher if self.training else self.other_dispatcher
        experts_TK, drops = routing.experts, routing.kept is not None
        if routing.kept is not None:
            experts_TK = experts_TK.masked_fill(~routing.kept, dispatcher.experts)
        tokens = x_TH, experts_TK, routing.weights
        parts = [tokens] if self.parts == 1 else [*zip(*(t.tensor_split(self.parts) for t in tokens))]
        exchanges = [dispatcher.dispatch(x, experts, weights, drops) for x, experts, weights in parts]
        shared, finish_shared = self.shared_experts, None
        if shared is not None and self.overlaps_shared:
            finish_shared = shared.start(x_SBH, ctx)
        returning = [self._compute(e, dispatcher.local, n == 0) for n, e in enumerate(exchanges)]
        shared_output = None if finish_shared is None else finish_shared()
        results = [wait() for wait in returning]
        y_TH = results[0] if len(results) == 1 else torch.cat(results)
        y = self.fc2_latent_proj(y_TH.unflatten(0, x_SBH.shape[:2]))
        if shared is not None:
            y = y + (shared(x_SBH, ctx) if shared_output is None else shared_output).y
        return MixerOutput(y, losses=routing.losses)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Exchange exactly inside, and measure the buffers that are needed; see :class:`ExplainsNonFinite`."""
        before = self.training_dispatcher
        if isinstance(before, BoundedDispatcher):
            self.training_dispatcher = self.measured = before.measuring()
        try:
            yield
        finally:
            self.training_dispatcher = before

    def nonfinite_reason(self) -> tuple[float, str] | None:
        """Return the largest overflow of a buffer of the exchange; see :class:`ExplainsNonFinite`."""
        if self.measured is None or not self.measured.needs:
            return None
        bound, rows = max(self.measured.needs)
        fixes = f"--moe-exchange-bound {bound:g}, the smallest that holds this step, or with --moe-exchange exact"
        return bound, f"in {self.name} {rows}; resume with {fixes}"

    def _compute(self, exchange: Exchange, experts: int, first: bool) -> Callable[[], Tensor]:
        """Apply the experts to tokens that arrive; return a function that waits for the results of this rank's.

        Args:
            exchange: of the tokens.
            experts: number of experts of this rank.
            first: they are the first part of the tokens, and so the last in backward.
        """
        tokens = exchange.wait()
        rows = ExpertRows.of(tokens, experts, self.kernels.rows)
        y_RH = self.experts(rows.rows.copy(tokens.x), rows.offsets, rows.weights, first)
        return exchange.combine(rows.rows.add(y_RH))
