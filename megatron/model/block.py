"""Transformer block: residual layers, each of a norm and a mixer such as attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed.random import stable_hash
from megatron.kernels.dropout import uniform_noise
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext, ForwardContext, Losses, MixerOutput
from megatron.layers.mixers.base import Mixer
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.norm import NoNorm, Norm, Residual
from megatron.layers.recompute import recompute, recompute_producer
from megatron.layers.recompute_plan import RecomputePlan


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

    def __call__(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Losses]:
        """Return the hidden state, and the auxiliary losses of the mixer."""
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
            return x_SBH, recompute_producer(self.norm.normalize, partial(self.mixer, ctx=ctx), x_SBH)
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

    def forward(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Losses]:
        """Return the hidden state, and the auxiliary losses of the block."""
        losses: Losses = {}
        for layer in self.residual_layers:
            residual, added = layer(residual, ctx)
            losses = add_losses(losses, added)
        return residual, losses


class ParallelBlock(Block):
    """Residual layers that all take the input of the block: ``x + attention(norm(x)) + mlp(norm(x))``."""

    def forward(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Losses]:
        """Return the hidden state, and the auxiliary losses of the block."""
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


def run_blocks(
    blocks: Sequence[Block], residual: Residual, losses: Losses, ctx: ForwardContext
) -> tuple[Residual, Losses]:
    """Run blocks one after the other; return the hidden state, and the auxiliary losses so far."""
    for block in blocks:
        residual, added = block(residual, ctx)
        losses = add_losses(losses, added)
    return residual, losses


def add_losses(losses: Losses, more: Losses) -> Losses:
    """Return the sums by name."""
    if not more:
        return losses
    return {**losses, **{name: losses[name] + loss if name in losses else loss for name, loss in more.items()}}


def hidden_dropout(x_SBH: Tensor, probability: float, ctx: ForwardContext, site: str) -> Tensor:
    """Apply dropout to this rank's rows of the residual stream, in training.

    Args:
        x_SBH: rows of the sequence, at ``ctx.rows``.
        probability: of dropping an element; the others are scaled by ``1 / (1 - probability)``.
        ctx: sample ids, step and seed, which key the mask.
        site: global name of the place in the model, which keys the mask too.
    """
    if probability == 0.0 or not ctx.training:
        return x_SBH
    return ctx.kernels.dropout(x_SBH, probability, _key(ctx, site, x_SBH), ctx.batch.sample_ids, ctx.row_positions)


def embedding_noise(x_SBH: Tensor, alpha: float, ctx: ForwardContext) -> Tensor:
    """Add NEFTune's noise to embeddings, in training: uniform in +-alpha / sqrt(tokens of the document x H).

    Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv 2310.05914.
    """
    if alpha == 0.0 or not ctx.training:
        return x_SBH
    batch, channels = ctx.batch, torch.arange(x_SBH.shape[2], device=x_SBH.device)
    positions = ctx.row_positions
    noise = uniform_noise(
        _key(ctx, "neftune", x_SBH), batch.sample_ids.view(1, -1, 1), positions.view(-1, 1, 1), channels
    )
    lengths_BS = batch.document_lengths()[:, positions]
    scale_SB1 = alpha * (lengths_BS * x_SBH.shape[2]).double().rsqrt().t().unsqueeze(-1)
    return x_SBH + (noise * scale_SB1).to(x_SBH)


def _key(ctx: ForwardContext, site: str, like: Tensor) -> Tensor:
    """Return the key of the random numbers of a place in the model, on the device of ``like``."""
    return torch.full((), stable_hash(ctx.seed, ctx.batch.step, site), device=like.device)
