"""Transformer block: residual layers, each of a norm and a mixer such as attention, an MLP or experts."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.bias import with_bias_gradient
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.mixers.base import Mixer
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.norm import NoNorm, Norm
from megatron.layers.recompute import recompute, recompute_producer
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.residual import MixerOutput, Residual, add_losses, hidden_dropout


class ResidualLayer:
    """``x + drop(multiplier * post_norm(mixer(norm(x))))``; the norm is before the mixer, after it, or both.

    Takes and returns the hidden state as a :class:`Residual`, whose sum the next norm takes.
    """

    def __init__(
        self, mixer: Mixer, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan
    ) -> None:
        """Build the layer.

        Args:
            mixer: declaration of its inside.
            config: of the model.
            context: of the block.
            layer: global index of the block.
            plan: what is recomputed in backward.
        """
        before, after = config.layernorm_placement != "post", config.layernorm_placement != "pre"
        self.norm = Norm(config, context.submodule(mixer.norm)) if before else NoNorm()
        self.mixer = mixer.build(config, context.submodule(mixer.module), layer, plan)
        self.post_norm = Norm(config, context.submodule(mixer.post_norm)) if after else NoNorm()
        modules = {mixer.norm: self.norm, mixer.module: self.mixer, mixer.post_norm: self.post_norm}
        # By their names in the block.
        self.modules = {name: module for name, module in modules.items() if isinstance(module, nn.Module)}
        self.recomputes_mixer = mixer.recomputed(plan)
        self.recomputes_norm = before and not plan.modules.isdisjoint(("layernorm", *mixer.recomputed_as))
        self.multiplier, self.dropout = config.residual_multiplier, config.hidden_dropout
        self.site = context.name(mixer.dropout)
        self.adds_plainly = not after and self.multiplier == 1.0

    def __call__(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Tensor | None]:
        """Return the hidden state, and the losses of a router."""
        x_SBH, (y_SBH, bias, losses) = self._mix(residual, ctx)
        if not self.adds_plainly or (self.dropout > 0.0 and ctx.training):
            y_SBH, bias = with_bias_gradient(y_SBH, bias), None
        y_SBH = self.post_norm.normalize(y_SBH)
        y_SBH = y_SBH if self.multiplier == 1.0 else y_SBH * self.multiplier
        return Residual(x_SBH, hidden_dropout(y_SBH, self.dropout, ctx, self.site), bias), losses

    def _mix(self, residual: Residual, ctx: ForwardContext) -> tuple[Tensor, MixerOutput]:
        """Return ``x`` and ``mixer(norm(x))``."""
        if self.recomputes_mixer:
            x_SBH = residual.sum()
            return x_SBH, recompute(self._mix_normalized, x_SBH, ctx)
        if self.recomputes_norm:
            x_SBH = residual.sum()
            return x_SBH, recompute_producer(self.norm.normalize, x_SBH, partial(self.mixer, ctx=ctx), drop=True)
        x_SBH, n_SBH = self.norm(residual)
        return x_SBH, self.mixer(n_SBH, ctx)

    def _mix_normalized(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        output: MixerOutput = self.mixer(self.norm.normalize(x_SBH), ctx)
        return output


class Block(nn.Module):
    """Residual layers, one after the other, on ``[S(/tp), B, H]``."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        """Build the block; arguments as for :class:`ResidualLayer`."""
        super().__init__()
        self.residual_layers = [
            ResidualLayer(mixer, config, context, layer, plan) for mixer in block_mixers(config, layer)
        ]
        for residual_layer in self.residual_layers:
            for name, module in residual_layer.modules.items():
                self.add_module(name, module)

    def forward(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Tensor | None]:
        """Return the hidden state, and the losses of routers."""
        losses = None
        for layer in self.residual_layers:
            residual, added = layer(residual, ctx)
            losses = add_losses(losses, added)
        return residual, losses


class ParallelBlock(Block):
    """Residual layers that all take the input of the block: ``x + attention(norm(x)) + mlp(norm(x))``."""

    def forward(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Tensor | None]:
        """Return the hidden state, and the losses of routers."""
        first, *others = self.residual_layers
        total, losses = first(residual, ctx)
        x = Residual(total.x)
        for layer in others:
            (_, y, bias), added = layer(x, ctx)
            total, losses = Residual(total.sum(), y, bias), add_losses(losses, added)
        return total, losses


def build_block(config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> Block:
    """Build a block of a model; arguments as for :class:`ResidualLayer`."""
    return (ParallelBlock if config.parallel_attention else Block)(config, context, layer, plan)
